"""A server of scripted transcripts, called in this process: what tests of single requests share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from single_model import SingleModelRegistry
from werkzeug.test import Client

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.service import Service
from mlx_backend.server.app import App
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from scripted_engine import ScriptedEngine
    from werkzeug.test import TestResponse

ANSWER = (
    "<|channel|>analysis<|message|>Capital of France.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The capital is Paris.<|return|>"
)
CALL = (
    "<|channel|>analysis<|message|>Look it up.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Oslo"}<|call|>'
)
USER = {"role": "user", "content": "hello"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"


def client_of(engine: ScriptedEngine, **options: Any) -> Client:
    """A client of a server with these settings."""
    settings = Settings(**options)
    return Client(App(SingleModelRegistry(Service(engine, ModelSettings.of(server=settings))), settings))


def answered(client: Client, **fields: Any) -> TestResponse:
    """The response to a chat request that is not refused."""
    response = client.post(CHAT, json={"messages": [USER], **fields})
    assert response.status_code == 200, response.get_data(as_text=True)
    return response


def message(client: Client, **fields: Any) -> dict[str, Any]:
    """The message of a reply that is not streamed."""
    answer: dict[str, Any] = answered(client, **fields).get_json()["choices"][0]["message"]
    return answer


def streamed(client: Client, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    response = client.post(path, json={"messages": [USER], "stream": True, **fields})
    assert response.mimetype == "text/event-stream"
    events = response.get_data(as_text=True).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
