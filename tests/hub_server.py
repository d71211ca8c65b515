"""Hugging Face's API on loopback, as far as it is asked what a repository holds: one real HTTP server."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class HubServer(ThreadingHTTPServer):
    """Lists `repositories`: the files of each, with their sizes. `paths` are the requests it got."""

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, int | None]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def requests_for(self, repository: str) -> list[str]:
        """The requests about a repository; the library makes others for itself."""
        return [path for path in self.paths if repository in path]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.paths.append(f"GET {path}")
        repository = path.removeprefix("/api/models/")
        files = self.server.repositories.get(repository)
        if files is None:
            self.send_error(404)
            return
        with_sizes = "blobs=" in query
        siblings = [
            {"rfilename": name} | ({"size": size} if with_sizes else {}) for name, size in files.items()
        ]
        body = json.dumps({"id": repository, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.server.paths.append(f"HEAD {self.path}")
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub(repositories: Mapping[str, Mapping[str, int | None]]) -> Iterator[HubServer]:
    with HubServer(repositories) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
