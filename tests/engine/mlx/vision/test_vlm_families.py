"""Families of mlx-vlm, each with a tiny model of random weights: prompts and replies are those of its own generation.

A handful here; `make vision-matrix` tries every family (tests/vlm_matrix.py).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import vlm_matrix
from picture_files import data_uri, png
from running_server import running
from vision_models import MIXTURES, WRITERS, needs_mlx_vlm
from vlm_families import OWN, write
from vlm_reference import compare

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.images import PreparedImage, PromptImage
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.vision.vlm_processor import VLMProcessor, _part_of_format, without_code_of_models
from mlx_backend.errors import EngineError
from mlx_backend.images import Picture

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = needs_mlx_vlm


@pytest.mark.parametrize("family", ["glm_ocr", "smolvlm", "lfm2_vl", "llama4", "llava", "muse_glimmer"])
def test_a_family_whose_text_mlx_lm_has_answers_in_the_batch_as_mlx_vlm_does(
    family: str, tmp_path: Path
) -> None:
    assert compare(tmp_path, family) == (False, True)


@pytest.mark.parametrize("family", ["llava_next", "minicpmv4_6"], ids=["fails the trial", "numbers pictures"])
def test_a_family_that_the_batch_cannot_show_pictures_answers_one_at_a_time_as_mlx_vlm_does(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert compare(tmp_path, family) == (False, False)
    assert "text only" not in caplog.text


def test_a_prompt_begins_with_a_picture_though_its_processor_puts_a_token_first(tmp_path: Path) -> None:
    write(tmp_path, "mllama")
    with load_engine(tmp_path) as engine:
        processor = engine.image_processor
        assert processor is not None
        image = processor.prepare(Picture(40, 20, bytes(2400)))
        prompt = engine.tokenizer.encode(image.written.text + "What is it?", control_tokens=True)
        shown = [PromptImage(image.written.before, image)]
        reply = engine.generate(GenerationRequest(prompt=prompt, images=shown, max_tokens=4))
        assert any(isinstance(item, TokenDelta) for item in reply)


def test_each_of_several_numbered_pictures_is_prepared_twice_and_not_with_all_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "minicpmv4_6")
    with load_engine(tmp_path) as engine:
        processor = engine.image_processor
        assert isinstance(processor, VLMProcessor)
        large, runs = Picture(300, 200, bytes(180_000)), list[Picture]()
        run = processor._run

        def counted(text: str, pictures: Sequence[Picture]) -> dict[str, Any]:
            runs.extend(pictures)
            return run(text, pictures)

        monkeypatch.setattr(processor, "_run", counted)
        images = list[PreparedImage]()
        for _ in range(5):
            images.append(processor.prepare(large, images))
        assert len({each.written.text for each in images}) == 5
        assert runs.count(large) == 1 + 4 * 2


@pytest.mark.parametrize(("family", "part"), [("deepseekocr", "<image>"), ("step3p7", "<im_patch>")])
def test_a_picture_brings_no_token_of_a_sound_into_the_prompt(family: str, part: str) -> None:
    assert _part_of_format(family) == part


def test_no_code_of_a_model_runs_though_mlx_vlms_processor_trusts_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "config.json").write_text('{"model_type": "of_its_own"}')
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with without_code_of_models(), pytest.raises(EngineError, match="--trust-remote-code"):
        AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)


PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "template", [PARTS, TEXTS], ids=["a template with parts", "a template with texts alone"]
)
def test_a_chat_about_pictures_over_http(template: str, tmp_path: Path) -> None:
    write(tmp_path, "smolvlm")
    engine = load_engine(tmp_path, chat_template=template)
    processor = engine.image_processor
    assert processor is not None
    places = processor.prepare(Picture(40, 20, bytes(2400))).num_tokens
    picture = {"type": "image_url", "image_url": {"url": data_uri(png(40, 20))}}
    with running(engine) as server:
        for pictures in (1, 2):
            content = [*[picture] * pictures, {"type": "text", "text": "What of <image> is it?"}]
            status, reply = server.call(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
            )
            assert status == 200, reply
            assert reply["usage"]["prompt_tokens_details"]["image_tokens"] == pictures * places
            assert reply["usage"]["completion_tokens"]
        _, listed = server.call("/v1/models")
        assert "vision" in listed["data"][0]["capabilities"]


def test_the_page_has_every_family_that_mlx_vlm_sees_with() -> None:
    """Should this fail after an upgrade of mlx-vlm: `make vision-matrix`."""
    listed = vlm_matrix.listed()
    assert sorted(listed) == vlm_matrix.families()
    batched = {name for name, (kind, _) in listed.items() if kind == vlm_matrix.BATCH}
    assert batched >= (WRITERS | MIXTURES).keys()


def test_a_remark_that_was_written_by_hand_is_of_what_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN, "some", {"met": "other logits", "remark": "it reads backwards"})
    assert vlm_matrix._remark("some", "a text gets other logits") == "it reads backwards"
    assert vlm_matrix._remark("some", "no file") == "no file"
    assert vlm_matrix._remark("some") == "", "it answers now"
    monkeypatch.setitem(OWN, "some", {"remark": "compared with that mended"})
    assert vlm_matrix._remark("some") == "compared with that mended"
    assert vlm_matrix._remark("some", "no file") == "no file"
