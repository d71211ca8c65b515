"""From wire chunks to what Dify shows: events first, then text in which reasoning is a thinking block.

Two small machines. `Reader` turns a server's deltas into channel events; where a server leaks its model's own markers
into the content, they are read by the same grammars the MLX server uses. `ThinkingText` turns events into pieces of
text: Dify has no field for reasoning, its pages and workflows look for exactly `<think>\\n…\\n</think>`, lower case,
without attributes, each tag in a chunk of its own, always closed.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

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
            ended_by = "length" if self.outcome.finish_reason == "length" else "stop"
            events += self._read_leak(self._parser.close("length" if ended_by == "length" else "stop"))
        calls = [call for _, call in sorted(self._by_index.items())] + list(self._leaked.values())
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
        for position, call in enumerate(delta.get("tool_calls") or ()):
            if isinstance(call, Mapping):
                self._call(call, position)
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

    def _call(self, delta: Mapping[str, Any], position: int) -> None:
        """Add a piece of a call; pieces belong together by index, or by id where a server sends no index."""
        index = delta.get("index")
        identifier = str(delta.get("id") or "")
        if not isinstance(index, int):
            known = [at for at, call in self._by_index.items() if identifier and call.id == identifier]
            if known:
                index = known[0]
            elif identifier or not self._by_index:
                index = max(self._by_index, default=-1) + 1
            else:
                index = min(max(self._by_index), position) if position else max(self._by_index)
        call = self._by_index.setdefault(index, Call())
        call.id = call.id or identifier
        function = delta.get("function")
        if isinstance(function, Mapping):
            call.name = call.name or str(function.get("name") or "")
            arguments = function.get("arguments")
            call.arguments += arguments if isinstance(arguments, str) else ""


OPEN, CLOSE = "<think>\n", "\n</think>"
_TAG = re.compile(r"<(?=/?think)", re.IGNORECASE)
_HALF_TAG = re.compile(r"</?(?:t(?:h(?:i(?:n)?)?)?)?\Z", re.IGNORECASE)
_FENCE = re.compile(r"^\s{0,3}(?:```|~~~)", re.MULTILINE)


class ThinkingText:
    """Turns events into the pieces of text Dify gets, one list a call, each piece a chunk of its own.

    A block opens with the first reasoning that is not blank (no empty blocks) and closes before anything else.
    Inside it, text that would itself open or close a block gets an invisible character, and an open code fence is
    closed first, because it would swallow the end of the block.
    """

    def __init__(self, *, hidden: bool = False) -> None:
        self._hidden = hidden
        self._open = False
        self._blank = ""  # white space that is kept only if reasoning follows
        self._held = ""  # the possible beginning of a tag
        self._block: list[str] = []

    def feed(self, event: Event) -> list[str]:
        """Return the pieces of one event."""
        match event:
            case ReasoningDelta(text):
                return [] if self._hidden else self._reasoning(text)
            case ContentDelta(text):
                return [*self.close(), text]
            case _:
                return self.close()

    def close(self) -> list[str]:
        """Close an open block; also called at the end, before tool calls, and when the answer breaks off."""
        held, self._held, self._blank = self._held, "", ""
        if not self._open:
            return []
        self._open = False
        self._block.append(held)
        fenced = len(_FENCE.findall("".join(self._block))) % 2 == 1
        self._block = []
        rest = held + ("\n```" if fenced else "")
        return [rest, CLOSE] if rest else [CLOSE]

    def _reasoning(self, text: str) -> list[str]:
        text = self._blank + self._held + text
        self._blank = self._held = ""
        pieces: list[str] = []
        if not self._open:
            text = text.lstrip()
            if not text:
                return []
            self._open = True
            pieces.append(OPEN)
        if half := _HALF_TAG.search(text):
            self._held = half.group()
            text = text[: half.start()]
        kept = text.rstrip("\n") if not self._held else text
        self._blank = text[len(kept) :]
        if kept:
            kept = _TAG.sub("<\u200b", kept)
            self._block.append(kept + self._blank)
            pieces.append(kept)
        return pieces


def texts(reader: Reader, thinking: ThinkingText, chunks: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the pieces of text of a whole answer; the block is closed also when the chunks break off."""
    try:
        for chunk in chunks:
            for event in reader.feed(chunk):
                yield from thinking.feed(event)
        for event in reader.close():
            yield from thinking.feed(event)
    except GeneratorExit:
        raise  # Dify stopped listening: there is nobody to close a block for
    except Exception:
        yield from thinking.close()
        raise
    yield from thinking.close()
