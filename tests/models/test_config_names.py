"""Configurations under the names of both generations of transformers; what they do to networks is in tests/layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.models.config_names import with_both_names
from mlx_backend.models.files import context_length, read_json

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e4, "partial_rotary_factor": [0.5]},
        {"rope_theta": 1e4, "partial_rotary_factor": float("inf")},
        {"rope_theta": 1e4, "partial_rotary_factor": float("nan")},
        {"rope_theta": 1e4, "rope_type": "yarn", "factor": 10**400},
        {"full_attention": {"partial_rotary_factor": {}}, "sliding_attention": {"rope_theta": "much"}},
    ],
    ids=["list", "infinity", "not a number", "huge factor", "objects"],
)
def test_values_that_make_no_sense_are_left_as_they_are(rope: dict[str, Any]) -> None:
    config = {"rope_parameters": rope, "head_dim": 64, "max_position_embeddings": 4096}
    assert with_both_names(config)["head_dim"] == 64
    assert context_length(config) == 4096


def test_a_file_that_is_nested_too_deeply_for_those_who_follow_it_is_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    for _ in range(400):
        config = {"text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(tmp_path / "config.json")
