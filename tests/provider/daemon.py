"""Drives the plugin as Dify's daemon does: a process of its own, JSON lines on its standard input and output.

Standard library only, so it can be used without the SDK (which patches sockets and threads on import).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIMEOUT = 120.0
"""Seconds to wait for a line before a test fails instead of hanging."""


class PluginError(Exception):
    """The plugin answered a request with an error; `kind` and `message` are what Dify gets."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.kind = str(data.get("error_type"))
        self.message = str(data.get("message"))
        self.data = data
        super().__init__(f"{self.kind}: {self.message}")


class PluginProcess:
    """A running plugin. A context manager; several requests may be open at once."""

    def __init__(self, root: Path, *, python: str = sys.executable) -> None:
        environment = {
            "INSTALL_METHOD": "local",
            "PATH": os.environ.get("PATH", ""),
            "HOME": os.environ.get("HOME", ""),
        }
        self._process = subprocess.Popen(
            [python, "-m", "dify_mlx_provider"],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self.manifest: dict[str, Any] = {}
        self.logs: list[str] = []
        self._ready = threading.Event()
        self._sessions: dict[str, queue.Queue[dict[str, Any] | None]] = {}
        self._count = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(TIMEOUT) or self._process.poll() is not None:
            self.stop()
            raise RuntimeError("The plugin did not start:\n" + "\n".join(self.logs[-20:]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process; closing its input would not."""
        self._process.kill()
        self._process.wait()
        self._reader.join(TIMEOUT)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def request(
        self, action: str, *, app_id: str | None = None, user_id: str = "user-1", **data: Any
    ) -> Iterator[dict[str, Any]]:
        """Send a model request; yield what the plugin streams. Raises PluginError for an error."""
        self._count += 1
        session = f"session-{self._count}"
        answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._sessions[session] = answers
        line = {
            "session_id": session,
            "conversation_id": None,
            "message_id": None,
            "app_id": app_id,
            "endpoint_id": None,
            "context": {},
            "event": "request",
            "data": {"user_id": user_id, "type": "model", "action": action, **data},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()
        return self._answers(session, answers)

    def invoke(
        self,
        messages: list[dict[str, Any]],
        *,
        credentials: dict[str, Any],
        model: str = "default",
        parameters: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        stop: list[str] | None = None,
        stream: bool = True,
        **sender: Any,
    ) -> Iterator[dict[str, Any]]:
        """Send `invoke_llm` as Dify does, empty values and all. `sender` is what `request` takes of app and user."""
        return self.request(
            "invoke_llm",
            provider="mlx",
            model=model,
            model_type="llm",
            credentials=credentials,
            model_parameters=parameters or {},
            prompt_messages=messages,
            tools=tools or [],
            stop=stop or [],
            stream=stream,
            **sender,
        )

    def _answers(self, session: str, answers: queue.Queue[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
        failure: PluginError | None = None
        while True:
            message = answers.get(timeout=TIMEOUT)
            if message is None:
                raise RuntimeError("The plugin ended in the middle of a request.")
            match message["type"]:
                case "stream":
                    yield message["data"]
                case "error":
                    failure = PluginError(message["data"])
                case "end":
                    del self._sessions[session]
                    if failure is not None:
                        raise failure
                    return

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.strip():
                continue
            try:
                message = json.loads(line)
            except ValueError:
                self.logs.append(line)
                continue
            match message.get("event"):
                case None:
                    self.manifest = self.manifest or message
                case "heartbeat":
                    self._ready.set()
                case "session":
                    self._sessions[message["session_id"]].put(message["data"])
                case _:
                    self.logs.append(line)
        self._ready.set()
        for answers in list(self._sessions.values()):
            answers.put(None)
