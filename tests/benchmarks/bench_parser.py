"""How fast output is parsed: our parser by token ids and by text, and openai-harmony's parser, in the same run.

    TIKTOKEN_ENCODINGS_BASE=FOLDER python tests/benchmarks/bench_parser.py

The folder holds `o200k_base.tiktoken`; without it the completion is cut into tokens of three characters, and
openai-harmony, which needs the vocabulary, is left out. Every figure is the median of 7 runs, in microseconds of
processor time per token (so that other load does not matter).
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harmony_data import HARMONY_DATA  # noqa: E402

from mlx_backend.conversation.dialects import DIALECTS, Dialect  # noqa: E402
from mlx_backend.conversation.dialects.harmony import HARMONY_TOKENS  # noqa: E402
from mlx_backend.conversation.events import Channel  # noqa: E402
from mlx_backend.conversation.parser import ChannelParser  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 7
TOKENS = 14_000
IDS = {text: token for token, text in HARMONY_TOKENS.items()}
SAMPLE = (
    "we have to find out what the user wants and then look at the file again so that {code} and 3 < 4 or"
    ' perhaps [a list], a "quotation", numbers like 1,024 and <tags> can all be seen here . \n'
)

type Tokens = Sequence[tuple[str, int]]


def main() -> None:
    """Print the table."""
    if (HARMONY_DATA / "o200k_base.tiktoken").exists():
        os.environ.setdefault("TIKTOKEN_ENCODINGS_BASE", str(HARMONY_DATA))
    encoding = _encoding()
    print(f"median of {ROUNDS} runs, µs of processor time per token; Python {sys.version.split()[0]}")
    for size in (TOKENS // 10, TOKENS, TOKENS * 10):
        _print_row(_completion(size, encoding), encoding)
    _print_dialects()


def _print_dialects() -> None:
    """Print a row for every dialect: reasoning, the answer, and the arguments of one long call."""
    words = SAMPLE.replace("{", "").replace("[", "").split(" ") * (TOKENS // len(SAMPLE.split(" ")))
    tokens = [(f" {word}", 1) for word in words]
    print(f"\n{'dialect':<18}{'reasoning':>10}{'answer':>10}{'call':>10}")
    for dialect in DIALECTS.values():

        def parsed(stream: Tokens, opens_in: Channel | None, dialect: Dialect = dialect) -> None:
            parser = ChannelParser(dialect, tools=["f"], opens_in=opens_in, special_tokens={0: "<|im_end|>"})
            for text, token in stream:
                parser.feed(text, token)
            parser.close()

        call = (
            "".join(piece.text for piece in dialect.calls.encode("f", {"a": SAMPLE * 100}))
            if dialect.calls
            else ""
        )
        pieces = [(call[at : at + 4], 1) for at in range(0, len(call), 4)]
        seconds = [
            _measure(lambda stream: parsed(stream, Channel.ANALYSIS), tokens),
            _measure(lambda stream: parsed(stream, Channel.FINAL), tokens),
            _measure(lambda stream: parsed(stream, None), pieces) if pieces else 0.0,
        ]
        counts = len(tokens), len(tokens), len(pieces) or 1
        figures = "".join(f"{each / count * 1e6:>10.2f}" for each, count in zip(seconds, counts, strict=True))
        print(f"{dialect.name:<18}{figures}")


def _print_row(tokens: Tokens, encoding: Any) -> None:
    plain = sum(len(text) for text, token in tokens if token not in HARMONY_TOKENS)
    print(f"\n{len(tokens):>7,} tokens, {plain / len(tokens):.1f} characters each")
    ours = {"by ids": _measure(_by_ids, tokens), "by text": _measure(_by_text, tokens)}
    theirs = {}
    if encoding is not None:
        theirs["openai-harmony, process() only"] = _measure(_openai_harmony(encoding, inspect=False), tokens)
        theirs["openai-harmony, and what changed"] = _measure(_openai_harmony(encoding, inspect=True), tokens)
    for name, seconds in {**ours, **theirs}.items():
        ratios = "".join(f"   {ours[mode] / seconds:5.2f} × {mode}" for mode in ours if name in theirs)
        print(f"  {name:<34} {seconds * 1e6 / len(tokens):6.2f}{ratios}")


def _measure(parse: Callable[[Tokens], object], tokens: Tokens) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        parse(tokens)
        times.append(time.process_time() - start)
    return statistics.median(times)


def _by_ids(tokens: Tokens) -> None:
    parser = ChannelParser()
    feed = parser.feed
    for text, token in tokens:
        feed(text, token)
    parser.close()


def _by_text(tokens: Tokens) -> None:
    parser = ChannelParser()
    feed = parser.feed
    for text, _ in tokens:
        feed(text)
    parser.close()


def _openai_harmony(encoding: Any, *, inspect: bool) -> Callable[[Tokens], None]:
    from openai_harmony import Role, StreamableParser

    def run(tokens: Tokens) -> None:
        parser = StreamableParser(encoding, role=Role.ASSISTANT)
        for _, token in tokens:
            parser.process(token)
            if inspect:
                _ = (parser.current_channel, parser.current_recipient, parser.last_content_delta)

    return run


def _encoding() -> Any:
    if "TIKTOKEN_ENCODINGS_BASE" not in os.environ:
        print("(no vocabulary: TIKTOKEN_ENCODINGS_BASE is not set, so openai-harmony is left out)")
        return None
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def _completion(size: int, encoding: Any) -> Tokens:
    """Make up reasoning, an answer and a call, `size` tokens in all."""
    choose = random.Random(7)
    words = SAMPLE.split(" ")
    parts: list[tuple[str, int]] = []
    for header, share, end in (
        ("<|channel|>analysis<|message|>", 0.6, "<|end|><|start|>assistant"),
        ("<|channel|>commentary<|message|>", 0.1, "<|end|><|start|>assistant"),
        ("<|channel|>commentary to=functions.write <|constrain|>json<|message|>", 0.3, "<|call|>"),
    ):
        text = "".join(choose.choice(words) + " " for _ in range(size))
        parts += _tokens(header, encoding)
        parts += _body(text, encoding)[: int(size * share)]
        parts += _tokens(end, encoding)
    return parts


def _body(text: str, encoding: Any) -> list[tuple[str, int]]:
    if encoding is None:
        return [(text[at : at + 3], 0) for at in range(0, len(text), 3)]
    ids = encoding.encode(text, disallowed_special=())
    return [(encoding.decode_utf8([token]), token) for token in ids]


def _tokens(text: str, encoding: Any) -> list[tuple[str, int]]:
    if encoding is not None:
        ids = encoding.encode(text, allowed_special="all")
        return [(encoding.decode_utf8([token]), token) for token in ids]
    found = []
    while text:
        marker = next((marker for marker in IDS if text.startswith(marker)), None)
        piece = marker or text.partition("<")[0]
        found.append((piece, IDS[piece] if marker else 0))
        text = text.removeprefix(piece)
    return found


if __name__ == "__main__":
    main()
