"""Imitations of other servers: each answers the requests by which it is recognised as the real one does."""

from __future__ import annotations

import json
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

from raw_server import at_an_unused_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHAT = "/v1/chat/completions"


def listed(*models: Mapping[str, Any]) -> dict[str, Any]:
    """A list of models as /v1/models gives it."""
    return {"object": "list", "data": [{"object": "model", **model} for model in models]}


def event_stream(text: str) -> bytes:
    """A whole streamed answer."""
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()


class FakeServer:
    """Answers each path as configured: an object is sent as JSON, bytes as they are, a number as a status.

    `header` is its header `Server`. `chat` maps a chat request's body to a status and an answer; `posts` do the same
    for other paths below /v1, by name. While `gate` is not set, requests wait. `paths` and `bodies` hold what came in.
    """

    def __init__(
        self,
        answers: Mapping[str, Any] | None = None,
        *,
        header: str = "",
        chat: Callable[[dict[str, Any]], tuple[int, Any]] = lambda _: (200, event_stream("ok")),
        **posts: Callable[[dict[str, Any]], tuple[int, Any]],
    ) -> None:
        called = {CHAT: chat} | {f"/v1/{name}": answer for name, answer in posts.items()}
        self.answers = dict(answers or {})
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.bodies: list[dict[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def version_string(self) -> str:
                return header or super().version_string()

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                owner.paths.append(self.path)
                owner.keys.append(self.headers.get("Authorization"))
                owner.gate.wait(60)
                self._send(200, owner.answers.get(self.path, 404))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                owner.paths.append(self.path)
                if self.path in called:
                    owner.bodies.append(body)
                    self._send(*called[self.path](body))
                else:
                    answer = owner.answers.get(self.path, 404)
                    self._send(
                        200, answer.get(body.get("model"), 404) if isinstance(answer, dict) else answer
                    )

            def _send(self, status: int, answer: Any) -> None:
                if isinstance(answer, int):
                    status, answer = answer, b"not found"
                kind = "text/event-stream" if isinstance(answer, bytes) else "application/json"
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = at_an_unused_port(lambda address: ThreadingHTTPServer(address, Handler))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, without /v1."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()


class CannedServer:
    """Sends the same bytes to every client."""

    def __init__(self, answer: bytes) -> None:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.recv(65_536)
                self.request.sendall(answer)

        self._server = at_an_unused_port(lambda address: socketserver.ThreadingTCPServer(address, Handler))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, without /v1."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()


def mlx_backend(*models: Mapping[str, Any], version: str = "0.1.0", **more: Any) -> FakeServer:
    """Our own server, as its list describes models."""
    owned = [{"owned_by": "mlx-backend", **model} for model in models]
    return FakeServer({"/v1/models": listed(*owned)}, header=f"mlx-backend/{version}", **more)


def mlx_lm() -> FakeServer:
    """mlx_lm.server with downloads to list; it lists nothing but their names."""
    answers = {"/v1/models": listed({"id": "mlx-community/some-model"}), "/health": {"status": "ok"}}
    return FakeServer(answers)


def vllm(**more: Any) -> FakeServer:
    """A vLLM with one model."""
    model = {"id": "openai/gpt-oss-20b", "owned_by": "vllm", "max_model_len": 65_536}
    return FakeServer({"/v1/models": listed(model)}, header="uvicorn", **more)


def llama_cpp(**more: Any) -> FakeServer:
    """llama-server with one model, 8192 tokens a slot."""
    meta = {"n_ctx": 8_192, "n_ctx_train": 131_072, "n_params": 1}
    model = {"id": "gpt-oss-20b.gguf", "owned_by": "llamacpp", "meta": meta}
    return FakeServer({"/v1/models": listed(model)}, header="llama.cpp", **more)


def lm_studio(**more: Any) -> FakeServer:
    """LM Studio with an embedding model, one with image input, and one that calls tools."""
    names = ("text-embedding-nomic", "qwen-vl", "openai/gpt-oss-20b")
    described = listed(
        {"id": names[0], "type": "embeddings", "state": "loaded", "max_context_length": 2_048},
        {
            "id": names[1],
            "type": "vlm",
            "state": "not-loaded",
            "max_context_length": 32_768,
            "capabilities": [],
        },
        {
            "id": names[2],
            "type": "llm",
            "state": "loaded",
            "max_context_length": 131_072,
            "loaded_context_length": 16_384,
            "capabilities": ["tool_use"],
        },
    )
    plain = listed(*({"id": name, "owned_by": "organization_owner"} for name in names))
    return FakeServer({"/v1/models": plain, "/api/v0/models": described}, header="Express", **more)


def ollama(**more: Any) -> FakeServer:
    """Ollama with a model that reasons by levels, one by a switch, and one that does not."""
    names = ("gpt-oss:20b", "qwen3:8b", "gemma3:latest")
    ollama_models = {
        "gpt-oss:20b": {
            "capabilities": ["completion", "tools", "thinking"],
            "details": {"family": "gptoss"},
            "parameters": "num_ctx                        24576\ntemperature 1",
        },
        "qwen3:8b": {"capabilities": ["completion", "tools", "thinking"], "details": {"family": "qwen3"}},
        "gemma3:latest": {"capabilities": ["completion", "vision"], "details": {"family": "gemma3"}},
    }
    answers = {
        "/v1/models": listed(*({"id": name, "owned_by": "library"} for name in names)),
        "/api/version": {"version": "0.12.0"},
        "/api/show": ollama_models,
    }
    return FakeServer(answers, header="gin", **more)
