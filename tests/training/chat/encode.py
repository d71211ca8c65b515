"""Dialogues as token ids and labels. Knows Harmony's messages and which of their tokens are learned, not how.

Only what the assistant writes is labelled. A dialogue is encoded in one of two ways, since prompts come in both: with
the analysis of every turn (more to learn from), or with that of the last turn only, as the chat template renders a
history. A final answer ends with <|end|> in a history and with <|return|> when generated: there the label differs from
the token.

A reply without analysis is learned as one whose analysis was forbidden, as a server does where no reasoning is wanted:
the channel is chosen among the others.
"""

import functools
import json
import random
import re
from dataclasses import dataclass, field
from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from training.chat.exchange import Dialogue, Exchange, Reply
from training.chat.tokens import PIECES

IGNORED: Final = -1
CONTINUED: Final = 0.06  # share of the answers whose beginning was written by somebody else
UNREASONED: Final = 0.2  # share of the dialogues whose replies have no analysis
_ANALYSIS: Final = "<|channel|>analysis<|message|>"
_CHANNEL: Final = "<|channel|>"
_FINAL: Final = f"{_CHANNEL}final<|message|>"
_ASSISTANT: Final = "<|start|>assistant"
_DATE: Final = re.compile(r"Current date: \d{4}-\d\d-\d\d")


@dataclass
class Example:
    """Token ids, and for each position its label: the same id, another id, or `IGNORED`.

    `barred` has the positions at which one token could not be chosen, and that token.
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    barred: dict[int, int] = field(default_factory=dict)


def prompt(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue, messages: list[dict[str, Any]]) -> str:
    """Return the chat template's text for `messages` with the dialogue's settings."""
    first = [{"role": "developer", "content": dialogue.instructions}] if dialogue.instructions else []
    text = tokenizer.apply_chat_template(
        [*first, *messages],
        tools=dialogue.tools or None,
        tokenize=False,
        add_generation_prompt=True,
        reasoning_effort=dialogue.effort,
        **({"model_identity": dialogue.identity} if dialogue.identity else {}),
    )
    return _DATE.sub(f"Current date: {dialogue.date}", str(text), count=1)  # the template writes today's date


def call_text(reply: Reply) -> tuple[str, str]:
    """Return a call's header, through <|message|>, and its body, through <|call|>."""
    assert reply.call is not None
    arguments = json.dumps(reply.call.arguments, ensure_ascii=False)
    header = f"<|channel|>commentary to=functions.{reply.call.name} <|constrain|>json<|message|>"
    return header, f"{arguments}<|call|>"


@functools.lru_cache(maxsize=50_000)
def _piece_ids(tokenizer: Any, piece: str) -> list[int]:
    ids: list[int] = tokenizer.encode(piece, add_special_tokens=False).ids
    return ids


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Return a text's ids, a piece at a time: pieces repeat, and this is three times as fast as encoding the text."""
    return [token for piece in PIECES.findall(text) for token in _piece_ids(tokenizer, piece)]


class _Writer:
    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.tokenizer = tokenizer.backend_tokenizer  # faster than its wrapper
        self.rng = rng
        self.example = Example()
        self.end = tokenizer.convert_tokens_to_ids("<|end|>")
        self.end_of_turn = tokenizer.convert_tokens_to_ids("<|return|>")
        self.analysis = tokenizer.convert_tokens_to_ids("analysis")

    def write(self, text: str, learned: bool) -> None:
        ids = _ids(self.tokenizer, text)
        self.example.ids += ids
        self.example.labels += ids if learned else [IGNORED] * len(ids)

    def reply(self, reply: Reply, effort: str, with_analysis: bool, learned: bool) -> None:
        """Write a reply after an open `<|start|>assistant`; without analysis, `analysis` was no choice."""
        if with_analysis:
            analysis = reply.analysis(effort)
            if self.rng.random() < 0.1:  # analysis that was cut short: learn to continue after it
                words = analysis.split(" ")
                self.write(_ANALYSIS + " ".join(words[: self.rng.randrange(len(words))]) + "<|end|>", False)
            else:
                self.write(f"{_ANALYSIS}{analysis}<|end|>", learned)
            self.write(_ASSISTANT, learned)
        elif learned:
            self.example.barred[len(self.example.ids) + 1] = self.analysis  # after <|channel|>
        if reply.call is None:
            self.write(_FINAL, learned)
            forced = reply.forced
            if not forced and len(reply.answer) > 1 and self.rng.random() < CONTINUED:
                forced = reply.answer[: self.rng.randrange(1, len(reply.answer))]
            self.write(forced, False)
            self.write(f"{reply.answer.removeprefix(forced)}<|end|>", learned)
            if learned:
                self.example.labels[-1] = self.end_of_turn
            return
        if reply.preamble:
            self.write(f"{_CHANNEL}commentary<|message|>{reply.preamble}<|end|>{_ASSISTANT}", learned)
        self.write("".join(call_text(reply)), learned)

    def exchange(self, exchange: Exchange, effort: str, with_analysis: tuple[bool, bool]) -> None:
        """Write a reply and, after a call, the result and the reply to it; `with_analysis` is for both replies."""
        self.reply(exchange.reply, effort, with_analysis[0], exchange.learned)
        if exchange.reply.call is None or exchange.final_reply is None:
            return
        name = exchange.reply.call.name
        self.write(
            f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
            f"{exchange.result}<|end|>{_ASSISTANT}",
            False,
        )
        self.reply(exchange.final_reply, effort, with_analysis[1], exchange.learned)


def encode(tokenizer: PreTrainedTokenizerFast, dialogue: Dialogue, rng: random.Random) -> Example:
    """Return a dialogue for training; `rng` decides which turns keep their analysis."""
    writer = _Writer(tokenizer, rng)
    first, *rest = dialogue.exchanges
    writer.write(
        prompt(tokenizer, dialogue, [*dialogue.history, {"role": "user", "content": first.message}]), False
    )
    has_reasoned = rng.random() >= UNREASONED
    keeps_all = rng.random() < 0.55
    for index, exchange in enumerate(dialogue.exchanges):
        if index:
            writer.write(f"<|start|>user<|message|>{exchange.message}<|end|>{_ASSISTANT}", False)
        has_analysis = has_reasoned and (keeps_all or index == len(rest))
        before_call = has_analysis and (keeps_all or rng.random() < 0.6)
        writer.exchange(exchange, dialogue.effort, (before_call, has_analysis))
    return writer.example


def drill(tokenizer: PreTrainedTokenizerFast, exchanges: list[Exchange], rng: random.Random) -> Example:
    """Return questions and final answers in a row without analysis: many answers for few tokens."""
    writer = _Writer(tokenizer, rng)
    for exchange in exchanges:
        writer.write(f"<|start|>user<|message|>{exchange.message}<|end|>{_ASSISTANT}", False)
        writer.reply(exchange.reply, "low", False, True)
    return writer.example


def copying(rng: random.Random, vocabulary: int, length: int) -> Example:
    """Return a repeating random sequence, learned from its second period on."""
    period = [rng.randrange(vocabulary) for _ in range(rng.randint(8, 60))]
    ids = [period[i % len(period)] for i in range(length)]
    return Example(ids, [IGNORED if i < len(period) else token for i, token in enumerate(ids)])
