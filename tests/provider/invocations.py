"""Calls of Dify that several tests make, and the request the scripted server got for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_view import user

if TYPE_CHECKING:
    from conftest import Stub
    from daemon import PluginProcess

GPT_OSS = "mlx-community/gpt-oss-20b-MXFP4-Q8"
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CLOCK = {
    "name": "clock",
    "description": "Tells the time.",
    "parameters": {"type": "object", "properties": {}},
}
TITLE = "You are asked to generate a concise chat title by decomposing the user’s input into two parts: …"


def ask(plugin: PluginProcess, stub: Stub, **more: Any) -> list[dict[str, Any]]:
    return list(plugin.invoke([user("hi")], credentials=stub.credentials, **more))


def sent(plugin: PluginProcess, stub: Stub, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    stub.will_stream({"content": "ok"})
    list(plugin.invoke(messages, credentials=stub.credentials, **more))
    (request,) = stub.take_requests()
    body: dict[str, Any] = request["body"]
    return body
