"""Hugging Face's API on loopback, as far as models are listed and downloaded: one real HTTP server."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

COMMIT = "c0ffee" + "0" * 34
LARGE = 1000
"""Bytes from which on a file is stored with a checksum, as the Hub's large files are."""


@dataclass
class Fault:
    """What goes wrong with the requests for one file. `times`: how often, before all is well."""

    status: int = 0  # instead of the file
    headers: Mapping[str, str] = field(
        default_factory=dict
    )  # in place of the right ones, or in addition to them
    stop_after: int | None = None  # bytes of the body; then the connection is closed
    ignores_range: bool = False
    damage: bool = False  # other bytes than the right ones
    times: int = 1 << 30


class HubServer(ThreadingHTTPServer):
    """Serves `repositories`: the files of each with their contents, or with their sizes alone if they are only listed.

    `paths` are the requests it got; `faults` are by file name, or by "api" for the listings, and `checksums` replace
    those that are listed. `on_body` is called before each piece of a file.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes | int | None]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.paths: list[str] = []
        self.ranges: list[tuple[str, int]] = []  # file, first byte: of every GET for a large file
        self.faults: dict[str, Fault] = {}
        self.checksums: dict[str, str] = {}
        self.on_fault: Callable[[str], object] = lambda _name: None
        self.on_body: Callable[[str, int], object] = lambda _name, _sent: None
        self.piece = 1 << 20

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def requests_for(self, repository: str) -> list[str]:
        """The requests about a repository; the library makes others for itself."""
        return [path for path in self.paths if repository in path]

    def fault(self, name: str) -> Fault | None:
        fault = self.faults.get(name)
        if fault is None or fault.times < 1:
            return None
        fault.times -= 1
        self.on_fault(name)
        return fault

    def entry(self, name: str, file: bytes | int | None, checksum: str) -> dict[str, Any]:
        """What a listing says of a file; `checksum` is the field of a large one's."""
        if not isinstance(file, bytes):
            return {"size": file, "oid": "0" * 40}
        entry: dict[str, Any] = {"size": len(file), "oid": hashlib.sha1(file).hexdigest()}
        if len(file) >= LARGE:
            shown = self.checksums.get(name) or _checksum(file)
            entry["lfs"] = {checksum: shown, "size": len(file), "pointerSize": 100}
        return entry

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.paths.append(f"GET {path}")
        if path.startswith("/api/models/"):
            self._list(path.removeprefix("/api/models/"), query)
        else:
            self._file(path)

    def do_HEAD(self) -> None:
        self.server.paths.append(f"HEAD {self.path}")
        self._file(self.path.partition("?")[0])

    def _list(self, path: str, query: str) -> None:
        repository, _, rest = re.sub("/(tree|revision)/", " \\1/", path, count=1).partition(" ")
        files = self.server.repositories.get(repository)
        if (fault := self.server.fault("api")) is not None:
            self._fail(fault.status, fault.headers)
        elif files is None:
            self._fail(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif rest.startswith("tree"):
            self._json(
                200,
                [
                    {"type": "file", "path": name} | self.server.entry(name, file, "oid")
                    for name, file in files.items()
                ],
            )
        else:
            with_sizes = "blobs=" in query
            siblings = [
                {"rfilename": name} | (self.server.entry(name, file, "sha256") if with_sizes else {})
                for name, file in files.items()
            ]
            self._json(200, {"id": repository, "sha": COMMIT, "siblings": siblings})

    def _file(self, path: str) -> None:
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        file = self.server.repositories.get(found[1], {}).get(found[2]) if found else None
        if found is None or not isinstance(file, bytes):
            self._fail(404, {"X-Error-Code": "EntryNotFound"})
            return
        name = found[2]
        fault = (self.server.fault(name) if self.command == "GET" else None) or Fault()
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if self.command == "GET" and len(file) >= LARGE:
            self.server.ranges.append((name, begin))
        if fault.status:
            self._fail(fault.status, fault.headers)
            return
        if fault.ignores_range:
            begin = 0
        if begin >= len(file) > 0:
            self._fail(416, {"Content-Range": f"bytes */{len(file)}"})
            return
        self.send_response(206 if begin else 200)
        headers = {
            "ETag": f'"{_checksum(file)}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            "Content-Length": str(len(file) - begin),
        }
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(file) - 1}/{len(file)}"
        for each, value in {**headers, **fault.headers}.items():
            self.send_header(each, value)
        self.end_headers()
        if self.command == "GET":
            self._body(name, file, begin, fault)

    def _body(self, name: str, file: bytes, begin: int, fault: Fault) -> None:
        end = len(file) if fault.stop_after is None else min(len(file), begin + fault.stop_after)
        try:
            for at in range(begin, end, self.server.piece):
                self.server.on_body(name, at - begin)
                piece = file[at : min(end, at + self.server.piece)]
                self.wfile.write(bytes(len(piece)) if fault.damage else piece)
                self.wfile.flush()
        except OSError:  # the client has gone
            self.close_connection = True
        if end < len(file):
            self.close_connection = True

    def _fail(self, status: int, headers: Mapping[str, str]) -> None:
        self._json(status, {"error": headers.get("X-Error-Message", "It does not work.")}, headers)

    def _json(self, status: int, value: Any, headers: Mapping[str, str] = {}) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _checksum(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest() if len(file) >= LARGE else hashlib.sha1(file).hexdigest()


@contextmanager
def hub(repositories: Mapping[str, Mapping[str, bytes | int | None]]) -> Iterator[HubServer]:
    with HubServer(repositories) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
