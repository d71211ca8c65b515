"""A reply in progress: engine items in, events out, up to one StreamEnd.

    engine items ─parser─▶ events ─StopFilter─▶ the events a client gets
                     ├─ UsageMeter        what they cost              (usage.py)
                     ├─ LogprobsAligner   log probabilities by text   (logprobs.py)
                     └─ FinishedReply     the whole of it, for `on_finished`

A `Reply` is an iterator of events that cancels its generation when it is closed. Knows no HTTP and no prompts.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from mlx_backend.chat.logprobs import ContentLogprobs, LogprobsAligner
from mlx_backend.chat.stop_strings import StopFilter
from mlx_backend.chat.superseded import CONTENT, REASONING
from mlx_backend.chat.usage import UsageMeter
from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta, StreamEnd, ToolCallEnd
from mlx_backend.conversation.parser import fold
from mlx_backend.conversation.reasoning_fields import REASONING_CONTENT
from mlx_backend.engine.base import Finished, Progress, TokenDelta
from mlx_backend.errors import ReplySuperseded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mlx_backend.chat.usage import Usage
    from mlx_backend.conversation.effort_sources import Resolution
    from mlx_backend.conversation.events import EndedBy, FinishReason, Message
    from mlx_backend.conversation.running_replies import RunningReply
    from mlx_backend.engine.base import Generation

type ReplyEvent = Event | ContentLogprobs


class Parser(Protocol):
    """Turns a model's text into events: `ChannelParser` for a conversation, `RawText` for a plain completion."""

    @property
    def ended(self) -> bool:
        """Nothing after this belongs to the reply."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Text that came next would be reasoning."""
        ...

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """Parse more text."""
        ...

    def close(self, ended_by: EndedBy = "stop") -> list[Event]:
        """Parse the end; the last event is a StreamEnd."""
        ...


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """The whole of a reply that has ended, and the ids that its complete tool calls went out with, in order."""

    message: Message
    call_ids: Sequence[str]

    @property
    def is_cut(self) -> bool:
        """Whether the token limit ended it."""
        return self.message.finish == "length"

    def as_history(self) -> dict[str, Any]:
        """Return the assistant message that a client would send back; which reasoning stays is the prompt's matter."""
        message = self.message
        answer: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.reasoning:
            answer[REASONING_CONTENT] = message.reasoning
        if not self.call_ids:
            return answer
        complete = [call for call in message.tool_calls if call.complete]
        calls = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call_id, call in zip(self.call_ids, complete, strict=True)
        ]
        return {**answer, "tool_calls": calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """How a generation becomes a reply.

    `on_finished` is called once, before the StreamEnd is handed out: the client's next request may follow at
    once. It is not called for a reply that was closed or failed. `running` learns what is said, and may end the reply.
    """

    parser: Parser
    prompt_tokens: int
    special_tokens: Mapping[int, str]
    image_tokens: int = 0
    effort: Resolution | None = None
    priority: int = 0
    thinking_budget: int | None = None
    stop: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    on_finished: Callable[[FinishedReply], None] | None = None
    running: RunningReply | None = None


class Reply:
    """A running reply: iterate its events, close it to cancel. One thread iterates; any may close.

    `usage` is right at any time and final after the last event.
    """

    def __init__(self, generation: Generation, plan: ReplyPlan) -> None:
        self.effort = plan.effort
        self.priority = plan.priority
        self.thinking_budget = plan.thinking_budget
        self.finish: FinishReason | None = None
        self._generation = generation
        self._plan = plan
        self._parser = plan.parser
        self._meter = UsageMeter(plan.prompt_tokens, plan.special_tokens, image_tokens=plan.image_tokens)
        self._logprobs = LogprobsAligner(plan.special_tokens)
        self._stop = StopFilter(plan.stop)
        self._call_ids: dict[int, str] = {}
        self._shown: list[Event] = []  # for on_finished
        self._running = plan.running
        if self._running is not None:
            self._running.start()
            self._running.watch(self._generation.close)

    @property
    def usage(self) -> Usage:
        """What the reply has cost so far."""
        return self._meter.usage

    def call_id(self, index: int) -> str:
        """Return the id of the tool call with this index; the same id every time."""
        return self._call_ids.setdefault(index, f"call_{uuid.uuid4().hex[:24]}")

    def close(self) -> None:
        """Stop generating. Idempotent, from any thread."""
        self._generation.close()
        if self._running is not None:
            self._running.end()

    def events(self, patience: float | None = None) -> Iterator[ReplyEvent | Progress | None]:
        """Yield everything up to one StreamEnd; a reply that was closed elsewhere ends without one.

        Besides events there is `Progress` during prefill, and None whenever `patience` seconds have passed
        without anything. Raises EngineError if the generation fails, and ReplySuperseded if nobody waits for the reply.
        """
        try:
            while self.finish is None:
                try:
                    item = self._generation.next(patience)
                except StopIteration:
                    if self._running is not None and self._running.is_superseded:
                        raise ReplySuperseded(
                            "This reply was ended: the conversation has gone on without it."
                        ) from None
                    return
                match item:
                    case None:
                        yield None
                    case Progress():
                        self._meter.note_progress(item)
                        yield item
                    case TokenDelta():
                        yield from self._token(item)
                    case Finished():
                        self._meter.finish(item, is_reasoning=self._parser.is_reasoning)
                        yield from self._end(item.reason)
        finally:
            if self.finish is None:  # closed, or failed: what it has cost so far is logged all the same
                self._meter.take_times(self._generation.times())
            self.close()

    def _token(self, delta: TokenDelta) -> list[ReplyEvent]:
        if self._parser.ended:  # at an end marker that is not one of the engine's end tokens
            return self._cut()
        was_reasoning = self._parser.is_reasoning
        events = self._parser.feed(delta.text, delta.token)
        is_reasoning = self._parser.is_reasoning
        self._meter.count(delta, events, was_reasoning=was_reasoning, is_reasoning=is_reasoning)
        self._logprobs.hold(delta, events)
        shown = self._show(events)
        if self._stop.stopped or (not self._plan.parallel_tool_calls and _completes_a_call(events)):
            shown += self._cut()
        return shown

    def _cut(self) -> list[ReplyEvent]:
        """End the reply here, though the engine would go on."""
        self._meter.take_times(self._generation.times())
        return self._end("stop")

    def _end(self, ended_by: EndedBy) -> list[ReplyEvent]:
        *shown, end = self._show(self._parser.close(ended_by))
        assert isinstance(end, StreamEnd)
        self.finish = end.finish
        if self._plan.on_finished is not None:
            message = fold(self._shown)
            call_ids = [self.call_id(at) for at, call in enumerate(message.tool_calls) if call.complete]
            self._plan.on_finished(FinishedReply(message, call_ids))
        return [*shown, end]

    def _show(self, events: Sequence[Event]) -> list[ReplyEvent]:
        """Return what a client gets of these events, log probabilities before the content they belong to."""
        shown: list[ReplyEvent] = []
        for event in self._stop.feed(events):
            if isinstance(event, ContentDelta) and (logprobs := self._logprobs.take()) is not None:
                shown.append(logprobs)
            shown.append(event)
            if self._plan.on_finished is not None:
                self._shown.append(event)
            if self._running is not None:
                _note(self._running, event)
        return shown


def _note(running: RunningReply, event: Event) -> None:
    match event:
        case ContentDelta(text):
            running.add(CONTENT, text)
        case ReasoningDelta(text):
            running.add(REASONING, text)


def _completes_a_call(events: Sequence[Event]) -> bool:
    return any(isinstance(event, ToolCallEnd) and event.complete for event in events)
