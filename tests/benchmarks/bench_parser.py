"""How fast output is parsed, in every dialect, and how long a model's template is probed when it is loaded or listed.

    TIKTOKEN_ENCODINGS_BASE=FOLDER python tests/benchmarks/bench_parser.py

First our Harmony parser by token ids and by text beside openai-harmony's, in the same run. The folder holds
`o200k_base.tiktoken`; without it the completion is cut into tokens of three characters, and openai-harmony, which needs
the vocabulary, is left out. Every figure there is the median of 7 runs. Then a row for every dialect: the first and the
last of 100,000 tokens cost the same, and a whole transcript at once less than its pieces. All of it is processor time:
other load matters little, but it makes a shared core slower, so the least of several runs is printed.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from harmony_data import HARMONY_DATA
from predefined_templates import FAMILIES

from mlx_backend.chat.effort_probe import probe_effort
from mlx_backend.chat.history_probe import probe_history
from mlx_backend.conversation.dialects import DIALECTS, Dialect
from mlx_backend.conversation.dialects.harmony import HARMONY_TOKENS
from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.models import templates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 7
NEAR_ROUNDS, FAR_ROUNDS = 20, 3
PROBE_ROUNDS = 5
TOKENS = 14_000
NEAR, FAR = 1_000, 100_000  # tokens: the cost of each must not depend on how many there were
IDS = {text: token for token, text in HARMONY_TOKENS.items()}
SAMPLE = (
    "we have to find out what the user wants and then look at the file again so that {code} and 3 < 4 or"
    ' perhaps [a list], a "quotation", numbers like 1,024 and <tags> can all be seen here . \n'
)

PLAIN = (
    "we have to find out what the user wants and then look at the file again so that all of it can be seen"
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
    _print_probes()


def _print_dialects() -> None:
    """Print a row for every dialect: text far from any marker, text full of what markers begin with, and one call."""
    rows = {name: _rows(dialect) for name, dialect in DIALECTS.items()}
    best: dict[tuple[str, str], float] = {}
    for round_ in range(NEAR_ROUNDS):  # alternating, so that a slow moment does not hit one of them alone
        for name, row in rows.items():
            for column, (parse, count) in row.items():
                if count < 2 * NEAR or round_ < FAR_ROUNDS:
                    seconds = _seconds(parse) / count
                    best[name, column] = min(seconds, best.get((name, column), seconds))
    columns = list(rows["harmony"])
    print(
        f"\nµs of processor time per token; the least of {FAR_ROUNDS} alternating runs ({NEAR:,}: {NEAR_ROUNDS})"
    )
    print("| dialect |" + "".join(f" {column} |" for column in columns))
    print("|--|" + "--|" * len(columns))
    for name in rows:
        cells = (
            f" {best[name, column] * 1e6:.2f} |" if (name, column) in best else " |" for column in columns
        )
        print(f"| {name} |" + "".join(cells))


def _rows(dialect: Dialect) -> dict[str, tuple[Callable[[], None], int]]:
    """Return what is measured of a dialect, with the number of its tokens."""
    rows: dict[str, tuple[Callable[[], None], int]] = {}

    def add(column: str, pieces: Sequence[str], opens_in: Channel | None) -> None:
        by_id, whole = [(piece, 1) for piece in pieces], [("".join(pieces), None)]
        rows[column] = (partial(_parse, dialect, by_id, opens_in), len(pieces))
        if column.endswith(f"{FAR:,}"):
            rows[column.replace(f"{FAR:,}", "whole")] = (
                partial(_parse, dialect, whole, opens_in),
                len(pieces),
            )

    for size in (NEAR, FAR):
        add(f"words {size:,}", _cycle([f" {word}" for word in PLAIN.split(" ")], size), Channel.ANALYSIS)
    add(f"code {FAR:,}", _cycle(_quarters(SAMPLE), FAR), Channel.FINAL)
    if dialect.calls:
        for size in (NEAR, FAR):
            text = SAMPLE * (size * 4 // len(SAMPLE) + 1)
            call = "".join(piece.text for piece in dialect.calls.encode("f", {"a": text}))
            add(f"call {size:,}", _quarters(call), None)
    return rows


def _parse(dialect: Dialect, pieces: Sequence[tuple[str, int | None]], opens_in: Channel | None) -> None:
    parser = ChannelParser(dialect, tools=["f"], opens_in=opens_in, special_tokens={0: "<|im_end|>"})
    feed = parser.feed
    for text, token in pieces:
        feed(text, token)
    parser.close()


def _quarters(text: str) -> list[str]:
    return [text[at : at + 4] for at in range(0, len(text), 4)]


def _cycle(pieces: Sequence[str], count: int) -> list[str]:
    return [pieces[at % len(pieces)] for at in range(count)]


def _print_probes() -> None:
    """Print how long a template's effort and its history are probed, once per model that is loaded or listed."""
    sources = {
        path.read_text(encoding="utf-8"): path.name.removesuffix(".jinja")
        for path in sorted([*HARMONY_DATA.glob("*.jinja"), *HARMONY_DATA.glob("templates/*.jinja")])
    }
    sources |= {family.template: f"{name.rpartition('/')[2]} (ours)" for name, family in FAMILIES.items()}
    best: dict[tuple[str, str], float] = {}
    for _ in range(PROBE_ROUNDS):
        for source, name in sources.items():
            templates._examination.cache_clear()  # parsing counts with the first
            for column, probe in (
                ("effort", partial(probe_effort, reasons=True)),
                ("history", probe_history),
            ):
                probe_effort.cache_clear()
                probe_history.cache_clear()
                seconds = _seconds(partial(probe, source))
                best[name, column] = min(seconds, best.get((name, column), seconds))
    print(f"\nms per template; the least of {PROBE_ROUNDS} runs")
    print("| template | effort | history |\n|--|--|--|")
    for name in sources.values():
        print(f"| {name} | {best[name, 'effort'] * 1e3:.0f} | {best[name, 'history'] * 1e3:.0f} |")


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


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
