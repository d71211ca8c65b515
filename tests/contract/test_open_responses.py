"""The demo model answers what Open Responses' compliance tests ask, and each response and event matches its schemas.

The schemas are Open Responses' own (open_responses.json, Apache License 2.0). Its tests of
WebSockets and of /v1/responses/compact pass, too: tests/server/test_websocket.py and tests/api/responses have what
they ask. Its test of a PDF does not.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from jsonschema_rs import Draft202012Validator
from picture_files import RED, data_uri, encoded
from running_server import running

from mlx_backend.demo import MODEL_NAME, MODEL_PATH, VISION_MODEL_PATH
from mlx_backend.engine.mlx import load_engine

COMPONENTS = json.loads((Path(__file__).parent / "open_responses.json").read_text())["components"]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "The weather", "parameters": CITY}
OSLO = "What is the weather in Oslo?"


def validator(*names: str) -> Draft202012Validator:
    choices = [{"$ref": f"#/components/schemas/{name}"} for name in names]
    return Draft202012Validator({"anyOf": choices, "components": COMPONENTS})


RESPONSE = validator("ResponseResource")
EVENT = validator(*(name for name in COMPONENTS["schemas"] if name.endswith("StreamingEvent")))


def said(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text, **fields}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with load_engine(MODEL_PATH, model_id=MODEL_NAME) as engine, running(engine) as server:
        yield f"{server.url}/v1/responses"


def created(url: str, **fields: Any) -> dict[str, Any]:
    answer = requests.post(url, json={"model": MODEL_NAME, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    RESPONSE.validate(body)
    assert body["status"] == "completed"
    return body


def streamed(url: str, **fields: Any) -> list[dict[str, Any]]:
    answer = requests.post(url, json={"model": MODEL_NAME, "stream": True, **fields}, timeout=60)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in events:
        EVENT.validate(event)
    RESPONSE.validate(events[-1]["response"])
    assert events[-1]["type"] == "response.completed"
    return events


@pytest.mark.parametrize(
    "items",
    [
        [said("user", "Say hello in three words.")],
        [said("system", "You are a sailor, and speak like one."), said("user", "Say hello.")],
        [said("user", "My name is Ada."), said("assistant", "Hello Ada!"), said("user", "What is my name?")],
        [
            said("assistant", "I should give the number.", phase="commentary"),
            said("assistant", "It is four.", phase="final_answer"),
            said("user", "Only the number, again."),
        ],
    ],
    ids=["a message", "a system message", "several turns", "phases"],
)
def test_a_conversation_is_answered_whole_and_streamed(url: str, items: list[dict[str, Any]]) -> None:
    assert created(url, input=items)["output"]
    assert streamed(url, input=items)[-1]["response"]["output"]


def test_a_call_is_streamed_and_its_result_answered_by_the_id_of_the_response(url: str) -> None:
    events = streamed(url, input=[said("user", OSLO)], tools=[WEATHER])
    kinds = {(event["type"], event.get("item", {}).get("type")) for event in events}
    assert {
        ("response.output_item.added", "function_call"),
        ("response.function_call_arguments.delta", None),
        ("response.function_call_arguments.done", None),
        ("response.output_item.done", "function_call"),
    } <= kinds
    choice = {"type": "function", "name": "get_weather"}
    first = created(url, input=OSLO, tools=[WEATHER], tool_choice=choice)
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "-3 C"}
    second = created(url, input=[result], previous_response_id=first["id"])
    assert "-3 C" in second["output"][-1]["content"][0]["text"]


def test_an_image_is_answered_by_a_model_that_sees() -> None:
    pytest.importorskip("mlx_vlm")
    from PIL import Image

    image = {"type": "input_image", "image_url": data_uri(encoded(Image.new("RGB", (32, 32), RED)))}
    question = [{"type": "input_text", "text": "What is this?"}, image]
    with load_engine(VISION_MODEL_PATH, model_id=MODEL_NAME) as engine, running(engine) as server:
        assert created(f"{server.url}/v1/responses", input=[{"role": "user", "content": question}])["output"]
