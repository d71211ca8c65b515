"""The debug port of Dify's daemon (5003): a plugin running elsewhere connects, declares itself, and gets requests.

Standard library only. One plugin, one request at a time.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "0f5c6c9e-0000-4000-8000-00000000abcd"
TIMEOUT = 120.0


class DebugDaemon:
    """Starts the plugin in a folder and waits for it; holds what it declared."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._close = ExitStack()
        self.key = ""
        self.order: list[str] = []
        self.manifest: dict[str, Any] = {}
        self.models: list[dict[str, Any]] = []
        self.assets: dict[str, bytes] = {}

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            listener.settimeout(TIMEOUT)
            host, port = listener.getsockname()
            environment = {
                "INSTALL_METHOD": "remote",
                "REMOTE_INSTALL_URL": f"{host}:{port}",
                "REMOTE_INSTALL_KEY": KEY,
                "PATH": os.environ.get("PATH", ""),
                "HOME": os.environ.get("HOME", ""),
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "dify_mlx_provider"],
                cwd=self._root,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            opened.callback(process.wait)
            opened.callback(process.kill)
            connection, _ = listener.accept()
            opened.enter_context(connection)
            connection.settimeout(TIMEOUT)
            self._lines = opened.enter_context(connection.makefile(encoding="utf-8"))
            self._connection = connection
            self._read_declarations()
            self._close = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def request(self, action: str, **data: Any) -> list[dict[str, Any]]:
        """Send one request; return what the plugin streamed."""
        line = {
            "session_id": "debugged",
            "event": "request",
            "data": {"user_id": "user-1", "type": "model", "action": action, "provider": "mlx", **data},
        }
        self._connection.sendall(json.dumps(line).encode() + b"\n")
        streamed: list[dict[str, Any]] = []
        for message in self._messages():
            if message.get("event") != "session":
                continue
            match message["data"]:
                case {"type": "stream", "data": piece}:
                    streamed.append(piece)
                case {"type": "error", "data": error}:
                    raise AssertionError(error["message"])
                case {"type": "end"}:
                    return streamed
        raise AssertionError("the plugin disconnected")

    def _read_declarations(self) -> None:
        for message in self._messages():
            kind, data = message["type"], message["data"]
            if kind not in self.order:
                self.order.append(kind)
            match kind:
                case "handshake":
                    self.key = data["key"]
                case "manifest_declaration":
                    self.manifest = data
                case "model_declaration":
                    self.models = data
                case "asset_chunk":
                    known = self.assets.setdefault(data["filename"], b"")
                    self.assets[data["filename"]] = known + base64.b64decode(data["data"])
                case "end":
                    return
        raise AssertionError("the plugin disconnected before its declarations ended")

    def _messages(self) -> Iterator[dict[str, Any]]:
        for line in self._lines:
            if line.strip():
                yield json.loads(line)
