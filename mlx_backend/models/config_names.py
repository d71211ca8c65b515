"""One configuration under the names of both generations of transformers, so that every reader finds its own.

transformers 5 saves what earlier versions had at the top (`rope_theta`, `rope_scaling`, `partial_rotary_factor`, …) in
`rope_parameters`: one table, or one for each type of layer. It also lists `layer_types` where a period was given. Each
of mlx-lm's architectures reads the names that were usual when it was written, and takes a default in silence where it
finds none. Where both are given, what counts is what counts in transformers. Knows no architecture by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    # Gets a model_type; returns the other names of its settings, by the names that transformers saves.
    type Aliases = Callable[[str], Mapping[str, str]]

_THETAS: Final = ("rope_theta", "rotary_emb_base")
_PARTIALS: Final = ("partial_rotary_factor", "rotary_pct")
_MAIN_LAYERS: Final = ("full_attention", "main")
_LAYER_THETAS: Final = {
    "sliding_attention": ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta"),
    "compress": ("compress_rope_theta",),
}
"""What the `rope_theta` of one type of layer was called before."""
_PERIODS: Final = ("sliding_window_pattern", "full_attention_interval")
"""Names for the number of layers of which the last attends to everything."""


def with_both_names(config: Mapping[str, Any], aliases: Aliases = lambda _model_type: {}) -> dict[str, Any]:
    """Return a configuration with its settings under the old names too, and under the new ones."""
    found = dict(config)
    if isinstance(text := found.get("text_config"), dict):
        found["text_config"] = with_both_names(text, aliases)
    for old, new in aliases(str(found.get("model_type"))).items():
        for missing, given in ((old, new), (new, old)):
            if found.get(missing) is None and found.get(given) is not None:
                found[missing] = found[given]
    _add_rope(found)
    _add_period(found)
    return found


def _add_rope(config: dict[str, Any]) -> None:
    given = config.get("rope_parameters")
    if not isinstance(given, dict):
        given = _from_old_names(config)
    by_layer = {name: _with_type(each) for name, each in given.items() if isinstance(each, dict) and each}
    of_all = {name: value for name, value in given.items() if not isinstance(value, dict)}
    scaling = config.get("rope_scaling")
    main = _first(by_layer, _MAIN_LAYERS) or of_all or next(iter(by_layer.values()), {})
    main = _with_type({**main, **(scaling if isinstance(scaling, dict) else {})})
    if not main:
        return
    if not by_layer:
        by_layer = dict.fromkeys(_layer_types(config), main)
    config["rope_parameters"] = {**by_layer, **main}
    scaled = next((each for each in (main, *by_layer.values()) if each["type"] != "default"), None)
    config["rope_scaling"] = scaled or config.get("rope_scaling")
    _set(config, _THETAS, main.get("rope_theta"))
    for layer_type, names in _LAYER_THETAS.items():
        _set(config, names, by_layer.get(layer_type, {}).get("rope_theta"))
    share = main.get("partial_rotary_factor")
    if all(each.get("partial_rotary_factor") == share for each in by_layer.values()):
        _set(config, _PARTIALS, share)
        if isinstance(share, int | float) and 0 <= share <= 1 and (size := _head_size(config)):
            config.setdefault("rotary_dim", int(size * share))
    if (length := main.get("original_max_position_embeddings")) is not None:
        config.setdefault("original_max_position_embeddings", length)


def _from_old_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what earlier versions of transformers had at the top, as version 5 has it."""
    theta = next((config[name] for name in _THETAS if isinstance(config.get(name), int | float)), None)
    if theta is None:
        return {}
    share = next((config[name] for name in _PARTIALS if config.get(name) is not None), None)
    of_all = {"rope_theta": theta} | ({} if share is None else {"partial_rotary_factor": share})
    own = {
        layer_type: of_all | {"rope_theta": config[name]}
        for layer_type, names in _LAYER_THETAS.items()
        for name in names
        if config.get(name) is not None
    }
    return {"full_attention": of_all} | own if own else of_all


def _with_type(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with its type under both of its names; mlx-lm checks that a factor is no integer."""
    if not rope:
        return {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor")
    if isinstance(factor, int) and abs(factor) < 2**53:
        rope = {**rope, "factor": float(factor)}
    return {**rope, "rope_type": kind, "type": kind}


def _add_period(config: dict[str, Any]) -> None:
    """Add how often a layer attends to everything, which some readers know in place of a list of types."""
    types = _layer_types(config)
    if not types:
        return
    period = (types.index("full_attention") if "full_attention" in types else len(types)) + 1
    if all((each == "full_attention") == (at % period == 0) for at, each in enumerate(types, start=1)):
        for name in _PERIODS:
            if config.get(name) is None:
                config[name] = period


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    types = config.get("layer_types")
    return [each for each in types if isinstance(each, str)] if isinstance(types, list) else []


def _head_size(config: Mapping[str, Any]) -> int:
    size, width, heads = (config.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(size, int):
        return size
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else 0


def _first(tables: Mapping[str, dict[str, Any]], names: Iterable[str]) -> dict[str, Any] | None:
    return next((tables[name] for name in names if name in tables), None)


def _set(config: dict[str, Any], names: Iterable[str], value: Any) -> None:
    if value is not None:
        config.update(dict.fromkeys(names, value))
