"""A configuration reaches mlx-lm's architectures under the names that they read, whichever transformers wrote it."""

from __future__ import annotations

import copy
import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from architecture_fields import VARIANTS
from architectures import architectures, config_of, write
from transformers import CONFIG_MAPPING

from mlx_backend.layers.architecture import load_network, readable

if TYPE_CHECKING:
    from pathlib import Path

UNUSUAL: dict[str, Any] = {
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), 54_321.0),
    **dict.fromkeys(("rope_local_base_freq", "rope_local_theta"), 1_234.0),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), 0.75),
}
"""In place of values that mlx-lm might assume."""
LEFT_OUT = {
    "olmo",  # importing it wants another package
    "apertus",  # transformers scales the rotation where nothing says so
    "gpt_oss",  # the same
    "laguna",  # an old form was never written
    *("gemma4", "gemma4_text", "gemma4_text, experts"),  # the same
    "mimo_v2_flash",  # the same
    "muse_glimmer",  # its configuration is another model's in transformers
    "minicpm3",  # the tiny one scales by a type that has no name
    "bailing_hybrid",  # not the same model in transformers
    "step3p5",  # the same
    "phi3, longrope",  # the tiny one's factors do not fit
    "bitnet",  # it runs on Metal only
    "muse_spark",  # the same
}


def old_form(name: str) -> dict[str, Any]:
    def unusual(config: dict[str, Any]) -> dict[str, Any]:
        return {
            key: unusual(value) if isinstance(value, dict) else UNUSUAL.get(key, value)
            for key, value in config.items()
        }

    found: dict[str, Any] = json.loads(json.dumps(unusual(config_of(name))))
    return found


def as_transformers_5_writes_it(config: dict[str, Any]) -> dict[str, Any]:
    made = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
    found: dict[str, Any] = json.loads(json.dumps(made.to_dict(), default=str))
    return found


def completed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The old form with what transformers adds to it, but without the new names for what it says."""
    found = {key: value for key, value in new.items() if key != "rope_parameters"} | old
    if isinstance(old.get("text_config"), dict):
        found["text_config"] = completed(old["text_config"], new["text_config"])
    return found


def logits(config: dict[str, Any]) -> Any:
    """What a network with random weights makes of a few tokens; the weights are the same ones every time."""
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(1)
    network = module.Model(module.ModelArgs.from_dict(readable(config, module.Model)))
    return network(mx.array([[1, 5, 9, 77, 3] * 8]))


NAMES = [
    name
    for name in [*architectures(), *VARIANTS]
    if name not in LEFT_OUT and VARIANTS.get(name, (name,))[0] in CONFIG_MAPPING
]


@pytest.mark.parametrize("name", NAMES)
def test_what_transformers_5_writes_computes_what_the_form_before_it_does(name: str) -> None:
    old = old_form(name)
    new = as_transformers_5_writes_it(old)
    assert mx.array_equal(logits(new), logits(completed(old, new)))


def with_config(folder: Path, change: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text()) | change
    kept = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_layers_of_each_type_get_their_own_rotation(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "gemma3", "gemma3_text", sizes={"rope_theta": 54_321.0, "rope_local_base_freq": 1_234.0}
    )
    tokens = mx.array([[1, 5, 9, 77, 3] * 8])
    before = load_network(folder)[0](tokens)
    scaled = {"rope_type": "linear", "factor": 4}
    rope: dict[str, dict[str, Any]] = {
        "full_attention": {"rope_theta": 54_321.0},
        "sliding_attention": {"rope_theta": 1_234.0},
    }
    with_config(folder, {"rope_theta": ..., "rope_local_base_freq": ..., "rope_parameters": rope})
    assert mx.array_equal(load_network(folder)[0](tokens), before)
    rope["full_attention"] |= scaled
    with_config(folder, {"rope_parameters": rope})
    assert not mx.array_equal(load_network(folder)[0](tokens), before)
