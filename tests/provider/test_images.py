"""Images from Dify to a model: plugin and server as processes, with scripted models and with a tiny one that looks."""

from __future__ import annotations

import base64
import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import GEMMA_3_VISION, QWEN_VL, QWEN_VL_MARKERS
from conftest import LOADED, listening
from daemon import PluginError, PluginProcess
from dify_view import assistant, text_of, user
from picture_files import BLUE, RED, encoded, png

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURE = png(56, 28)
"""Two tokens; ten times as wide and high, with little detail, 190."""
LETTERS = {"max_tokens": 30, "extra_body": json.dumps({"guided_regex": "[a-z]{20}"})}
"""What a tiny model writes by itself is hardly ever text."""


def image(file: bytes = PICTURE, **more: str) -> dict[str, Any]:
    """An image as Dify sends it; the detail is what the app has chosen."""
    encoded_file = base64.b64encode(file).decode()
    return {"type": "image", "format": "png", "mime_type": "image/png", "base64_data": encoded_file, **more}


def asks(words: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {**user(""), "content": [{"type": "text", "data": words}, *parts]}


def features(plugin: PluginProcess, form: dict[str, str]) -> list[str]:
    (answer,) = plugin.request(
        "get_ai_model_schemas", provider="mlx", model_type="llm", model="default", credentials=form
    )
    found: list[str] = answer["model_schema"]["features"]
    return found


@contextmanager
def scripted(folder: Path, *, sees: bool = True, **settings: Any) -> Iterator[tuple[dict[str, str], Path]]:
    """A server with a model of Qwen's that can see, or one that has no eyes; the form for it, and its prompts."""
    specification, prompts = folder / "model.json", folder / "prompts.jsonl"
    markers = QWEN_VL_MARKERS if sees else QWEN_VL_MARKERS[:2]
    replies = ["A corner.<|im_end|>"] * 9
    specification.write_text(
        json.dumps({"template": QWEN_VL, "markers": markers, "replies": replies, "settings": settings})
    )
    script = str(Path(__file__).parent / "family_server.py")
    with listening([sys.executable, script, str(specification), str(prompts)]) as address:
        yield {"endpoint_url": f"{address}/v1"}, prompts


def told(prompts: Path) -> list[str]:
    return [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]


def test_dify_is_told_whether_a_model_sees_by_the_server_itself(
    plugin: PluginProcess, tmp_path: Path
) -> None:
    for sees in (True, False):
        folder = tmp_path / str(sees)
        folder.mkdir()
        with scripted(folder, sees=sees) as (form, _):
            assert ("vision" in features(plugin, form)) is sees


def test_a_model_is_shown_the_images_of_every_turn_with_their_detail(
    plugin: PluginProcess, tmp_path: Path
) -> None:
    large = png(1120, 560)
    history = [
        asks("What is this?", image(detail="low")),
        assistant("A corner."),
        asks("And these?", image(large, detail="low"), image(large, detail="high")),
    ]
    with scripted(tmp_path) as (form, prompts):
        chunks = list(plugin.invoke(history, credentials=form))
    (prompt,) = told(prompts)
    runs = [part.count("<|image_pad|>") for part in prompt.split("<|vision_start|>")[1:]]
    assert runs == [2, 26 * 13, 40 * 20]
    assert chunks[-1]["delta"]["usage"]["prompt_tokens"] > sum(runs)
    assert text_of(chunks) == "A corner."


def test_a_conversation_about_an_image_goes_on_with_a_model_that_cannot_see(
    plugin: PluginProcess, tmp_path: Path
) -> None:
    history = [asks("What is this?", image()), assistant("A corner."), user("Why is it red?")]
    with scripted(tmp_path, sees=False) as (form, prompts):
        for vision in ({}, {"vision": "supported"}):  # what the plugin does, and what the server does
            list(plugin.invoke(history, credentials={**form, **vision}))
    first, second = told(prompts)
    assert first == second
    assert "<|im_start|>user\nWhat is this?\n[image]<|im_end|>" in first


def test_what_is_wrong_with_an_image_is_said_as_the_server_says_it(
    plugin: PluginProcess, tmp_path: Path
) -> None:
    address = {**image(), "base64_data": "", "url": "http://127.0.0.1/a.png"}
    with scripted(tmp_path) as (form, _):
        for part, words in (
            (
                image(b"<svg/>"),
                r"The image's file is an SVG drawing, which cannot be shown to a model. Send it as PNG",
            ),
            (address, r"This server fetches no images from addresses. Send the image itself"),
        ):
            with pytest.raises(PluginError, match=words) as caught:
                list(plugin.invoke([asks("What is this?", part)], credentials=form))
            assert caught.value.kind == "InvokeBadRequestError"


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_model_that_looks_answers_by_what_it_sees(
    plugin: PluginProcess, tmp_path: Path, family: str
) -> None:
    pytest.importorskip("mlx_vlm")
    from vision_models import WRITERS

    WRITERS[family](tmp_path)
    template = {"gemma3": GEMMA_3_VISION, "qwen2_5_vl": QWEN_VL}[family]
    (tmp_path / "chat_template.jinja").write_text(template)
    command = [
        sys.executable,
        "-m",
        "mlx_backend",
        "--port",
        "0",
        "--model",
        str(tmp_path),
        "--temperature",
        "0",
    ]
    from PIL import Image

    shown = [encoded(Image.new("RGB", (40, 40), colour)) for colour in (RED, BLUE)]
    with listening(command, ready=LOADED) as address:
        form = {"endpoint_url": address}
        assert "vision" in features(plugin, form)
        answers = [
            list(plugin.invoke([asks("What?", image(file))], credentials=form, parameters=LETTERS))
            for file in (*shown, shown[0])
        ]
    red, blue, again = map(text_of, answers)
    assert red == again != blue
    tokens = {each[-1]["delta"]["usage"]["prompt_tokens"] for each in answers}
    assert len(tokens) == 1
