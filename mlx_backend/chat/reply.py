"""A reply on its way: what the engine says becomes events, counted, cut at stop strings, and told to the end.

    engine items ─parser─▶ events ─stop strings─▶ what the client gets, and what it cost

A `Reply` is an iterator of events that cancels its generation when it is closed. Knows no HTTP, no prompts.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mlx_backend.chat.stop_strings import StopStrings
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    Event,
    FinishReason,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.engine.base import Finished, Progress, TokenDelta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mlx_backend.chat.reasoning_store import ReasoningStore
    from mlx_backend.conversation.effort import Resolution
    from mlx_backend.engine.base import Generation, Logprobs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of the answer and how likely it was."""

    token: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class ContentLogprobs:
    """The tokens of the content delta that comes next."""

    tokens: tuple[TokenLogprobs, ...]


type ReplyEvent = Event | ContentLogprobs


@dataclass(slots=True)
class Usage:
    """What a reply has cost so far. Seconds are the engine's, and there at the end, whatever that was."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Parser(Protocol):
    """What turns text into events (ChannelParser, or RawText)."""

    @property
    def ended(self) -> bool:
        """Nothing after this belongs to the turn."""
        ...

    @property
    def reasons(self) -> bool:
        """Text that came next would be reasoning."""
        ...

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """Read more text."""
        ...

    def close(self, ended_by: Literal["stop", "length"] = "stop") -> list[Event]:
        """Read the end."""
        ...


class RawText:
    """The parser that reads nothing: all text is content, markers included.

    With `special_tokens` the end token is left out, as a plain completion expects: a control token is shown
    only when something follows it.
    """

    def __init__(self, special_tokens: Mapping[int, str] | None = None, *, keep_end: bool = False) -> None:
        self.ended = self.reasons = False
        self._special = {} if keep_end or special_tokens is None else special_tokens
        self._held = ""

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """Show the text as it is."""
        shown = self._held + text
        self._held = ""
        if token in self._special:
            self._held = text
            shown = shown.removesuffix(text)
        return [ContentDelta(shown)] if shown else []

    def close(self, ended_by: Literal["stop", "length"] = "stop") -> list[Event]:
        """End; a control token cut off by the limit was no end token."""
        shown: list[Event] = [ContentDelta(self._held)] if self._held and ended_by == "length" else []
        return [*shown, StreamEnd(ended_by)]


class Reply:
    """A running reply: iterate it for events, close it to cancel. One thread iterates; any may close.

    `usage` is right at any time and final after the last event. Besides events the iterator gives `Progress`
    while the prompt is read, and None whenever `patience` seconds passed without anything.
    """

    def __init__(
        self,
        generation: Generation,
        parser: Parser,
        *,
        prompt_tokens: int,
        special_tokens: Mapping[int, str],
        effort: Resolution | None = None,
        stop: tuple[str, ...] = (),
        one_call: bool = False,
        thoughts: ReasoningStore | None = None,
        open_calls: Sequence[str] = (),
        told: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.effort = effort
        self.usage = Usage(prompt_tokens)
        self.finish: FinishReason | None = None
        self._generation = generation
        self._parser = parser
        self._special = special_tokens
        self._stop = StopStrings(stop)
        self._one_call = one_call
        self._thoughts = thoughts
        self._open_calls = open_calls
        self._told = told
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: dict[int, str] = {}
        self._call_parts: dict[int, tuple[str, list[str]]] = {}
        self._logprobs: list[TokenLogprobs] = []  # of tokens whose text has not been shown yet
        self._unclaimed = 0  # tokens since the last event or marker: part of whatever comes next
        self._halves = 0  # tokens of a character that is not complete

    def call_id(self, index: int) -> str:
        """Return the id of the tool call with this index; the same id every time."""
        return self._calls.setdefault(index, f"call_{uuid.uuid4().hex[:24]}")

    def close(self) -> None:
        """Stop generating. Idempotent, from any thread."""
        self._generation.close()

    def events(self, patience: float | None = None) -> Iterator[ReplyEvent | Progress | None]:
        """Yield everything up to one StreamEnd. A reply that was closed elsewhere ends without one."""
        try:
            while self.finish is None:
                try:
                    item = self._generation.next(patience)
                except StopIteration:
                    return
                match item:
                    case None:
                        yield None
                    case Progress():
                        self.usage.cached_tokens = item.cached
                        yield item
                    case TokenDelta() if self._parser.ended:  # an end marker that is no end token here
                        yield from self._cut()
                    case TokenDelta():
                        yield from self._read(item)
                    case Finished():
                        self._measure(item)
                        if self._parser.reasons:
                            self.usage.reasoning_tokens += self._halves
                        yield from self._end(self._parser.close(item.reason))
            self._tell()
        finally:
            if self.finish is None:  # left, or failed: what it has cost is to be told all the same
                self._take_times()
            self._generation.close()

    def _read(self, item: TokenDelta) -> list[ReplyEvent]:
        self.usage.completion_tokens += 1
        reasons = self._parser.reasons
        events = self._parser.feed(item.text, item.token)
        self._count_reasoning(item, events, reasons=reasons)
        if item.logprobs is not None:
            self._note_logprobs(item, item.logprobs, events)
        shown = self._filtered(events)
        if self._stop.stopped or (self._one_call and _completes_a_call(events)):
            shown += self._cut()
        return shown

    def _cut(self) -> list[ReplyEvent]:
        """End the turn here, though the engine would go on."""
        self._take_times()
        return self._end(self._parser.close("stop"))

    def _count_reasoning(self, item: TokenDelta, events: list[Event], *, reasons: bool) -> None:
        """Count what was shown, and what would have been had its character not been cut; `reasons` is of before."""
        if any(isinstance(event, ReasoningDelta) for event in events):
            self.usage.reasoning_tokens += 1 + self._unclaimed
            self._unclaimed = 0
        elif events or item.token in self._special:
            self.usage.reasoning_tokens += self._halves if reasons else 0
            self._unclaimed = 0
        else:
            self._unclaimed += 1
        self._halves = 0 if item.text else self._halves + 1

    def _note_logprobs(self, item: TokenDelta, logprobs: Logprobs, events: list[Event]) -> None:
        """Hold a token's log probabilities until its text is shown; those of anything but the answer go."""
        # Nothing yet: half a character, or what may still become a marker.
        undecided = not events and item.token not in self._special
        if undecided or any(isinstance(event, ContentDelta) for event in events):
            self._logprobs.append(TokenLogprobs(item.token, logprobs))
        else:
            self._logprobs.clear()

    def _content_shown(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        self._content.append(text)
        shown: list[ReplyEvent] = [ContentDelta(text)]
        if self._logprobs:
            shown.insert(0, ContentLogprobs(tuple(self._logprobs)))
            self._logprobs.clear()
        return shown

    def _filtered(self, events: list[Event]) -> list[ReplyEvent]:
        """Apply stop strings to the answer, and to nothing else."""
        shown: list[ReplyEvent] = []
        for event in events:
            match event:
                case ContentDelta(text, Channel.FINAL):
                    shown += self._content_shown(self._stop.feed(text))
                case ContentDelta(text) if not self._stop.stopped:
                    shown += self._content_shown(text)
                case ReasoningDelta(text):
                    if self._thoughts is not None:
                        self._reasoning.append(text)
                    shown.append(event)
                case ToolCallStart(index, name) if not self._stop.stopped:
                    self._call_parts[index] = (name, [])
                    shown.append(event)
                case ToolCallDelta(index, arguments) if not self._stop.stopped:
                    self._call_parts[index][1].append(arguments)
                    shown.append(event)
                case ToolCallEnd(index, complete=True):
                    self.call_id(index)
                    shown.append(event)
                case StreamEnd():
                    shown.append(event)
        return shown

    def _end(self, events: list[Event]) -> list[ReplyEvent]:
        shown = self._filtered(events)
        end = shown.pop()
        assert isinstance(end, StreamEnd)
        shown += self._content_shown(self._stop.close())
        self.finish = end.finish
        self._remember()
        return [*shown, end]

    def _remember(self) -> None:
        """Keep the reasoning of calls until their results come back; forget it with the turn's answer."""
        if self._thoughts is None:
            return
        if self._calls:
            self._thoughts.put(self._calls.values(), "".join(self._reasoning))
        elif self.finish == "stop":
            self._thoughts.drop(self._open_calls)

    def _tell(self) -> None:
        """Say what the whole answer was, as a history would have it, unless it was cut."""
        if self._told is None or self.finish not in ("stop", "tool_calls"):
            return
        calls = [
            {
                "id": self._calls[index],
                "type": "function",
                "function": {"name": name, "arguments": "".join(parts)},
            }
            for index, (name, parts) in self._call_parts.items()
            if index in self._calls
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if calls:
            answer |= {"tool_calls": calls, "reasoning_content": "".join(self._reasoning)}
        self._told(answer)

    def _take_times(self) -> None:
        times = self._generation.times()
        self.usage.queue_seconds = times.queue
        self.usage.prefill_seconds = times.prefill
        self.usage.decode_seconds = times.decode

    def _measure(self, finished: Finished) -> None:
        self.usage.cached_tokens = finished.cached_tokens
        self.usage.queue_seconds = finished.queue_seconds
        self.usage.prefill_seconds = finished.prefill_seconds
        self.usage.decode_seconds = finished.decode_seconds


def _completes_a_call(events: Sequence[Event]) -> bool:
    return any(isinstance(event, ToolCallEnd) and event.complete for event in events)
