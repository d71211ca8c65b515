"""Media in tools' results: images stay for whoever knows the model, others are refused by the tool's name."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import CHAT, USER, client_of

from mlx_backend.conversation.history import HistoryError, sanitise

IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 1000}"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "screenshot", "input": {}}]}
TEXT = {"type": "text", "text": "here"}

AUDIO = {"type": "input_audio", "input_audio": {"data": "A" * 1000}}

SHAPES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "by the call's id": (
        [CALLING, {"role": "tool", "tool_call_id": "c1", "content": [TEXT, AUDIO]}],
        r"messages\[2\].content\[1\]: The result of the tool 'screenshot' holds audio",
    ),
    "by its own name": (
        [CALLING, {"role": "tool", "name": "camera", "content": [{"type": "video_url"}]}],
        r"messages\[2\].content\[0\]: The result of the tool 'camera' holds a video",
    ),
    "of nobody": ([{"role": "tool", "content": [AUDIO]}], "The result of a tool holds audio"),
    "in Anthropic's parts": (
        [
            USES,
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [IMAGE]}]},
        ],
        r"messages\[2\].content\[0\]: The result of the tool 'screenshot' holds an image",
    ),
    "a file": (
        [CALLING, {"role": "tool", "tool_call_id": "c1", "content": [{"type": "file", "file": {}}]}],
        "holds a file",
    ),
}


@pytest.mark.parametrize(("messages", "words"), SHAPES.values(), ids=SHAPES)
def test_a_medium_in_a_result_is_refused_by_the_tools_name(
    messages: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(HistoryError, match=words):
        sanitise([USER, *messages])


def test_an_image_in_a_result_stays_among_its_texts_for_whoever_knows_the_model() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": ["one", IMAGE, TEXT, {"type": "thinking"}]}
    history = sanitise([USER, CALLING, result])
    assert history[-1]["content"] == [{"type": "text", "text": "one"}, IMAGE, TEXT]


@pytest.mark.parametrize(
    ("result", "begins"),
    [
        ({"tool_call_id": "c1"}, "The result of the tool 'screenshot' holds an image."),
        ({"name": "camera"}, "The result of the tool 'camera' holds an image."),
        ({}, "The result of a tool holds an image."),
    ],
)
def test_the_server_of_a_model_that_cannot_see_refuses_it_by_the_tools_name(
    result: dict[str, Any], begins: str
) -> None:
    messages = [USER, CALLING, {"role": "tool", "content": [TEXT, IMAGE], **result}]
    with ScriptedEngine([]) as engine:
        refused = client_of(engine).post(CHAT, json={"messages": messages})
    error = refused.get_json()["error"]
    assert refused.status_code == 400
    assert (error["param"], error["code"]) == ("messages[2].content[1]", "unsupported_content")
    assert error["message"].startswith(begins)
    assert "This model cannot see images" in error["message"]


@pytest.mark.parametrize("content", [[TEXT], [{"type": "json", "json": {"image": "x.png"}}], "image", None])
def test_results_without_media_are_texts(content: Any) -> None:
    history = sanitise([USER, CALLING, {"role": "tool", "tool_call_id": "c1", "content": content}])
    assert isinstance(history[-1]["content"], str)
