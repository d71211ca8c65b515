"""From a server's chunks to channel events, and on to the text Dify shows.

Servers differ: reasoning under one name or another, calls with or without an index, a model's own markers leaked into
the content. Behind `Reader` they are all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.chat.leaked_markup import LeakyText
from dify_mlx_provider.chat.tool_calls import ToolCall, ToolCallAssembler
from dify_mlx_provider.upstream.errors import Unavailable
from dify_mlx_provider.upstream.surrogates import SurrogateJoiner
from mlx_backend.conversation import reasoning_fields
from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta

if TYPE_CHECKING:
    from dify_mlx_provider.chat.think_block import ThinkBlockWriter

MAX_ANSWER_LENGTH = 8 * 2**20
"""Characters of one answer, reasoning included: more than any model's context holds."""

MAX_PIECE_LENGTH = 2**18
"""Characters of one chunk for Dify, which takes no line above 5 MiB."""

_TEXT_KEYS = ("text", "thinking", "reasoning", "content", "summary")


@dataclass
class StreamResult:
    """What is known only when the answer is over."""

    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)


class StreamReader:
    """Reads a server's chunks: `feed` gives events of text, `close` the last of them; `outcome` has the rest.

    Reasoning comes in a field of one of several names (some servers send it in more than one: it is taken once), or
    leaks into the content (see `leaks`). `watch` and `inside` are as there.
    """

    def __init__(self, tools: Collection[str] = (), *, watch: bool = True, inside: bool = False) -> None:
        self.outcome = StreamResult()
        self._calls = ToolCallAssembler()
        self._tools = tools
        self._reasoning = self._stretch()
        self._content = LeakyText(ContentDelta, self._calls, tools=tools, watch=watch, inside=inside)
        self._halves = {True: SurrogateJoiner(), False: SurrogateJoiner()}
        self._said = False

    @property
    def begins_inside(self) -> bool | None:
        """Where it was not as `inside` said: whether the answer's text began inside a block of reasoning."""
        return self._content.begins_inside

    def feed(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Read one chunk."""
        usage = chunk.get("usage")
        if isinstance(usage, Mapping) and usage:
            self.outcome.usage = usage
        events: list[Event] = []
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping) or choice.get("index") not in (None, 0):
                continue
            if reason := choice.get("finish_reason"):
                self.outcome.finish_reason = "tool_calls" if reason == "function_call" else str(reason)
            delta = choice.get("delta")
            if not isinstance(delta, Mapping) or (not delta and not self._said):
                delta = None if self._said else choice.get("message")  # a whole message in place of a delta
            if isinstance(delta, Mapping):
                events += self._delta(delta)
        return _joined(events)

    def close(self) -> list[Event]:
        """Read the end: what was held, and the calls in their order."""
        cut = self.outcome.finish_reason == "length"
        events = [*self._reasoning.close(cut=cut), *self._content.close(cut=cut)]
        self.outcome.calls = self._calls.finished(cut=cut)
        if self.outcome.calls and self.outcome.finish_reason in (None, "stop"):
            self.outcome.finish_reason = "tool_calls"
        return events

    def _stretch(self) -> LeakyText:
        return LeakyText(ReasoningDelta, self._calls, tools=self._tools, watch=False)

    def _delta(self, delta: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        for reasoning, piece in _texts_of(delta):
            self._said = self._said or bool(piece)
            text = self._halves[reasoning].feed(piece)
            if not text:
                continue
            if reasoning:
                events += self._content.separates()
                events += self._reasoning.feed(text)
            else:
                if text.strip():  # what was held of the reasoning can become no marker any more
                    events += self._reasoning.close(cut=False)
                    self._reasoning = self._stretch()
                events += self._content.feed(text)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            self._said = True
            self._calls.add(call)
        if isinstance(delta.get("function_call"), Mapping):  # the field's old name, for one call
            self._calls.add({"index": 0, "function": delta["function_call"]})
        return events


def _joined(events: list[Event]) -> list[Event]:
    """Join texts of one kind that follow each other: each would be a chunk for Dify, which costs more than its text."""
    joined: list[Event] = []
    for kind, run in groupby(events, type):
        together = list(run)
        if len(together) > 1 and kind in (ReasoningDelta, ContentDelta):
            text = "".join(
                event.text for event in together if isinstance(event, ReasoningDelta | ContentDelta)
            )
            together = [ReasoningDelta(text) if kind is ReasoningDelta else ContentDelta(text)]
        joined += together
    return joined


def _texts_of(delta: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield a delta's texts, each with whether it is reasoning."""
    for name in reasoning_fields.DELTA_FIELDS:
        if text := _text(delta.get(name)):
            yield True, text
            break
    content = delta.get("content")
    if isinstance(content, list):
        for part in content:
            reasoning = isinstance(part, Mapping) and part.get("type") in reasoning_fields.PART_TYPES
            yield reasoning, _text(part)
    else:
        yield False, _text(content)
    yield False, _text(delta.get("refusal"))


def _text(value: Any) -> str:
    """The text in a value: itself, under one of the names it has in parts, or in a list of parts."""
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
    """Yield the pieces of text of a whole answer; the block is closed also when the chunks break off."""
    length = 0
    try:
        for chunk in chunks:
            for event in reader.feed(chunk):
                for piece in thinking.feed(event):
                    length += len(piece)
                    if length > MAX_ANSWER_LENGTH:
                        raise Unavailable(
                            f"the server sent more than {MAX_ANSWER_LENGTH:,} characters as one answer. The answer was "
                            "stopped; a limit of Max tokens keeps a model from repeating itself without end."
                        )
                    for at in range(0, len(piece), MAX_PIECE_LENGTH):
                        yield piece[at : at + MAX_PIECE_LENGTH]
    except Exception:  # not GeneratorExit: when Dify stops listening there is nobody to close a block for
        yield from _rest(reader, thinking)
        raise
    yield from _rest(reader, thinking)


def _rest(reader: StreamReader, thinking: ThinkBlockWriter) -> Iterator[str]:
    for event in reader.close():
        yield from thinking.feed(event)
    yield from thinking.close()
