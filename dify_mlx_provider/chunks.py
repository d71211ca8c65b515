"""From a server's chunks to channel events, and on to the text Dify shows.

Servers differ: reasoning under one name or another, calls with or without an index, a model's own markers leaked into
the content. Behind `Reader` they are all the same.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.conversation.parser import ChannelParser

if TYPE_CHECKING:
    from .thinking import ThinkingText

_HARMONY_OPENERS = ("<|channel|>", "<|start|>", "<|message|>")
_THINK_OPENERS = ("<think>", "<thinking>", "<|begin_of_thought|>", "◁think▷", "[THINK]")


@dataclass
class Call:
    """A tool call being assembled."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Outcome:
    """What is known only when the answer is over."""

    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)


class Reader:
    """Reads a server's chunks: `feed` gives events of text, `close` the last of them; `outcome` has the rest.

    Reasoning comes as `reasoning_content` or `reasoning` (some servers send both: then once). Content that begins
    with a marker while no reasoning field has been seen is a leak, and is read by a parser from then on.
    """

    def __init__(self, tools: Collection[str] = ()) -> None:
        self.outcome = Outcome()
        self._tools = tools
        self._by_index: dict[int, Call] = {}
        self._opening: str | None = ""  # content held until it is known whether it leaks; None: decided
        self._parser: ChannelParser | None = None
        self._leaked: dict[int, Call] = {}

    def feed(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Read one chunk."""
        if isinstance(chunk.get("usage"), Mapping):
            self.outcome.usage = chunk["usage"]
        events: list[Event] = []
        for choice in chunk.get("choices") or ():
            if not isinstance(choice, Mapping):
                continue
            if choice.get("finish_reason"):
                self.outcome.finish_reason = str(choice["finish_reason"])
            delta = choice.get("delta")
            if isinstance(delta, Mapping):
                events += self._delta(delta)
        return events

    def close(self) -> list[Event]:
        """Read the end: what was held, and the calls in their order."""
        events: list[Event] = []
        if self._opening:
            held, self._opening = self._opening, None
            events.append(ContentDelta(held))
        if self._parser is not None:
            cut = self.outcome.finish_reason == "length"
            events += self._read_leak(self._parser.close("length" if cut else "stop"))
        calls = [call for _, call in sorted(self._by_index.items())]
        if calls and self.outcome.finish_reason == "length" and not _is_json(calls[-1].arguments):
            calls.pop()  # cut by the token limit: it must not be run
        calls += self._leaked.values()
        self.outcome.calls = [call for call in calls if call.name]
        for call in self.outcome.calls:
            call.id = call.id or f"call_{uuid.uuid4().hex[:24]}"
        if self.outcome.calls and self.outcome.finish_reason in (None, "stop"):
            self.outcome.finish_reason = "tool_calls"
        return events

    def _delta(self, delta: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(reasoning, str) and reasoning:
            if self._opening is not None and not self._opening:
                self._opening = None  # this server separates by itself
            events.append(ReasoningDelta(reasoning))
        content = delta.get("content")
        if isinstance(content, str) and content:
            events += self._content(content)
        for call in delta.get("tool_calls") or ():
            if isinstance(call, Mapping):
                self._call(call)
        return events

    def _content(self, text: str) -> list[Event]:
        if self._parser is not None:
            return self._read_leak(self._parser.feed(text))
        if self._opening is None:
            return [ContentDelta(text)]
        self._opening += text
        start = self._opening.lstrip()
        dialect = None
        if start.startswith(_HARMONY_OPENERS):
            dialect = "harmony"
        elif start.startswith(_THINK_OPENERS):
            dialect = "think"
        elif any(opener.startswith(start) for opener in _HARMONY_OPENERS + _THINK_OPENERS):
            return []
        held, self._opening = self._opening, None
        if dialect is None:
            return [ContentDelta(held)]
        self._parser = ChannelParser(dialect, tools=self._tools or None)
        return self._read_leak(self._parser.feed(start))

    def _read_leak(self, events: Iterable[Event]) -> list[Event]:
        """Keep the text of parsed events; put calls aside."""
        texts: list[Event] = []
        for event in events:
            match event:
                case ReasoningDelta() | ContentDelta():
                    texts.append(event)
                case ToolCallStart(index, name):
                    self._leaked[index] = Call(name=name)
                case ToolCallDelta(index, arguments):
                    self._leaked[index].arguments += arguments
                case ToolCallEnd(index, complete):
                    if not complete:  # cut by the token limit: it must not be run
                        del self._leaked[index]
                case StreamEnd():
                    pass
        return texts

    def _call(self, delta: Mapping[str, Any]) -> None:
        """Add a piece of a call."""
        identifier = str(delta.get("id") or "")
        function = delta.get("function")
        given = function if isinstance(function, Mapping) else {}
        name = str(given.get("name") or "")
        index = delta.get("index")
        if not isinstance(index, int):
            index = self._place(identifier, name)
        call = self._by_index.setdefault(index, Call())
        call.id = call.id or identifier
        call.name = call.name or name
        arguments = given.get("arguments")
        if isinstance(arguments, str):
            call.arguments += arguments
        elif arguments is not None:  # some servers send the object itself
            call.arguments += json.dumps(arguments, ensure_ascii=False)

    def _place(self, identifier: str, name: str) -> int:
        """Where a piece without an index belongs: to the call of its id; else an id or a name begins a new call."""
        for index, call in self._by_index.items():
            if identifier and call.id == identifier:
                return index
        last = max(self._by_index, default=-1)
        return last + 1 if identifier or name or last < 0 else last


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def texts(
    reader: Reader, thinking: ThinkingText, chunks: Iterable[Mapping[str, Any]]
) -> Generator[str, None, None]:
    """Yield the pieces of text of a whole answer; the block is closed also when the chunks break off."""
    try:
        for chunk in chunks:
            for event in reader.feed(chunk):
                yield from thinking.feed(event)
    except Exception:  # not GeneratorExit: when Dify stops listening there is nobody to close a block for
        yield from _rest(reader, thinking)
        raise
    yield from _rest(reader, thinking)


def _rest(reader: Reader, thinking: ThinkingText) -> Iterator[str]:
    for event in reader.close():
        yield from thinking.feed(event)
    yield from thinking.close()
