"""Text completions over HTTP."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, client_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return client_of(engine)


def test_a_plain_completion_is_the_models_own_text(engine: ScriptedEngine, client: Client) -> None:
    for prompt in ("<|start|>assistant", engine.tokenizer.encode("<|start|>assistant", control_tokens=True)):
        body = client.post("/v1/completions", json={"prompt": prompt}).get_json()
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == ANSWER.removesuffix("<|return|>")
        assert engine.requests[-1].prompt == "<|start|>assistant"
    response = client.post("/completions", json={"prompt": "x", "stream": True, "stop": "France"})
    events = response.get_data(as_text=True).split("\n\n")
    chunks = [json.loads(event[6:]) for event in events if event.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == ANSWER[: ANSWER.index("France")]
