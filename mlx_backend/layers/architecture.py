"""From a model's folder to its network: mlx-lm's classes, given a configuration whose names they know.

mlx-lm ignores every name of a config.json that its architecture does not have. So a configuration is read here, with
the names of both generations of transformers. A model may come with Python code of its own that defines the network
(`model_file`), which runs only if that is allowed.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx_lm.utils
from mlx.utils import tree_flatten

from mlx_backend.errors import EngineError, first_line
from mlx_backend.models.config_names import with_both_names
from mlx_backend.models.folders import MLX_VERSION, WEIGHTS, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType

_HEAD: Final = re.compile(r"(?:.+\.)?mtp\w*\..+")
_PROJECTION: Final = ".eh_proj.weight"  # what only a layer that is a head has
_OLD_LAYER_TYPES: Final = {"linear_attention": "mamba", "full_attention": "attention"}
"""What transformers 5 calls a type of layer, and what it was called before in networks with both."""


def load_network(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    change: Callable[[type[Any]], type[Any]] = lambda network: network,
) -> tuple[Any, dict[str, Any]]:
    """Load a network lazily; return it and its configuration.

    `overrides` replace what the configuration says; `change` makes the class that is used of the architecture's own.
    """
    mlx_lm.utils.glob = WeightGlob
    written = mlx_lm.utils.load_config(folder)
    network_class, arguments_class = network_classes(folder, written, trust_remote_code=trust_remote_code)
    changed = change(network_class)
    try:
        network, config = mlx_lm.utils.load_model(
            folder,
            lazy=True,
            model_config={**readable(written, network_class), "model_file": None, **(overrides or {})},
            get_model_classes=lambda config: (_without_heads(changed), arguments_class),
        )
        network.__class__ = changed
    except (ValueError, KeyError, RuntimeError) as error:
        if (method := _foreign_quantisation(written)) is None:
            raise
        raise EngineError(
            f"The model {folder.name!r} is quantised in a way that is not read here ({method}): {MLX_VERSION}. What "
            f"was found: {first_line(error)}."
        ) from error
    return network, config


def _without_heads(network_class: type[Any]) -> type[Any]:
    """Return a class whose networks leave out the weights of an MTP head, which not all of mlx-lm's do."""

    class WithoutHeads(network_class):  # type: ignore[misc]  # a class all the same
        def load_weights(self, weights: Sequence[tuple[str, Any]], strict: bool = True) -> Any:
            own = {name for name, _ in tree_flatten(self.parameters())}
            heads = weights_of_head(name for name, _ in weights)
            rest = [(name, value) for name, value in weights if name in own or name not in heads]
            return super().load_weights(rest, strict=strict)

    WithoutHeads.__module__ = network_class.__module__
    return WithoutHeads


def weights_of_head(names: Iterable[str]) -> set[str]:
    """Return which of the names of weights are those of an MTP head, or of a layer that is one."""
    every = set(names)
    layers = tuple(name.removesuffix(_PROJECTION) + "." for name in every if name.endswith(_PROJECTION))
    return {name for name in every if _HEAD.fullmatch(name) or name.startswith(layers)}


def readable(config: Mapping[str, Any], network_class: type[Any]) -> dict[str, Any]:
    """Return a configuration under the names that an architecture may read."""
    found = with_both_names(config, _aliases)
    if "text_config" in found:
        found["text_config"] = _text_config(found)
    quantised = found.get("quantization_config")
    if (
        isinstance(quantised, dict)
        and {"bits", "group_size"} <= quantised.keys()
        and "quant_method" not in quantised
    ):
        found.setdefault("quantization", quantised)  # as MLX writes it, under the other name
    if isinstance(types := found.get("layer_types"), list):
        source = _source(sys.modules[network_class.__module__])
        found["layer_types"] = [
            old if f'"{each}"' not in source and f'"{old}"' in source else each
            for each in types
            for old in [_OLD_LAYER_TYPES.get(each, each)]
        ]
    return found


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


class WeightGlob:
    """Stands for the module `glob` in mlx-lm and mlx-vlm: a pattern of weights finds the files that are a model's."""

    @staticmethod
    def glob(pattern: str) -> list[str]:
        """Return the files that a pattern finds."""
        folder, _, names = pattern.rpartition("/")
        if names in (WEIGHTS, "*.safetensors"):
            return [str(file) for file in weight_files(Path(folder))]
        return glob.glob(pattern)  # noqa: PTH207 - mlx-lm's


def _foreign_quantisation(config: Mapping[str, Any]) -> str | None:
    """Return how another program than MLX has quantised a model; None if none has."""
    told = config.get("quantization_config") or _text_config(config).get("quantization_config")
    if "quantization" in config or not isinstance(told, dict):
        return None
    words = (told.get(key) for key in ("quant_method", "format", "quant_algo"))
    return " ".join(str(each) for each in words if each) or None


def network_classes(
    folder: Path, config: dict[str, Any], *, trust_remote_code: bool
) -> tuple[type[Any], type[Any]]:
    """Return the classes of a network and of its arguments: mlx-lm's, or those of the code that a model comes with.

    Raises EngineError if that code is not allowed, or not there.
    """
    if (name := config.get("model_file")) is None:
        mlx_lms_own = inspect.signature(mlx_lm.utils.load_model).parameters["get_model_classes"].default
        try:
            found: tuple[type[Any], type[Any]] = mlx_lms_own(config)
        except AttributeError:  # a module of mlx-lm's that is no architecture
            raise ValueError(f"Model type {config['model_type']} not supported") from None
        return found
    if not trust_remote_code:
        raise EngineError(
            f"The model {folder.name!r} comes with Python code of its own; --trust-remote-code runs it, if you trust "
            f"its makers ({name} defines the network)."
        )
    file = folder / str(name)
    if not file.is_file():
        raise EngineError(
            f"The config.json of {folder.name!r} says that {name} defines its network, and there is no such file in "
            f"{folder}: fetch it again."
        )
    # Classes are looked up by their module's name, by dataclasses as by this engine.
    unique = "mlx_model_" + hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    spec = importlib.util.spec_from_file_location(unique, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[unique] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Model, module.ModelArgs


@cache
def _aliases(model_type: str) -> Mapping[str, str]:
    """Return the names of an architecture's settings in transformers, by what else they are called."""
    from transformers import CONFIG_MAPPING

    try:
        return getattr(CONFIG_MAPPING[model_type], "attribute_map", None) or {}
    except Exception:  # of whatever kind: what it cannot import says nothing here
        return {}


@cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""
