"""Loading: a model's name and context length, and the errors of a model that cannot be loaded."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from architectures import write
from engine_models import write_adapter, write_model, write_random

from mlx_backend.device import Device
from mlx_backend.device import mlx as device
from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.errors import EngineError, EngineStopped
from mlx_backend.layers.architecture import load_network
from mlx_backend.models import files as model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small-oss")


def error_of(model: str | Path) -> str:
    with pytest.raises(EngineError) as caught:
        load_engine(model)
    return str(caught.value)


def test_a_model_has_its_folders_name_unless_it_is_given_one(folder: Path) -> None:
    with load_engine(str(folder)) as engine:
        assert (engine.model_id, engine.context_length) == ("small-oss", 1024)
        assert engine.tokenizer.vocabulary_size == 512
    with load_engine(folder, model_id="mine", context_length=100) as engine:
        assert (engine.model_id, engine.context_length) == ("mine", 100)


def test_end_tokens_come_from_the_generation_config_too(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert load_model(folder).tokenizer.end_tokens == {1, 7}


def test_ranks_that_share_a_model_read_as_much_of_it_at_once_as_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_CHUNK_BYTES", 200_000)
    counts = []
    for ranks in (1, 4):  # each reads whole tensors, and keeps its part of them
        reports: list[float] = []
        device.load_weights(load_network(folder)[0], reports.append, ranks)
        assert reports[-1] == pytest.approx(0.95)
        counts.append(len(reports))
    assert counts[1] > 2 * counts[0]


def test_of_freed_buffers_a_gpu_keeps_some_unless_its_process_shares_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "gpu_memory", lambda: 80 << 30)
    mx.eval(mx.zeros(1 << 20) + 1)
    device.trim_buffers()
    assert mx.get_cache_memory() > 0
    device.trim_buffers(shares_model=True)
    assert mx.get_cache_memory() == 0


def test_a_longer_context_than_the_model_has_is_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match="context of 4096 tokens is not possible: this model's is 1024"):
        load_engine(folder, context_length=4096)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    text = error_of(tmp_path / "nowhere")
    assert "There is no folder" in text
    assert "nowhere" in text
    assert "Hugging Face repository" in text


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "nowhere", "a/b/c"])
def test_a_name_that_can_be_no_repository_is_not_looked_up_on_the_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "There is no folder" in error_of(name)


def test_without_a_network_an_unknown_repository_says_what_to_do(tmp_path: Path) -> None:
    code = "from mlx_backend.engine.mlx import load_engine; load_engine('nobody/no-such-model')"
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True)
    message = done.stderr.splitlines()[-1]
    assert message == (
        "mlx_backend.errors.EngineError: HF_HUB_OFFLINE forbids downloading, and 'nobody/no-such-model' is not, or not "
        "completely, on this machine. Unset that, or name a folder that holds the model."
    )


def test_a_file_is_not_a_folder(folder: Path) -> None:
    assert "is a file; name the folder" in error_of(folder / "config.json")


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    assert "there is no config.json" in error_of(tmp_path)


def test_a_config_that_is_no_json_is_reported_as_unreadable(folder: Path) -> None:
    (folder / "config.json").write_text("{oops")
    assert "'small-oss' cannot be loaded: its config.json cannot be read: " in error_of(folder)


@pytest.mark.parametrize(
    ("content", "said"), [("{}", "names no model_type"), ("[]", "config.json holds no JSON object")]
)
def test_a_config_of_something_else_is_no_language_model(folder: Path, content: str, said: str) -> None:
    (folder / "config.json").write_text(content)
    assert said in error_of(folder)


def test_an_unsupported_architecture_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "hal9000"}))
    text = error_of(folder)
    assert "hal9000 not supported" in text
    assert "newer mlx-lm" in text


def test_missing_weights_are_reported(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    text = error_of(folder)
    assert "'small-oss' has no weights: there is no model*.safetensors in" in text
    assert "if it is no MLX model, choose the model's MLX version" in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: whole[:1000], "is damaged or cut short at 1 kB: fetch it again."),
        (lambda whole: whole[:-1], "is damaged or cut short at "),
        (lambda _: b"", "is damaged or cut short at 0 bytes: fetch it again."),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "run `git lfs pull` in "),
        (lambda _: b"<html>Not found</html>" * 9, "is damaged or cut short"),
    ],
    ids=["its beginning", "all but a byte", "nothing", "a pointer", "a page"],
)
def test_a_file_of_weights_that_is_not_whole_is_named(
    folder: Path, content: Callable[[bytes], bytes], said: str
) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(content(weights.read_bytes()))
    text = error_of(folder)
    assert text.startswith("model.safetensors of 'small-oss' ")
    assert said in text


def test_weights_of_which_a_part_is_missing_are_not_complete(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    assert "are not complete: of 3 files 1 are there" in error_of(folder)
    index = {"weight_map": {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "1 of the files that model.safetensors.index.json names are missing, among them model-00002" in (
        error_of(folder)
    )


@pytest.mark.parametrize("index", [["model-00001-of-00004.safetensors"], ["model.safetensors"], None])
@pytest.mark.parametrize("stray", ["consolidated.safetensors", "model-00002-of-00002.safetensors", None])
def test_neither_a_stale_index_nor_a_stray_file_is_in_the_way(
    folder: Path, index: list[str] | None, stray: str | None
) -> None:
    if index:
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict(enumerate(index))})
        )
    if stray:
        (folder / stray).write_bytes(b"what a training left")
    assert load_model(folder).name == "small-oss"


def test_a_folder_may_have_brackets_in_its_name(folder: Path) -> None:
    assert load_model(folder.rename(folder.with_name("oss [4 bit]"))).name == "oss [4 bit]"


def test_a_folder_that_holds_a_model_in_another_one_names_that(folder: Path) -> None:
    inner = folder.rename(folder.with_name("mlx"))
    outer = folder.with_name("outer")
    outer.mkdir()
    inner.rename(outer / "mlx")
    assert f"but one in {outer / 'mlx'}. Name that folder." in error_of(outer)


def test_code_of_a_models_own_runs_only_if_that_is_allowed(tmp_path: Path) -> None:
    folder = write(tmp_path / "own", "helium")
    source = Path(mlx_lm.models.__path__[0], "helium.py").read_text().replace("from .", "from mlx_lm.models.")
    (folder / "network.py").write_text(f"from __future__ import annotations\n{source}")
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own",
        "model_file": "network.py",
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert error_of(folder) == (
        "The model 'own' comes with Python code of its own; --trust-remote-code runs it, if you trust its makers "
        "(network.py defines the network)."
    )
    with load_engine(folder, trust_remote_code=True) as engine:
        request = GenerationRequest(prompt=[5, 6, 7], max_tokens=3)
        assert any(isinstance(event, TokenDelta) for event in engine.generate(request))
    (folder / "network.py").unlink()
    with pytest.raises(
        EngineError, match=r"says that network.py defines its network, and there is no such file"
    ):
        load_engine(folder, trust_remote_code=True)


def test_a_missing_tokenizer_is_reported(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "'small-oss' has no tokenizer: there is no tokenizer.json in" in error_of(folder)


def test_half_precision_runs_on_a_cpu_in_float32_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if mx.default_device() != mx.Device(mx.cpu):
        pytest.skip("this machine's MLX runs on a GPU, where half precision is kept")
    half = write_model(tmp_path / "half", dtype="bfloat16")
    with caplog.at_level(logging.INFO), load_engine(half) as engine:
        items = list(engine.generate(GenerationRequest(prompt=[9, 10], max_tokens=3)))
    assert sum(isinstance(item, TokenDelta) for item in items) == 3
    assert "half is in half precision; on this CPU it runs in float32." in caplog.text


def test_a_model_that_is_too_large_is_refused_before_its_weights_are_read(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    read: list[float] = []
    with pytest.raises(EngineError, match=r"'small-oss' needs .* of memory for its weights alone"):
        load_engine(folder, device=Device(size), on_progress=read.append)
    assert read == []


def test_on_a_cpu_most_of_a_load_is_trials_which_can_be_stopped(folder: Path) -> None:
    reports: list[float] = []
    with load_engine(folder, on_progress=reports.append):
        assert reports == sorted(reports)
    during = [share for share in reports if 0.4 < share < 0.95]
    assert len(during) > 8

    def stop(share: float) -> None:
        if share > 0.7:
            raise EngineStopped("stopping")

    with pytest.raises(EngineStopped, match="stopping"):
        load_engine(folder, on_progress=stop)


@pytest.mark.parametrize("kind", ["draft", "adapter"])
def test_what_comes_with_a_model_counts_towards_its_size(folder: Path, tmp_path: Path, kind: str) -> None:
    size = (folder / "model.safetensors").stat().st_size
    options: dict[str, Any] = {"draft_model": str(write_model(tmp_path / "draft"))}
    limit = 3 * size // 2
    if kind == "adapter":
        options = {"adapters": {"mine": write_adapter(tmp_path / "lora", folder)}}
        limit = int(size / 0.95) + 1000
    with pytest.raises(EngineError, match=r"for its weights alone, and --memory-gb .* leaves"):
        load_engine(folder, memory_bytes=limit, **options)


GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 2,
    },
}


def silenced(folder: Path) -> Path:
    """Take the context length out of a model's config.json."""

    def without(config: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in config.items() if name not in model_files.CONTEXT_KEYS}
        return kept | ({"text_config": without(kept["text_config"])} if "text_config" in kept else {})

    file = folder / "config.json"
    file.write_text(json.dumps(without(json.loads(file.read_text()))))
    return folder


def test_a_file_without_a_context_length_leaves_the_architectures_own_which_may_be_raised(
    tmp_path: Path,
) -> None:
    """Gemma 3 as Google publishes it: 4B and larger state a rotation, and no length."""
    model = write_random(tmp_path, GEMMA3, seed=3)
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    (model / "config.json").write_text(json.dumps(config))
    with load_engine(silenced(model)) as engine:
        assert engine.context_length == 32_768, "mlx-lm's default for gemma3_text"
    for given in (100, 32_768, 131_072):
        with load_engine(model, context_length=given) as engine:
            assert engine.context_length == given


@pytest.mark.parametrize(
    ("name", "length"),
    [("plamo3", 2048), ("youtu_llm", 131_072), ("qwen3_5", 131_072), ("kimi_vl", 2048), ("llama", 4096)],
    ids=["kept as config", "not kept by the network", "in a text_config", "of a class of its own", "none"],
)
def test_wherever_a_network_has_its_arguments_their_context_length_is_found_and_is_a_guess(
    tmp_path: Path, name: str, length: int
) -> None:
    loaded = load_model(silenced(write(tmp_path, name)))
    assert (loaded.context_length, loaded.states_context_length) == (length, False)


def test_a_number_that_stands_for_no_limit_states_no_context_length() -> None:
    for number in (10**30, 1 << 32, 0, -1, True, "4096"):
        assert model_files.context_length({"model_max_length": number}) is None
    assert model_files.context_length({"max_position_embeddings": 10**30, "n_ctx": 4096}) == 4096


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "kimi_linear", "model_max_length": 1_048_576},
        {"model_type": "openelm", "max_context_length": 1_048_576},
        {"model_type": "lille-130m", "block_size": 1_048_576},
        {"model_type": "kimi_vl", "text_config": {"max_position_embeddings": 1_048_576}},
    ],
    ids=lambda config: config["model_type"],
)
def test_an_architectures_own_key_states_a_context_length(config: dict[str, Any]) -> None:
    assert model_files.context_length(config) == 1_048_576


def test_the_size_of_blocks_is_no_context_length_of_other_architectures() -> None:
    assert model_files.context_length({"model_type": "minimax_m3_vl", "block_size": 64}) is None


def test_no_architecture_of_mlx_lm_has_a_context_length_under_a_name_that_is_not_known() -> None:
    names = {
        name
        for folder in mlx_lm.models.__path__
        for file in Path(folder).glob("*.py")
        for name in re.findall(
            r"^    (\w*(?:position|seq|ctx|context|max_len|block_size)\w*): *(?:Optional\[)?int",
            file.read_text(),
            re.MULTILINE,
        )
    }
    blocks = {"attn_res_block_size", "blocksparse_block_size", "candidate_block_size", "index_block_size"}
    unknown = names - {*model_files.CONTEXT_KEYS, "block_size", "original_max_position_embeddings"} - blocks
    assert names >= {"max_position_embeddings", "model_max_length", "n_positions"}
    assert not unknown
