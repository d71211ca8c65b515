"""Answers to clients that read slowly: a slow one gets all of it, one that hardly reads is given up."""

from __future__ import annotations

import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from mlx_backend.server.response_writer import ResponseWriter

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER = bytes(range(256)) * 2048
AT_ONCE = 64


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A server's end that takes little ahead, and its client's."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        server, _ = listener.accept()
    with client, server:
        yield server, client


def read_slowly(client: socket.socket, received: bytearray) -> threading.Thread:
    def read() -> None:
        while piece := client.recv(AT_ONCE):
            received.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_a_client_that_reads_a_little_at_a_time_gets_everything(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    server, client = connection
    received = bytearray()
    reader = read_slowly(client, received)
    writer = ResponseWriter(server, stall_seconds=60, min_bytes_per_second=1)
    assert writer.write(ANSWER) == len(ANSWER)
    server.shutdown(socket.SHUT_WR)
    reader.join(60)
    assert received == ANSWER
    assert writer.bytes_written == len(ANSWER)


def test_a_client_that_reads_more_slowly_than_it_must_is_given_up_though_it_reads(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    server, client = connection
    received = bytearray()
    reader = read_slowly(client, received)
    writer = ResponseWriter(server, stall_seconds=0.01, min_bytes_per_second=1e12)
    with pytest.raises(TimeoutError):
        writer.write(ANSWER * 1000)  # which no processor reads so soon
    server.close()
    reader.join(60)
    assert received


def test_a_client_that_does_not_read_is_given_up(connection: tuple[socket.socket, socket.socket]) -> None:
    server, _ = connection
    with pytest.raises(TimeoutError):
        ResponseWriter(server, stall_seconds=0.01, min_bytes_per_second=1).write(ANSWER * 100)


def test_a_client_that_reads_fast_saves_nothing_up_for_later(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    server, client = connection
    reader = read_slowly(client, bytearray())
    writer = ResponseWriter(server, stall_seconds=1, min_bytes_per_second=1)
    writer.write(ANSWER)  # a second for each of its bytes
    client.shutdown(socket.SHUT_RD)
    reader.join(60)
    with pytest.raises(OSError, match=r"timed out|reset|pipe"):
        writer.write(ANSWER * 100)
