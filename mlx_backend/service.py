"""What a request means: from a conversation to a running reply.

    request ─history─▶ messages ─effort─▶ one effort ─prompt─▶ tokens ─engine─▶ items ─parser─▶ events

Knows no HTTP and no MLX: it takes frozen requests, raises meaning, and answers with a `Reply`, an iterator of
events that cancels its generation when it is closed.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from mlx_backend.conversation import effort as efforts
from mlx_backend.conversation.dialects import DIALECTS, detect
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    Event,
    FinishReason,
    ReasoningDelta,
    StreamEnd,
    ToolCallEnd,
)
from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.conversation.template import TemplateTraits, for_template
from mlx_backend.engine.base import Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.prompt import Prompt, PromptBuilder
from mlx_backend.reasoning_store import ReasoningStore
from mlx_backend.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mlx_backend.conversation.effort import Effort, Resolution
    from mlx_backend.engine.base import Engine, Generation


class RequestError(ValueError):
    """This server does not do what a request asks for; the text is for people, `param` names the field."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A conversation to answer. `fields` is the request as the client wrote it: effort is looked up there."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    continue_last: bool = True
    raw: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A text or token ids to continue, without a template. Markers in a text are control tokens here."""

    prompt: str | tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(slots=True)
class Usage:
    """What a reply has cost so far. Seconds are the engine's when it finished by itself, else ours."""

    prompt_tokens: int
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


class Service:
    """One engine, and what a conversation with it means. Safe to use from several threads."""

    def __init__(
        self, engine: Engine, *, effort: Effort | None = None, max_tokens: int | None = None
    ) -> None:
        self.engine = engine
        tokenizer = engine.tokenizer
        self._effort = effort
        self._max_tokens = max_tokens
        self._dialect = detect(tokenizer.chat_template, tokenizer.special_tokens.values())
        self._traits = TemplateTraits.of(tokenizer.chat_template)
        self._prompts = PromptBuilder(tokenizer, DIALECTS[self._dialect])
        self._thoughts = ReasoningStore()

    def chat(self, request: ChatRequest) -> Reply:
        """Begin a reply. Raises RequestError, HistoryError, EffortError or an EngineError."""
        if self.engine.tokenizer.chat_template is None:
            raise RequestError("This model has no chat template: use /v1/completions.", "messages")
        tools = list(request.tools)
        messages = sanitise(request.messages, tools=tools or None)
        resolution = efforts.resolve(
            request.fields, messages, model_default=None, server_default=self._effort
        )
        messages = self._with_thoughts(resolution.messages)
        prompt = self._chat_prompt(request, messages, resolution.effort)
        parser: Parser
        if request.raw:
            parser = RawText(keep_end=True)
        else:
            parser = ChannelParser(
                self._dialect,
                tools=[tool["function"]["name"] for tool in tools],
                opens_in=prompt.opens_in,
                special_tokens=self.engine.tokenizer.special_tokens,
            )
        return Reply(
            self._generate(prompt, request),
            parser,
            prompt_tokens=len(prompt.tokens),
            special_tokens=self.engine.tokenizer.special_tokens,
            effort=resolution,
            stop=request.stop,
            one_call=not request.parallel_tool_calls,
            thoughts=self._thoughts,
            open_calls=_open_calls(messages),
        )

    def complete(self, request: CompletionRequest) -> Reply:
        """Begin a completion of a bare text. Raises RequestError or an EngineError."""
        tokenizer = self.engine.tokenizer
        special = tokenizer.special_tokens
        if isinstance(request.prompt, str):
            tokens = tuple(tokenizer.encode(request.prompt, control_tokens=True))
            opening = tuple(tokenizer.opening)
            tokens = tokens if tokens[: len(opening)] == opening else opening + tokens
        else:
            tokens = request.prompt
        return Reply(
            self._generate(Prompt(tokens=tokens), request),
            RawText(special_tokens=special),
            prompt_tokens=len(tokens),
            special_tokens=special,
            stop=request.stop,
        )

    def _chat_prompt(self, request: ChatRequest, messages: list[dict[str, Any]], effort: Effort) -> Prompt:
        kwargs = {**request.template_kwargs, **efforts.template_kwargs(effort, self._traits)}
        tools = list(request.tools) or None
        last = messages[-1]
        if not (request.continue_last and last["role"] == "assistant" and not last.get("tool_calls")):
            return self._prompts.build(for_template(messages, self._traits), tools, kwargs)
        # Templates do not render nothing: an answer without a question gets an empty one.
        earlier = messages[:-1] or [{"role": "user", "content": ""}]
        return self._prompts.continued(
            for_template(earlier, self._traits),
            tools,
            kwargs,
            reasoning=last.get("reasoning_content", ""),
            content=last["content"],
        )

    def _with_thoughts(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Give the calls of an unfinished turn the reasoning back that the client has lost."""
        filled = [dict(message) for message in messages]
        for message in _unfinished_turn(filled):
            if message.get("tool_calls") and not message.get("reasoning_content"):
                thought = self._thoughts.get(message["tool_calls"][0]["id"])
                if thought:
                    message["reasoning_content"] = thought
        return filled

    def _generate(self, prompt: Prompt, request: ChatRequest | CompletionRequest) -> Generation:
        length, holds = len(prompt.tokens), self.engine.context_length
        if length >= holds:
            raise RequestError(
                f"The prompt has {length} tokens; the context holds {holds}, and the reply needs room too.",
                "prompt" if isinstance(request, CompletionRequest) else "messages",
                "context_length_exceeded",
            )
        size = self.engine.tokenizer.vocabulary_size
        for token, _ in request.sampling.logit_bias:
            if not 0 <= token < size:
                raise RequestError(
                    f"logit_bias: {token} is not a token id of this model (0 to {size - 1})", "logit_bias"
                )
        if isinstance(request, CompletionRequest):
            for at, token in enumerate(prompt.tokens):
                if not 0 <= token < size:
                    raise RequestError(
                        f"prompt[{at}]: {token} is not a token id of this model (0 to {size - 1})", "prompt"
                    )
        wanted = request.max_tokens or self._max_tokens or holds
        return self.engine.generate(
            GenerationRequest(
                prompt=prompt.tokens,
                max_tokens=min(wanted, holds - length),
                checkpoints=prompt.checkpoints,
                sampling=request.sampling,
            )
        )


class Parser(Protocol):
    """What turns text into events (ChannelParser, or RawText)."""

    @property
    def ended(self) -> bool:
        """Nothing after this belongs to the turn."""
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
        self.ended = False
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
        self._reasoning: list[str] = []
        self._calls: dict[int, str] = {}
        self._unclaimed = 0  # tokens since the last event or marker: part of whatever comes next
        self._born = time.perf_counter()
        self._first: float | None = None

    def call_id(self, index: int) -> str:
        """Return the id of the tool call with this index; the same id every time."""
        return self._calls.setdefault(index, f"call_{uuid.uuid4().hex[:24]}")

    def close(self) -> None:
        """Stop generating. Idempotent, from any thread."""
        self._generation.close()

    def events(self, patience: float | None = None) -> Iterator[Event | Progress | None]:
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
                        yield from self._end(self._parser.close(item.reason))
        finally:
            self._generation.close()

    def _read(self, item: TokenDelta) -> list[Event]:
        if self._first is None:
            self._first = time.perf_counter()
        self.usage.completion_tokens += 1
        events = self._parser.feed(item.text, item.token)
        self._count_reasoning(item, events)
        shown = self._filtered(events)
        if self._stop.stopped or (self._one_call and _completes_a_call(events)):
            shown += self._cut()
        return shown

    def _cut(self) -> list[Event]:
        """End the turn here, though the engine would go on."""
        now = time.perf_counter()
        first = self._first or now
        self.usage.prefill_seconds = first - self._born
        self.usage.decode_seconds = now - first
        return self._end(self._parser.close("stop"))

    def _count_reasoning(self, item: TokenDelta, events: list[Event]) -> None:
        if any(isinstance(event, ReasoningDelta) for event in events):
            self.usage.reasoning_tokens += 1 + self._unclaimed
            self._unclaimed = 0
        elif events or item.token in self._special:
            self._unclaimed = 0
        else:
            self._unclaimed += 1

    def _filtered(self, events: list[Event]) -> list[Event]:
        """Apply stop strings to the answer, and to nothing else."""
        shown: list[Event] = []
        for event in events:
            match event:
                case ContentDelta(text, Channel.FINAL):
                    text = self._stop.feed(text)
                    if text:
                        shown.append(ContentDelta(text))
                case ReasoningDelta(text):
                    if self._thoughts is not None:
                        self._reasoning.append(text)
                    shown.append(event)
                case ToolCallEnd(index, complete=True):
                    self.call_id(index)
                    shown.append(event)
                case StreamEnd():
                    shown.append(event)
                case _ if not self._stop.stopped:
                    shown.append(event)
        return shown

    def _end(self, events: list[Event]) -> list[Event]:
        shown = self._filtered(events)
        end = shown.pop()
        assert isinstance(end, StreamEnd)
        held = self._stop.close()
        if held:
            shown.append(ContentDelta(held))
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

    def _measure(self, finished: Finished) -> None:
        self.usage.cached_tokens = finished.cached_tokens
        self.usage.queue_seconds = finished.queue_seconds
        self.usage.prefill_seconds = finished.prefill_seconds
        self.usage.decode_seconds = finished.decode_seconds


def _completes_a_call(events: Sequence[Event]) -> bool:
    return any(isinstance(event, ToolCallEnd) and event.complete for event in events)


def _unfinished_turn(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the assistant messages after the last user message."""
    turn: list[dict[str, Any]] = []
    for message in reversed(messages):
        if message["role"] == "user":
            break
        if message["role"] == "assistant":
            turn.append(message)
    return turn


def _open_calls(messages: Sequence[dict[str, Any]]) -> list[str]:
    return [call["id"] for message in _unfinished_turn(messages) for call in message.get("tool_calls") or ()]
