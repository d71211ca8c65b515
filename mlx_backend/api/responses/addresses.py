"""What the store of responses is for: they are created, counted, read, continued and deleted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.api.addresses import Addresses, Api
from mlx_backend.api.errors import refuse
from mlx_backend.api.openai.objects import ErrorObject
from mlx_backend.api.openai.stream import ChatLogprobs
from mlx_backend.api.responses import objects
from mlx_backend.api.responses.body import ResponsesBody
from mlx_backend.api.responses.compaction import ASKS_FOR_SUMMARY, CompactBody, CompactionWriter
from mlx_backend.api.responses.errors import error_object
from mlx_backend.api.responses.socket import SOCKET_API, CreateEvent, ResponsesConnection
from mlx_backend.api.responses.store import ConnectionStore, ResponseStore
from mlx_backend.api.responses.stream import ResponseWriter
from mlx_backend.api.sent import Sent
from mlx_backend.api.tools import echoed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.api.addresses import Query
    from mlx_backend.api.responses.body import ParsedRequest
    from mlx_backend.chat.reply import Reply
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient


def addresses() -> Addresses:
    """Return the addresses, with a store of their own."""
    api, store = Addresses(Api(ErrorObject, error_object)), ResponseStore()
    responses = Responses(store)

    def connection() -> ResponsesConnection:
        """Create responses over a WebSocket."""
        own = ConnectionStore(store)
        return ResponsesConnection(Responses(own).create, own)

    api.reply("/v1/responses", responses.create, ResponsesBody, objects.Response, objects.Event)
    api.socket("/v1/responses", connection, CreateEvent, objects.Event, SOCKET_API)
    api.reply("/v1/responses/compact", responses.compact, CompactBody, objects.CompactedResponse, None)
    api.json("/v1/responses/input_tokens", responses.count, ResponsesBody, objects.InputTokens)
    path = "/v1/responses/<response_id>"
    api.resource("GET", path, responses.get, objects.Response)
    api.resource("DELETE", path, responses.delete, objects.DeletedResponse)
    api.resource("POST", path + "/cancel", responses.cancel, objects.Response)
    api.resource("GET", path + "/input_items", responses.input_items, objects.ItemList)
    return api


class Responses:
    """The addresses that look into a store."""

    def __init__(self, store: ResponseStore | ConnectionStore) -> None:
        self._store = store

    def create(
        self,
        body: ResponsesBody,
        service: Service,
        client: QueueClient,
        writer_type: type[ResponseWriter] = ResponseWriter,
    ) -> tuple[Reply, ResponseWriter]:
        """Answer a conversation of items."""
        parsed = body.request(self._store, client.name)
        reply = service.chat(parsed.chat, client)
        asked = body.asked_reasoning
        summary = asked.get("summary") or asked.get("generate_summary")
        # OpenAI's and Open Responses' events of reasoning have other names, but for those of a summary.
        is_plain = not asked
        writer = writer_type(
            _head(body, service, parsed, reply, summary),
            parsed.tools,
            call_id=reply.call_id,
            logprobs=ChatLogprobs(service.engine.tokenizer.bytes_of) if body.wants_logprobs else None,
            summarises=is_plain or summary not in (None, "none"),
            streams_text=not is_plain,
            seals="reasoning.encrypted_content" in (body.include or ()),
            on_end=lambda response: self._store.put(response, parsed.items, parsed.previous, client.name),
        )
        return reply, writer

    def compact(
        self, body: CompactBody, service: Service, client: QueueClient
    ) -> tuple[Reply, CompactionWriter]:
        """Sum up a conversation of items."""
        parsed = body.request(self._store, client.name, ASKS_FOR_SUMMARY)
        reply = service.chat(parsed.chat, client)
        before = [] if parsed.previous is None else parsed.previous.conversation()
        return reply, CompactionWriter([*before, *parsed.items])

    def count(self, body: ResponsesBody, service: Service, client: QueueClient) -> objects.InputTokens:
        """Count the tokens of a conversation of items."""
        prompt = service.prompt(body.request(self._store, client.name).chat, client)
        return {"object": "response.input_tokens", "input_tokens": len(prompt.tokens)}

    def get(self, query: Query) -> dict[str, Any]:
        """Return a stored response."""
        if query.arguments.get("stream") in ("true", "1"):
            raise refuse("A stored response cannot be streamed again: leave stream out.", "stream")
        return self._store.get(query.arguments["response_id"], query.client.name).response

    def delete(self, query: Query) -> objects.DeletedResponse:
        """Forget a stored response."""
        identifier = query.arguments["response_id"]
        self._store.delete(identifier, query.client.name)
        return {"id": identifier, "object": "response", "deleted": True}

    def cancel(self, query: Query) -> dict[str, Any]:
        """Cancel a response in the background."""
        self._store.get(query.arguments["response_id"], query.client.name)
        raise refuse(
            "This response is complete: only one in the background could be cancelled. To end one that is being "
            "generated, close its connection.",
            "response_id",
        )

    def input_items(self, query: Query) -> dict[str, Any]:
        """List the items that a stored response was given."""
        identifier = query.arguments["response_id"]
        stored = self._store.get(identifier, query.client.name)
        given = [] if stored.previous is None else stored.previous.conversation()
        items = [
            {"type": "message", **item, "id": item.get("id") or f"item_{at}_{identifier}"}
            for at, item in enumerate((*given, *stored.input))
        ]
        return page(items, query.arguments)


_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
"""Fields of a request that are those of its response, too."""
_SAMPLING = ("frequency_penalty", "presence_penalty", "temperature", "top_p")


def _head(
    body: ResponsesBody, service: Service, parsed: ParsedRequest, reply: Reply, summary: Any
) -> dict[str, Any]:
    """Return the fields of the response object that say what was asked for."""
    text = body.written.get("text") or {}
    effort, sampling = reply.effort, service.sampling_of(parsed.chat)
    head = {
        **{name: getattr(body, name) for name in _REPEATED},
        **{name: getattr(sampling, name) for name in _SAMPLING},
        "background": False,
        "metadata": body.metadata or {},
        "model": service.model_id,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": effort.effort if effort else None, "summary": summary},
        "service_tier": "default",
        "store": body.store is not False,
        "text": {"format": {"type": "text"}, **{key: text[key] for key in text if text[key] is not None}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [echoed(tool) for tool in body.written.get("tools") or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": "disabled",
    }
    return dict(sorted(head.items()))


def page(items: list[dict[str, Any]], arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list: `limit` items (1 to 100) in an `order`, those that follow `after`."""
    limit, order, after = arguments.get("limit", "20"), arguments.get("order", "desc"), arguments.get("after")
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise Sent(limit, "limit").wrong_value("must be a whole number from 1 to 100.")
    if order not in ("asc", "desc"):
        raise Sent(order, "order").wrong_value("must be asc or desc.")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise Sent(after, "after").wrong_value("there is no such item in this response.")
        items = items[ids.index(after) + 1 :]
    shown = items[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
