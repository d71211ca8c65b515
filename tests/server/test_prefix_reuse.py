"""Each API's clients send a conversation back in their own way; the server has all of it but what is new.

The shapes are those of agents: calls without spaces, with keys in another order and defaults added, other ids and marks
for a cache in each request, tools in another order.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import QWEN_XML_MARKERS, qwen_xml
from running_server import running
from scripted_engine import HARMONY_MARKERS, HARMONY_TEMPLATE, ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from running_server import RunningServer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "description": "The file."},
        "line": {"type": "integer"},
        "replace_all": {"type": "boolean", "default": False},
    },
    "required": ["path"],
}
NAMES = ("edit", "look", "run")
INSTRUCTIONS = "Be brief. " * 50
TASK = "Edit the file."


def anew(written: dict[str, Any]) -> dict[str, Any]:
    """Arguments as a client makes them of its own types."""
    return {"replace_all": False, **dict(reversed(written.items()))}


def reordered(value: Any) -> Any:
    return {key: reordered(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


def in_turn(turn: int, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools, in every other request in another order."""
    return tools if turn % 2 == 0 else [reordered(tool) for tool in reversed(tools)]


class Chat:
    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": TASK},
        ]

    def body(self, turn: int) -> dict[str, Any]:
        functions = [{"type": "function", "function": {"name": each, "parameters": SCHEMA}} for each in NAMES]
        return {"messages": self.messages, "tools": in_turn(turn, functions), "user": f"user {turn}"}

    def take(self, reply: dict[str, Any]) -> None:
        message = reply["choices"][0]["message"]
        calls = [
            {
                **call,
                "index": 0,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(
                        anew(json.loads(call["function"]["arguments"])), separators=(",", ":")
                    ),
                },
            }
            for call in message["tool_calls"]
        ]
        self.messages += [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": message["reasoning_content"].strip(),
                "tool_calls": calls,
            },
            *({"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls),
        ]


class Responses:
    path = "/v1/responses"

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": INSTRUCTIONS}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]},
        ]

    def body(self, turn: int) -> dict[str, Any]:
        functions = [{"type": "function", "name": each, "parameters": SCHEMA} for each in NAMES]
        return {
            "input": self.items,
            "tools": in_turn(turn, functions),
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": f"key {turn}",
            "client_metadata": {"turn": str(turn)},
        }

    def take(self, reply: dict[str, Any]) -> None:
        for item in reply["output"]:
            if item["type"] == "reasoning":
                self.items.append({**item, "content": [], "summary": []})
            else:
                written = json.dumps(anew(json.loads(item["arguments"])))
                self.items.append({**item, "id": None, "arguments": written})
                call_id = item["call_id"]
                self.items.append({"type": "function_call_output", "call_id": call_id, "output": "done"})


class Messages:
    path = "/v1/messages"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]

    def body(self, turn: int) -> dict[str, Any]:
        tools = [{"name": each, "input_schema": SCHEMA} for each in NAMES]
        *earlier, last = self.messages
        blocks = (
            last["content"]
            if isinstance(last["content"], list)
            else [{"type": "text", "text": last["content"]}]
        )
        marked = [*blocks[:-1], {**blocks[-1], "cache_control": {"type": "ephemeral"}}]
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{turn};"}
        return {
            "max_tokens": 1000,
            "system": [
                billing,
                {"type": "text", "text": INSTRUCTIONS, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [*earlier, {**last, "content": marked}],
            "tools": in_turn(turn, tools),
            "metadata": {"user_id": f"user {turn}"},
            "thinking": {"type": "adaptive"},
        }

    def take(self, reply: dict[str, Any]) -> None:
        blocks = [
            {**block, "input": anew(block["input"])} if block["type"] == "tool_use" else block
            for block in reply["content"]
        ]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "done"}]}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        self.messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]


class Ollama:
    path = "/api/chat"

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": TASK},
        ]

    def body(self, turn: int) -> dict[str, Any]:
        functions = [{"type": "function", "function": {"name": each, "parameters": SCHEMA}} for each in NAMES]
        return {
            "model": "scripted",
            "messages": self.messages,
            "tools": in_turn(turn, functions),
            "stream": False,
        }

    def take(self, reply: dict[str, Any]) -> None:
        message = reply["message"]
        # Its clients know no ids.
        functions = [call["function"] for call in message["tool_calls"]]
        calls = [
            {"function": {"name": each["name"], "arguments": anew(each["arguments"])}} for each in functions
        ]
        self.messages += [
            {"role": "assistant", "thinking": message["thinking"], "content": "", "tool_calls": calls},
            *({"role": "tool", "tool_name": each["name"], "content": "done"} for each in functions),
        ]


def harmony(turn: int) -> str:
    return (
        f"<|channel|>analysis<|message|>Step {turn}. <|end|><|start|>assistant<|channel|>commentary "
        f'to=functions.edit <|constrain|>json<|message|>{{"path":"{turn}.py","line":{turn}}}<|call|>'
    )


def qwen(turn: int) -> str:
    parameters = f"<parameter=path>\n{turn}.py\n</parameter>\n<parameter=line>\n{turn}\n</parameter>\n"
    return f"Step {turn}. \n</think>\n\n<tool_call>\n<function=edit>\n{parameters}</function>\n</tool_call><|im_end|>"


FAMILIES = {
    "harmony": (harmony, HARMONY_MARKERS, HARMONY_TEMPLATE),
    "qwen": (qwen, QWEN_XML_MARKERS, qwen_xml()),
}


def answer(server: RunningServer, body: dict[str, Any], path: str) -> dict[str, Any]:
    status, reply = server.call(path, body)
    assert status == 200, reply
    return dict(reply)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wire", [Chat, Responses, Messages, Ollama])
def test_only_what_is_new_is_computed(
    wire: Callable[[], Chat | Responses | Messages | Ollama], family: str
) -> None:
    write, markers, template = FAMILIES[family]
    turns = iter(range(100))
    engine = ScriptedEngine(
        lambda _: write(next(turns)), markers=markers, chat_template=template, caches=True
    )
    conversation = wire()
    with running(engine) as server:
        for turn in range(5):
            conversation.take(answer(server, conversation.body(turn), conversation.path))
    tokenizer = engine.tokenizer
    for turn, (before, now) in enumerate(zip(engine.requests, engine.requests[1:], strict=False)):
        written = tokenizer.encode(write(turn), control_tokens=True)
        assert now.repeated >= len(before.request.prompt) + len(written) - 1, now.prompt
        new = tokenizer.decode(now.request.prompt[now.repeated :])
        assert "done" in new
        assert len(new) < 150
