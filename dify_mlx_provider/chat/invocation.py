"""One call of Dify to a chat model: the request out, chunks in, Dify's result objects back.

There is one path: an answer that is not streamed is the fold of the stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, TypeGuard

from dify_plugin.entities.model.llm import LLMResult, LLMResultChunk, LLMResultChunkDelta, LLMUsage
from dify_plugin.entities.model.message import AssistantPromptMessage

from dify_mlx_provider.chat.abandoned_answers import ShownText, answer_to, until_abandoned
from dify_mlx_provider.chat.answer_limits import CutAnswerCheck, chosen_limit, limit_tokens
from dify_mlx_provider.chat.content_parts import document_texts
from dify_mlx_provider.chat.dify_requests import (
    as_json_block,
    asks_for_json,
    asks_for_json_block,
    background_parameters,
    is_background_request,
    is_own_prompt,
)
from dify_mlx_provider.chat.long_chats import LongChat, count_app_messages, estimate_prompt
from dify_mlx_provider.chat.messages import chat_request, tool_field, wants_structure
from dify_mlx_provider.chat.react_agent import as_action, described_tools
from dify_mlx_provider.chat.stream_reader import StreamReader, StreamResult, iter_text
from dify_mlx_provider.chat.think_block import ThinkBlockWriter, shown_before
from dify_mlx_provider.dify_errors import to_dify_error
from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.token_count import count_tokens, estimate_tokens
from dify_mlx_provider.upstream.cache import BoundedMap
from dify_mlx_provider.upstream.credentials import Credentials
from dify_mlx_provider.upstream.errors import Unavailable

if TYPE_CHECKING:
    from dify_mlx_provider.chat.messages import ChatInvocation
    from dify_mlx_provider.chat.tool_calls import ServerToolCall
    from dify_mlx_provider.servers.base import ServerProfile
    from mlx_backend.conversation.running_replies import RunningReply
    from mlx_backend.conversation.tools import ToolDefinition

type UsageOf = Callable[[int, int], LLMUsage]
"""Makes Dify's usage of the tokens of a prompt and of its answer."""

type ChunkStream = Generator[dict[str, Any], None, None]

type AnswerStream = Generator[str, None, StreamResult]
"""An answer's text in pieces; returns the rest of it."""

MAX_RESULT_BYTES = 4 * 2**20
"""Bytes of an answer in one piece; Dify takes no line above 5 MiB."""

# Models whose template opens the reasoning block, so that many servers send the answer from inside it.
_STARTS_IN_REASONING = re.compile(r"deepseek-r1|qwq|thinking-2507", re.IGNORECASE)

_observed_starts: BoundedMap[tuple[str, str], bool] = BoundedMap()
"""Whether a model's answers were seen to start inside a reasoning block, by address and name."""


def invoke(call: ChatInvocation, usage_of: UsageOf) -> Generator[LLMResultChunk, None, None]:
    """Send the request and return its answer's chunks; closing them leaves the server.

    What is wrong with the request is raised here, as one of Dify's errors; what goes wrong later, by the chunks.
    """
    own_prompt = is_own_prompt(call.messages, stream=call.stream)
    for_json = wants_structure(call.parameters) or asks_for_json(call.messages)
    is_background = is_background_request(
        call.parameters, is_own_prompt=own_prompt, chosen=call.chosen, stream=call.stream
    )
    if is_background:
        call = replace(call, parameters=background_parameters(call.parameters, call.efforts))
    try:
        credentials = Credentials.from_form(call.form)
        profile = discovery.find_profile(credentials)
        described = discovery.find_model(call.model, credentials)
        described_for_react = [] if call.tools else described_tools(call.messages)
        if described is not None and described.has("tools") and credentials.tool_calling is not False:
            call = replace(call, tools=call.tools or described_for_react)
        own_limit = chosen_limit(call.parameters)
        default = profile.answer_limit(credentials.max_output_tokens)
        limited = limit_tokens(call.parameters, described, default, is_background=is_background)
        body = chat_request(replace(call, parameters=limited), credentials, described)
        running = answer_to(call.messages, call.user, stream=call.stream)
        chat = LongChat(
            credentials,
            body,
            shorten=call.parameters.get("long_conversations") != "refuse",
            app_messages=count_app_messages(message.role.value for message in call.messages),
            documents=lambda: document_texts(call.messages),
            max_tokens=own_limit,
        )
        chunks = until_abandoned(chat.answer(), running)
    except Exception as error:
        raise to_dify_error(error) from error
    answer_format = _AnswerFormat(
        address_and_model=(credentials.base_url, call.model),
        tools=[tool_field(tool) for tool in call.tools or described_for_react],
        profile=profile,
        stop=() if profile.separates_reasoning else tuple(body.get("stop", ())),
        hide_reasoning=own_prompt or for_json or call.parameters.get("reasoning_format") == "hide",
        verbatim=own_prompt or for_json,
        follows=shown_before([(each.role.value, each.get_text_content()) for each in call.messages]),
        cut_check=CutAnswerCheck(
            wants_json=for_json, has_tools=bool(call.tools), max_tokens=body.get("max_tokens")
        ),
    )
    answer = answer_format.stream(chunks) if call.stream else answer_format.collect(chunks)
    if asks_for_json_block(call.messages):
        answer = _in_block(answer)
    if described_for_react:
        answer = _with_action(answer)

    def usage(result: StreamResult, estimated: int) -> LLMUsage:
        """The server's counts, or estimates."""
        prompt, completion = result.usage.get("prompt_tokens"), result.usage.get("completion_tokens")
        return usage_of(
            prompt if _is_count(prompt) else chat.estimated_tokens(),
            completion if _is_count(completion) else estimated,
        )

    return _dify_chunks(call.model, chunks, answer, running, usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AnswerFormat:
    """How one answer is parsed and shown."""

    address_and_model: tuple[str, str]
    tools: Sequence[ToolDefinition]
    profile: ServerProfile
    stop: tuple[str, ...]
    hide_reasoning: bool
    verbatim: bool
    follows: str
    cut_check: CutAnswerCheck

    def stream(self, chunks: ChunkStream) -> AnswerStream:
        """Yield an answer's text as it arrives. Raises Refused if it was cut off so that it cannot be used."""
        reader, writer = self._start()
        yield from iter_text(reader, writer, chunks)
        if reader.started_in_reasoning is not None:  # too late for this answer, in time for the next
            _observed_starts.set(self.address_and_model, reader.started_in_reasoning)
        self.cut_check.check(reader.result, writer)
        return reader.result

    def collect(self, chunks: ChunkStream) -> AnswerStream:
        """Like `stream`, in one piece; an answer that turns out to start in reasoning is parsed again."""
        received: list[dict[str, Any]] = []

        def record() -> Iterator[dict[str, Any]]:
            for chunk in chunks:
                received.append(chunk)
                yield chunk

        reader, writer = self._start()
        text = "".join(iter_text(reader, writer, record()))
        if reader.started_in_reasoning is not None:
            _observed_starts.set(self.address_and_model, reader.started_in_reasoning)
            reader, writer = self._start()
            text = "".join(iter_text(reader, writer, received))
        self.cut_check.check(reader.result, writer)
        if len(json.dumps([text, [call.arguments for call in reader.result.calls]])) > MAX_RESULT_BYTES:
            raise Unavailable(
                f"the answer has {len(text):,} characters, more than Dify takes in one piece. Lower Max tokens, or use "
                "a node that streams."
            )
        yield text
        return reader.result

    def _start(self) -> tuple[StreamReader, ThinkBlockWriter]:
        """Start as this model's last answer did, or as its name suggests."""
        by_name = _STARTS_IN_REASONING.search(self.address_and_model[1]) is not None
        scan = not self.profile.separates_reasoning
        starts = scan and _observed_starts.get(self.address_and_model, by_name)
        reader = StreamReader(
            self.tools,
            scan=scan,
            starts_in_reasoning=starts,
            unwrapped=not self.verbatim,
            stop=self.stop,
            calls_in_logprobs=self.profile.calls_in_logprobs,
        )
        writer = ThinkBlockWriter(
            hide_reasoning=self.hide_reasoning, verbatim=self.verbatim, follows=self.follows
        )
        return reader, writer


def _in_block(answer: AnswerStream) -> AnswerStream:
    """Yield an answer in one piece, with its JSON in a whole block."""
    pieces: list[str] = []
    with closing(answer):
        while True:
            try:
                pieces.append(next(answer))
            except StopIteration as end:
                result: StreamResult = end.value
                break
    yield as_json_block("".join(pieces))
    return result


def _with_action(answer: AnswerStream) -> AnswerStream:
    """Yield an answer with a call as the text that a ReAct agent looks for."""
    result = yield from answer
    if result.calls:
        yield as_action(result.calls[0])
        result.calls, result.finish_reason = [], "stop"
    return result


def _dify_chunks(
    model: str,
    chunks: ChunkStream,
    answer: AnswerStream,
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


def count_prompt_tokens(call: ChatInvocation) -> int:
    """Return a prompt's tokens: the server's count, or an estimate. Never raises."""
    credentials = Credentials.from_form_leniently(call.form)
    try:
        body = chat_request(call, credentials, discovery.find_model(call.model, credentials))
    except ValueError:
        return sum(estimate_tokens(message.get_text_content()) for message in call.messages)
    counted = count_tokens(credentials, body)
    return estimate_prompt(body) if counted is None else counted


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _dify_chunk(
    model: str,
    index: int,
    text: str,
    *,
    calls: Sequence[ServerToolCall] = (),
    usage: LLMUsage | None = None,
    finish_reason: str | None = None,
) -> LLMResultChunk:
    tool_calls = [
        AssistantPromptMessage.ToolCall(
            id=call.id,
            type="function",
            function=AssistantPromptMessage.ToolCall.ToolCallFunction(
                name=call.name, arguments=call.arguments
            ),
        )
        for call in calls
    ]
    message = AssistantPromptMessage(content=text, tool_calls=tool_calls)
    delta = LLMResultChunkDelta(index=index, message=message, usage=usage, finish_reason=finish_reason)
    return LLMResultChunk(model=model, delta=delta)
