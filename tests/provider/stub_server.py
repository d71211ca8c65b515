"""A scripted OpenAI-compatible server, a process of its own: it sends exactly what a test scripts.

`POST /script` takes {"status", "type", "pieces", "cut"}: the next answer to a chat request, piece by piece, with the
connection cut after the last one if `cut`. `GET /requests` returns the requests since the last time, with headers.
`GET /forget` drops both, so that a test that failed leaves nothing to the next one.
"""

from __future__ import annotations

import json
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

scripts: list[dict[str, Any]] = []
requests: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    """Plays scripts."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def body(self) -> Any:
        """Read the request's JSON."""
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")

    def answer(self, status: int, kind: str, data: bytes) -> None:
        """Send a whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Answer /requests, /forget and /v1/models."""
        if self.path == "/forget":
            scripts.clear()
            requests.clear()
            self.answer(200, "application/json", b"{}")
        elif self.path == "/requests":
            seen, requests[:] = list(requests), []
            self.answer(200, "application/json", json.dumps(seen).encode())
        else:
            listed = {
                "object": "list",
                "data": [{"id": "served-model", "object": "model", "owned_by": "mlx-backend"}],
            }
            self.answer(200, "application/json", json.dumps(listed).encode())

    def do_POST(self) -> None:
        """Store a script, or play one."""
        body = self.body()
        if self.path == "/script":
            scripts.append(body)
            self.answer(200, "application/json", b"{}")
            return
        requests.append({"path": self.path, "headers": dict(self.headers), "body": body})
        script = scripts.pop(0)
        self.send_response(script.get("status", 200))
        self.send_header("Content-Type", script.get("type", "text/event-stream"))
        self.send_header("Connection", "close")
        if script.get("cut"):
            self.send_header("Content-Length", "1000000")
        self.end_headers()
        for piece in script["pieces"]:
            self.wfile.write(piece.encode())
            self.wfile.flush()
        self.close_connection = True
        if script.get("cut"):
            self.connection.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(f"Listening on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
