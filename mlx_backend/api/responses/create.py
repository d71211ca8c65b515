"""POST /v1/responses, and POST /v1/responses/input_tokens, which counts what that would be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_backend.api.base import JsonAnswer, Operation
from mlx_backend.api.fields import BodyCall
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.openai.base import with_extra_body
from mlx_backend.api.openai.stream import ChatLogprobs
from mlx_backend.api.responses import objects
from mlx_backend.api.responses.body import ResponsesBody, check_reasoning
from mlx_backend.api.responses.store import StoreProtocol
from mlx_backend.api.responses.stream import ResponseWriter
from mlx_backend.api.tools import echoed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.api.base import OnDisconnect
    from mlx_backend.api.responses.body import ParsedRequest
    from mlx_backend.api.responses.store import ResponseStore
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.reply_group import ReplyGroup
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import Lease, ModelRegistry


class CreateResponse(StoreProtocol):
    """Implements `ReplyProtocol`: a conversation of items is answered."""

    operation = Operation(
        summary="Answer a conversation of items",
        body=ResponsesBody,
        answer=objects.Response,
        event=objects.Event,
    )

    def parse(self, body: bytes) -> CreateResponseCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        written = with_extra_body(decode_json(body))
        return CreateResponseCall(ResponsesBody.parse(written), written, self._store)


@dataclass(frozen=True)
class CreateResponseCall(BodyCall[ResponsesBody]):
    """Implements `ReplyCall`. `written` is the body as the client wrote it"""

    written: Mapping[str, Any]
    store: ResponseStore

    @property
    def stream(self) -> bool:
        """Whether the response is to be streamed."""
        return bool(self.body.stream)

    def start(self, service: Service, client: QueueClient) -> tuple[Reply | ReplyGroup, ResponseWriter]:
        """Start the reply."""
        body, engine = self.body, service.engine
        asked = check_reasoning(self.written)
        parsed = body.request(self.written, self.store, client.name)
        reply = service.chat(parsed.chat, client)
        summary = asked.get("summary") or asked.get("generate_summary")
        # OpenAI's and Open Responses' events of reasoning have other names, but for those of a summary.
        is_plain = not asked
        writer = ResponseWriter(
            self._head(service, parsed, reply, summary),
            parsed.tools,
            call_id=reply.call_id,
            logprobs=ChatLogprobs(engine.tokenizer.bytes_of) if body.wants_logprobs else None,
            summarises=is_plain or summary not in (None, "none"),
            streams_text=not is_plain,
            seals="reasoning.encrypted_content" in (body.include or ()),
            on_end=lambda response: self._store_response(response, parsed, client.name),
        )
        return reply, writer

    def _store_response(self, response: dict[str, Any], parsed: ParsedRequest, owner: str) -> None:
        if self.body.store is not False:
            self.store.put(response, parsed.items, parsed.previous, owner)

    def _head(self, service: Service, parsed: ParsedRequest, reply: Reply, summary: Any) -> dict[str, Any]:
        """Return the fields of the response object that say what was asked for."""
        body, written = self.body, self.written
        text = written.get("text") or {}
        effort, sampling = reply.effort, service.sampling_of(parsed.chat)
        return {
            "background": False,
            "frequency_penalty": sampling.frequency_penalty,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": service.model_id,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "presence_penalty": sampling.presence_penalty,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": effort.effort if effort else None, "summary": summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **{key: text[key] for key in text if text[key] is not None}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": [echoed(tool) for tool in written.get("tools") or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": body.user,
        }


class CountInputTokens(StoreProtocol):
    """Implements `JsonProtocol`: how many tokens a request's prompt has."""

    operation = Operation(
        summary="Count the tokens of a conversation of items", body=ResponsesBody, answer=objects.InputTokens
    )

    def parse(self, body: bytes) -> CountInputTokensCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        written = with_extra_body(decode_json(body))
        return CountInputTokensCall(ResponsesBody.parse(written), written, self._store)


@dataclass(frozen=True)
class CountInputTokensCall(BodyCall[ResponsesBody]):
    """Implements `JsonCall`."""

    waits_for_engine: ClassVar[bool] = False

    written: Mapping[str, Any]
    store: ResponseStore

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[Service]:
        """Lease a language model."""
        return models.acquire(self.model, wait)

    def answer(self, service: Service, client: QueueClient, _on_disconnect: OnDisconnect) -> JsonAnswer:
        """Build the prompt and count it."""
        check_reasoning(self.written)
        parsed = self.body.request(self.written, self.store, client.name)
        tokens = service.prompt(parsed.chat, client).tokens
        return JsonAnswer({"object": "response.input_tokens", "input_tokens": len(tokens)})
