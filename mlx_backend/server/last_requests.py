"""The last requests that have ended, without anything of their contents, for /activity. Bounded in their number."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NotRequired, TypedDict

from mlx_backend.server.errors import CLIENT_CLOSED_REQUEST
from mlx_backend.server.request_log import LEFT

if TYPE_CHECKING:
    from mlx_backend.server.request_log import RequestRecord

MAX_REQUESTS = 200
_OF_A_REPLY = (
    *("model", "effort", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens"),
    *("queue_seconds", "first_token_seconds", "tokens_per_second"),
)


class EndedRequest(TypedDict):
    """A request that has ended: when (seconds since 1970), what it was, how long it took; of a reply what it cost."""

    id: str
    at: float
    seconds: float
    path: str
    status: int
    outcome: str
    key: NotRequired[str]
    model: NotRequired[str]
    effort: NotRequired[str]
    prompt_tokens: NotRequired[int]
    cached_tokens: NotRequired[int]
    completion_tokens: NotRequired[int]
    reasoning_tokens: NotRequired[int]
    queue_seconds: NotRequired[float]
    first_token_seconds: NotRequired[float]
    tokens_per_second: NotRequired[float]


def outcome_of(record: RequestRecord) -> str:
    """Return in a word how a request ended: a reply's finish, or what became of one that generated nothing."""
    if record.status == CLIENT_CLOSED_REQUEST:
        outcome = LEFT
    elif record.error is not None and "finish" not in record.fields:
        outcome = "error" if record.error.status >= 500 else "refused"
    else:
        outcome = str(record.fields.get("finish", "answered"))
    return outcome.replace(" ", "_")


class LastRequests:
    """Keeps them, the newest first. Safe to use from any thread."""

    def __init__(self) -> None:
        self._ended: deque[EndedRequest] = deque(maxlen=MAX_REQUESTS)
        self._guard = threading.Lock()

    def add(self, record: RequestRecord) -> None:
        """Note a request that has ended; one that only asks how things are (GET) is left out."""
        if record.method != "POST":
            return
        seconds = time.perf_counter() - record.started
        known = {name: record.fields.get(name) for name in _OF_A_REPLY}
        ended = EndedRequest(
            id=record.id,
            at=round(time.time() - seconds, 3),
            seconds=round(seconds, 4),
            path=record.path,
            status=record.status,
            outcome=outcome_of(record),
        )
        ended.update({name: value for name, value in known.items() if value is not None})  # type: ignore[typeddict-item]
        if record.client.key_name:
            ended["key"] = record.client.key_name
        with self._guard:
            self._ended.appendleft(ended)

    def of(self, key: str | None) -> list[EndedRequest]:
        """Return those of one key; with None those of all."""
        with self._guard:
            ended = list(self._ended)
        return ended if key is None else [each for each in ended if each.get("key") == key]
