"""The real server on a free port, in a thread, with a test's own engine or models."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from single_model import SingleModelRegistry

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.service import Service
from mlx_backend.registry.registry import image_loader
from mlx_backend.server.app import App
from mlx_backend.server.connection_limits import ConnectionLimits
from mlx_backend.server.wsgi_server import Server
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.engine.threaded import Engine
    from mlx_backend.registry.base import ModelRegistry

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class RunningServer:
    server: Server
    app: App

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return host, int(port)

    def open(self, path: str, body: Any = None, **headers: str) -> Any:
        """The open response; an HTTPError for a status that is one."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json", **headers}
        )
        return urllib.request.urlopen(request, timeout=60)

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and decoded JSON, whatever the status."""
        try:
            with self.open(path, body, **headers) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def chat(self, messages: list[dict[str, Any]] = HELLO, **fields: Any) -> Any:
        status, body = self.call("/v1/chat/completions", {"messages": messages, **fields})
        assert status == 200, body
        return body

    def chunks(self, messages: list[dict[str, Any]] = HELLO, **fields: Any) -> list[dict[str, Any]]:
        """Every JSON event of a stream, which must end properly."""
        body = {"messages": messages, "stream": True, **fields}
        with self.open("/v1/chat/completions", body) as response:
            events = response.read().decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2] if event[:1] != ":"]

    def send(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> socket.socket:
        """A connection on which the request has been sent and nothing has been read yet."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(self.address, timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


@contextmanager
def running(engine: Engine, *, app_type: type[App] = App, **chosen: Any) -> Iterator[RunningServer]:
    """Serve the engine with these settings; stop both at the end."""
    # One thread for each request that may wait: few, since every test starts them all.
    settings = Settings(**{"port": 0, "temperature": 0.0, "max_queue": 64, **chosen})
    service = Service(engine, ModelSettings.of(server=settings), images=image_loader(settings))
    try:
        with served(SingleModelRegistry(service), settings, app_type=app_type) as server:
            yield server
    finally:
        engine.stop()


@contextmanager
def served(
    models: ModelRegistry,
    settings: Settings,
    limits: ConnectionLimits | None = None,
    *,
    send_buffer: int | None = None,
    app_type: type[App] = App,
) -> Iterator[RunningServer]:
    """Serve these models inside the block; `send_buffer` is how many bytes the system takes for a slow client."""
    limits = limits or ConnectionLimits(max_body_bytes=settings.max_received_bytes)
    app = app_type(models, settings)
    server = Server(settings.host, settings.port, app, requests=settings.max_requests, limits=limits)
    server.shutdown_seconds = 5
    server.check_seconds = 0.02  # so that short limits of tests hold
    if send_buffer is not None:
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield RunningServer(server, app)
    finally:
        server.stop()
        thread.join()
