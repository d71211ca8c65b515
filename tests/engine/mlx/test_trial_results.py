"""What a trial found right is kept for the next load of the same model, and nothing else is."""

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from architectures import write
from drafting import generate, loaded_batch
from engine_models import write_model

from mlx_backend.engine.base import GenerationRequest
from mlx_backend.engine.mlx import trial_results
from mlx_backend.engine.mlx.batch_trial import Abilities, BatchTrial, BatchTrialError
from mlx_backend.models.engine_options import EngineOptions

ASKED = [GenerationRequest(prompt=[20 + at] * (2 + 3 * at), max_tokens=12) for at in range(4)]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that results are kept in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlx-backend" / "trials.json"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the texts that are tried."""
    lengths: list[int] = []
    run_one = BatchTrial._run_one

    def counted(self: BatchTrial, text: Any, first: int, second: int) -> Any:
        lengths.append(len(text))
        return run_one(self, text, first, second)

    monkeypatch.setattr(BatchTrial, "_run_one", counted)
    return lengths


def load(folder: Path, **options: Any) -> tuple[Abilities, list[list[int]]]:
    """Return what a model can do, and what it answers to several at once."""
    with loaded_batch(folder, **options) as batch:
        return batch.runtime.abilities, [reply.tokens for reply in generate(batch, ASKED)]


# Of each way to run packed one: attention alone, with states, and with layers that run for each segment by themselves.
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "longcat_flash_ngram"])
def test_a_model_is_tried_in_its_first_load_and_answers_the_same_in_the_next(
    architecture: str, tmp_path: Path, kept: Path, runs: list[int]
) -> None:
    folder = write(tmp_path / "model", architecture)
    first = load(folder, draft_from_text=True)
    assert runs
    before = kept.read_bytes()
    runs.clear()
    assert load(folder, draft_from_text=True) == first
    assert not runs
    assert kept.read_bytes() == before


def test_other_files_other_options_and_other_code_are_tried(
    tmp_path: Path, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model")
    load(folder)
    runs.clear()
    load(folder, kv_bits=8, kv_group_size=32)
    assert runs
    runs.clear()
    with monkeypatch.context() as patched:
        patched.setattr(trial_results, "_code_digest", lambda: "of other code")
        load(folder)
    assert runs
    runs.clear()
    load(folder)
    assert not runs
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    load(folder)
    assert runs


@pytest.mark.parametrize(
    "name",
    ["device/mlx.py", "engine/mlx/batch_trial.py", "layers/architecture.py", "models/config_names.py"],
)
def test_code_that_reads_or_runs_a_network_is_part_of_a_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (Path(trial_results.__file__).parents[2] / name).is_file()
    monkeypatch.setattr(trial_results, "__file__", str(tmp_path / "engine" / "mlx" / "trial_results.py"))
    code = tmp_path / name
    code.parent.mkdir(parents=True)
    digests = set()
    for text in ("a = 1", "a = 2"):
        code.write_text(text)
        digests.add(trial_results._code_digest.__wrapped__())
    assert len(digests) == 2


def test_other_versions_of_libraries_have_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, keys = write_model(tmp_path / "model"), set[str]()
    for changed in ("", "mlx", "mlx-vlm", "transformers"):

        def installed(name: str, changed: str = changed) -> str:
            if name == changed:
                raise PackageNotFoundError(name)
            return "1" if name == "mlx-vlm" else version(name)

        monkeypatch.setattr(trial_results, "version", installed)
        keys.add(trial_results.key_of(folder, EngineOptions(), has_head=False))
    assert len(keys) == 4


def test_a_model_is_loaded_next_to_what_is_no_file(tmp_path: Path, kept: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "consolidated.safetensors").symlink_to(tmp_path / "not downloaded")
    (folder / "tools.py").mkdir()
    assert not load(folder)[0].unbatched
    assert kept.exists()


def test_a_model_whose_files_cannot_all_be_read_is_tried_in_every_load(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise PermissionError

    monkeypatch.setattr(trial_results, "model_fingerprint", fail)
    assert not load(write_model(tmp_path / "model"))[0].unbatched
    assert not kept.exists()


def test_a_model_is_loaded_where_there_is_no_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(trial_results, "user_cache_folder", fail)
    assert not load(write_model(tmp_path / "model"))[0].unbatched


def test_two_results_may_be_written_at_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trial_results.TrialResult(merges=True, rewinds=False, by_segment=(), with_states=())
    write_text = Path.write_text

    def write(path: Path, text: str) -> int:
        size = write_text(path, text)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_CACHE_HOME", str(kept.parent.parent))
        trial_results.remember("another", found)
        return size

    monkeypatch.setattr(Path, "write_text", write)
    trial_results.remember("one", found)
    assert trial_results.recall("one") == found
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_nothing_is_left_of_a_result_that_cannot_be_written(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Path:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    trial_results.remember("one", trial_results.TrialResult(True, False, (), ()))
    assert not [*kept.parent.iterdir()]


def test_what_went_wrong_is_tried_in_every_load(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tried = write_model(tmp_path / "model"), list[bool]()

    def fail(_: BatchTrial, *, packs_replies: bool = True, many_tokens: bool = False) -> None:
        tried.append(packs_replies)
        raise BatchTrialError("there was too little memory")

    with monkeypatch.context() as patched:
        patched.setattr(BatchTrial, "try_packing", fail)
        for _ in range(2):
            assert load(folder)[0].unbatched == "there was too little memory"
    assert len(tried) == 4  # with caches merged, and not
    assert not kept.exists()
    assert not load(folder)[0].unbatched


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"KEY": 3}', '{"KEY": {}}', '{"KEY": {"merges": true, "rewinds": true}}', None]
)
def test_a_file_that_says_nothing_is_as_none(
    text: str | None, tmp_path: Path, kept: Path, runs: list[int]
) -> None:
    folder = write_model(tmp_path / "model")
    load(folder)
    right = json.loads(kept.read_bytes())
    [key] = right
    if text is None:  # of modules that the network does not have
        text = json.dumps({key: right[key] | {"by_segment": ["mlx_lm.models.llama.Mixer"]}})
    kept.write_text(text.replace("KEY", key))
    runs.clear()
    load(folder)
    assert runs
    assert json.loads(kept.read_bytes()) == right


def test_the_oldest_results_of_many_are_forgotten(kept: Path) -> None:
    found = trial_results.TrialResult(merges=True, rewinds=False, by_segment=(), with_states=("a", "b"))
    for number in range(trial_results.MAX_RESULTS + 2):
        trial_results.remember(f"model {number}", found)
    assert trial_results.recall("model 1") is None
    assert trial_results.recall("model 2") == found
    assert len(json.loads(kept.read_bytes())) == trial_results.MAX_RESULTS
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_results_that_cannot_be_kept_leave_nothing_else_there(kept: Path) -> None:
    kept.mkdir(parents=True)  # in place of the file
    trial_results.remember("model", trial_results.TrialResult(True, False, (), ()))
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
