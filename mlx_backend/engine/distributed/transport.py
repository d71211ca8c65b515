"""What the processes that share one model send each other: rank 0 leads, the others follow.

The model's own sums go through MLX's collectives. Commands do not: a process that waits in a collective keeps a core
busy and cannot be called out of it, and a command would wait for everything that is still being computed. Here a
follower sleeps until a message comes, rank 0 never waits for an answer while it serves, and a process that has ended
is noticed at once.

    all_gather(value)     ──▶  all values, in the order of ranks     while loading: every rank waits for the last
    broadcast(message)    ──▶  receive() of every follower           while serving
    report_failure(text)  ──▶  on_lost at rank 0                     also when a connection simply ends

A collective that one side has left may never return. So when a rank is lost, all the others are told to stop at once;
a process that cannot, because it waits in a collective, is ended after some seconds. Only rank 0 stays, to report it.

Knows ranks and JSON messages (wire.py carries them); no model and no MLX.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from mlx_backend.engine.distributed.wire import Wire, accept, connect, open_listener
from mlx_backend.errors import EngineError, EngineStopped, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

LEADER_VARIABLE = "MLX_BACKEND_LEADER"
"""Where the others reach rank 0: "host" or "host:port"."""
COLLECTIVE_GRACE = 2.0
"""Seconds for rank 0 to come out of a collective before requests are failed regardless."""
EXIT_TIMEOUT = 10.0
"""Seconds for a process to end by itself once it is alone."""
JOIN_TIMEOUT = 30.0
"""Seconds for all ranks to connect."""
MAX_GREETING_BYTES = 64

RESTART_ALL = "A model that several processes share needs all of them: start them again."


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where rank 0 listens, and the key that the ranks authenticate with. It travels over MLX's connections."""

    addresses: Sequence[str]
    port: int
    authkey: bytes = field(repr=False)

    def to_json(self) -> bytes:
        """Write it for the other ranks."""
        return json.dumps([list(self.addresses), self.port, self.authkey.hex()]).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Endpoint:
        """Return what another rank wrote with `to_json`."""
        addresses, port, authkey = json.loads(data)
        return cls(addresses, port, bytes.fromhex(authkey))

    def __str__(self) -> str:
        return f"{' or '.join(self.addresses)}, port {self.port}"


class Leader:
    """Rank 0's end. Used by one thread; listens to each follower on a thread of its own.

    `addresses` are the names under which other machines may reach this one. Raises EngineError if it cannot listen.
    """

    def __init__(
        self, size: int, addresses: Sequence[str] = (), *, exit_timeout: float = EXIT_TIMEOUT
    ) -> None:
        self._size = size
        self._exit_timeout = exit_timeout
        self._wires: dict[int, Wire] = {}
        self._contributions: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        """A rank and its value in a list; None in place of the list if the rank is lost."""
        self._changed = threading.Condition()  # Held for all that follows.
        self._lost: dict[int, str] = {}
        """What each lost rank reported, "" if nothing."""
        self._on_lost: Callable[[EngineStopped], object] | None = None
        self._stopping = self._closing = False
        host, _, port = os.environ.get(LEADER_VARIABLE, "").partition(":")
        if port and not port.isdigit():
            raise EngineError(f"{LEADER_VARIABLE} must be a host or host:port, not {host}:{port}.")
        addresses = [host] if host else list(addresses) or [socket.gethostname()]
        try:
            self._listener = open_listener(addresses, int(port or 0))
        except OSError as error:
            raise EngineError(f"Rank 0 cannot listen for the other ranks: {first_line(error)}.") from error
        self.endpoint = Endpoint(addresses, self._listener.getsockname()[1], secrets.token_bytes(32))

    def accept_followers(self, *, timeout: float = JOIN_TIMEOUT) -> None:
        """Wait until all have connected. Raises EngineError if one has not within `timeout` seconds."""
        deadline = monotonic() + timeout
        with self._listener:
            while len(self._wires) < self._size - 1:
                try:
                    self._accept_one(max(0.01, deadline - monotonic()))
                except TimeoutError:
                    raise self._missing_ranks(timeout) from None
        for rank, wire in self._wires.items():
            threading.Thread(
                target=self._receive, args=(rank, wire), name=f"rank-{rank}", daemon=True
            ).start()

    def _accept_one(self, timeout: float) -> None:
        """Accept one rank, or refuse any other connection."""
        wire = accept(self._listener, self.endpoint.authkey, timeout=timeout)
        if wire is None:
            return
        match wire.receive(MAX_GREETING_BYTES):
            case int(rank) if 0 < rank < self._size and rank not in self._wires:
                try:
                    wire.set_timeout(None)
                except OSError:  # the rank has ended since
                    wire.close()
                else:
                    self._wires[rank] = wire
            case _:
                wire.close()

    def _missing_ranks(self, seconds: float) -> EngineError:
        missing = ", ".join(str(rank) for rank in range(1, self._size) if rank not in self._wires)
        return EngineError(
            f"Rank {missing} did not connect to rank 0 within {seconds:g} seconds, at {self.endpoint}. A firewall "
            f"may be in between; {LEADER_VARIABLE} names another address, as host or host:port."
        )

    def all_gather(self, value: Any) -> list[Any]:
        """Wait for every rank's value, and give all of them to every rank. Raises EngineStopped if one is lost."""
        values = {0: value}
        while len(values) < self._size:
            rank, contribution = self._contributions.get()
            if contribution is None:
                raise self.lost_rank() or EngineStopped(f"Rank {rank} was lost.")
            [values[rank]] = contribution
        gathered = [values[rank] for rank in range(self._size)]
        self.broadcast({"gathered": gathered})
        return gathered

    def broadcast(self, message: Any) -> None:
        """Send a message to all followers. Raises EngineStopped if one of them is lost."""
        for wire in self._wires.values():
            try:
                wire.send(message)
            except OSError as error:
                raise self.lost_rank(timeout=2.0) or EngineStopped(
                    f"A rank was lost: {first_line(error)}."
                ) from error

    def stop_followers(self, reason: str) -> None:
        """Tell all followers to stop; with a reason if something has failed."""
        with self._changed:
            self._stopping = True
        for wire in self._wires.values():
            with suppress(OSError):
                wire.send({"stop": reason})

    def lost_rank(self, *, timeout: float = 0.0) -> EngineStopped | None:
        """Return an error that names a rank that was lost, if one was or is within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost, timeout)
            if not self._lost:
                return None
            if len(self._lost) < self._size - 1:
                # A rank that ends without a word may be the cause of what another reports: give it a moment.
                self._changed.wait_for(lambda: "" in self._lost.values(), 1.0)
            rank = min(self._lost, key=lambda rank: (self._lost[rank] != "", rank))
            failure = self._lost[rank]
        what = f"has ended: {failure}" if failure else "was lost: its process ended or cannot be reached."
        return EngineStopped(f"Rank {rank} {what} {RESTART_ALL}")

    def on_lost(self, callback: Callable[[EngineStopped], object]) -> None:
        """Have `callback` called, on another thread, when a rank is lost; at once if one already is."""
        with self._changed:
            self._on_lost = callback
        if (error := self.lost_rank()) is not None:
            callback(error)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._listener.close()
        for wire in self._wires.values():
            wire.close()

    def wait_for_exits(self) -> None:
        """Wait, for a limited time, until the followers, which have been told to stop, are gone."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._lost) >= len(self._wires), self._exit_timeout / 3)

    def _receive(self, rank: int, wire: Wire) -> None:
        """Receive what one follower sends, until its connection ends. Runs on a thread of its own."""
        failure = ""
        while (message := wire.receive()) is not None:
            if "failed" in message:
                failure = message["failed"] or "it gave no reason."
            else:
                self._contributions.put((rank, [message["gather"]]))
        with self._changed:
            self._lost[rank] = failure
            self._changed.notify_all()
            if self._closing:
                return
            is_first, is_expected = len(self._lost) == 1, self._stopping
        self._contributions.put((rank, None))
        if not is_first or (not is_expected and self._report_loss()):
            return
        with self._changed:
            if not self._changed.wait_for(lambda: self._closing, self._exit_timeout):
                _exit_process("MLX still waits for a rank that is gone.")

    def _report_loss(self) -> bool:
        """Stop the other ranks and call `on_lost`; False if no callback is set yet."""
        error = self.lost_rank()
        assert error is not None
        log.error("%s", error)
        self.stop_followers(str(error))
        with self._changed:
            callback = self._on_lost
        if callback is None:
            return False
        callback(error)
        return True


class Follower:
    """Another rank's end. Connects when it is made; raises EngineError if rank 0 cannot be reached."""

    def __init__(self, rank: int, endpoint: Endpoint, *, exit_timeout: float = EXIT_TIMEOUT) -> None:
        self.rank = rank
        self._exit_timeout = exit_timeout
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._closed = threading.Event()
        self._wire = _connect(rank, endpoint)
        with suppress(OSError):  # then nothing will be received either
            self._wire.send(rank)
        threading.Thread(target=self._receive, name="rank-0", daemon=True).start()

    def all_gather(self, value: Any) -> list[Any]:
        """Contribute a value, and return those of all ranks in their order. Raises EngineStopped."""
        with suppress(OSError):  # then nothing will be received either
            self._wire.send({"gather": value})
        message = self.receive()
        if message is None:
            raise EngineStopped(f"Rank 0 was lost: its process ended or cannot be reached. {RESTART_ALL}")
        if "stop" in message:
            raise EngineStopped(f"Rank 0 has ended: {message['stop'] or 'it was stopped.'}")
        gathered: list[Any] = message["gathered"]
        return gathered

    def receive(self) -> Any:
        """Wait for rank 0's next message, however long it takes; None once rank 0 is gone."""
        return self._messages.get()

    def report_failure(self, text: str) -> None:
        """Tell rank 0 why this rank ends."""
        with suppress(OSError):
            self._wire.send({"failed": text})

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._closed.set()
        self._wire.close()

    def _receive(self) -> None:
        while (message := self._wire.receive()) is not None:
            self._messages.put(message)
            if "stop" in message:
                break
        self._messages.put(None)
        if not self._closed.wait(self._exit_timeout):
            _exit_process("MLX still waits for rank 0, which is gone.")


def _connect(rank: int, endpoint: Endpoint) -> Wire:
    """Connect to the first address that answers and knows the key."""
    reasons = []
    for address in endpoint.addresses:
        try:
            # Rank 0 authenticates one connection after the other, so an answer may take as long as joining does.
            return connect(address, endpoint.port, endpoint.authkey, timeout=JOIN_TIMEOUT)
        except OSError as error:
            reasons.append(f"{address}: {first_line(error)}")
    raise EngineError(
        f"Rank {rank} cannot reach rank 0 at {endpoint} ({'; '.join(reasons)}). A firewall may be in between; "
        f"{LEADER_VARIABLE} names another address, as host or host:port."
    )


def _exit_process(why: str) -> None:
    log.critical("%s This process ends.", why)
    logging.shutdown()
    os._exit(1)
