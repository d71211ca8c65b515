"""Which models see, by their files: on the page about images, and in what the server says of a folder."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_backend.engine.images import ImageSupport
from mlx_backend.engine.mlx.vision import families
from mlx_backend.engine.mlx.vision.families import image_support

SEEING = {"vision_config": {}, "image_token_id": 5}


@pytest.mark.parametrize(
    ("config", "installed", "support"),
    [
        ({"model_type": "gemma3", **SEEING}, True, ImageSupport.AVAILABLE),
        ({"model_type": "gemma3", **SEEING}, False, ImageSupport.NOT_INSTALLED),
        ({"model_type": "newest_vl", **SEEING}, True, ImageSupport.UNKNOWN_FAMILY),
        ({"model_type": "gemma3"}, True, ImageSupport.NONE),  # converted without its vision tower
        ({"model_type": "llama"}, True, ImageSupport.NONE),
        ({}, True, ImageSupport.NONE),
    ],
)
def test_a_models_files_say_whether_it_can_be_shown_images(
    config: dict[str, Any], installed: bool, support: ImageSupport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "is_installed", lambda: installed)
    assert image_support(config) is support
