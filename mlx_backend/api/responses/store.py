"""Responses that clients may refer to again, in bounded memory and for a bounded time.

Each belongs to its owner, who sent the request (an API key, or an address where there are none): nobody else can read
it. What is older than TIME_TO_LIVE is gone. Where there is no room, what was used longest ago of the owner that holds
most gives way: nobody can push out the responses of others who hold less. Knows no models.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from dataclasses import dataclass
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from mlx_backend.api.errors import ApiError
from mlx_backend.api.json_text import body
from mlx_backend.byte_cache import ByteCache, CacheBudget
from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

MAX_BYTES = 128 << 20
"""Of all that is stored. One owner's may be half of it."""
TIME_TO_LIVE = 4 * 3600.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and what the model was given for it, as JSON: objects of many small values take 20 times as much.

    `item_ids` are those of the items of both; `nbytes` are those of its whole conversation.
    """

    written: bytes
    written_input: bytes
    item_ids: frozenset[str]
    previous: StoredResponse | None
    expires: float
    nbytes: int

    @property
    def response(self) -> dict[str, Any]:
        """The response object."""
        response: dict[str, Any] = json.loads(self.written)
        return response

    @property
    def input(self) -> list[dict[str, Any]]:
        """The items of the request."""
        items: list[dict[str, Any]] = json.loads(self.written_input)
        return items

    def conversation(self) -> list[Any]:
        """Return all items up to the end of this response, in their order."""
        chain: list[StoredResponse] = []
        each: StoredResponse | None = self
        while each is not None:
            chain.append(each)
            each = each.previous
        return [item for each in reversed(chain) for item in (*each.input, *each.response["output"])]


class ResponseStore:
    """The stored responses of all clients. Safe to use from any thread. `clock` returns seconds."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = CacheBudget(max_bytes, from_largest=True)
        self._owners: dict[str, ByteCache[str, StoredResponse]] = {}
        self._guard = threading.RLock()
        self._clock = clock

    def _of(self, owner: str) -> ByteCache[str, StoredResponse]:
        """Return an owner's responses. Owners who have none any more are forgotten."""
        with self._guard:
            if owner not in self._owners:
                self._owners = {name: each for name, each in self._owners.items() if len(each)}
                self._owners[owner] = ByteCache(self._budget)
            return self._owners[owner]

    def put(
        self,
        response: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
        previous: StoredResponse | None,
        owner: str,
        *,
        identifier: str | None = None,
    ) -> None:
        """Store a response with the items that it was given, unless it is not to be stored.

        Under another `identifier` it is kept in any case, and its items are not found.
        """
        if response.get("store") is False and identifier is None:
            return
        written, written_input = body(response), body(given)
        items = (*given, *response["output"]) if identifier is None else ()
        ids = frozenset(item["id"] for item in items if isinstance(item.get("id"), str))
        nbytes = len(written) + len(written_input) + getsizeof(ids) + sum(map(getsizeof, ids))
        total = nbytes + (previous.nbytes if previous is not None else 0)
        expires = self._clock() + TIME_TO_LIVE
        stored = StoredResponse(written, written_input, ids, previous, expires, total)
        with self._guard:  # or an owner who has none yet may be forgotten
            self._of(owner).put(identifier or response["id"], stored, total)

    def get(self, identifier: str, owner: str, *, field: str = "response_id") -> StoredResponse:
        """Return a response. Raises the ApiError (404) if there is none of this client's."""
        stored = self._of(owner).find(identifier)
        if stored is None or stored.expires < self._clock():
            self._of(owner).drop(identifier)
            raise ApiError(
                404,
                f"There is no response {excerpt(identifier)} any more. Responses are kept for "
                f"{TIME_TO_LIVE / 3600:.0f} hours at most, and until the server is restarted; with store = false "
                "not at all. Send the conversation in 'input' instead.",
                param=field,
                code="previous_response_not_found"
                if field == "previous_response_id"
                else "response_not_found",
            )
        return stored

    def take(self, identifier: str, owner: str) -> StoredResponse | None:
        """Return a response that nobody finds after this; None if there is none."""
        stored = self._of(owner).find(identifier)
        self._of(owner).drop(identifier)
        return stored if stored is not None and stored.expires >= self._clock() else None

    def delete(self, identifier: str, owner: str) -> None:
        """Forget a response. Raises what `get` raises."""
        self.get(identifier, owner)
        self._of(owner).drop(identifier)

    def items(self, identifiers: Set[str], owner: str) -> dict[str, Mapping[str, Any]]:
        """Return those of this client's items that have these ids; of two with one id the newer."""
        return {
            item["id"]: item
            for stored in self._of(owner).values()
            if stored.expires >= self._clock() and not identifiers.isdisjoint(stored.item_ids)
            for item in (*stored.response["output"], *stored.input)
            if isinstance(item.get("id"), str) and item["id"] in identifiers
        }


class ConnectionStore:
    """The store as one connection sees it: its last response can be continued once, even if it is not stored.

    Such a one is among its owner's, under a key that nobody can know.
    """

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._key = uuid.uuid4().hex
        self._last: tuple[str, str] | None = None
        self._is_closed = False
        self.items, self.delete = store.items, store.delete

    def put(
        self,
        response: Mapping[str, Any],
        given: Sequence[Mapping[str, Any]],
        previous: StoredResponse | None,
        owner: str,
    ) -> None:
        """Keep a response as the last one, and store it if it is to be."""
        self.forget()
        self._store.put(response, given, previous, owner)
        if not response["store"]:
            last = response["id"] + self._key, owner
            self._store.put(response, given, previous, owner, identifier=last[0])
            self._last = last
        if self._is_closed:  # by another thread, perhaps just now
            self.forget()

    def get(self, identifier: str, owner: str, *, field: str = "response_id") -> StoredResponse:
        """Return a response; one that is not stored, only once. Raises what the store raises."""
        last = self._store.take(identifier + self._key, owner)
        return last or self._store.get(identifier, owner, field=field)

    def forget(self) -> None:
        """Forget the last response."""
        last, self._last = self._last, None
        if last is not None:
            self._store.take(*last)

    def close(self) -> None:
        """Forget the last response, and keep none any more."""
        self._is_closed = True
        self.forget()
