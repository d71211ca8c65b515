"""Families of mlx-vlm, each with a tiny model of random weights: prompts and replies are those of mlx-vlm's own generation.

A handful here; `make matrix` tries every family (tests/engine/mlx/vision/vlm_matrix.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from vision_models import needs_mlx_vlm
from vlm_reference import compare

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_mlx_vlm


@pytest.mark.parametrize("family", ["glm_ocr", "smolvlm", "lfm2_vl", "internvl"])
def test_a_family_that_the_batch_does_not_know_answers_as_mlx_vlm_does(family: str, tmp_path: Path) -> None:
    compare(tmp_path, family)
