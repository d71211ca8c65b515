"""Folders as people have them: each is loaded, or refused in a sentence that says what is wrong and what to do."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from architectures import write

from mlx_backend.demo import VISION_MODEL_PATH
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.errors import EngineError
from mlx_backend.models.folders import problem_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    type Change = Callable[[Path], object]

WEIGHTS = "model.safetensors"
MLX_VERSION = "choose the model's MLX version"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "model", "helium")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "mine")


def configured(**settings: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(config))

    return change


def written(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else content.encode()
    )


def renamed(name: str) -> Change:
    return lambda folder: (folder / WEIGHTS).rename(folder / name)


def without(*names: str, then: str = "") -> Change:
    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()
        if then:
            (folder / then).touch()

    return change


def weights(**changes: Any) -> Change:
    """Other weights under some names; None leaves one out."""

    def change(folder: Path) -> None:
        loaded: Any = mx.load(str(folder / WEIGHTS))
        loaded |= {key.replace("__", "."): each for key, each in changes.items()}
        mx.eval(loaded)
        mx.save_safetensors(
            str(folder / WEIGHTS), {key: each for key, each in loaded.items() if each is not None}
        )

    return change


@pytest.mark.parametrize(
    "change",
    [
        written("generation_config.json", b"\xef\xbb\xbf{}"),
        written("generation_config.json", '{"temperature": 0.5'),
        written("config.json.bak", "{"),
        written("optimizer.safetensors", b"left by a training"),
        written("adapter_model.safetensors", b"another program's"),
        written("model-old.safetensors", b""),
        written("model-00001-of-00002.safetensors", b"half a download of another version"),
        written("params.json", "{}"),
        renamed("model-00001-of-00001.safetensors"),
        configured(eos_token_id=None, dtype="bfloat16", transformers_version="5.23.0"),
        configured(quantization_config={"bits": 4, "group_size": 64}),
        configured(rope_parameters=None, rope_scaling=None),
        without("tokenizer_config.json"),
        written("generation_config.json", '{"eos_token_id": "x", "temperature": "hot"}'),
        written("generation_config.json", '{"eos_token_id": [-1, 99999]}'),
        written(
            "generation_config.json", '{"repetition_penalty": 0, "top_p": -4, "min_p": NaN, "top_k": 1e999}'
        ),
    ],
)
def test_what_does_no_harm_is_not_in_the_way(change: Change, folder: Path) -> None:
    change(folder)
    assert problem_of(folder, "mine") == ""
    loaded = load_model(folder)
    assert loaded.name == "mine"
    assert loaded.sampling_defaults.keys() <= {"temperature"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            written("config.json", b"\xef\xbb\xbf{}"),
            "config.json begins with a byte order mark: save it as plain UTF-8",
        ),
        (written("config.json", "// mine\n{}"), "config.json cannot be read: Expecting value"),
        (configured(model_type=["helium"]), "names no model_type"),
        (configured(model_type="base"), "Model type base not supported. A newer mlx-lm may know"),
        (written("config.json", '{"model_type": "helium"}'), "its config.json says nothing of 'hidden_size'"),
        (
            configured(quantization={"group_size": 64}),
            "'bits' is missing in its config.json, or in its weights",
        ),
        (written("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n"), "run `git lfs pull` in "),
        (
            written("special_tokens_map.json", "{"),
            "its special_tokens_map.json cannot be read: Expecting property",
        ),
        (
            written("added_tokens.json", "[]"),
            "its added_tokens.json holds no JSON object. Correct the file, or fetch",
        ),
        (without("tokenizer.json"), "has no tokenizer: there is no tokenizer.json in "),
        (
            written("chat_template.jinja", b"\xfc{{ messages }}"),
            "chat_template.jinja cannot be read: 'utf-8' codec",
        ),
        (
            renamed("pytorch_model.safetensors"),
            "no model*.safetensors, but pytorch_model.safetensors: if that has all",
        ),
        (
            renamed("model.safetensors.incomplete"),
            "model.safetensors.incomplete is half a download. Finish it.",
        ),
        (
            without(WEIGHTS, then="weights.npz"),
            f"has weights in a format that is not read here: {MLX_VERSION}",
        ),
        (
            without("config.json", WEIGHTS, then="params.json"),
            "its makers' own layout (params.json, without a config",
        ),
        (
            lambda folder: (without(WEIGHTS)(folder), (folder / WEIGHTS).symlink_to("/nowhere/model")),
            "is a folder, or a link to a file that is not there: fetch the model again, or connect the disk",
        ),
        (
            weights(model__norm__weight=None),
            "Missing 1 parameters: model.norm.weight. If its files are incomplete",
        ),
        (
            weights(model__norm__weight=mx.zeros(7)),
            "Expected shape (64,) but received shape (7,) for parameter",
        ),
        (
            lambda folder: (
                configured(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})(
                    folder
                ),
                weights(model__norm__absmax=mx.zeros(7))(folder),
            ),
            f"is quantised in a way that is not read here (bitsandbytes): {MLX_VERSION}",
        ),
        (
            configured(quantization_config={"quant_method": "gptq", "bits": 8}),
            f"is quantised in a way that is not read here (gptq): {MLX_VERSION}",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence_with_what_to_do(change: Change, said: str, folder: Path) -> None:
    change(folder)
    problem_of(folder, "mine")
    with pytest.raises(EngineError) as caught:
        load_model(folder)
    assert said in str(caught.value)
    assert "'mine'" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"peft_type": "LORA", "r": 8},
            "holds an adapter in PEFT's format, which mlx-lm does not read: merge it",
        ),
        ({"fine_tune_type": "lora", "num_layers": 2}, "holds no adapter: there is no adapters.safetensors."),
        ([], "holds no adapter that can be read: adapter_config.json holds no JSON object."),
        (
            "x" * (17 << 20),
            "holds no adapter that can be read: adapter_config.json is larger than 16,384 KiB.",
        ),
    ],
    ids=["of another program", "without weights", "a list", "large"],
)
def test_an_adapter_that_cannot_be_loaded_is_told_as_what_it_is(
    settings: Any, said: str, folder: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(EngineError) as caught:
        load_engine(folder, adapters={"mine": adapter})
    assert str(caught.value).startswith(f"{adapter} {said}")


def test_a_model_that_sees_is_not_blinded_by_a_stray_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(VISION_MODEL_PATH, tmp_path / "eye")
    (folder / "optimizer.safetensors").write_bytes(b"left by a training")
    with load_engine(folder) as engine:
        assert engine.model_id == "eye"
    assert "it answers text only" not in caplog.text
