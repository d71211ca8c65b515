"""One call of Dify to a chat model: the request out, chunks in, Dify's result objects back.

There is one path: an answer that is not streamed is the fold of the stream.
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

from dify_mlx_provider.chat.abandoned_answers import ShownText, answer_to, until_abandoned
from dify_mlx_provider.chat.agent_rounds import shown_before
from dify_mlx_provider.chat.background_requests import (
    asks_for_json,
    background_parameters,
    is_background_request,
    is_read_by_program,
)
from dify_mlx_provider.chat.content_parts import document_texts
from dify_mlx_provider.chat.cut_answers import CutAnswerCheck
from dify_mlx_provider.chat.history_trimming import chat_within_context
from dify_mlx_provider.chat.messages import chat_request, wants_structure
from dify_mlx_provider.chat.stream_reader import StreamReader, StreamResult, iter_text
from dify_mlx_provider.chat.think_block import ThinkBlockWriter
from dify_mlx_provider.chat.token_limits import chosen_limit, limit_tokens
from dify_mlx_provider.chat.turns import count_app_messages
from dify_mlx_provider.dify_errors import to_dify_error
from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.token_count import TOKENS_PER_MESSAGE, count_tokens, estimate_tokens
from dify_mlx_provider.upstream.cache import BoundedMap
from dify_mlx_provider.upstream.credentials import Credentials, ServerKind
from dify_mlx_provider.upstream.errors import Unavailable

if TYPE_CHECKING:
    from dify_mlx_provider.chat.tool_calls import ToolCall
    from mlx_backend.conversation.running_replies import RunningReply
    from mlx_backend.conversation.tools import ToolDefinition

type UsageOf = Callable[[int, int], LLMUsage]
type ChunkStream = Generator[dict[str, Any], None, None]

MAX_RESULT_BYTES = 4 * 2**20
"""Bytes of an answer in one piece; Dify takes no line above 5 MiB."""

# Models whose template opens the reasoning block, so that many servers send the answer from inside it.
_STARTS_IN_REASONING = re.compile(r"deepseek-r1|qwq|thinking-2507", re.IGNORECASE)

_observed_starts: BoundedMap[tuple[str, str], bool] = BoundedMap()
"""Whether a model's answers were seen to start inside a reasoning block, by address and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswerFormat:
    """How one answer is parsed and shown."""

    address_and_model: tuple[str, str]
    tools: Sequence[ToolDefinition]
    server_separates: bool
    hide_reasoning: bool
    verbatim: bool
    follows: str
    cut_check: CutAnswerCheck

    def start(self, *, starts_in_reasoning: bool = False) -> tuple[StreamReader, ThinkBlockWriter]:
        reader = StreamReader(
            self.tools, scan=not self.server_separates, starts_in_reasoning=starts_in_reasoning
        )
        writer = ThinkBlockWriter(
            hide_reasoning=self.hide_reasoning, verbatim=self.verbatim, follows=self.follows
        )
        return reader, writer

    def start_as_observed(self) -> tuple[StreamReader, ThinkBlockWriter]:
        """Start as this model's last answer did, or as its name suggests."""
        by_name = _STARTS_IN_REASONING.search(self.address_and_model[1]) is not None
        observed = _observed_starts.get(self.address_and_model, by_name)
        return self.start(starts_in_reasoning=not self.server_separates and observed)

    def check(self, reader: StreamReader, writer: ThinkBlockWriter) -> None:
        """Raise Refused for an answer that was cut off so that it cannot be used."""
        self.cut_check.check(reader.result, writer)


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
    user: str | None = None,
    chosen: Collection[str] = (),
    efforts: Collection[str] = (),
) -> Generator[LLMResultChunk, None, None]:
    """Send the request and return its answer's chunks; closing them leaves the server.

    What is wrong with the request is raised here, as one of Dify's errors; what goes wrong later, by the chunks.
    `user` is Dify's id of who asks, `chosen` are the settings that Dify sent, `efforts` those the model has.
    """
    texts = [message.get_text_content() for message in messages]
    is_background = is_background_request(texts, parameters, chosen=chosen, stream=stream)
    if is_background:
        parameters = background_parameters(parameters, efforts)
    is_data = wants_structure(parameters) or is_read_by_program(texts, stream=stream)
    try:
        credentials = Credentials.from_form(form)
        kind = discovery.find_server(credentials).kind
        described = discovery.find_model(model.strip(), credentials)
        own_limit = chosen_limit(parameters)
        default = discovery.PROFILES[kind].answer_limit(credentials.max_output_tokens)
        parameters = limit_tokens(parameters, described, default, is_background=is_background)
        body = chat_request(
            model, credentials, messages, parameters, tools=tools, stop=stop, described=described
        )
        running = answer_to(messages, user, stream=stream)
        sent = chat_within_context(
            credentials,
            body,
            shorten=parameters.get("long_conversations") != "refuse",
            app_messages=count_app_messages(message.role.value for message in messages),
            documents=lambda: document_texts(messages),
            max_tokens=own_limit,
        )
        answer_format = _AnswerFormat(
            address_and_model=(credentials.base_url, model),
            tools=body.get("tools", ()),
            server_separates=kind is ServerKind.MLX_BACKEND,
            hide_reasoning=is_data or parameters.get("reasoning_format") == "hide",
            verbatim=is_data,
            follows=shown_before(
                [(message.role.value, text) for message, text in zip(messages, texts, strict=True)]
            ),
            cut_check=CutAnswerCheck(
                wants_json=wants_structure(parameters) or asks_for_json(texts),
                has_tools=bool(tools),
                max_tokens=body.get("max_tokens"),
            ),
        )
    except Exception as error:
        raise to_dify_error(error) from error
    chunks = until_abandoned(sent.chunks, running)
    answer = _stream(answer_format, chunks) if stream else _collect(answer_format, chunks)

    def usage(result: StreamResult, estimated: int) -> LLMUsage:
        """The server's counts, or estimates."""
        prompt, completion = result.usage.get("prompt_tokens"), result.usage.get("completion_tokens")
        return usage_of(
            prompt if _is_count(prompt) else sent.estimated_tokens(),
            completion if _is_count(completion) else estimated,
        )

    return _dify_chunks(model, chunks, answer, running, usage)


def _dify_chunks(
    model: str,
    chunks: ChunkStream,
    answer: Generator[str, None, StreamResult],
    running: RunningReply,
    usage_of: Callable[[StreamResult, int], LLMUsage],
) -> Generator[LLMResultChunk, None, None]:
    """Yield an answer's text as Dify's chunks, then its calls, then its usage."""
    numbers = count()
    estimated = 0
    shown = ShownText(running)
    try:
        with running, closing(chunks), closing(answer):
            while True:
                try:
                    piece = next(answer)
                except StopIteration as end:
                    result: StreamResult = end.value
                    break
                estimated += estimate_tokens(piece)
                shown.add(piece)
                yield _dify_chunk(model, next(numbers), piece)
    except Exception as error:
        raise to_dify_error(error) from error
    if result.calls:
        yield _dify_chunk(model, next(numbers), "", calls=result.calls)
    reason = result.finish_reason or "stop"
    yield _dify_chunk(model, next(numbers), "", usage=usage_of(result, estimated), finish_reason=reason)


def _stream(answer_format: _AnswerFormat, chunks: ChunkStream) -> Generator[str, None, StreamResult]:
    """Yield an answer's text as it arrives; return the rest of it."""
    reader, writer = answer_format.start_as_observed()
    yield from iter_text(reader, writer, chunks)
    if reader.started_in_reasoning is not None:  # too late for this answer, in time for the next
        _observed_starts.set(answer_format.address_and_model, reader.started_in_reasoning)
    answer_format.check(reader, writer)
    return reader.result


def _collect(answer_format: _AnswerFormat, chunks: ChunkStream) -> Generator[str, None, StreamResult]:
    """Like `_stream`, in one piece; an answer that turns out to start in reasoning is parsed again."""
    received: list[dict[str, Any]] = []

    def record() -> Iterator[dict[str, Any]]:
        for chunk in chunks:
            received.append(chunk)
            yield chunk

    reader, writer = answer_format.start_as_observed()
    text = "".join(iter_text(reader, writer, record()))
    if reader.started_in_reasoning is not None:
        _observed_starts.set(answer_format.address_and_model, reader.started_in_reasoning)
        reader, writer = answer_format.start(starts_in_reasoning=reader.started_in_reasoning)
        text = "".join(iter_text(reader, writer, received))
    answer_format.check(reader, writer)
    if len(json.dumps([text, [call.arguments for call in reader.result.calls]])) > MAX_RESULT_BYTES:
        raise Unavailable(
            f"the answer has {len(text):,} characters, more than Dify takes in one piece. Lower Max tokens, or use "
            "a node that streams."
        )
    yield text
    return reader.result


def fold(model: str, chunks: Generator[LLMResultChunk, None, None]) -> LLMResult:
    """Join an answer's chunks into one result."""
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
        described = discovery.find_model(model.strip(), credentials)
        body = chat_request(model, credentials, messages, {}, tools=tools, described=described)
        count = count_tokens(credentials, body)
    except ValueError:
        count = None
    return _estimate_prompt_tokens(messages, tools) if count is None else count


def _estimate_prompt_tokens(
    messages: Sequence[PromptMessage], tools: Sequence[PromptMessageTool] | None = None
) -> int:
    texts = [message.get_text_content() for message in messages]
    texts += [call.function.arguments for message in messages for call in _calls_in(message)]
    texts += [tool.model_dump_json() for tool in tools or ()]
    return sum(map(estimate_tokens, texts)) + TOKENS_PER_MESSAGE * len(messages)


def _calls_in(message: PromptMessage) -> Sequence[AssistantPromptMessage.ToolCall]:
    return message.tool_calls if isinstance(message, AssistantPromptMessage) else ()


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _dify_chunk(
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
