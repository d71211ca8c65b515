"""The addresses of stored responses: read, forget, cancel, and list what one was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.api.base import Operation
from mlx_backend.api.errors import refuse
from mlx_backend.api.responses import objects
from mlx_backend.api.responses.store import StoreProtocol
from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import ModelRegistry


class GetResponse(StoreProtocol):
    """Implements `ResourceProtocol`: a stored response."""

    operation = Operation(summary="Return a stored response", answer=objects.Response)

    def answer(
        self, _models: ModelRegistry, arguments: Mapping[str, str], client: QueueClient
    ) -> dict[str, Any]:
        """Return the response. Raises ApiError."""
        if arguments.get("stream") in ("true", "1"):
            raise refuse("A stored response cannot be streamed again: leave stream out.", "stream")
        return dict(self._store.get(arguments["response_id"], client.name).response)


class DeleteResponse(StoreProtocol):
    """Implements `ResourceProtocol`: a stored response is forgotten."""

    operation = Operation(summary="Forget a stored response", answer=objects.DeletedResponse)

    def answer(
        self, _models: ModelRegistry, arguments: Mapping[str, str], client: QueueClient
    ) -> dict[str, Any]:
        """Forget it. Raises ApiError."""
        identifier = arguments["response_id"]
        self._store.delete(identifier, client.name)
        return {"id": identifier, "object": "response", "deleted": True}


class CancelResponse(StoreProtocol):
    """Implements `ResourceProtocol`: only a response in the background could be cancelled, and there are none."""

    operation = Operation(summary="Cancel a response in the background", answer=objects.Response)

    def answer(
        self, _models: ModelRegistry, arguments: Mapping[str, str], client: QueueClient
    ) -> dict[str, Any]:
        """Refuse it. Raises ApiError."""
        self._store.get(arguments["response_id"], client.name)
        raise refuse(
            "This response is complete: only one in the background could be cancelled. To end one that is being "
            "generated, close its connection.",
            "response_id",
        )


class ListInputItems(StoreProtocol):
    """Implements `ResourceProtocol`: what a stored response was given."""

    operation = Operation(summary="List the items that a stored response was given", answer=objects.ItemList)

    def answer(
        self, _models: ModelRegistry, arguments: Mapping[str, str], client: QueueClient
    ) -> dict[str, Any]:
        """Return a page of them, the newest first unless asked otherwise. Raises ApiError."""
        identifier = arguments["response_id"]
        stored = self._store.get(identifier, client.name)
        given = [] if stored.previous is None else stored.previous.conversation()
        items = [
            {"type": "message", **item, "id": item.get("id") or f"item_{at}_{identifier}"}
            for at, item in enumerate((*given, *stored.input))
        ]
        return page(items, arguments)


def page(items: list[dict[str, Any]], arguments: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a list: `limit` items (1 to 100) in an `order`, those that follow `after`."""
    limit, order, after = arguments.get("limit", "20"), arguments.get("order", "desc"), arguments.get("after")
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= 100):
        raise refuse(f"limit = {excerpt(limit)}: must be a whole number from 1 to 100.", "limit")
    if order not in ("asc", "desc"):
        raise refuse(f"order = {excerpt(order)}: must be asc or desc.", "order")
    if order == "desc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise refuse(f"after = {excerpt(after)}: there is no such item in this response.", "after")
        items = items[ids.index(after) + 1 :]
    shown = items[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
