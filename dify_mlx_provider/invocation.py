"""One call of Dify to the model: request out, chunks in, Dify's result objects back.

The streamed answer and the whole one are the same path: a whole answer is the fold of the stream.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from dify_plugin.entities.model.llm import LLMResult, LLMResultChunk, LLMResultChunkDelta, LLMUsage
from dify_plugin.entities.model.message import AssistantPromptMessage, PromptMessage, PromptMessageTool

from .chunks import Outcome, Reader, texts
from .credentials import Credentials
from .errands import is_errand, quick
from .errors import for_dify
from .messages import chat_request, wants_structure
from .sending import send
from .thinking import ThinkingText

if TYPE_CHECKING:
    from .calls import Call

type UsageOf = Callable[[int, int], LLMUsage]

_WIDE = re.compile(r"[\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]")


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
) -> Generator[LLMResultChunk, None, None]:
    """Send the request and return its answer's chunks. What is wrong with the request is raised here, mapped."""
    errand = is_errand([message.get_text_content() for message in messages], stream=stream)
    if errand:
        parameters = quick(parameters)
    try:
        credentials = Credentials.read(form)
        body = chat_request(model, credentials, messages, parameters, tools=tools, stop=stop)
        wire = send(credentials, body)
    except Exception as error:
        raise for_dify(error) from error
    reader = Reader([tool.name for tool in tools or ()])
    thinking = ThinkingText(hidden=errand or wants_structure(parameters))

    def chunks() -> Generator[LLMResultChunk, None, None]:
        index = 0
        shown = 0
        pieces = texts(reader, thinking, wire)
        try:
            with closing(wire), closing(pieces):
                for piece in pieces:
                    shown += estimated_tokens(piece)
                    yield _chunk(model, index, piece)
                    index += 1
        except GeneratorExit:
            raise
        except Exception as error:
            raise for_dify(error) from error
        outcome = reader.outcome
        if outcome.calls:
            yield _chunk(model, index, "", calls=outcome.calls)
            index += 1
        usage = usage_of(*_counts(outcome, messages, shown))
        yield _chunk(model, index, "", usage=usage, finish_reason=outcome.finish_reason or "stop")

    return chunks()


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


def estimated_tokens(text: str) -> int:
    """Estimate a text's tokens without a vocabulary: four letters a token, one for an East Asian character."""
    wide = len(_WIDE.findall(text))
    return wide + (len(text) - wide + 3) // 4


def _counts(outcome: Outcome, messages: Sequence[PromptMessage], shown: int) -> tuple[int, int]:
    """Tokens of prompt and answer: the server's, or an estimate where it does not say."""
    prompt, completion = outcome.usage.get("prompt_tokens"), outcome.usage.get("completion_tokens")
    if isinstance(prompt, int) and isinstance(completion, int):
        return prompt, completion
    return sum(estimated_tokens(message.get_text_content()) for message in messages), shown


def _chunk(
    model: str,
    index: int,
    text: str,
    *,
    calls: Sequence[Call] = (),
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
