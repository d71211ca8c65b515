"""How large a model is, from its folder's files or from its repository's listing, before anything is loaded."""

from pathlib import Path

import pytest
from hub_server import hub

from mlx_backend.models.folders import adapter_bytes, folder_bytes, head_files, repository_bytes, weight_files

FILES: dict[str, int | None] = {
    "config.json": 900,
    "model-00001-of-00002.safetensors": 5_000_000_000,
    "model-00002-of-00002.safetensors": 3_000_000_000,
    "model.safetensors.index.json": 40_000,
    "original/model.safetensors": 9_000_000_000,
    "consolidated.safetensors": 9_000_000_000,
    "pytorch_model.bin": 16_000_000_000,
}


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def test_a_repository_is_as_large_as_the_files_that_would_be_loaded() -> None:
    with hub({"maker/large": FILES}) as server:
        assert repository_bytes("maker/large", server.url) == 8_000_000_000
        assert server.requests_for("maker/large") == ["GET /api/models/maker/large"], (
            "one request, and no file"
        )


def test_what_the_listing_does_not_say_is_unknown() -> None:
    with hub({"maker/empty": {}, "maker/mirrored": {"model.safetensors": None}}) as server:
        assert repository_bytes("maker/empty", server.url) is None
        assert repository_bytes("maker/mirrored", server.url) is None
        assert repository_bytes("maker/missing", server.url) is None
    assert repository_bytes("maker/large", server.url) is None, "nobody listens there any more"


def test_without_a_network_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with hub({"maker/large": FILES}) as server:
        assert repository_bytes("maker/large", server.url) is None
        assert server.paths == []


PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEAD = ("model-mtp-00001-of-00002.safetensors", "model-mtp-00002-of-00002.safetensors")


def files_in(folder: Path, *names: str) -> list[str]:
    for name in names:
        (folder / name).write_bytes(b"")
    return [file.name for file in weight_files(folder)]


def test_a_head_in_parts_is_not_taken_for_the_model_next_to_it(tmp_path: Path) -> None:
    assert files_in(tmp_path, *PARTS, *HEAD) == [*PARTS]
    assert [file.name for file in head_files(tmp_path)] == [*HEAD]
    (tmp_path / PARTS[1]).unlink()
    assert files_in(tmp_path) == [], "a whole head does not stand for a part of the model that is missing"


def test_a_head_alone_in_a_folder_is_what_is_loaded(tmp_path: Path) -> None:
    assert files_in(tmp_path, *HEAD) == [*HEAD]


def test_a_folder_and_an_adapter_are_as_large_as_their_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    assert folder_bytes(tmp_path) is None
    assert adapter_bytes(tmp_path) is None
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(100 * number))
    (tmp_path / "adapters.safetensors").write_bytes(bytes(7))
    assert folder_bytes(tmp_path) == 300
    assert adapter_bytes(tmp_path) == 7
