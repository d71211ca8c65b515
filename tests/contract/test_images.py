"""Tiny models that look, behind the real server: what they count, what is cached of a picture, alone and in a crowd.

The weights are random, so what is asserted holds whatever a model writes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from picture_files import BLUE, RED, data_uri, encoded
from running_server import RunningServer, served
from vision_models import WRITERS, part_of

from mlx_backend.engine.mlx import load_engine
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from PIL import Image
else:
    pytest.importorskip("mlx_vlm")
    from PIL import Image

TEMPLATE = """\
{%- for message in messages -%}
{{ message.role }}: {% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}PART{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{% endif %}
{% endfor -%}
{%- if add_generation_prompt -%}assistant:{%- endif -%}
"""
FIXED = {"temperature": 0, "max_tokens": 8, "guided_regex": "[a-z]{6}"}


@pytest.fixture(scope="module", params=sorted(WRITERS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    name: str = request.param
    models = tmp_path_factory.mktemp("models")
    folder = models / name
    folder.mkdir()
    WRITERS[name](folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PART", part_of(name)))
    settings = Settings(port=0, max_queue=64)
    registry = MultiModelRegistry(
        Catalogue([], models_dirs=[models]),
        lambda spec, options, progress: load_engine(
            spec.source, options, model_id=spec.name, on_progress=progress
        ),
        EngineOptions(),
        settings,
        default_name=name,
    )
    try:
        with served(registry, settings) as server:
            yield server
    finally:
        registry.stop()


def image(colour: tuple[int, int, int], size: int = 40) -> dict[str, Any]:
    file = encoded(Image.new("RGB", (size, size), colour))
    return {"type": "image_url", "image_url": {"url": data_uri(file)}}


def asked(*parts: dict[str, Any], words: str = "What is this?") -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": words}]}


def written(reply: dict[str, Any]) -> str:
    """What the model wrote, be it reasoning."""
    message = reply["choices"][0]["message"]
    text: str = message.get("reasoning_content", "") + message["content"]
    assert text
    return text


def answer(server: RunningServer, *messages: dict[str, Any]) -> str:
    return written(server.chat(list(messages), **FIXED))


def test_a_picture_decides_the_answer_and_is_counted(server: RunningServer) -> None:
    _, listed = server.call("/v1/models")
    assert "vision" in listed["data"][0]["capabilities"]  # before it is loaded
    messages = [asked(image(RED))]
    reply = server.chat(messages, **FIXED)
    status, counted = server.call("/v1/tokenize", {"messages": messages})
    assert (status, counted["count"]) == (200, reply["usage"]["prompt_tokens"])
    assert reply["usage"]["prompt_tokens_details"]["image_tokens"] > 0
    assert answer(server, *messages) == written(reply)
    assert answer(server, asked(image(BLUE))) != written(reply)
    _, listed = server.call("/v1/models")
    assert "vision" in listed["data"][0]["capabilities"]


def test_the_next_turn_reads_only_the_new_words(server: RunningServer) -> None:
    first = [asked(image((9, 200, 9)), image((200, 200, 9)), words="Compare these two.")]
    reply = server.chat(first, **FIXED)
    said = {"role": "assistant", "content": written(reply)}
    following = server.chat([*first, said, {"role": "user", "content": "Why?"}], **FIXED)["usage"]
    details = following["prompt_tokens_details"]
    assert details["image_tokens"] == reply["usage"]["prompt_tokens_details"]["image_tokens"]
    assert details["cached_tokens"] >= details["image_tokens"]
    other = server.chat([asked(image((9, 200, 10)), words="Compare these two.")], **FIXED)["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] < other["prompt_tokens_details"]["image_tokens"]


def test_another_question_about_the_same_picture_reads_only_the_question(server: RunningServer) -> None:
    picture = image((9, 9, 140))
    server.chat([asked(picture, words="What is on it?")], **FIXED)
    usage = server.chat([asked(picture, words="Which colour is it?")], **FIXED)["usage"]
    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] >= details["image_tokens"] > 0


def test_replies_are_the_same_alone_and_beside_each_other(server: RunningServer) -> None:
    requests = [
        [asked(image(RED), image(BLUE))],
        [{"role": "user", "content": "Only words."}],
        [asked(image(BLUE, 64))],
        [{"role": "user", "content": "Only words, and some more of them."}],
        [asked(words="None."), {"role": "assistant", "content": "No."}, asked(image(RED))],
    ]
    alone = [answer(server, *each) for each in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(lambda each: answer(server, *each), requests)) == alone
