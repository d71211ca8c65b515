"""The models on this machine, as list, show, pull, rm and recommend tell of them."""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.cli import main
from mlx_backend.commands import rm
from mlx_backend.demo import MODEL_PATH
from mlx_backend.errors import EngineError
from mlx_backend.models.names import source_of
from mlx_backend.models.spec import RECOMMENDED_MODELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models with one in it, which is all there is."""
    shutil.copytree(MODEL_PATH, tmp_path / "owner" / "Tiny-Oss-20b-4bit")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLX_BACKEND_MODELS_DIR", str(tmp_path))
    monkeypatch.setenv("MLX_BACKEND_MEMORY_GB", "8")
    return tmp_path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run a command that succeeds; what it prints, or the object that it prints."""

    def run(*words: str) -> Any:
        assert main(words) == 0
        printed = capsys.readouterr().out
        return json.loads(printed) if "--json" in words else printed

    return run


@pytest.mark.parametrize(
    "name",
    ["tiny-oss:20b", "tiny-oss:20b:high", "tiny-oss-20b", "Tiny-Oss:20B-4bit", "owner/Tiny-Oss-20b-4bit"],
)
def test_a_model_is_known_by_the_names_that_people_use(
    name: str, folder: Path, said: Callable[..., Any]
) -> None:
    shown = said("show", name, "--json")
    assert shown["name"] == "owner/Tiny-Oss-20b-4bit"
    assert shown["folder"] == str(folder / "owner" / "Tiny-Oss-20b-4bit")


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gpt-oss:20b", "mlx-community/gpt-oss-20b-MXFP4-Q8"),
        ("gpt-oss-120b:latest", "mlx-community/gpt-oss-120b-MXFP4-Q8"),
        ("qwen3.5:4b", "mlx-community/Qwen3.5-4B-MLX-4bit"),
        ("someone/gpt-oss-20b", "someone/gpt-oss-20b"),
    ],
)
def test_a_name_from_elsewhere_means_the_recommended_model(name: str, source: str) -> None:
    assert source_of(name) == source


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-oss", "gpt-oss-20b-MXFP4-Q8 or mlx-community/gpt-oss-120b-MXFP4-Q8"),
        ("gpt-oss:2", "There is no model 'gpt-oss:2' here"),
        ("gpt-os-20b-mxfp4-q8", "did you mean mlx-community/gpt-oss-20b-MXFP4-Q8?"),
    ],
)
def test_a_name_that_means_none_or_several_is_refused(name: str, message: str) -> None:
    with pytest.raises(EngineError) as refused:
        source_of(name)
    assert message in str(refused.value)


def test_list_says_what_each_model_can_do(folder: Path, said: Callable[..., Any]) -> None:
    table = said("list")
    row = next(line for line in table.splitlines() if line.startswith("owner/Tiny-Oss-20b-4bit"))
    told = ["7.9 MB", "gpt_oss", "none low medium* high", "yes", "-", "yes"]
    assert re.split(r"\s{3,}", row)[1:7] == told
    model = said("ls", "--json")["models"][0]
    assert model["efforts"] == ["none", "low", "medium", "high"]
    assert model["fits"]
    assert not any(each["fits"] for each in said("ls", "--json", "--memory-gb", "0.5")["models"])


def test_show_says_the_memory_that_a_server_would_reserve(folder: Path, said: Callable[..., Any]) -> None:
    memory = said("show", "mlx-demo", "--json")["memory"]
    assert list(memory) == ["8192", "32768", "131072"]
    weights, quantised = (said("show", "mlx-demo", "--json")[name] for name in ("bytes", "memory_by_kv_bits"))
    assert weights < memory["8192"] < memory["32768"] < memory["131072"]
    assert list(quantised) == ["8", "4"]
    for tokens, nbytes in memory.items():
        assert weights < quantised["4"][tokens] < quantised["8"][tokens] < nbytes / 2, "of 32 bits each"
    page = said("show", "mlx-demo")
    assert "harmony: the template has <|channel|>" in page
    assert re.search(r"at 32k tokens .* MB with --kv-bits 8; .* MB with --kv-bits 4\n", page)
    assert "beyond its context" in page


def test_show_says_why_the_memory_of_a_model_is_not_known(folder: Path, said: Callable[..., Any]) -> None:
    config = folder / "owner" / "Tiny-Oss-20b-4bit" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    assert re.search(r"with caches +not known: .* could not be loaded: ", said("show", "Tiny-Oss-20b-4bit"))
    shown = said("show", "Tiny-Oss-20b-4bit", "--json")
    assert shown["memory"] == {}
    assert "could not be loaded" in shown["memory_unknown"]
    assert said("show", "mlx-demo", "--json")["memory_unknown"] == ""


def test_recommend_names_the_largest_that_fits(folder: Path, said: Callable[..., Any]) -> None:
    found = said("recommend", "--memory-gb", "16", "--json")
    assert found["best"] == "mlx-community/gpt-oss-20b-MXFP4-Q8"
    assert len(found["models"]) == len(RECOMMENDED_MODELS)
    first = found["models"][0]
    assert first["bytes"] < first["memory"]["32768"] < first["memory"]["131072"]
    assert re.search(r"Qwen3.5-9B-4bit +6.0 GB +5.57 GB +6.62 GB +9.62 GB", said("recommend"))
    assert "mlx-backend chat mlx-demo" in said("recommend", "--memory-gb", "1")


@pytest.mark.parametrize(
    "command", [["recommend"], ["list"], ["show", "mlx-demo"]], ids=lambda words: words[0]
)
def test_memory_is_given_as_to_serve(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--memory-gb", "-3"])
    assert "--memory-gb: '-3' is not a number of gigabytes above 0" in capsys.readouterr().err
    monkeypatch.setenv("MLX_BACKEND_MEMORY_GB", "16GB")
    assert main(command) == 1
    assert "MLX_BACKEND_MEMORY_GB: '16GB' is not a number of gigabytes above 0." in capsys.readouterr().err


def test_what_is_recommended_leaves_room_to_talk_for_some_time(said: Callable[..., Any]) -> None:
    tight = said(
        "recommend", "--memory-gb", "16.5", "--json"
    )  # the weights of gemma-4-26b are 14.3 GB of 15.7
    assert tight["best"] == "mlx-community/gpt-oss-20b-MXFP4-Q8"
    assert (
        said("recommend", "--memory-gb", "17.5", "--json")["best"] == "mlx-community/gemma-4-26b-a4b-it-4bit"
    )


def test_rm_asks_says_how_much_is_free_and_deletes(
    folder: Path, said: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rm, "is_interactive", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: print(question) or "n")
    assert main(["rm", "tiny-oss:20b"]) == 1
    assert (folder / "owner" / "Tiny-Oss-20b-4bit").is_dir()
    assert "are free again" in said("rm", "-y", "tiny-oss:20b")
    assert not (folder / "owner" / "Tiny-Oss-20b-4bit").exists()


def test_rm_deletes_a_link_and_not_what_it_leads_to(
    folder: Path, said: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model"
    (folder / "owner" / "Tiny-Oss-20b-4bit").rename(elsewhere)
    link = folder / "linked"
    link.symlink_to(elsewhere)
    said("rm", "-y", "linked", "linked")
    assert not link.is_symlink()
    assert (elsewhere / "config.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rm", "-y", "mlx-demo"], "comes with this package"),
        (["rm", "-y", "tiny-oss:20b:high"], "owner/Tiny-Oss-20b-4bit at one of its efforts"),
        (["rm", "-y", str(MODEL_PATH)], "a folder of yours"),
        (["rm", "tiny-oss"], "Nobody is here to answer"),
        (["show", "gpt-oss:20b"], "`mlx-backend pull mlx-community/gpt-oss-20b-MXFP4-Q8` fetches it"),
        (["pull", "gpt-oss:20b"], "A smaller one that fits: mlx-community/Qwen3.5-9B-4bit"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    words: list[str],
    message: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_backend.models.folders.repository_bytes", lambda _repository: None)  # no network
    assert main(words) == 1
    assert message in capsys.readouterr().err
