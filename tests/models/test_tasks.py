"""What a model is for that this server does not serve, told by its files alone."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
from families.tiny_models import FAMILIES

from mlx_backend.models import tasks
from mlx_backend.models.tasks import why_not_served


def of(architecture: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **more}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (of("WhisperForConditionalGeneration", model_type="whisper"), "speech or sound (whisper)"),
        ({"n_mels": 80, "n_audio_ctx": 1500}, "speech or sound (whisper)"),
        ({"target": "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel"}, "speech or sound"),
        ({"istftnet": {}, "plbert": {}}, "speech or sound (kokoro)"),
        (of("Wav2Vec2ForCTC", model_type="wav2vec2"), "speech or sound (wav2vec2)"),
        (of("Qwen3TTSForConditionalGeneration", model_type="qwen3_tts"), "speech or sound (qwen3_tts)"),
        (of("Qwen3OmniMoeTalkerForConditionalGeneration", model_type="qwen3_omni_talker"), "speech or sound"),
        (of("NewSpeechModelForSpeechSeq2Seq", model_type="brandnew"), "speech or sound (brandnew)"),
        (
            {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.36"},
            "generating images (diffusers)",
        ),
        (of("SuryaForDetection", model_type="surya"), "reading text from images (OCR) (surya)"),
        (of("ViTForImageClassification", model_type="vit"), "images alone (vit)"),
        (of("CLIPModel", model_type="clip"), "images alone (clip)"),
        (of("T5ForConditionalGeneration", model_type="t5"), "an encoder and a decoder (t5)"),
    ],
)
def test_a_model_for_another_task_is_told_as_that(config: dict[str, Any], said: str) -> None:
    text = why_not_served("mine", config, ["config.json"])
    assert text is not None
    assert text.startswith("The model 'mine' cannot be served: it is a model for ")
    assert said in text
    assert "this server serves chat, embeddings and rerankers. " in text


def test_a_pipeline_of_diffusers_needs_no_configuration_to_be_told() -> None:
    assert "generating images" in str(why_not_served("mine", {}, ["model_index.json"]))


@pytest.mark.parametrize("family", ["glm4v", "glm_ocr", "deepseekocr", "smolvlm", "lfm2_vl"])
def test_a_family_that_only_mlx_vlm_has_is_served_where_that_is_installed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_vlm")
    config = {"model_type": family, "vision_config": {}}
    assert why_not_served("eye", config, []) is None
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if name == "mlx_vlm" else find_spec(name))
    tasks._families.cache_clear()
    tasks._vlm_folder.cache_clear()
    try:
        text = str(why_not_served("eye", config, []))
    finally:
        tasks._families.cache_clear()
        tasks._vlm_folder.cache_clear()
    assert text.startswith("The model 'eye' cannot be served: ")
    assert "make vision" in text


def test_a_family_that_nobody_knows_is_left_to_loading() -> None:
    assert why_not_served("new", {"model_type": "hal9000"}, []) is None, "loading says more"


@pytest.mark.parametrize("family", ["sam3", "qwen3_vl_embedding", "colidefics3", "rfdetr"])
def test_a_family_of_mlx_vlm_that_does_not_chat_is_refused(family: str) -> None:
    assert why_not_served("eye", {"model_type": family, "vision_config": {}}, [])


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_that_is_served_is_taken_for_something_else(name: str) -> None:
    assert why_not_served(name, FAMILIES[name].architecture, ["config.json"]) is None


@pytest.mark.parametrize(
    "family", ["mistral", "qwen2_5_vl", "bert", "xlm-roberta", "lfm2-vl", "gemma3n", "llava"]
)
def test_families_under_another_name_and_encoders_are_served(family: str) -> None:
    config = of("SomethingForConditionalGeneration", model_type=family, vision_config={}, audio_config={})
    assert why_not_served(family, config, []) is None


def test_neither_package_is_imported_to_know_what_it_has() -> None:
    code = (
        "import sys; from mlx_backend.models.tasks import why_not_served; "
        "print(why_not_served('x', {'model_type': 'glm4v'}, []) is None, {'mlx_lm', 'mlx_vlm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True set()\n"
