"""A reply in progress: engine items in, events out, up to one StreamEnd.

    engine items ─parser─▶ events ─StopFilter─▶ the events a client gets
                     ├─ Usage             what they cost
                     ├─ LogprobsAligner   log probabilities, held until the text that they belong to is shown
                     └─ FinishedReply     the whole of it, for `on_finished`

A `Reply` is an iterator of events that cancels its generation when it is closed. Knows no prompts, no wire format and
no HTTP.
"""

from __future__ import annotations

import uuid
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.chat.repetition import RepetitionGuard
from mlx_backend.chat.superseded import CONTENT, REASONING
from mlx_backend.constraints.reasoning_count import ReasoningCount
from mlx_backend.conversation.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    StreamEnd,
    ToolCallEnd,
)
from mlx_backend.conversation.message_parts import REASONING_CONTENT
from mlx_backend.conversation.parser import fold
from mlx_backend.conversation.stop_strings import StopFilter
from mlx_backend.engine.base import Finished, Progress, PromptLogprobs, TokenDelta
from mlx_backend.errors import ReplySuperseded

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Generator, Mapping, Sequence

    from mlx_backend.chat.recent_prompts import PromptMatch
    from mlx_backend.conversation.effort_sources import Resolution
    from mlx_backend.conversation.events import EndedBy, FinishReason, Message
    from mlx_backend.conversation.parser import ChannelParser
    from mlx_backend.conversation.running_replies import RunningReply
    from mlx_backend.conversation.tool_names import ToolNames
    from mlx_backend.engine.base import GenerationTimes, Logprobs, Queued
    from mlx_backend.engine.jobs import Generation


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of the answer and how likely it was."""

    token: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class ContentLogprobs:
    """The tokens of the content delta, or of the end, that comes next."""

    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """What a reply begins with that repeats its prompt. Log probabilities of its tokens may follow."""

    text: str
    tokens: Sequence[int]


class LogprobsAligner:
    """Assigns each token's log probabilities to the content delta that shows its text.

    With `every_token` those are kept that show nothing, such as the end token: they go with what is shown next.
    """

    def __init__(self, special_tokens: Container[int], *, every_token: bool = False) -> None:
        self._special_tokens = special_tokens
        self._every_token = every_token
        self._undecided: list[TokenLogprobs] = []
        self._of_content: list[TokenLogprobs] = []

    def hold(self, delta: TokenDelta, events: Sequence[Event]) -> None:
        """Hold a token's log probabilities."""
        if delta.logprobs is not None:
            self._undecided.append(TokenLogprobs(delta.token, delta.logprobs))
            self.decide(events, is_special=delta.token in self._special_tokens)

    def decide(self, events: Sequence[Event], *, is_special: bool = False) -> None:
        """Keep what is held for the answer if events show some of it; drop that if they are anything else.

        As long as there are none, it is part of a character, or of what may still become a marker.
        """
        if self._every_token or any(isinstance(event, ContentDelta) for event in events):
            self._of_content += self._undecided
            self._undecided.clear()
        elif events or is_special:
            self._undecided.clear()

    def belong_to(self, event: Event) -> bool:
        """Whether what is held goes with an event that is about to be shown."""
        return isinstance(event, ContentDelta) or (self._every_token and isinstance(event, StreamEnd))

    def take(self) -> ContentLogprobs | None:
        """Return what is held of content."""
        if not self._of_content:
            return None
        taken, self._of_content = self._of_content, []
        return ContentLogprobs(tuple(taken))


@dataclass(slots=True)
class Usage:
    """What a reply has cost so far. Times are the engine's, in seconds, and are filled in when the reply ends.

    `image_tokens` are among those of the prompt; of the `drafted_tokens`, `accepted_tokens` became part of the reply.
    `repeated_run` is how many tokens it repeated over and over, if that is why it was ended. `match` says how much of
    the prompt of a conversation was sent before.
    """

    prompt_tokens: int
    image_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    repeated_run: int | None = None
    match: PromptMatch | None = None

    @property
    def broken_by(self) -> str:
        """What kept the rest of the prompt from being found in the cache; empty if more was found than was sent."""
        match = self.match
        return match.broken_by if match is not None and self.cached_tokens <= match.tokens else ""

    def take_times(self, times: GenerationTimes) -> None:
        """Take the times of a generation that the engine did not finish: it was cut short, cancelled or failed."""
        self.queue_seconds, self.prefill_seconds, self.decode_seconds = (
            times.queue,
            times.prefill,
            times.decode,
        )


class RawText:
    """Parses nothing, for completions and raw replies: all text is content, markers included.

    With `special_tokens` the end token is left out, as a plain completion expects: a control token is shown
    only once something follows it. Without them everything is shown.
    """

    def __init__(self, special_tokens: Container[int] = ()) -> None:
        self.ended = self.is_reasoning = False
        self._special_tokens = special_tokens
        self._held = ""

    def feed(self, text: str, token: int | None = None) -> list[Event]:
        """Return the text as content, but for a control token at its end."""
        shown = self._held + text
        self._held = ""
        if token in self._special_tokens:
            self._held = text
            shown = shown.removesuffix(text)
        return [ContentDelta(shown)] if shown else []

    def close(self, ended_by: EndedBy = "stop") -> list[Event]:
        """End the text. A control token at the token limit was not the end token, so it is shown."""
        shown: list[Event] = [ContentDelta(self._held)] if self._held and ended_by == "length" else []
        return [*shown, StreamEnd(ended_by)]


type ReplyEvent = Event | ContentLogprobs | EchoedPrompt | PromptLogprobs

type Parser = ChannelParser | RawText
"""Turns a model's text into events, of a conversation or of a plain completion."""


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """The whole of a reply that has ended, and the ids that its complete tool calls went out with, in order.

    `tokens` are all that were generated; none if the message is less than what they say.
    """

    message: Message
    call_ids: Sequence[str]
    tokens: Sequence[int] = ()

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
class ReplySetup:
    """How a generation becomes a reply.

    `unread` are fields of the request that mean nothing to the model. `on_finished` is called once, before the
    StreamEnd is handed out: the client's next request may follow at once. It is not called for a reply that was
    closed or failed. `running` learns what is said, and may end the reply. Of a reply that `is_constrained` by a
    grammar, which may demand repetition, `max_repeated_tokens` limits only the reasoning. `tool_names` gives calls
    the names that the client knows, where the model has others for them. With `prompt_only` nothing is generated:
    only what `echo` shows of the prompt is wanted.
    """

    parser: Parser
    prompt_tokens: int
    special_tokens: Mapping[int, str]
    image_tokens: int = 0
    match: PromptMatch | None = None
    effort: Resolution | None = None
    priority: int = 0
    thinking_budget: int | None = None
    stop: tuple[str, ...] = ()
    max_repeated_tokens: int = 0
    is_constrained: bool = False
    parallel_tool_calls: bool = True
    on_finished: Callable[[FinishedReply], None] | None = None
    running: RunningReply | None = None
    tool_names: ToolNames | None = None
    unread: Sequence[str] = ()
    echo: EchoedPrompt | None = None
    prompt_only: bool = False


class Reply:
    """A running reply: iterate its events, close it to cancel. One thread iterates; any may close.

    `usage` is right at any time and final after the last event.
    """

    def __init__(self, generation: Generation, setup: ReplySetup) -> None:
        self.effort = setup.effort
        self.priority = setup.priority
        self.thinking_budget = setup.thinking_budget
        self.unread = setup.unread
        self.finish: FinishReason | None = None
        self._generation = generation
        self._setup = setup
        self._parser = setup.parser
        self.usage = Usage(setup.prompt_tokens, setup.image_tokens, match=setup.match)
        """What the reply has cost so far."""
        self._reasoning = ReasoningCount(setup.special_tokens)
        # Of a text as the model wrote it, every token is part.
        is_raw = isinstance(setup.parser, RawText)
        self._logprobs = LogprobsAligner(setup.special_tokens, every_token=is_raw)
        self._stop = StopFilter(setup.stop)
        self._repetition = RepetitionGuard(setup.max_repeated_tokens)
        self._call_ids: dict[int, str] = {}
        self._shown: list[Event] = []  # for on_finished
        self._tokens = array("I")  # likewise
        self._running = setup.running
        if self._running is not None:
            self._running.start()
            self._running.watch(self._generation.close)

    @property
    def completion_tokens(self) -> int:
        """How many tokens have been generated so far."""
        return self.usage.completion_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the reply."""
        return self._stop.found or None

    def queued(self) -> Queued | None:
        """Return where in the queue it waits; None once it is prefilled."""
        return self._generation.queued()

    @property
    def replies(self) -> Sequence[Reply]:
        """The replies to the request, as in `ReplyGroup`: this one."""
        return (self,)

    def call_id(self, index: int) -> str:
        """Return the id of the tool call with this index; the same id every time."""
        return self._call_ids.setdefault(index, f"call_{uuid.uuid4().hex[:24]}")

    def notify(self, on_item: Callable[[], None]) -> None:
        """Have `on_item` called, from any thread, when there may be more events."""
        self._generation.notify(on_item)

    def close(self) -> None:
        """Stop generating. Idempotent, from any thread."""
        self._generation.close()
        if self._running is not None:
            self._running.end()

    def events(self, patience: float | None = None) -> Generator[ReplyEvent | Progress | None]:
        """Yield everything up to one StreamEnd; a reply that was closed elsewhere ends without one.

        In addition to events there is `Progress` during prefill, and None whenever `patience` seconds have passed
        without anything. Raises EngineError if the generation fails, and ReplySuperseded if the conversation goes on
        without the reply.
        """
        try:
            if self._setup.echo is not None:
                yield self._setup.echo
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
                        self.usage.cached_tokens = item.cached
                        yield item
                    case PromptLogprobs():
                        yield item
                    case TokenDelta():
                        yield from self._token(item)
                    case Finished():
                        self._finish(item)
                        yield from self._end(item.reason)
        finally:
            if self.finish is None:  # closed, or failed: what it has cost so far is logged all the same
                self.usage.take_times(self._generation.times())
            self.close()

    def _token(self, delta: TokenDelta) -> list[ReplyEvent]:
        if self._setup.prompt_only:
            return self._cut("length")
        if self._parser.ended:  # at an end marker that is not one of the engine's end tokens
            return self._cut()
        was_reasoning = self._parser.is_reasoning
        events = self._restored(self._parser.feed(delta.text, delta.token))
        is_reasoning = self._parser.is_reasoning
        self._tokens.append(delta.token)
        self._reasoning.add(
            delta.token, delta.text, events, was_reasoning=was_reasoning, is_reasoning=is_reasoning
        )
        self.usage.completion_tokens += 1
        self.usage.reasoning_tokens = self._reasoning.counted
        self._logprobs.hold(delta, events)
        shown = self._show(events)
        if self._stop.found or (not self._setup.parallel_tool_calls and _completes_a_call(events)):
            return shown + self._cut()
        if was_reasoning or not self._setup.is_constrained:
            self.usage.repeated_run = self._repetition.add(delta.token)
        return shown if self.usage.repeated_run is None else shown + self._cut("length")

    def _finish(self, finished: Finished) -> None:
        """Take the engine's last figures, and count a character of the reasoning that the end has cut."""
        usage = self.usage
        usage.cached_tokens = finished.cached_tokens
        usage.queue_seconds = finished.queue_seconds
        usage.prefill_seconds = finished.prefill_seconds
        usage.decode_seconds = finished.decode_seconds
        usage.drafted_tokens = finished.drafted_tokens
        usage.accepted_tokens = finished.accepted_tokens
        self._reasoning.close(is_reasoning=self._parser.is_reasoning)
        usage.reasoning_tokens = self._reasoning.counted

    def _cut(self, ended_by: EndedBy = "stop") -> list[ReplyEvent]:
        """End the reply here, though the engine would go on."""
        self.usage.take_times(self._generation.times())
        return self._end(ended_by)

    def _end(self, ended_by: EndedBy) -> list[ReplyEvent]:
        events = self._restored(self._parser.close(ended_by))
        self._logprobs.decide(events)
        *shown, end = self._show(events)
        assert isinstance(end, StreamEnd)
        self.finish = end.finish
        if self._setup.on_finished is not None:
            message = fold(self._shown)
            call_ids = [self.call_id(at) for at, call in enumerate(message.tool_calls) if call.complete]
            tokens = () if self._stop.found else self._tokens
            self._setup.on_finished(FinishedReply(message, call_ids, tokens))
        return [*shown, end]

    def _restored(self, events: list[Event]) -> list[Event]:
        names = self._setup.tool_names
        return events if names is None else names.restored(events)

    def _show(self, events: Sequence[Event]) -> list[ReplyEvent]:
        """Return what a client gets of these events, log probabilities before the content or the end they belong to."""
        shown: list[ReplyEvent] = []
        for event in self._stop.feed(events):
            if self._logprobs.belong_to(event) and (logprobs := self._logprobs.take()) is not None:
                shown.append(logprobs)
            shown.append(event)
            if self._setup.on_finished is not None:
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
