"""Images and documents in a message, and those that cannot be sent."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError, PluginProcess
from dify_view import assistant, user
from fake_servers import mlx_backend

if TYPE_CHECKING:
    from conftest import Stub


IMAGE = {"type": "image", "format": "png", "mime_type": "image/png", "base64_data": "aaaa"}


def document(name: str, data: bytes, kind: str) -> dict[str, Any]:
    """A document as Dify sends it."""
    encoded = base64.b64encode(data).decode()
    form = name.rpartition(".")[2]
    return {"type": "document", "format": form, "mime_type": kind, "base64_data": encoded, "filename": name}


def parts_sent(plugin: PluginProcess, stub: Stub, *parts: dict[str, Any], **form: str) -> Any:
    stub.will_stream({"content": "ok"})
    message = {"role": "user", "content": list(parts)}
    list(plugin.invoke([message], credentials={**stub.credentials, **form}, model="seeing"))
    (request,) = stub.take_requests()
    return request["body"]["messages"][0]["content"]


def test_images_are_sent_unchanged_and_in_order(plugin: PluginProcess, stub: Stub) -> None:
    address = {**IMAGE, "base64_data": "", "url": "http://dify/files/a.png", "detail": "high"}
    sent_parts = parts_sent(
        plugin, stub, {"type": "text", "data": "one"}, IMAGE, {"type": "text", "data": "two"}, address
    )
    assert sent_parts == [
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa", "detail": "low"}},
        {"type": "text", "text": "two"},
        {"type": "image_url", "image_url": {"url": "http://dify/files/a.png", "detail": "high"}},
    ]


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.md", "# 題\n".encode(), "text/markdown"),
        ("a.csv", "\ufeff# 題\n".encode(), "text/csv; charset=utf-8"),
        ("a.json", "# 題\n".encode(), "application/json"),
        ("a.log", "# 題\n".encode("utf-16"), "application/octet-stream"),
    ],
)
def test_a_plain_text_document_is_sent_as_text(
    plugin: PluginProcess, stub: Stub, name: str, data: bytes, kind: str
) -> None:
    read = parts_sent(plugin, stub, {"type": "text", "data": "Summarise:"}, document(name, data, kind))
    assert read == f"Summarise:\n{name}:\n\n# 題\n"


def test_another_document_is_sent_as_a_file(plugin: PluginProcess, stub: Stub) -> None:
    (part,) = parts_sent(plugin, stub, document("a.pdf", b"%PDF", "application/pdf"))
    assert part == {
        "type": "file",
        "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="},
    }


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (document("a.txt", "表".encode("cp932"), "text/plain"), "'a.txt' is not text in UTF-8"),
        ({**document("a.txt", b"", "text/plain"), "url": "http://x"}, "MULTIMODAL_SEND_FORMAT=base64"),
    ],
)
def test_an_unreadable_document_is_refused_with_advice(
    plugin: PluginProcess, stub: Stub, part: dict[str, Any], words: str
) -> None:
    with pytest.raises(PluginError, match=words) as caught:
        list(plugin.invoke([{"role": "user", "content": [part]}], credentials=stub.credentials))
    assert caught.value.kind == "InvokeBadRequestError"


def test_an_image_for_a_model_without_image_input_is_refused(plugin: PluginProcess, stub: Stub) -> None:
    form = {**stub.credentials, "vision": "unsupported"}
    with pytest.raises(PluginError, match=SEES_NO_IMAGES) as caught:
        list(plugin.invoke([{"role": "user", "content": [IMAGE]}], credentials=form))
    assert caught.value.kind == "InvokeBadRequestError"


SEES_NO_IMAGES = r"\[MLX\] the model \S+ cannot see images. Remove the image, or choose a model with vision."
READER = {"id": "reader", "type": "llm", "capabilities": ["completion", "tools"]}
VIEWER = {"id": "viewer", "type": "llm", "capabilities": ["completion", "vision"]}
AUDIO = {"type": "audio", "format": "mp3", "mime_type": "audio/mp3", "base64_data": "aaaa"}
VIDEO = {"type": "video", "format": "mp4", "mime_type": "video/mp4", "base64_data": "aaaa"}


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (IMAGE, SEES_NO_IMAGES),
        (AUDIO, "the model reader cannot hear audio. Remove the audio file, or choose a model that can."),
        (VIDEO, "the model reader cannot watch videos. Remove the video, or choose a model that can."),
        (document("a.pdf", b"%PDF", "application/pdf"), "Remove the document, or send its text."),
    ],
)
def test_what_the_server_says_its_model_cannot_take_is_not_sent(
    plugin: PluginProcess, part: dict[str, Any], sentence: str
) -> None:
    with mlx_backend(READER) as server:
        form = {"endpoint_url": server.address}
        for model in ("reader", "default"):
            message = {"role": "user", "content": [{"type": "text", "data": "What is this?"}, part]}
            with pytest.raises(PluginError, match=sentence):
                list(plugin.invoke([message], credentials=form, model=model))
        assert server.bodies == []


def test_an_image_of_an_earlier_turn_is_named_to_a_model_that_cannot_see(plugin: PluginProcess) -> None:
    asked = {"role": "user", "content": [{"type": "text", "data": "What is this?"}, IMAGE]}
    history = [asked, assistant("A cat."), user("What colour?")]
    with mlx_backend(READER, VIEWER) as server:
        for model in ("reader", "viewer"):
            list(plugin.invoke(history, credentials={"endpoint_url": server.address}, model=model))
        first, second = (body["messages"][0]["content"] for body in server.bodies)
    assert first == "What is this?\n[image]"
    assert [part["type"] for part in second] == ["text", "image_url"]


def test_a_result_with_an_image_shows_it_to_a_model_that_sees_and_tells_any_other_of_it(
    plugin: PluginProcess,
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = json.dumps({"content": [{"type": "image", "mimeType": "image/png", "data": "aaaa" * 500}]})
    messages = [
        user("Look."),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    with mlx_backend(READER, VIEWER) as server:
        for model in ("reader", "viewer"):
            list(plugin.invoke(messages, credentials={"endpoint_url": server.address}, model=model))
        first, second = (body["messages"][2]["content"] for body in server.bodies)
    assert first == "[image/png, 2 kB, not shown: this model does not see]"
    assert [part["image_url"]["url"] for part in second] == [f"data:image/png;base64,{'aaaa' * 500}"]


def test_another_file_of_an_earlier_turn_cannot_be_removed_so_the_sentence_says_what_can_be_done(
    plugin: PluginProcess,
) -> None:
    history = [{"role": "user", "content": [AUDIO]}, assistant("A cat."), user("What colour?")]
    with (
        mlx_backend(READER) as server,
        pytest.raises(
            PluginError, match=r"an earlier message of this conversation has an audio file. Start a new"
        ),
    ):
        list(plugin.invoke(history, credentials={"endpoint_url": server.address}, model="reader"))


def test_an_image_is_sent_to_a_model_with_vision_and_where_the_form_says_so(plugin: PluginProcess) -> None:
    message = {"role": "user", "content": [IMAGE]}
    with mlx_backend(READER, VIEWER) as server:
        form = {"endpoint_url": server.address}
        list(plugin.invoke([message], credentials=form, model="viewer"))
        list(plugin.invoke([message], credentials={**form, "vision": "supported"}, model="reader"))
        assert [body["messages"][0]["content"][0]["type"] for body in server.bodies] == ["image_url"] * 2
