"""What one client may take of the server: requests at the same time, and of a key requests and tokens in a minute.

It stands in front of the engines' queue, in which the next request is of the client that has been given the least. What
a key has left is stated in the headers of OpenAI's API.

Each limit of a key is a bucket that holds a minute's worth and fills steadily, so a burst may use all of it at once.
Tokens are counted when they are known: those of the prompt when a reply begins, the others when it ends. A bucket may
owe them then, and nothing more is admitted until it is filled again: over time no key gets more than its limit.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from mlx_backend.api.errors import ApiError, shutting_down
from mlx_backend.errors import EngineBusy

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.api.errors import LimitKind
    from mlx_backend.server.api_keys import ApiKey

_SECONDS = 60.0
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{part}-{kind}"
    for part in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)


class RequestsInFlight:
    """The requests that are being answered, and whose they are: a server that is stopped drains them.

    A client at its limit still leaves threads for the others: its requests may all wait for the same thing, such as a
    model that is being loaded. Safe to use from any thread.
    """

    def __init__(self, most: int, most_of_client: int) -> None:
        self._most = most
        self._most_of_client = most_of_client
        self._changed = threading.Condition()
        self._of_client: Counter[str] = Counter()
        self.is_draining = False

    def begin(self, client: str) -> Callable[[], None]:
        """Count a request; return what is to be called when it has been answered.

        Raises the 503 of a server that is draining, and EngineBusy if there are too many.
        """
        with self._changed:
            if self.is_draining:
                raise shutting_down("The server is shutting down and accepts no new requests.")
            if self._of_client[client] >= self._most_of_client:
                raise EngineBusy(
                    f"{self._most_of_client} of your requests are being answered; send fewer at once."
                )
            if self.count >= self._most:
                raise EngineBusy("Too many requests are being answered.")
            self._of_client[client] += 1
        return partial(self._end, client)

    def _end(self, client: str) -> None:
        with self._changed:
            self._of_client[client] -= 1
            if not self._of_client[client]:
                del self._of_client[client]
            self._changed.notify_all()

    @property
    def count(self) -> int:
        """How many requests are in flight."""
        return self._of_client.total()

    def drain(self) -> None:
        """Admit no more requests."""
        with self._changed:
            self.is_draining = True

    def wait_until_idle(self, seconds: float | None) -> bool:
        """Wait until no request is in flight; False if that took longer than `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.count, seconds)


class _Bucket:
    """What is left of a limit for each minute; below zero it is owed."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._left = float(limit)
        self._at = now

    def left(self, now: float) -> float:
        self._left = min(self.limit, self._left + (now - self._at) * self.limit / _SECONDS)
        self._at = now
        return self._left

    def take(self, count: int, now: float) -> None:
        self._left = self.left(now) - count

    def with_limit(self, limit: int, now: float) -> _Bucket:
        """Return the bucket for another limit: what was used stays used.

        A lower limit keeps the share that was left, so a key within its limits is not suddenly in debt.
        """
        used, share = self.limit - self.left(now), self.left(now) / self.limit
        bucket = _Bucket(limit, now)
        bucket._left = max(limit - used, share * limit)
        return bucket

    def seconds_until(self, count: float, now: float) -> float:
        return max(0.0, (count - self.left(now)) * _SECONDS / self.limit)


class RateLimits:
    """The limits of all keys. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def admit(self, key: ApiKey) -> None:
        """Count one request. Raises a 429 if the key has used up its requests or tokens; that one is not counted."""
        with self._lock:
            now = self._clock()
            buckets = self._of(key, now)
            for kind, bucket in buckets.items():
                if (wait := bucket.seconds_until(1, now)) > 0:
                    raise _limit_reached(kind, bucket.limit, wait)
            if "requests" in buckets:
                buckets["requests"].take(1, now)

    def charge(self, key: ApiKey, tokens: int) -> None:
        """Count tokens that a request of the key has used."""
        with self._lock:
            now = self._clock()
            if (bucket := self._of(key, now).get("tokens")) is not None:
                bucket.take(tokens, now)

    def headers(self, key: ApiKey) -> list[tuple[str, str]]:
        """Return the headers that say what is left of the key's limits, and in what time all of it is there again."""
        with self._lock:
            now = self._clock()
            return [
                header
                for kind, bucket in self._of(key, now).items()
                for header in (
                    (f"x-ratelimit-limit-{kind}", str(bucket.limit)),
                    (f"x-ratelimit-remaining-{kind}", str(max(0, int(bucket.left(now))))),
                    (f"x-ratelimit-reset-{kind}", _duration(bucket.seconds_until(bucket.limit, now))),
                )
            ]

    def _of(self, key: ApiKey, now: float) -> dict[LimitKind, _Bucket]:
        """Return the buckets of the limits that the key has now: a file that is read again may change them."""
        found = {}
        limits: dict[LimitKind, int | None] = {
            "requests": key.requests_per_minute,
            "tokens": key.tokens_per_minute,
        }
        for kind, limit in limits.items():
            if limit is None:
                self._buckets.pop((key.name, kind), None)
                continue
            bucket = self._buckets.get((key.name, kind))
            if bucket is None:
                bucket = _Bucket(limit, now)
            elif bucket.limit != limit:
                bucket = bucket.with_limit(limit, now)
            self._buckets[key.name, kind] = found[kind] = bucket
        return found


def _limit_reached(kind: LimitKind, limit: int, wait: float) -> ApiError:
    retry_after = math.ceil(wait)
    return ApiError(
        429,
        f"This API key has reached its limit of {limit:,} {kind} per minute; try again in {retry_after} s.",
        kind=kind,
        code="rate_limit_exceeded",
        headers=(("Retry-After", str(retry_after)),),
        numbers={"retry_after": retry_after},
    )


def _duration(seconds: float) -> str:
    """Write a time as OpenAI's headers do: 250ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
