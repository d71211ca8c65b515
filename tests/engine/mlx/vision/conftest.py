"""A tiny model of each family that sees, and an engine that it is loaded in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from seeing import Seeing
from vision_models import WRITERS, SeeingModel

from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.vision.tower import Vision

if TYPE_CHECKING:
    from collections.abc import Iterator

    import mlx.core as mx

    from mlx_backend.engine.images import PreparedImage


@pytest.fixture(scope="module", params=sorted(WRITERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    name: str = request.param
    return WRITERS[name](tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def seeing(folder: SeeingModel) -> Iterator[Seeing]:
    engine = load_engine(folder.folder, cache_bytes=0)
    yield Seeing(folder, engine)
    engine.stop()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The digests of the images that the vision tower has seen."""
    digests: list[bytes] = []
    compute = Vision._compute

    def noting(self: Vision, image: PreparedImage) -> mx.array:
        digests.append(image.digest)
        return compute(self, image)

    monkeypatch.setattr(Vision, "_compute", noting)
    return digests
