"""A server that finds its port in use says by what, also where the system would let it listen beside the other."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from free_ports import free_port
from running_server import running
from scripted_engine import ScriptedEngine

from mlx_backend.server import port_check
from mlx_backend.server.port_check import MAX_ANSWER_BYTES, port_in_use

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY_NAME = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "")


@contextmanager
def answering(answer: bytes, *, endless: bool = False, address: str = "127.0.0.1") -> Iterator[int]:
    """A program on a port of its own that answers one connection with these bytes."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:

        def answer_one() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.recv(4096)
                    connection.sendall(answer)
                    while endless:
                        connection.sendall(answer)
                except OSError:
                    pass

        thread = threading.Thread(target=answer_one)
        thread.start()
        yield listener.getsockname()[1]
        thread.join()


@pytest.mark.parametrize("host", EVERY_NAME)
def test_a_free_port_is_free(host: str) -> None:
    assert port_in_use(host, free_port()) is None
    assert port_in_use(host, 0) is None


@pytest.mark.parametrize("host", EVERY_NAME)
def test_another_mlx_backend_is_named_with_its_model(host: str) -> None:
    with running(ScriptedEngine(lambda _prompt: "yes", model_id="the-demo")) as server:
        _, port = server.address
        assert port_in_use(host, port) == (
            f"Port {port} is in use: an mlx-backend with the-demo answers at http://127.0.0.1:{port} already. Stop "
            "that one (Ctrl-C in its terminal), or choose another port with --port (0: any free one)."
        )


def test_the_command_refuses_to_listen_beside_it() -> None:
    with running(ScriptedEngine(lambda _prompt: "yes", model_id="the-demo")) as server:
        where = ("--host", "0.0.0.0", "--no-auth", "--port", str(server.address[1]))
        command = [sys.executable, "-m", "mlx_backend", *where]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "an mlx-backend with the-demo answers at" in done.stderr
    assert "Listening" not in done.stdout


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b'HTTP/1.0 200 OK\r\n\r\n{"status": "ok"}',
        b'HTTP/1.0 200 OK\r\n\r\n["server"]',
        b'HTTP/1.0 200 OK\r\n\r\n{"server": "mlx-backend", "models": [7]}',
        b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 20_000,
        b"\xff\xfe\x00",
    ],
)
def test_any_other_program_is_another_program(answer: bytes) -> None:
    with answering(answer) as port:
        said = port_in_use("0.0.0.0", port)
    assert said is not None
    assert said.startswith(f"Port {port} is in use: another program answers at 127.0.0.1:{port}.")


def test_a_program_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_check, "ANSWER_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert "another program" in (port_in_use("127.0.0.1", listener.getsockname()[1]) or "")


def test_a_program_that_never_ends_is_not_read_to_its_end() -> None:
    with answering(b"x" * MAX_ANSWER_BYTES, endless=True) as port:
        assert "another program" in (port_in_use("127.0.0.1", port) or "")


def test_names_that_another_server_claims_are_cut() -> None:
    names = ", ".join('{"model": "' + "long" * 50 + '"}' for _ in range(100))
    with answering(
        f'HTTP/1.0 200 OK\r\n\r\n{{"server": "mlx-backend", "models": [{names}]}}'.encode()
    ) as port:
        assert len(port_in_use("127.0.0.1", port) or "") < 600


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ipv6_loopback_is_asked_too() -> None:
    with answering(b"", address="::1") as port:
        assert f"answers at [::1]:{port}" in (port_in_use("0.0.0.0", port) or "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has every address of 127.0.0.0/8 by itself")
def test_an_address_of_its_own_is_asked_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert port_in_use("127.0.0.2", listener.getsockname()[1]) is None
