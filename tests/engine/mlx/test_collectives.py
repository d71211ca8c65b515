"""Processes that share a model have to take the same steps, whatever each was started with."""

from dataclasses import fields

from mlx_backend.engine.mlx.collectives import SHARED_OPTIONS
from mlx_backend.models.engine_options import EngineOptions

REFUSED = {"engine", "adapters", "adapter", "draft_model", "cache_folder", "cache_folder_bytes"}
AGREED = {"memory_bytes"}  # the rank with the least decides
OWN = {"allow_download", "trust_remote_code", "wired", "blas"}  # how a rank loads its part
ALONE = {"dequantize"}  # what is not done by several ranks
QUEUE = {"max_concurrent", "max_waiting"}  # which rank 0 alone has


def test_every_option_is_alike_on_all_ranks_or_changes_no_step() -> None:
    groups = [set(SHARED_OPTIONS), REFUSED, AGREED, OWN, ALONE, QUEUE]
    assert sorted(name for group in groups for name in group) == sorted(
        field.name for field in fields(EngineOptions)
    )
