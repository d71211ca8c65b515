"""Which call a tool's result answers, and where it belongs: behind that call, whatever came between.

Clients give calls the ids they like, several times the same, or none; a result may name an id, a tool or neither.
Every answer here takes constant time, so that a history of many calls is read in time proportional to its length.
Knows no messages but as what results are put behind.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

type Message = dict[str, Any]


class CallResults:
    """The calls of a history, by our ids, and their results."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._results: dict[str, list[Message]] = {}  # call -> the results of its message, in their order
        self._latest: dict[str, str] = {}  # a client's id -> the last call that had it
        self._unanswered: set[str] = set()
        self._by_client_id: defaultdict[str, deque[str]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[str]] = defaultdict(deque)
        self._in_order: deque[str] = deque()

    def begin_message(self) -> list[Message]:
        """Begin a message with calls: those before it are not waited for. Return where its results will be."""
        self._unanswered.clear()
        self._by_client_id.clear()
        self._by_name.clear()
        self._in_order.clear()
        return []

    def new_id(self, wanted: str) -> str:
        """Return an id that no call has: the client's, if it is one."""
        unique, count = wanted, len(self._names)
        while not unique or unique in self._names:
            count += 1
            unique = f"call_{count}"
        return unique

    def add_call(self, identifier: str, client_id: str, name: str, results: list[Message]) -> None:
        """Note a call; `results` is what `begin_message` returned for its message."""
        self._names[identifier] = name
        self._results[identifier] = results
        self._unanswered.add(identifier)
        self._by_name[name].append(identifier)
        self._in_order.append(identifier)
        if client_id:
            self._latest[client_id] = identifier
            self._by_client_id[client_id].append(identifier)

    def call_of(self, client_id: str, name: str) -> str:
        """Return the call that a result answers: by id, else by name, else the first without a result; "" for none."""
        return (
            (self._first(self._by_client_id, client_id) or self._latest.get(client_id, ""))
            or self._first(self._by_name, name)
            or self._first_of(self._in_order)
        )

    def add_result(self, identifier: str, name: str, content: Any) -> None:
        """Put a result behind the message of its call."""
        self._unanswered.discard(identifier)
        named = self._names[identifier] or name
        result = {"role": "tool", "tool_call_id": identifier, "name": named, "content": content}
        self._results[identifier].append(result)

    def behind(self, messages: Iterable[Message]) -> Iterator[Message]:
        """Yield messages, each with the results that belong behind it."""
        for message in messages:
            yield message
            if calls := message.get("tool_calls"):
                yield from self._results[calls[0]["id"]]

    def _first(self, queues: defaultdict[str, deque[str]], key: str) -> str:
        return self._first_of(queues[key]) if key in queues else ""

    def _first_of(self, queue: deque[str]) -> str:
        while queue and queue[0] not in self._unanswered:
            queue.popleft()
        return queue[0] if queue else ""
