"""Tiny models of mlx-lm's architectures with random weights; the same ones every time.

A configuration is made from the fields of an architecture's own `ModelArgs` and the values in architecture_fields.py.
What architectures there are is asked of the installed mlx-lm.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from architecture_fields import OWN, SIZES, VARIANTS, VOCABULARY
from engine_models import byte_level, write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

_TEXT_CLASSES = ("TextArgs", "TextConfig", "TextModelArgs")


def architectures() -> list[str]:
    """Return the architectures of the installed mlx-lm: its modules that define a model.

    They are read and not imported, because importing one may end the process.
    """
    import mlx_lm.models

    paths = {
        found.name: Path(folder) / f"{found.name}.py"
        for folder in mlx_lm.models.__path__
        for found in pkgutil.iter_modules([folder])
    }
    texts = {name: path.read_text() for name, path in paths.items() if path.is_file()}
    return sorted(name for name, text in texts.items() if re.search(r"^class Model\b", text, re.MULTILINE))


def config_of(name: str, sizes: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the configuration of a tiny model of an architecture or a variant; `sizes` replace fields."""
    architecture, changes = VARIANTS.get(name, (name, {}))
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    own = OWN.get(architecture, {}) | changes
    config = (
        {"model_type": architecture, "vocab_size": VOCABULARY} | _sizes(module.ModelArgs) | own | dict(sizes)
    )
    if "text_config" in own:
        config["text_config"] = _text_config(module, own["text_config"]) | dict(sizes)
    return config


def _sizes(arguments: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(arguments)}
    return {name: value for name, value in SIZES.items() if name in names}


def _text_config(module: ModuleType, own: dict[str, Any]) -> dict[str, Any]:
    """Complete the fields of a model's text part, which is another architecture or has a class of its own.

    That class is in the model's module, or in the one whose model it inherits from.
    """
    if "model_type" in own:
        return config_of(own["model_type"]) | own
    modules = [module, *(sys.modules[each.__module__] for each in module.Model.__mro__)]
    arguments = next(getattr(each, name) for each in modules for name in _TEXT_CLASSES if hasattr(each, name))
    return {"model_type": "text"} | _sizes(arguments) | own


def write(
    folder: Path,
    name: str,
    *,
    seed: int = 3,
    dtype: str = "float32",
    bits: int | None = None,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a tiny model with a tokenizer; its `sanitize` is expected to leave MLX's own names alone.

    `bits` quantises the layers that can be, in groups of 32. `sizes` are fields for one that is less tiny.
    """
    import mlx.core as mx
    from mlx import nn
    from mlx.utils import tree_flatten, tree_unflatten

    config = config_of(name, sizes) | {"eos_token_id": []}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    network = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    larger = [(path, _larger(path, value)) for path, value in tree_flatten(network.parameters())]
    network.update(tree_unflatten(larger))
    network.set_dtype(getattr(mx, dtype))
    if bits is not None:
        nn.quantize(network, 32, bits, class_predicate=_can_quantise)
        config |= {"quantization": {"group_size": 32, "bits": bits}}
    write_tokenizer(folder, byte_level())
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def _can_quantise(_: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def _larger(path: str, weight: Any) -> Any:
    """Make attention less flat than it is when a network is initialised, and let no bias or sink be zero."""
    import mlx.core as mx

    if not mx.issubdtype(weight.dtype, mx.floating):  # packed
        return mx.random.randint(0, 1 << 30, weight.shape).astype(weight.dtype)
    if path.endswith("signs"):  # +1 and -1 only
        return weight
    if weight.ndim > 1 and mx.any(weight != 0).item():
        return weight * 1.5
    return weight + 0.1 * mx.random.normal(weight.shape).astype(weight.dtype)
