"""From a model's folder to its network: mlx-lm's classes, given a configuration whose names they know.

mlx-lm ignores every name of a config.json that its architecture does not have. So a configuration is read here, with
the names of both generations of transformers, and what no part of the network has taken is said in the log. A model may
come with Python code of its own that defines the network (`model_file`), which runs only if that is allowed.
"""

from __future__ import annotations

import copy
import glob
import hashlib
import importlib.util
import inspect
import json
import logging
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx_lm.utils
from mlx.utils import tree_flatten

from mlx_backend.errors import EngineError, first_line
from mlx_backend.models.config_names import (
    SAME_SETTING,
    says_nothing,
    with_both_names,
    with_old_names,
)
from mlx_backend.models.folders import MLX_VERSION, WEIGHTS, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

log = logging.getLogger(__name__)

_OF_TRAINING: Final = re.compile(
    r"_.*|.*(dropout|_pdrop|_coef|_loss\w*|aux\w*|jitter\w*|initializer_range|init_std|_token_id|_token_index)|use_cache"
    r"|pretraining_tp|vocab_size|max_position_embeddings|(text|vision|audio)_config|quantization_config|(use_)?mtp\w*"
    r"|num_(nextn_predict|mtp)\w*|cache_implementation|time_step_\w+|architectures|model_type|bos\w*|eos\w*|pad\w*"
)
"""Names of settings that do not change which token a trained network finds next."""
_TELLING: Final = re.compile(
    r"hidden_act(ivation)?|activation_function|\w*softcap\w*|logits?_scal(e|ing)|\w+_multiplier|query_pre_attn_scalar"
    r"|sliding_window|use_qk_norm|qk_layernorm|clip_qkv|alibi|no_rope_layers|use_bidirectional_attention|scale_(emb|depth)"
    r"|routed_scaling_factor|norm_topk_prob"
)
_TELLING_ROTATION: Final = re.compile(
    r"rope_(theta|scaling|local_\w+)|partial_rotary_factor|rotary_(pct|dim|emb_base)"
)
"""Names that change it, in any architecture that has them."""
_ACTIVATIONS: Final = {
    **dict.fromkeys(("silu", "swish"), frozenset(["silu", "swiglu"])),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), frozenset(["gelu_approx", "geglu"])),
}
"""What mlx-lm calls an activation, by the name in a configuration."""
_HEAD: Final = re.compile(r"(?:.+\.)?mtp\w*\..+")
_PROJECTION: Final = ".eh_proj.weight"  # what only a layer that is a head has
_MAX_VALUE: Final = 40
"""Characters of a value that is shown in the log."""
_OLD_LAYER_TYPES: Final = {"linear_attention": "mamba", "full_attention": "attention"}
"""What transformers 5 calls a type of layer, and what it was called before in networks with both."""


def load_network(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] | None = None,
    change: Callable[[type[Any]], type[Any]] = lambda network: network,
    also_read: Collection[str] = (),
) -> tuple[Any, dict[str, Any]]:
    """Load a network lazily; return it and its configuration.

    `overrides` replace what the configuration says; `change` makes the class that is used of the architecture's own.
    `also_read` are names in the configuration that the caller sees to.
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
    if ignored := sorted(set(_ignored(written, network, also_read))):
        log.warning(
            "mlx-lm does not know %s of the config.json in %s: if replies are worse than elsewhere, this may be why.",
            ", ".join(ignored),
            folder,
        )
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
def _transformers_config(model_type: str) -> Any:
    """Return the class of transformers for an architecture's configuration; None if it has none."""
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]
    except Exception:  # of whatever kind: what it cannot import says nothing here
        return None


def _aliases(model_type: str) -> Mapping[str, str]:
    return getattr(_transformers_config(model_type), "attribute_map", None) or {}


def _completed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what transformers makes of the settings of a configuration that are given; none if it cannot."""
    its_log = logging.getLogger("transformers")
    level = its_log.level
    try:
        its_log.setLevel(logging.ERROR)  # it misses the settings that are not given
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = _transformers_config(str(config.get("model_type"))).from_dict(copy.deepcopy(dict(config)))
            found: Mapping[str, Any] = json.loads(json.dumps(made.to_dict(), default=str))
    except Exception:  # of whatever kind: it checks what it is given
        return {}
    finally:
        its_log.setLevel(level)
    return with_old_names(found)


def _ignored(config: Mapping[str, Any], network: Any, also_read: Collection[str]) -> Iterator[str]:
    """Yield what a configuration says that no part of its network reads, unless it follows from what is read.

    A name that stands in the source of one of the network's classes counts as read.
    """
    classes = {base for module in network.modules() for base in type(module).__mro__ if base is not object}
    modules = {each.__module__ for each in classes if not each.__module__.startswith("mlx.")}
    known = {word for name in modules for word in re.findall(r"\w+", _source(sys.modules[name]))} | {
        *also_read
    }
    for given in (config, _text_config(config)):
        model_type = str(given.get("model_type"))
        rest = _completed(
            {name: value for name, value in given.items() if name in known or name == "model_type"}
        )
        # In transformers a rotation counts if the architecture has one.
        telling = [_TELLING, _TELLING_ROTATION] if not rest or "rope_theta" in rest else [_TELLING]
        same = [*SAME_SETTING, *({old, new} for old, new in _aliases(model_type).items())]
        for name, value in with_old_names(given).items():
            others = {each for names in same if name in names for each in names} or {name}
            if (
                (name in rest or any(each.fullmatch(name) for each in telling))
                and not _OF_TRAINING.fullmatch(name)
                and known.isdisjoint(others)
                and value != rest.get(name)
                and not says_nothing(name, value, given)
                and not (isinstance(value, str) and known & _ACTIVATIONS.get(value, {value}))
            ):
                shown = repr(value)
                yield f"{name} ({shown if len(shown) <= _MAX_VALUE else shown[:_MAX_VALUE] + '…'})"


@cache
def _source(module: ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""
