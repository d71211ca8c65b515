"""The image parts of messages, as clients send them."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_backend.api.errors import ApiError
from mlx_backend.api.openai.chat_body import take_images
from mlx_backend.images import Detail

URI = "data:image/png;base64,aaaa"
TEXT = {"type": "text", "text": "What is this?"}


def image(url: Any = URI, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "part",
    [
        image(),
        image(detail=None),
        {"type": "image_url", "image_url": URI},
        {"type": "input_image", "image_url": URI},
        {"type": "input_image", "image_url": {"url": URI}},
    ],
)
def test_every_form_becomes_a_number_and_the_address(part: dict[str, Any]) -> None:
    messages, sources = take_images([user(TEXT, part)])
    assert messages == [user(TEXT, {"type": "image", "image": 0})]
    assert [(each.url, each.detail, each.where) for each in sources] == [
        (URI, Detail.AUTO, "messages[0].content[1]")
    ]


def test_images_are_numbered_through_all_messages_and_tools_results_too() -> None:
    sent = [
        {"role": "system", "content": "Look."},
        user(image(detail="low"), TEXT, image("https://a.example/a.png", detail="high")),
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "1", "content": [image()]},
        user(TEXT),
    ]
    before = repr(sent)
    messages, sources = take_images(sent)
    assert repr(sent) == before
    numbers = [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    assert numbers == [0, 1, 2]
    assert [each.detail for each in sources] == [Detail.LOW, Detail.HIGH, Detail.AUTO]
    assert sources[1].url == "https://a.example/a.png"
    assert messages[0] is sent[0]
    assert messages[4] is sent[4]


def test_messages_without_images_stay_as_they_are() -> None:
    sent = ["not a message", {"role": "user", "content": "hello"}, {"role": "user"}, user("text", 7, None)]
    messages, sources = take_images(sent)
    assert messages == sent
    assert not sources


@pytest.mark.parametrize(
    ("part", "says", "param"),
    [
        ({"type": "image_url"}, "is missing", ".image_url"),
        ({"type": "image_url", "image_url": {}}, "is missing", ".image_url"),
        ({"type": "image_url", "image_url": {"url": ""}}, "is empty", ".image_url"),
        ({"type": "image_url", "image_url": {"url": 7}}, "is a number", ".image_url"),
        ({"type": "image_url", "image_url": [URI]}, "is a list", ".image_url"),
        ({"type": "input_image", "file_id": "file-1"}, "Files are not stored here", ".image_url"),
        (image(detail="ultra"), 'detail is "ultra": send low, high or auto', ".image_url.detail"),
        (image(detail=["low"]), "send low, high or auto", ".image_url.detail"),
        ({"type": "input_image", "image_url": URI, "detail": 1}, "send low, high or auto", ".detail"),
    ],
)
def test_a_part_that_names_no_image_is_refused_by_its_place(part: Any, says: str, param: str) -> None:
    with pytest.raises(ApiError) as raised:
        take_images([user(TEXT, TEXT), user(TEXT, part)])
    assert says in raised.value.message
    assert (raised.value.status, raised.value.param) == (400, f"messages[1].content[1]{param}")


@pytest.mark.parametrize("role", ["system", "developer", "assistant", None, 7])
def test_only_users_and_tools_show_images(role: Any) -> None:
    with pytest.raises(ApiError, match="only users' messages and tools' results") as raised:
        take_images([{"role": role, "content": [TEXT, image()]}])
    assert raised.value.param == "messages[0].content[1]"
