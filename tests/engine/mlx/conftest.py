"""Fixtures that several tests of the engine on MLX share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_stores import Stores
from engine_models import write_model, write_qwen

from mlx_backend.engine.mlx import batch


@pytest.fixture(scope="session", autouse=True)
def steps_as_on_a_gpu() -> Iterator[None]:
    """Have steps started ahead, as on the machines that models are served on; test_steps_on_a_cpu.py has the others."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(batch, "computes_ahead", lambda: True)
        yield


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with sliding windows of 32 tokens, whose replies never end by themselves."""
    return write_model(tmp_path_factory.mktemp("gpt-oss"), eos_token_id=[])


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the vocabulary of `windowed` that generates something else: nearly every draft of it is wrong."""
    return write_model(tmp_path_factory.mktemp("other"), seed=4, eos_token_id=[])


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model that attends to everything."""
    return write_qwen(tmp_path_factory.mktemp("qwen"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path / "kept")
    yield stores
    stores.close()
