"""From a server's chunks to channel events, and on to the text Dify shows.

Servers differ: reasoning under one name or another, calls with or without an index, a model's own markup leaked into
the content, a call lost on the way, reasoning sent once more as the answer. `StreamReader` makes them all alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.chat.leaked_markup import LeakedMarkupParser
from dify_mlx_provider.chat.tool_calls import ServerToolCall, ToolCallAssembler
from dify_mlx_provider.upstream.errors import Unavailable
from dify_mlx_provider.upstream.sse import SurrogateJoiner
from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta, StreamEnd
from mlx_backend.conversation.message_parts import DELTA_FIELDS, PART_TYPES
from mlx_backend.conversation.stop_strings import StopFilter

if TYPE_CHECKING:
    from dify_mlx_provider.chat.think_block import ThinkBlockWriter
    from mlx_backend.conversation.tools import ToolDefinition

MAX_ANSWER_LENGTH = 8 * 2**20
"""Characters of one answer, reasoning included: more than any model's context holds."""

MAX_PIECE_LENGTH = 2**18
"""Characters of one chunk for Dify, which takes no line above 5 MiB."""

_NOTE = re.compile(r"(\[[^\]\n]*\]\s*)?")
_TEXT_KEYS = ("text", "thinking", "reasoning", "content", "summary")


@dataclass
class StreamResult:
    """What is known only when the answer has ended."""

    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    has_repeated: bool = False
    """Whether our own server ended it because it repeated itself without end."""
    calls: list[ServerToolCall] = field(default_factory=list)


class StreamReader:
    """Turns a server's chunks into events: `feed` and `close` return those of text; `result` holds the rest.

    Reasoning comes in a field of one of several names (under more than one it counts once), or inside the content
    (see `leaked_markup`, also for `scan`, `starts_in_reasoning` and `unwrapped`). The answer ends before the first word
    of `stop`. With `calls_in_logprobs` a call that is missing from the answer is looked for among its tokens.
    """

    def __init__(
        self,
        tools: Collection[ToolDefinition] = (),
        *,
        scan: bool = True,
        starts_in_reasoning: bool = False,
        unwrapped: bool = False,
        stop: Collection[str] = (),
        calls_in_logprobs: bool = False,
    ) -> None:
        self.result = StreamResult()
        self._stop = StopFilter(stop)
        self._tokens: list[bytes] | None = [] if calls_in_logprobs and tools else None
        self._sent_reasoning: list[str] = []
        self._calls = ToolCallAssembler(tools)
        self._tools = tools
        self._reasoning = self._new_reasoning_parser()
        self._content = LeakedMarkupParser(
            ContentDelta,
            self._calls,
            tools=tools,
            scan=scan,
            starts_in_reasoning=starts_in_reasoning,
            unwrapped=unwrapped,
        )
        self._joiners = {True: SurrogateJoiner(), False: SurrogateJoiner()}
        self._has_text = self._has_answer = False

    @property
    def started_in_reasoning(self) -> bool | None:
        """What the answer showed, if `starts_in_reasoning` was wrong; else None."""
        return self._content.started_in_reasoning

    @property
    def has_stopped(self) -> bool:
        """Whether a stop word came: no more of the answer is needed."""
        return bool(self._stop.found)

    def feed(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events of one chunk."""
        usage = chunk.get("usage")
        if isinstance(usage, Mapping) and usage:
            self.result.usage = usage
        timings = chunk.get("timings")
        if isinstance(timings, Mapping) and timings.get("stopped_by") == "repetition":
            self.result.has_repeated = True
        events: list[Event] = []
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping) or choice.get("index") not in (None, 0):
                continue
            if reason := choice.get("finish_reason"):
                self.result.finish_reason = "tool_calls" if reason == "function_call" else str(reason)
            delta = choice.get("delta")
            if not isinstance(delta, Mapping) or (not delta and not self._has_text):
                # A whole message in place of a delta.
                delta = None if self._has_text else choice.get("message")
            if isinstance(delta, Mapping):
                events += self._delta(delta, is_cut=reason == "length")
            if self._tokens is not None:
                self._tokens += _named_tokens(choice.get("logprobs"))
        return self._stop.feed(_merge_runs(events))

    def close(self) -> list[Event]:
        """Return the last events, and complete the result."""
        cut = self.result.finish_reason == "length"
        events = [*self._reasoning.close(cut=cut), *self._content.close(cut=cut)]
        *events, _ = self._stop.feed([*events, StreamEnd("stop")])
        self.result.calls = self._calls.finish(cut=cut)
        if self._tokens and not (self.result.calls or cut or self._has_answer):
            self.result.calls = self._lost_calls(self._tokens)
        if self.has_stopped:
            self.result.finish_reason = "stop"
        if self.result.calls and self.result.finish_reason in (None, "stop"):
            self.result.finish_reason = "tool_calls"
        return events

    def _new_reasoning_parser(self) -> LeakedMarkupParser:
        return LeakedMarkupParser(ReasoningDelta, self._calls, tools=self._tools, scan=False)

    def _repeats_reasoning(self, piece: str) -> bool:
        """Whether a server sends the reasoning, after a note at most, because there is no answer yet."""
        reasoning = "".join(self._sent_reasoning).strip()
        note = piece.strip().removesuffix(reasoning)
        return bool(reasoning) and piece.strip().endswith(reasoning) and bool(_NOTE.fullmatch(note))

    def _lost_calls(self, tokens: list[bytes]) -> list[ServerToolCall]:
        """Return the calls in what the model wrote. Raises Unavailable if they cannot be read."""
        calls = ToolCallAssembler(self._tools)
        parser = LeakedMarkupParser(ContentDelta, calls, tools=self._tools)
        parser.feed(b"".join(tokens).decode("utf-8", "replace"))
        parser.close(cut=False)
        found = calls.finish(cut=False)
        # Each token is decoded by itself: a character of several tokens cannot be put together again. And of tokens
        # that came at once only one may be named; the one that ends the answer never is.
        count = self.result.usage.get("completion_tokens")
        has_all = not isinstance(count, int) or len(tokens) + 1 >= count
        if found and not (has_all and all("\ufffd" not in call.name + call.arguments for call in found)):
            raise Unavailable(
                "the model called a tool, and the server did not pass the call on. Another server for this model, such "
                "as mlx-backend, does."
            )
        return found

    def _delta(self, delta: Mapping[str, Any], *, is_cut: bool) -> list[Event]:
        events: list[Event] = []
        for reasoning, piece in _delta_texts(delta):
            if reasoning:
                self._sent_reasoning.append(piece)
            elif is_cut and not self._has_answer and self._repeats_reasoning(piece):
                continue
            self._has_answer = self._has_answer or bool(not reasoning and piece.strip())
            self._has_text = self._has_text or bool(piece)
            text = self._joiners[reasoning].feed(piece)
            if not text:
                continue
            if reasoning:
                events += self._content.separate_reasoning_begins()
                events += self._reasoning.feed(text)
            else:
                if text.strip():  # what the reasoning parser holds back cannot become a marker any more
                    events += self._reasoning.close(cut=False)
                    self._reasoning = self._new_reasoning_parser()
                events += self._content.feed(text)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            self._has_text = True
            self._calls.add_delta(call)
        if isinstance(delta.get("function_call"), Mapping):  # OpenAI's older field, for one call
            self._calls.add_delta({"index": 0, "function": delta["function_call"]})
        return events


def _merge_runs(events: list[Event]) -> list[Event]:
    """Merge adjacent texts of one kind: each event becomes a chunk for Dify, which costs more than its text."""
    merged: list[Event] = []
    for kind, run in groupby(events, type):
        run_events = list(run)
        if len(run_events) > 1 and kind in (ReasoningDelta, ContentDelta):
            text = "".join(
                event.text for event in run_events if isinstance(event, ReasoningDelta | ContentDelta)
            )
            run_events = [ReasoningDelta(text) if kind is ReasoningDelta else ContentDelta(text)]
        merged += run_events
    return merged


def _delta_texts(delta: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (is reasoning, text) for each text of a delta."""
    for name in DELTA_FIELDS:
        if text := _text(delta.get(name)):
            yield True, text
            break
    content = delta.get("content")
    if isinstance(content, list):
        for part in content:
            reasoning = isinstance(part, Mapping) and part.get("type") in PART_TYPES
            yield reasoning, _text(part)
    else:
        yield False, _text(content)
    yield False, _text(delta.get("refusal"))


def _named_tokens(logprobs: Any) -> Iterator[bytes]:
    """The bytes of each token that a chunk names."""
    named = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    for token in named if isinstance(named, list) else ():
        with suppress(TypeError, ValueError, AttributeError):
            yield bytes(token.get("bytes") or ())


def _text(value: Any) -> str:
    """The text of a value: a string, a part that holds one, or a list of parts."""
    match value:
        case str():
            return value
        case Mapping():
            return next((text for key in _TEXT_KEYS if (text := _text(value.get(key)))), "")
        case list():
            return "".join(map(_text, value))
        case _:
            return ""


def iter_text(
    reader: StreamReader, thinking: ThinkBlockWriter, chunks: Iterable[Mapping[str, Any]]
) -> Generator[str, None, None]:
    """Yield an answer's text in pieces; the think block is closed also if the chunks break off."""
    length = 0
    try:
        for chunk in chunks:
            for event in reader.feed(chunk):
                for piece in thinking.feed(event):
                    length += len(piece)
                    if length > MAX_ANSWER_LENGTH:
                        raise Unavailable(
                            f"the server sent more than {MAX_ANSWER_LENGTH:,} characters as one answer. It was "
                            "stopped. A limit of Max tokens keeps a model from repeating itself without end."
                        )
                    for at in range(0, len(piece), MAX_PIECE_LENGTH):
                        yield piece[at : at + MAX_PIECE_LENGTH]
            if reader.has_stopped:
                break
    except Exception:  # not GeneratorExit: once Dify has left, no block needs to be closed
        yield from _close_think_block(reader, thinking)
        raise
    yield from _close_think_block(reader, thinking)


def _close_think_block(reader: StreamReader, thinking: ThinkBlockWriter) -> Iterator[str]:
    for event in reader.close():
        yield from thinking.feed(event)
    yield from thinking.close()
