"""A first chat in Open WebUI, with the requests that version 0.12.4 was seen to send, in their order and their shapes.

Its title, follow-ups and tags begin as the page's own prompts do; its 36 built-in tools are made here, as large as
its own are: 26 KB of JSON.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from running_server import RunningServer, running
from scripted_engine import ScriptedEngine

from mlx_backend.demo import MODEL_NAME, MODEL_PATH
from mlx_backend.engine.mlx import load_engine
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

QUESTION = "What is the capital of France?"
CALL = (
    "<|channel|>analysis<|message|>I look at the clock.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.tool_7 <|constrain|>json<|message|>{"first_argument": "now"}<|call|>'
)
LATE = "<|channel|>final<|message|>It is late.<|return|>"

TASKS = {
    "title": "Generate a concise title summarizing the chat history.",
    "follow-ups": "Predict 3-5 useful messages this user might naturally send next.",
    "tags": "Generate 1-3 broad tags categorizing the main themes of the chat history.",
}


def builtin_tools() -> list[dict[str, Any]]:
    """36 tools, their descriptions raw docstrings with line breaks and indentation."""
    names = ("first_argument", "second_argument")
    argument = {"type": "string", "description": "what it needs, in plain text", "default": ""}
    description = (
        "Search, list, read or change one of the many kinds of things that a page like this one keeps for its users, "
        "such as notes, files and calendars.\n\n    :param first_argument: which of them\n    :return: JSON\n"
    ) * 2
    return [
        {
            "type": "function",
            "function": {
                "name": f"tool_{at}",
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": dict.fromkeys(names, argument),
                    "required": [names[0]],
                },
            },
        }
        for at in range(36)
    ]


class Page:
    """The page's side of one chat with the first model that is listed."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        [self.model] = server.call("/v1/models")[1]["data"]
        self.history: list[dict[str, Any]] = []

    @property
    def capabilities(self) -> dict[str, bool]:
        """What the page takes from the model's entry; where nothing is said it takes true."""
        said: dict[str, bool] = self.model.get("info", {}).get("meta", {}).get("capabilities", {})
        return {"builtin_tools": True, "vision": True} | said

    def task(self, task: str, **fields: Any) -> str:
        """Send a request of the page's own; return the effort the server says, and its source."""
        history = "\n".join(f"{turn['role'].upper()}: {turn['content']}" for turn in self.history)
        prompt = f"### Task:\n{TASKS[task]}\n### Chat History:\n<chat_history>\n{history}\n</chat_history>"
        body = {"model": self.model["id"], "messages": [{"role": "user", "content": prompt}], "stream": False}
        with self.server.open("/v1/chat/completions", {**body, **fields}) as response:
            assert isinstance(json.load(response)["choices"][0]["message"]["content"], str)
            return str(response.headers["x-mlx-backend-effort"]).partition(";")[0]

    def ask(self, text: str, **fields: Any) -> str:
        """Send a user's message; return the answer as it was streamed."""
        tools = {"tools": builtin_tools()} if self.capabilities["builtin_tools"] else {}
        self.history.append({"role": "user", "content": text})
        chunks = self.server.chunks(self.history, model=self.model["id"], **tools, **fields)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        answer = "".join(delta.get("content", "") for delta in deltas)
        self.history.append({"role": "assistant", "content": answer})
        return answer


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    engine = load_engine(MODEL_PATH, model_id=MODEL_NAME, options=EngineOptions(context_length=4096))
    try:
        with running(engine) as server:
            yield server
    finally:
        engine.stop()


def test_the_first_chat_with_the_demo_model_works(demo: RunningServer) -> None:
    page = Page(demo)
    assert page.capabilities == {"builtin_tools": False, "vision": False}
    page.history = [{"role": "user", "content": QUESTION}]
    low = "low (background request: Open WebUI, {})"
    assert page.task("title", max_tokens=1000) == low.format("title")
    page.history = []
    assert page.ask(QUESTION) == "The capital of France is Paris."
    assert page.task("follow-ups") == low.format("follow-ups")
    assert page.task("tags") == low.format("tags")
    assert page.ask("What is the capital of Italy?", reasoning_effort="high")


def test_tools_that_fill_the_context_are_named_and_counted(demo: RunningServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    status, answer = demo.call("/v1/chat/completions", {**body, "tools": builtin_tools()})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    counted = [
        demo.call("/v1/tokenize", {**body, **tools})[1]["count"] for tools in ({"tools": builtin_tools()}, {})
    ]
    assert (error["prompt_tokens"], error["max_model_len"]) == (counted[0], 4096)
    assert error["tool_tokens"] == counted[0] - counted[1]
    assert error["message"] == (
        f"The prompt has {counted[0]} tokens; the context holds 4096, and the reply needs room too. "
        f"{error['tool_tokens']} of its tokens describe the 36 tools that were sent with it: "
        "turn off what is not needed. This model's maximum context length is 4096 tokens. However, your messages "
        f"resulted in {counted[0]} tokens. Please reduce the length of the messages."
    )


def test_a_large_model_gets_the_tools_and_they_are_as_large_as_the_pages_own() -> None:
    assert 24_000 < len(json.dumps(builtin_tools())) < 28_000
    scripts = iter([CALL, LATE])
    with ScriptedEngine(lambda _: next(scripts)) as engine, running(engine) as server:
        page = Page(server)
        assert page.capabilities == {"builtin_tools": True, "vision": False}
        tools = builtin_tools()
        question: dict[str, Any] = {"role": "user", "content": "How late is it?"}
        call, *_ = [
            call
            for chunk in server.chunks([question], tools=tools)
            for call in chunk["choices"][0]["delta"].get("tool_calls", ())
        ]
        assert call["index"] == 0
        # As the page sends a call back: without its index, its arguments written anew, the reasoning lost.
        function = {"name": call["function"]["name"], "arguments": '{"first_argument":"now"}'}
        round_ = [
            question,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call["id"], "content": '{"time": "23:59"}'},
        ]
        chunks = server.chunks(round_, tools=tools)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "It is late."
        assert "I look at the clock." in engine.requests[-1].prompt
