"""A model's layers with an implementation for many rows, tried in its networks when it is loaded.

What such layers are is in layers/many_rows.py. Knows no requests.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_backend.engine.mlx.arrays import coarsest_dtype
from mlx_backend.engine.mlx.fresh_caches import run_first
from mlx_backend.layers.many_rows import use_many_rows_layers
from mlx_backend.layers.unread_outputs import find_unread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.layers.many_rows_state import ManyRows
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

TRIED_TOKENS = 64  # enough that mlx-lm sorts the rows of a mixture by expert
FEW_TOKENS = 2  # where it does not matter which implementation layers use

type NetworkAndCaches = tuple[Any, Callable[[], LayerCaches]]  # a network, and what makes empty caches for it


def load_many_rows(
    answering: Sequence[NetworkAndCaches], drafting: Sequence[NetworkAndCaches], options: EngineOptions
) -> ManyRows | None:
    """Replace the layers for which another implementation is faster with many rows; return None if none was replaced.

    `answering` are the networks of the model and its adapters, the model's first; `drafting` is that of a draft model.
    """
    networks = [network for network, _ in (*answering, *drafting)]
    many_rows = use_many_rows_layers(networks, coarsest_dtype(networks[0]), dequantize=options.dequantize)
    if many_rows is None:
        return None
    tokens = mx.zeros((1, TRIED_TOKENS), mx.int32)
    try:
        with many_rows.always():
            for network, make_caches in answering:
                layers = make_caches()
                run_first(network, tokens, layers, options)
                mx.eval(_contents(layers))
            for network, make_caches in drafting:
                mx.eval(_filled(network, make_caches, tokens))
    except Exception as error:  # such as a network that is compiled, and cannot wait for its layers
        log.warning("Weights are not dequantised for long prompts, and rows not grouped by expert: %r", error)
        many_rows.is_enabled = False
        return None
    for each in answering:
        try:
            number = find_unread(many_rows, partial(_filled, *each, tokens[:, :FEW_TOKENS]))
        except Exception as error:
            log.debug("Every layer is computed in every chunk of a prompt: %r", error)
        else:
            log.debug("%d layers are left out of chunks that do not end a prompt.", number)
    return many_rows


def _filled(network: Any, make_caches: Callable[[], LayerCaches], tokens: mx.array) -> list[mx.array]:
    """Run a network on tokens, and return what its caches hold then."""
    layers = make_caches()
    network(tokens, cache=layers)
    return _contents(layers)


def _contents(layers: LayerCaches) -> list[mx.array]:
    values = (value for _, value in tree_flatten([layer.state for layer in layers]))
    return [value for value in values if isinstance(value, mx.array)]
