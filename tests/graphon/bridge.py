"""Connects graphon, which starts a runner for every call, to the plugin, which keeps running.

It does one thing that Dify does and neither graphon nor the plugin: for a node with structured output Dify's api puts
the schema under `schema` next to a name, sets `response_format`, and parses the answer as JSON. Dify repairs what is
not JSON and takes the first object it finds, even in the thinking; here the whole answer must be JSON, so that no fault
is hidden.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

sys.path.insert(0, str(Path(__file__).parents[1] / "provider"))

from daemon import PluginError, PluginProcess

if TYPE_CHECKING:
    from collections.abc import Iterator


class Bridge:
    """Listens for slim.py on a port of its own; records every invocation."""

    def __init__(self, plugin: PluginProcess) -> None:
        self._plugin = plugin
        self._sending = threading.Lock()
        self.invocations: list[dict[str, Any]] = []
        bridge = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for event in bridge.answer(json.loads(self.rfile.readline())):
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                    self.wfile.flush()

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        host, port = self._server.server_address[:2]
        self.address = f"{host!s}:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events the runner prints for one request."""
        action, data = request["action"], request["data"]
        is_structured = False
        if action == "invoke_llm":
            parameters = data["model_parameters"]
            is_structured = "json_schema" in parameters and "response_format" not in parameters
            if is_structured:
                schema = {"schema": json.loads(parameters["json_schema"]), "name": "llm_response"}
                parameters |= {"response_format": "json_schema", "json_schema": json.dumps(schema)}
            self.invocations.append(data)
        text = ""
        last: dict[str, Any] | None = None
        try:
            with self._sending:
                pieces = self._plugin.request(action, **data)
            for piece in pieces:
                if action == "invoke_llm":
                    text += piece["delta"]["message"]["content"]
                if last is not None:
                    yield {"event": "chunk", "data": last}
                last = piece
        except PluginError as error:
            yield {"event": "error", "data": {"code": error.kind, "message": error.message}}
            return
        if is_structured and last is not None:
            last["structured_output"] = json.loads(text)
        yield {"event": "chunk", "data": last}
        yield {"event": "done"}
