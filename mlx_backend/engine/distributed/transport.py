"""What the processes that share one model tell each other: rank 0 leads, the others follow.

Knows connections and plain data; no model and no MLX. The model's own sums go through MLX's collectives. What is
to be done does not: a process that waits in a collective keeps a core busy and cannot be called out of it, and a
message would stand behind everything that is still being computed. Here a follower sleeps until it is told
something, rank 0 never waits for an answer while it serves, and a process that has ended is noticed at once.

    meet(mine)  ──▶  everybody's, in the order of ranks   while loading: all wait for the last of them
    tell(x)     ──▶  receive() of every follower          while serving
    fail(text)  ──▶  `lost` at rank 0                     also when a connection simply ends

A collective that one side has left may never return. So when a rank is lost all the others are sent home at once,
and who cannot go, for it waits in a collective, is ended after some seconds; only rank 0 stays to tell why.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import secrets
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

from mlx_backend.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

LEADER_VARIABLE = "MLX_BACKEND_LEADER"  # rank 0 as the others reach it, "host" or "host:port"
GRACE = 2.0  # seconds for rank 0 to come out of a collective before it tells everybody nevertheless
PATIENCE = 10.0  # seconds for a process to end by itself once it is alone
JOINING = 30.0  # seconds for everybody to connect
CONNECTING = 3.0  # seconds for one address
LONGEST_GREETING = 4096  # bytes
LONGEST_MESSAGE = 1 << 30
_LENGTH = struct.Struct(">I")

# What the launchers set, by MLX's name of the backend that reads it.
LAUNCHERS = {
    "ring": ("MLX_RANK", "MLX_HOSTFILE"),
    "jaccl": ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"),
    "nccl": ("MLX_RANK", "MLX_WORLD_SIZE", "NCCL_HOST_IP"),
    "mpi": ("OMPI_COMM_WORLD_SIZE",),
}


def launched() -> str | None:
    """Name the backend that the environment asks for; None if this process was started alone."""
    for backend, variables in LAUNCHERS.items():
        if all(os.environ.get(variable) for variable in variables):
            return backend
    return None


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where rank 0 listens, and the word that lets one in. It travels through MLX's own connections."""

    addresses: Sequence[str]
    port: int
    word: str

    def as_bytes(self) -> bytes:
        """Write it down."""
        return json.dumps([list(self.addresses), self.port, self.word]).encode()

    @classmethod
    def of(cls, written: bytes) -> Invitation:
        """Read it."""
        addresses, port, word = json.loads(written)
        return cls(addresses, port, word)


class _Wire:
    """One connection. A message arrives whole or not at all."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A machine that loses its power says no goodbye. The names differ between systems.
        for name, value in (
            ("TCP_KEEPIDLE", 5),
            ("TCP_KEEPALIVE", 5),
            ("TCP_KEEPINTVL", 3),
            ("TCP_KEEPCNT", 4),
            ("TCP_USER_TIMEOUT", 20_000),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if sys.platform == "darwin":
            connection.setsockopt(socket.IPPROTO_TCP, 0x80, 20)  # TCP_RXT_CONNDROPTIME, in seconds

    def send(self, message: Any) -> None:
        written = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self._connection.sendall(_LENGTH.pack(len(written)) + written)

    def receive(self, longest: int = LONGEST_MESSAGE) -> Any:
        """Wait for a message; None once the connection has ended, however it did."""
        try:
            length = self._read(_LENGTH.size)
            if length is None or (count := _LENGTH.unpack(length)[0]) > longest:
                return None
            written = self._read(count)
            return None if written is None else json.loads(written)
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        with suppress(OSError):  # it may have ended already
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def settimeout(self, seconds: float | None) -> None:
        self._connection.settimeout(seconds)

    def _read(self, count: int) -> bytes | None:
        read = bytearray()
        while len(read) < count:
            piece = self._connection.recv(min(count - len(read), 1 << 20))
            if not piece:
                return None
            read += piece
        return bytes(read)


class Leader:
    """Rank 0's end. Used by one thread; it listens to each follower on a thread of its own."""

    rank = 0

    def __init__(self, size: int, addresses: Sequence[str] = (), *, patience: float = PATIENCE) -> None:
        self.size = size
        self._patience = patience
        self._wires: dict[int, _Wire] = {}
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # None: that rank is gone
        self._changed = threading.Condition()  # for all that follows
        self._gone: dict[int, str] = {}  # with what it said last
        self._heard: Callable[[EngineStopped], object] | None = None
        self._dismissed = self._closing = False
        named, _, port = os.environ.get(LEADER_VARIABLE, "").partition(":")
        if port and not port.isdigit():
            raise EngineError(f"{LEADER_VARIABLE} must be a host or host:port, not {named}:{port}.")
        addresses = [named] if named else list(addresses) or [socket.gethostname()]
        try:
            self._door = _door(addresses, int(port or 0))
        except OSError as error:
            raise EngineError(f"Rank 0 cannot listen for the other ranks: {error}.") from error
        self.invitation = Invitation(addresses, self._door.getsockname()[1], secrets.token_hex(16))

    def gather(self, *, within: float = JOINING) -> None:
        """Wait until all have come. EngineError if somebody has not within so many seconds."""
        until = monotonic() + within
        with self._door:
            while len(self._wires) < self.size - 1:
                self._door.settimeout(max(0.01, until - monotonic()))
                try:
                    connection, _ = self._door.accept()
                except TimeoutError:
                    away = [str(rank) for rank in range(1, self.size) if rank not in self._wires]
                    raise EngineError(
                        f"Rank {', '.join(away)} did not connect to rank 0 within {within:g} seconds, at "
                        f"{_places(self.invitation)}. A firewall may be in between; {LEADER_VARIABLE} names "
                        "another address, as host or host:port."
                    ) from None
                wire = _Wire(connection)
                wire.settimeout(CONNECTING)
                rank = self._greeted(wire.receive(LONGEST_GREETING))
                if rank is None:
                    wire.close()
                    continue
                wire.settimeout(None)
                self._wires[rank] = wire
        for rank, wire in self._wires.items():
            threading.Thread(target=self._listen, args=(rank, wire), name=f"rank-{rank}", daemon=True).start()

    def meet(self, mine: Any) -> list[Any]:
        """Wait for what all the others bring, and give everybody everything. EngineError if one is lost."""
        brought = {0: mine}
        while len(brought) < self.size:
            rank, answer = self._answers.get()
            if answer is None:
                raise self.ending() or EngineStopped(f"Rank {rank} was lost.")
            brought[rank] = answer[0]
        everything = [brought[rank] for rank in range(self.size)]
        self.tell({"met": everything})
        return everything

    def tell(self, message: Any) -> None:
        """Send a message to everybody. EngineStopped if one of them is lost."""
        for wire in self._wires.values():
            try:
                wire.send(message)
            except OSError as error:
                raise self.ending(wait=2.0) or EngineStopped(f"A rank was lost: {error}.") from error

    def dismiss(self, reason: str) -> None:
        """Send everybody home; with a reason if it is no ordinary end."""
        with self._changed:
            self._dismissed = True
        for wire in self._wires.values():
            with suppress(OSError):
                wire.send({"stop": reason})

    def ending(self, *, wait: float = 0.0) -> EngineStopped | None:
        """Say which rank was lost, if one was; wait so long for that to become known."""
        with self._changed:
            self._changed.wait_for(lambda: self._gone, wait)
            if not self._gone:
                return None
            if len(self._gone) < self.size - 1:  # who says nothing may be why others say something
                self._changed.wait_for(lambda: "" in self._gone.values(), 1.0)
            rank = min(self._gone, key=lambda rank: (self._gone[rank] != "", rank))
            said = self._gone[rank]
            what = f"has ended: {said}" if said else "was lost: its process ended or cannot be reached."
        return EngineStopped(f"Rank {rank} {what} {_SHARED}")

    def when_lost(self, heard: Callable[[EngineStopped], object]) -> None:
        """Have somebody called, on another thread, when a rank is lost."""
        with self._changed:
            self._heard = heard
        if (ending := self.ending()) is not None:
            heard(ending)

    def close(self) -> None:
        """Let go of everybody. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._door.close()
        for wire in self._wires.values():
            wire.close()

    def wait_for_the_others(self) -> None:
        """Wait until they have gone, but not for long: they have been told to."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._gone) >= len(self._wires), self._patience / 3)

    def _greeted(self, greeting: Any) -> int | None:
        match greeting:
            case [str(word), int(rank)] if hmac.compare_digest(word.encode(), self.invitation.word.encode()):
                return rank if 0 < rank < self.size and rank not in self._wires else None
        return None

    def _listen(self, rank: int, wire: _Wire) -> None:
        said = ""
        while (message := wire.receive()) is not None:
            if "failed" in message:
                said = message["failed"] or "for no reason that it gave."
            else:
                self._answers.put((rank, [message["meet"]]))
        with self._changed:
            self._gone[rank] = said
            self._changed.notify_all()
            if self._closing:
                return
            first, expected = len(self._gone) == 1, self._dismissed
        self._answers.put((rank, None))
        if not first:
            return
        if not expected:
            ending = self.ending()
            assert ending is not None
            log.error("%s", ending)
            self.dismiss(str(ending))
            with self._changed:
                heard = self._heard
            if heard is not None:
                heard(ending)
                return
        with self._changed:
            if not self._changed.wait_for(lambda: self._closing, self._patience):
                _end_the_process("MLX still waits for a rank that has gone.")


class Follower:
    """Another rank's end."""

    def __init__(self, rank: int, size: int, invitation: Invitation, *, patience: float = PATIENCE) -> None:
        self.rank = rank
        self.size = size
        self._patience = patience
        self._messages: SimpleQueue[Any] = SimpleQueue()
        self._closed = threading.Event()
        self._wire = _connect(rank, invitation)
        self._wire.send([invitation.word, rank])
        threading.Thread(target=self._listen, name="rank-0", daemon=True).start()

    def meet(self, mine: Any) -> list[Any]:
        """Bring something, and get what everybody brought. EngineError if it comes to nothing."""
        with suppress(OSError):  # then there is nothing to receive either
            self._wire.send({"meet": mine})
        message = self.receive()
        if message is None:
            raise EngineStopped(f"Rank 0 was lost: its process ended or cannot be reached. {_SHARED}")
        if "stop" in message:
            raise EngineStopped(f"Rank 0 has ended: {message['stop'] or 'it was told to.'}")
        met: list[Any] = message["met"]
        return met

    def receive(self) -> Any:
        """Wait for what rank 0 says, without a limit and without work; None once it has gone."""
        return self._messages.get()

    def fail(self, text: str) -> None:
        """Tell rank 0 why this rank goes."""
        with suppress(OSError):
            self._wire.send({"failed": text})

    def close(self) -> None:
        """Leave. Idempotent."""
        self._closed.set()
        self._wire.close()

    def _listen(self) -> None:
        while (message := self._wire.receive()) is not None:
            self._messages.put(message)
            if "stop" in message:
                break
        self._messages.put(None)
        if not self._closed.wait(self._patience):
            _end_the_process("MLX still waits for rank 0, which has gone.")


_SHARED = "A model that several processes share needs all of them: start them again."


def _door(addresses: Sequence[str], port: int) -> socket.socket:
    if all(address in ("127.0.0.1", "localhost") for address in addresses):
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _connect(rank: int, invitation: Invitation) -> _Wire:
    reasons = []
    for address in invitation.addresses:
        try:
            connection = socket.create_connection((address, invitation.port), timeout=CONNECTING)
        except OSError as error:
            reasons.append(f"{address}: {error}")
        else:
            connection.settimeout(None)
            return _Wire(connection)
    raise EngineError(
        f"Rank {rank} cannot reach rank 0 at {_places(invitation)} ({'; '.join(reasons)}). A firewall may be in "
        f"between; {LEADER_VARIABLE} names another address, as host or host:port."
    )


def _places(invitation: Invitation) -> str:
    return f"{' or '.join(invitation.addresses)}, port {invitation.port}"


def _end_the_process(why: str) -> None:
    log.critical("%s This process ends.", why)
    logging.shutdown()
    os._exit(1)
