"""A model that is too large is refused before anything of it is downloaded or loaded, with both sizes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import HubServer, hub
from model_folders import put_model

from mlx_backend.device.machine import Machine
from mlx_backend.device.memory import MemoryBudget
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.errors import InsufficientMemory
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.settings import Settings

GB = 1 << 30
LARGE = "mlx-community/gpt-oss-20b-MXFP4-Q8"
MAC = Machine(system="Darwin", processor="arm64", macos=15, memory=16 * GB)
LIMIT = int(16 * GB * 2 / 3 * 0.9)  # what models may use on such a Mac


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with one large repository, a small one and two others, asked in place of Hugging Face."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("mlx_backend.device.memory.this_machine", lambda: MAC)
    repositories: dict[str, dict[str, int | None]] = {
        LARGE: {"model-1.safetensors": 7 * 10**9, "model-2.safetensors": 5 * 10**9 + 10**8},
        "maker/small": {"model.safetensors": 5 * GB},
        "maker/large-embedding": {"model.safetensors": 30 * GB},
    }
    with hub(repositories) as server:
        monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
        yield server


class Refused:
    """A registry whose loads must not begin."""

    def __init__(self, *specs: ModelSpec, ranks: int = 1, **options: Any) -> None:
        self.begun: list[str] = []
        self.registry = MultiModelRegistry(
            Catalogue(specs, allow_download=True),
            self.load,
            EngineOptions(**options),
            Settings(),
            memory=MemoryBudget(options.get("memory_bytes") or (lambda: LIMIT)),
            ranks=ranks,
        )

    def load(self, spec: ModelSpec, *_: Any) -> Any:
        self.begun.append(spec.name)
        raise AssertionError

    def error(self, name: str) -> str:
        try:
            with pytest.raises(InsufficientMemory) as caught:
                self.registry.acquire_any(name, 60)
        finally:
            self.registry.stop()
        assert self.begun == []
        assert caught.value.retry_after is None
        return str(caught.value)

    def begins(self, name: str) -> bool:
        try:
            with pytest.raises(Exception, match="could not be loaded"):
                self.registry.acquire_any(name, 60)
        finally:
            self.registry.stop()
        return self.begun == [name]


def spec(source: str, **engine: Any) -> ModelSpec:
    return ModelSpec(name=source, source=source, named_on_command_line=True, engine=engine)


def test_a_single_model_that_would_have_to_be_downloaded(server: HubServer) -> None:
    said = Refused(spec(LARGE)).error(LARGE)
    assert (
        "needs 11.3 GB of memory for its weights alone, and models may use 9.12 GB of the 16 GB here" in said
    )
    assert "A smaller one that fits: mlx-community/Qwen3.5-9B-4bit" in said
    assert "sudo sysctl iogpu.wired_limit_mb=" in said
    assert server.requests_for(LARGE) == [f"GET /api/models/{LARGE}"], "nothing was fetched"


def test_an_operator_may_insist_with_a_limit_of_their_own(server: HubServer) -> None:
    assert Refused(spec(LARGE), memory_bytes=12 * GB).begins(LARGE)


def test_a_model_that_fits_is_loaded(server: HubServer) -> None:
    assert Refused(spec("maker/small")).begins("maker/small")


def test_the_draft_model_counts_too(server: HubServer) -> None:
    said = Refused(spec("maker/small", draft_model="maker/small")).error("maker/small")
    assert "needs 10 GB" in said


def test_adapters_count_too(server: HubServer, tmp_path: Path) -> None:
    with (tmp_path / "adapters.safetensors").open("wb") as file:
        file.truncate(5 * GB)  # a hole in the file: it takes no room on the disk
    assert "needs 10 GB" in Refused(spec("maker/small", adapters={"mine": tmp_path})).error("maker/small")


def test_a_folder_is_measured_by_its_files(server: HubServer, tmp_path: Path) -> None:
    folder = put_model(tmp_path / "large")
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(11 * GB)
    assert "needs 11 GB" in Refused(spec(str(folder))).error(str(folder))
    assert server.paths == []


def test_an_embedding_model_is_not_told_to_become_a_chat_model(server: HubServer) -> None:
    said = Refused(spec("maker/large-embedding")).error("maker/large-embedding")
    assert "needs 30 GB" in said
    assert "smaller" not in said


def test_a_model_that_is_spread_over_two_machines_needs_half_of_its_size_on_each(server: HubServer) -> None:
    assert Refused(spec(LARGE), ranks=2).begins(LARGE)


def test_a_repository_of_unknown_size_is_left_to_the_load(server: HubServer) -> None:
    assert Refused(spec("maker/unknown")).begins("maker/unknown")
