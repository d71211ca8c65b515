"""Whether something answers already where a server is about to listen.

Binding alone does not tell on macOS: with SO_REUSEADDR a server on 0.0.0.0 and one on 127.0.0.1 may have the same port,
and then clients on the machine, containers among them, reach the one on 127.0.0.1. So loopback is asked first, in both
address families. What answers is asked for its name, and trusted with nothing: with few bytes and little time.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from time import monotonic

_LOOPBACK = ("127.0.0.1", "::1")
_LOCAL = frozenset(["", "0.0.0.0", "::", "localhost", *_LOOPBACK])
CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0
MAX_ANSWER_BYTES = 64 * 1024
_MAX_NAMED = 3
"""Models in the sentence."""
_MAX_NAME = 100
"""Characters of the name of each."""


def port_in_use(host: str, port: int) -> str | None:
    """Return what answers at a port that `host` is about to listen on, as a sentence; None if nothing does.

    Port 0 is any free one. A host that is neither loopback nor every address of the machine is asked alone.
    """
    if port == 0:
        return None
    for address in _LOOPBACK if host in _LOCAL else (host,):
        with suppress(OSError), socket.create_connection((address, port), CONNECT_SECONDS) as connection:
            return _sentence(address, port, _models_in(_answer(connection)))
    return None


def _sentence(address: str, port: int, models: list[str] | None) -> str:
    shown = f"[{address}]" if ":" in address else address
    choose = "choose another port with --port (0: any free one)"
    if models is None:
        return f"Port {port} is in use: another program answers at {shown}:{port}. Stop it, or {choose}."
    named = ", ".join(name[:_MAX_NAME] for name in models[:_MAX_NAMED])
    which = f" with {named}" if named else ""
    return (
        f"Port {port} is in use: an mlx-backend{which} answers at http://{shown}:{port} already. Stop that one "
        f"(Ctrl-C in its terminal), or {choose}."
    )


def _models_in(answer: bytes) -> list[str] | None:
    """Return the models in memory of the mlx-backend that answered; None if it is something else."""
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
        health = json.loads(answer.partition(b"\r\n\r\n")[2])
        if health["server"] == "mlx-backend":
            return [str(model["model"]) for model in health.get("models", [])]
    return None


def _answer(connection: socket.socket) -> bytes:
    """Ask for the server's health and read until it closes, but not for ever and not everything."""
    deadline, answer = monotonic() + ANSWER_SECONDS, b""
    with suppress(OSError):
        connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        while len(answer) < MAX_ANSWER_BYTES and (left := deadline - monotonic()) > 0:
            connection.settimeout(left)
            piece = connection.recv(MAX_ANSWER_BYTES)
            if not piece:
                break
            answer += piece
    return answer
