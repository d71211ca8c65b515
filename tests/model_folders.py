"""Model folders and Hugging Face downloads, as far as a catalogue looks at them."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.errors import UnknownModel

LONG_AGO = 1_600_000_000
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_model(folder: Path, weights: int = 10) -> Path:
    """Write the files of a model that a catalogue looks at."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "model.safetensors").write_bytes(bytes(weights))
    return folder


def put_snapshot(repository: str, parts: Iterable[str] = ("model.safetensors",)) -> Path:
    """Write a download as the Hugging Face library does: files are links to blobs."""
    repository_folder = Path(constants.HF_HUB_CACHE, "models--" + repository.replace("/", "--"))
    folder = repository_folder / "snapshots" / COMMIT
    for new in (folder, repository_folder / "refs", repository_folder / "blobs"):
        new.mkdir(parents=True)
    (repository_folder / "refs" / "main").write_text(COMMIT)
    for part in ("config.json", *parts):
        (repository_folder / "blobs" / part).write_text("{}")
        (folder / part).symlink_to(repository_folder / "blobs" / part)
    return folder


def age(root: Path) -> None:
    """Set all modification times to long ago."""
    for path in (root, *root.rglob("*")):
        os.utime(path, (LONG_AGO, LONG_AGO))


def names(catalogue: Catalogue) -> list[str]:
    return [spec.name for spec in catalogue.models()]


def refusal(catalogue: Catalogue, name: str) -> str:
    with pytest.raises(UnknownModel) as caught:
        catalogue.find(name)
    return str(caught.value)


class ManualTime:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
