"""One call of Dify to the model: request out, chunks in, Dify's result objects back.

The streamed answer and the whole one are the same path: a whole answer is the fold of the stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeGuard

from dify_plugin.entities.model.llm import LLMResult, LLMResultChunk, LLMResultChunkDelta, LLMUsage
from dify_plugin.entities.model.message import AssistantPromptMessage, PromptMessage, PromptMessageTool

from dify_mlx_provider.chat.background_requests import (
    background_parameters,
    is_background_request,
    is_read_by_program,
)
from dify_mlx_provider.chat.messages import chat_request, wants_structure
from dify_mlx_provider.chat.stream_reader import StreamReader, StreamResult, iter_text
from dify_mlx_provider.chat.think_block import ThinkBlockWriter
from dify_mlx_provider.dify_errors import to_dify_error
from dify_mlx_provider.upstream import discovery
from dify_mlx_provider.upstream.cache import BoundedMap
from dify_mlx_provider.upstream.credentials import Credentials
from dify_mlx_provider.upstream.errors import Refused, Unavailable
from dify_mlx_provider.upstream.requests import chat
from dify_mlx_provider.upstream.server_kinds import ServerKind
from dify_mlx_provider.upstream.token_count import TOKENS_PER_MESSAGE, count_tokens, estimate_tokens

if TYPE_CHECKING:
    from dify_mlx_provider.chat.tool_calls import ToolCall

type UsageOf = Callable[[int, int], LLMUsage]
type ChunkStream = Generator[dict[str, Any], None, None]

MAX_RESULT_BYTES = 4 * 2**20
"""Bytes of an answer in one piece; Dify takes no line above 5 MiB."""

# Models whose template opens the block of reasoning, so that many servers send the answer from inside it.
_STARTS_IN_REASONING = re.compile(r"deepseek-r1|qwq|thinking-2507", re.IGNORECASE)

_observed_starts: BoundedMap[tuple[str, str], bool] = BoundedMap()
"""Which models' answers were seen to begin inside a block of reasoning, by address and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswerFormat:
    """How one answer is read and shown."""

    where: tuple[str, str]
    tools: Sequence[str]
    separates: bool
    hidden: bool
    exact: bool

    def start(self, *, inside: bool = False) -> tuple[StreamReader, ThinkBlockWriter]:
        reader = StreamReader(self.tools, watch=not self.separates, inside=inside)
        return reader, ThinkBlockWriter(hidden=self.hidden, exact=self.exact)

    def start_as_before(self) -> tuple[StreamReader, ThinkBlockWriter]:
        usual = _STARTS_IN_REASONING.search(self.where[1]) is not None
        return self.start(inside=not self.separates and _observed_starts.get(self.where, usual))


def invoke(
    model: str,
    form: Mapping[str, Any],
    messages: Sequence[PromptMessage],
    parameters: Mapping[str, Any],
    *,
    tools: Sequence[PromptMessageTool] | None,
    stop: Sequence[str] | None,
    stream: bool,
    usage_of: UsageOf,
    chosen: Collection[str] = (),
    efforts: Collection[str] = (),
) -> Generator[LLMResultChunk, None, None]:
    """Send the request and return its answer's chunks; closing them leaves the server.

    What is wrong with the request is raised here, mapped; what goes wrong later, by the chunks.
    `chosen` are the settings that Dify sent, `efforts` those the model has.
    """
    said = [message.get_text_content() for message in messages]
    if is_background_request(said, parameters, chosen=chosen, stream=stream):
        parameters = background_parameters(parameters, efforts)
    data = wants_structure(parameters) or is_read_by_program(said, stream=stream)
    try:
        credentials = Credentials.from_form(form)
        body = chat_request(model, credentials, messages, parameters, tools=tools, stop=stop)
        wire = chat(credentials, body)
        reading = _AnswerFormat(
            where=(credentials.base_url, model),
            tools=[tool.name for tool in tools or ()],
            separates=discovery.find_server(credentials).kind is ServerKind.MLX_BACKEND,
            hidden=data or parameters.get("reasoning_format") == "hide",
            exact=data,
        )
    except Exception as error:
        raise to_dify_error(error) from error
    answer = _streamed(reading, wire) if stream else _collected(reading, wire)
    return _chunks(model, wire, answer, lambda outcome, shown: usage_of(*_counts(outcome, messages, shown)))


def _chunks(
    model: str,
    wire: ChunkStream,
    answer: Generator[str, None, StreamResult],
    usage_of: Callable[[StreamResult, int], LLMUsage],
) -> Generator[LLMResultChunk, None, None]:
    """Yield an answer's text as Dify's chunks, then its calls, then what it cost."""
    numbers = count()
    shown = 0
    try:
        with closing(wire), closing(answer):
            while True:
                try:
                    piece = next(answer)
                except StopIteration as end:
                    outcome: StreamResult = end.value
                    break
                shown += estimate_tokens(piece)
                yield _chunk(model, next(numbers), piece)
    except Exception as error:
        raise to_dify_error(error) from error
    if outcome.calls:
        yield _chunk(model, next(numbers), "", calls=outcome.calls)
    finish = outcome.finish_reason or "stop"
    yield _chunk(model, next(numbers), "", usage=usage_of(outcome, shown), finish_reason=finish)


def _streamed(reading: _AnswerFormat, wire: ChunkStream) -> Generator[str, None, StreamResult]:
    """Yield an answer's text as it arrives; return how it ended."""
    reader, thinking = reading.start_as_before()
    said = False
    with closing(iter_text(reader, thinking, wire)) as pieces:
        for piece in pieces:
            said = said or bool(piece.strip())
            yield piece
    if reader.begins_inside is not None:  # what this answer has shown, the next one is read by
        _observed_starts.set(reading.where, reader.begins_inside)
    _check(reader.outcome, thinking, said=said)
    return reader.outcome


def _collected(reading: _AnswerFormat, wire: ChunkStream) -> Generator[str, None, StreamResult]:
    """Like `_streamed`, in one piece: nothing is shown before all is known."""
    kept: list[dict[str, Any]] = []

    def passing() -> Iterator[dict[str, Any]]:
        for chunk in wire:
            kept.append(chunk)
            yield chunk

    reader, thinking = reading.start_as_before()
    text = "".join(iter_text(reader, thinking, passing()))
    if reader.begins_inside is not None:
        _observed_starts.set(reading.where, reader.begins_inside)
        reader, thinking = reading.start(inside=reader.begins_inside)
        text = "".join(iter_text(reader, thinking, kept))
    _check(reader.outcome, thinking, said=bool(text.strip()))
    if len(json.dumps([text, [call.arguments for call in reader.outcome.calls]])) > MAX_RESULT_BYTES:
        raise Unavailable(
            f"the answer has {len(text):,} characters, more than Dify takes in one piece. Lower Max tokens, or use "
            "a node that streams."
        )
    yield text
    return reader.outcome


def _check(outcome: StreamResult, thinking: ThinkBlockWriter, *, said: bool) -> None:
    """Refuse an answer that would be empty because reasoning that is not shown took all the tokens."""
    if thinking.has_hidden_reasoning and not said and not outcome.calls and outcome.finish_reason == "length":
        raise Refused(
            "the model spent all of its tokens thinking, and none were left for the answer. Raise Max tokens, or lower "
            "the reasoning effort."
        )


def fold(model: str, chunks: Generator[LLMResultChunk, None, None]) -> LLMResult:
    """Join an answer's chunks to one result."""
    text: list[str] = []
    calls: list[AssistantPromptMessage.ToolCall] = []
    usage = LLMUsage.empty_usage()
    for chunk in chunks:
        text.append(str(chunk.delta.message.content or ""))
        calls += chunk.delta.message.tool_calls
        usage = chunk.delta.usage or usage
    message = AssistantPromptMessage(content="".join(text), tool_calls=calls)
    return LLMResult(model=model, message=message, usage=usage)


def count_prompt_tokens(
    model: str,
    form: Mapping[str, Any],
    messages: Sequence[PromptMessage],
    tools: Sequence[PromptMessageTool] | None = None,
) -> int:
    """Return a prompt's tokens: the server's count, or an estimate. Never raises."""
    try:
        credentials = Credentials.from_form_leniently(form)
        count = count_tokens(credentials, chat_request(model, credentials, messages, {}, tools=tools))
    except ValueError:
        count = None
    return _estimated(messages, tools) if count is None else count


def _estimated(messages: Sequence[PromptMessage], tools: Sequence[PromptMessageTool] | None = None) -> int:
    said = [message.get_text_content() for message in messages]
    said += [call.function.arguments for message in messages for call in _calls_in(message)]
    said += [tool.model_dump_json() for tool in tools or ()]
    return sum(map(estimate_tokens, said)) + TOKENS_PER_MESSAGE * len(messages)


def _calls_in(message: PromptMessage) -> Sequence[AssistantPromptMessage.ToolCall]:
    return message.tool_calls if isinstance(message, AssistantPromptMessage) else ()


def _counts(outcome: StreamResult, messages: Sequence[PromptMessage], shown: int) -> tuple[int, int]:
    """Tokens of prompt and answer: the server's, or an estimate where it does not say."""
    prompt, completion = outcome.usage.get("prompt_tokens"), outcome.usage.get("completion_tokens")
    return (
        prompt if _is_count(prompt) else _estimated(messages),
        completion if _is_count(completion) else shown,
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _chunk(
    model: str,
    index: int,
    text: str,
    *,
    calls: Sequence[ToolCall] = (),
    usage: LLMUsage | None = None,
    finish_reason: str | None = None,
) -> LLMResultChunk:
    message = AssistantPromptMessage(
        content=text,
        tool_calls=[
            AssistantPromptMessage.ToolCall(
                id=call.id,
                type="function",
                function=AssistantPromptMessage.ToolCall.ToolCallFunction(
                    name=call.name, arguments=call.arguments
                ),
            )
            for call in calls
        ],
    )
    delta = LLMResultChunkDelta(index=index, message=message, usage=usage, finish_reason=finish_reason)
    return LLMResultChunk(model=model, delta=delta)
