"""A request in the log: a line when it arrives and one when it ends, with its id, its client's address and key's name.

Nothing of what a request or a reply contains is logged: of a request that was refused as it should not be, only which
field was wrong. Lines carry their parts as `fields` too, for `--log-format json`. The last requests that have ended
are kept, for /activity.
"""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from mlx_backend.server.errors import CLIENT_CLOSED_REQUEST

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from werkzeug import Request

    from mlx_backend.api.errors import ApiError
    from mlx_backend.server.auth import Client

log = logging.getLogger("mlx_backend.requests")

MAX_PATH_CHARACTERS = 200
_SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_PROBES = frozenset(["/", "/health", "/ready", "/metrics", "/activity", "/docs"])
"""What monitors, containers and the page ask all the time: logged at the level debug, and not counted."""
_PAGE_FILES = "/page/"
_MAY_QUOTE = frozenset([400, 422])
"""Errors whose words may repeat a value of the request."""
LEFT = "client left"


class RequestRecord:
    """One request, from its arrival to the end of its response. `on_end` is called once; for probes not at all."""

    def __init__(
        self, request: Request, client: Client, on_end: Callable[[RequestRecord], None] | None = None
    ) -> None:
        given = request.headers.get("X-Request-Id", "")
        self.id = given if _SANE_ID.fullmatch(given) else f"req_{uuid.uuid4().hex[:24]}"
        self.client = client
        self.method, self.path = request.method, request.path[:MAX_PATH_CHARACTERS]
        self.status = 0
        self.error: ApiError | None = None
        self.fields: Mapping[str, Any] = {}
        """What is known of a reply when it has ended."""
        self._on_end = on_end
        self.started = time.perf_counter()
        self._ended = threading.Lock()
        is_probe = self.method in ("GET", "HEAD") and (
            self.path in _PROBES or self.path.startswith(_PAGE_FILES)
        )
        self._is_counted = not (is_probe or self.method == "OPTIONS")
        self._level = logging.INFO if self._is_counted else logging.DEBUG

    def arrived(self) -> None:
        """Log that the request has come."""
        self._log("%s %s", self.method, self.path, fields={"event": "request", **self._what()})

    def refused(self, error: ApiError) -> None:
        """Log why the request is not answered as it should be."""
        self.error = error
        where = " ".join(
            f"{name}={value}" for name, value in (("param", error.param), ("code", error.code)) if value
        )
        words = (
            where
            if error.status in _MAY_QUOTE
            else f"{error.message}{f' [{error.code}]' if error.code else ''}"
        )
        fields = {"event": "refused", "status": error.status, "code": error.code, "param": error.param}
        self._log("refused %d %s", error.status, words, fields=fields, level=logging.INFO)
        if error.status in _MAY_QUOTE:
            log.debug("%s refused %d %s", self.id, error.status, error.message)

    def end(self, words: str | None = None, fields: Mapping[str, Any] | None = None) -> None:
        """Log that the response has ended; only the first call counts. `words` replace what is known of any request."""
        if not self._ended.acquire(blocking=False):
            return
        seconds = time.perf_counter() - self.started
        self.fields = fields or {}
        words = words or f"{self.status} {self.method} {self.path} {seconds:.3f}s"
        what = {
            "event": "response",
            "status": self.status or None,
            "seconds": round(seconds, 4),
            **self._what(),
        }
        self._log("%s", words, fields={**what, **self.fields})
        if self._on_end is not None and self._is_counted:
            self._on_end(self)

    def _what(self) -> dict[str, Any]:
        return {"method": self.method, "path": self.path}

    def _log(self, text: str, *parts: Any, fields: Mapping[str, Any], level: int | None = None) -> None:
        level = self._level if level is None else max(level, self._level)
        if not log.isEnabledFor(level):
            return
        key = f" key={self.client.key_name}" if self.client.key_name else ""
        who = {"request_id": self.id, "client": self.client.address, "key": self.client.key_name or None}
        known = {name: value for name, value in {**who, **fields}.items() if value is not None}
        log.log(
            level,
            f"%s %s%s {text}",
            self.id,
            self.client.address or "-",
            key,
            *parts,
            extra={"fields": known},
        )


# -- the last requests that have ended, for /activity ---------------------------------------------------------


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
