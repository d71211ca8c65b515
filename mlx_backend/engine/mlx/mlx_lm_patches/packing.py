"""Networks that run several sequences as one row of tokens (`patch_for_packing`; `--no-packing` leaves it out).

mlx-lm can batch sequences only as equally long rows. To run prompt chunks and replies as one row without padding
(packed_forward.py says what that gains), attention and rotary embeddings must know which token belongs to which
sequence. mlx-lm has no hook for it. So the attention function, where a model's module imported it by name, and the
classes of its rotary embeddings are replaced by ones that act on `PackedLayer` and `TokenPositions` and pass every
other call on unchanged; so is what some networks count positions with. A model that does not fit is run without
packing: batch_trial.py tries each one when it is loaded.

A recurrent layer goes on from a state, and attention may have masks and positions of its own kind (MLA). So the
classes of all modules that take a cache or a mask are replaced, too. One that is given a `PackedLayer` runs once for
all tokens, with convolutions and the functions that go on from a state (`_CORES`) run segment by segment: projections
are then computed at once. A module that cannot run so, as it raises when it is tried, is itself run segment by segment
(`Packing`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base, rope_utils

from mlx_backend.engine.mlx.mlx_lm_patches.attention import MAX_SINGLE_QUERIES, compute_attention
from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import RUNNING, BySegment, PackedLayer, TokenPositions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


_ATTENTION = "scaled_dot_product_attention"


class Packing:
    """How the modules of a network run when it is packed: those of the kinds `by_segment` for each segment by itself.

    A kind is added when a module of it raises, and it was nothing inside that module that did.
    """

    def __init__(self) -> None:
        self.by_segment: set[type[Any]] = set()
        self.with_states: set[type[Any] | None] = set()

    @property
    def repeats_recurrence(self) -> bool:
        """Whether recurrent layers run for each segment by itself, so that their weights are read for each."""
        return not self.by_segment.isdisjoint(self.with_states)

    @property
    def kinds(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of `by_segment` and of `with_states`: what `settle` goes by."""
        by_segment, with_states = (
            tuple(sorted(_name(kind) for kind in kinds if kind is not None))
            for kinds in (self.by_segment, self.with_states)
        )
        return by_segment, with_states

    def restore(self, network: Any, by_segment: Sequence[str], with_states: Sequence[str]) -> None:
        """Have a patched network run as one did before whose `kinds` these were. Raises KeyError if it has no such."""
        modules = (module for module in network.modules() if vars(module).get("packing") is self)
        kinds: dict[str, type[Any]] = {}
        for module in modules:
            kind: Any = type(module).__base__
            kinds[_name(kind)] = kind
        self.by_segment |= {kinds[name] for name in by_segment}
        self.with_states |= {kinds[name] for name in with_states}
        self.settle(network)

    def settle(self, network: Any) -> None:
        """Once a network has run packed, have modules run as before that need not know of it: most attention."""
        needed = {*self.by_segment, *self.with_states}
        for module in network.modules():
            kind = type(module).__base__
            if vars(module).get("packing") is self and kind not in needed:
                module.__class__ = kind
                del vars(module)["packing"]


def patch_for_packing(network: Any) -> Packing:
    """Make a network's modules accept `PackedLayer`, if they can; other calls work as before."""
    modules = network.modules()
    known = (vars(module)["packing"] for module in modules if "packing" in vars(module))
    packing: Packing = next(known, None) or Packing()
    for module in modules:
        kind: Any = type(module)
        if kind in _PACKABLE:
            module.__class__ = _PACKABLE[kind]
        elif _has_latents(kind):
            module.__class__ = _attending_to_latents(kind)
        elif _has_latents(kind.__base__) and kind is _attending_to_latents(kind.__base__):
            continue  # it has been replaced before
        elif module is not network and not _GIVEN.isdisjoint(inspect.signature(kind.__call__).parameters):
            module.__class__ = _taking_packed(kind)
            vars(module)["packing"] = packing
    for name in {type(module).__module__ for module in modules}:
        module = sys.modules[name]
        if getattr(module, _ATTENTION, None) is base.scaled_dot_product_attention:
            setattr(module, _ATTENTION, _attention)
        for core, axis in _CORES.items():
            function = getattr(module, core, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                setattr(module, core, _by_segment(function, axis))
        for library in _COUNTED_WITH.get(name.removeprefix("mlx_lm.models."), ()):
            if isinstance(numbers := vars(module)[library], ModuleType):
                setattr(module, library, _counting(numbers))
    return packing


_COUNTED_WITH = {"gpt2": ("mx",), "gpt_bigcode": ("mx", "np"), "llama4": ("mx",)}
"""By modules of mlx-lm that count positions from a cache's offset, the libraries with which they do."""


def _counting(library: ModuleType) -> Any:
    """Return MLX or NumPy as such a module sees it: the tokens of a packed run are counted already."""

    def arange(start: Any, *given: Any) -> Any:
        return start.of_tokens if isinstance(start, TokenPositions) else library.arange(start, *given)

    def array(value: Any) -> Any:
        return value if isinstance(value, TokenPositions) else library.array(value)

    return SimpleNamespace(**{**vars(library), "arange": arange, "array": array})


_GIVEN = {"cache", "mask"}
"""Parameters of modules that get what is not the same for all segments."""


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def _taking_packed(kind: Any) -> type[Any]:
    has_no_cache = "cache" not in inspect.signature(kind.__call__).parameters

    def call(self: Any, *given: Any, **named: Any) -> Any:
        passed, packing = (*given, *named.values()), vars(self)["packing"]
        packed = next((each for each in passed if type(each) is PackedLayer), None)
        if packed is None and (kind in packing.by_segment or has_no_cache):
            packed = next((each.packed for each in passed if type(each) is BySegment), None)
        if packed is None:
            return kind.__call__(self, *given, **named)
        run, by_segment = functools.partial(kind.__call__, self), packing.by_segment
        if kind in by_segment:
            if packed.num_states:
                packing.with_states.add(kind)
            return packed.run_by_segment(run, given, named)
        packed.innermost, number = kind, len(by_segment)
        try:
            output = packed.run_at_once(run, given, named)
        except Exception:
            if len(by_segment) == number:  # it was nothing in it
                by_segment.add(kind)
            raise
        if packed.num_states:
            packing.with_states.add(packed.innermost)
        return output

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@functools.cache
def _attending_to_latents(kind: Any) -> type[Any]:
    """Return a class of multi-head latent attention (MLA) that accepts `PackedLayer`.

    mlx-lm's own computes with what caches return before it calls the attention function. And it spreads the latents of
    all tokens over the heads for more than one query, where it takes far less to project a few queries onto them.
    """

    def call(self: Any, inputs: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows, length, _ = inputs.shape
        if not isinstance(cache, PackedLayer):
            if cache is None or rows > 1 or not 1 < length <= MAX_SINGLE_QUERIES:
                return kind.__call__(self, inputs, mask, cache)  # type: ignore[no-any-return]  # mlx-lm has no types
            cache, mask = PackedLayer([cache], [(1, length)], cache.offset), [mask]
        queries = (
            self.q_proj(inputs)
            if self.q_lora_rank is None
            else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs)))
        )
        queries = queries.reshape(1, length, self.num_heads, -1).swapaxes(1, 2)
        queries, rotated = mx.split(queries, [self.qk_nope_head_dim], axis=-1)
        latents, keys = mx.split(self.kv_a_proj_with_mqa(inputs)[:, None], [self.kv_lora_rank], axis=-1)
        rotated, keys = self.rope(rotated, cache.offset), self.rope(keys, cache.offset)
        fetched = cache.update_and_fetch(self.kv_a_layernorm(latents), keys)

        def attend(
            queries: mx.array, latents: mx.array, keys: mx.array, own: Any, scale: float, mask: Any, _: None
        ) -> mx.array:
            queries, rotated = mx.split(queries, [self.qk_nope_head_dim], axis=-1)
            scores = (rotated * scale) @ keys.swapaxes(-1, -2)
            if mask is not None:
                scores = mx.where(mask, scores, mx.finfo(scores.dtype).min)
            attention = functools.partial(compute_attention, cache=own, scale=scale, mask=scores, sinks=None)
            if queries.shape[2] <= MAX_SINGLE_QUERIES:
                return self.unembed_out(attention(self.embed_q(queries), latents, latents))  # type: ignore[no-any-return]
            return attention(queries, self.embed_q(latents, transpose=False), self.unembed_out(latents))

        heads = mx.concatenate([queries, rotated], axis=-1)
        output = cache.attend(attend, heads, *fetched, self.scale, mask, None)
        projected: mx.array = self.o_proj(output.swapaxes(1, 2).reshape(1, length, -1))
        return projected

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


_LATENT_ATTENTION = {"deepseek_v3": "DeepseekV3Attention", "glm4_moe_lite": "Glm4MoeLiteAttention"}
"""By modules of mlx-lm, the classes whose `__call__` is the one that is replaced."""


def _has_latents(kind: type[Any]) -> bool:
    module = kind.__module__.removeprefix("mlx_lm.models.")
    return _LATENT_ATTENTION.get(module) == kind.__name__ and kind is getattr(
        sys.modules[kind.__module__], kind.__name__
    )


def _packable(rotation: type[Any]) -> type[Any]:
    def call(self: Any, heads: mx.array, offset: Any = 0, **named: Any) -> Any:
        if isinstance(offset, TokenPositions):
            heads = heads.swapaxes(0, 2)
            if offset.axes is None:
                return rotation.__call__(self, heads, offset=offset.of_tokens, **named).swapaxes(0, 2)
            time, row, column = (
                rotation.__call__(self, heads, offset=each, **named).swapaxes(0, 2)
                for each in offset.of_tokens
            )
            return mx.where(offset.axes == 0, time, mx.where(offset.axes == 1, row, column))
        return rotation.__call__(self, heads, offset=offset, **named)

    return type(rotation.__name__, (rotation,), {"__call__": call, "__module__": rotation.__module__})


def _convolve(self: Any, inputs: mx.array) -> mx.array:
    """Convolve each segment's tokens after those before them, of which a network has put zeros before all."""
    packed = RUNNING.get()
    if packed is None:
        return nn.Conv1d.__call__(self, inputs)  # type: ignore[no-any-return]  # MLX's modules have no types
    kept = inputs.shape[1] - packed.num_tokens
    if kept < 1:
        raise TypeError("a convolution keeps no tokens")

    def run(before: mx.array | None, own: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        [tokens] = own
        if before is None:
            before = mx.zeros((tokens.shape[0], kept, tokens.shape[2]), tokens.dtype)
        tokens = mx.concatenate([before, tokens], axis=1)
        return nn.Conv1d.__call__(self, tokens), mx.contiguous(tokens[:, -kept:])

    return packed.run_core(run, [inputs[:, kept:]], 1)


_CORES = {"gated_delta_update": 1, "ssm_update": 1, "recurrent_gla": 2}
"""Functions of mlx-lm that go on from a state, and the axis of tokens in what they take and return."""
_STATE_NAMES = ("state", "h")


def _by_segment(function: Callable[..., Any], axis: int) -> Callable[..., Any]:
    """Return a function that goes on from each segment's own state."""
    signature = inspect.signature(function)
    [state] = (name for name in _STATE_NAMES if name in signature.parameters)

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        packed = RUNNING.get()
        if packed is None:
            return function(*given, **named)
        arguments = signature.bind(*given, **named).arguments
        of_tokens = {
            name: value
            for name, value in arguments.items()
            if isinstance(value, mx.array) and value.ndim > 2 and value.shape[axis] == packed.num_tokens
        }

        def run(before: mx.array | None, own: Sequence[mx.array]) -> Any:
            return function(**{**arguments, **dict(zip(of_tokens, own, strict=True)), state: before})

        return packed.run_core(run, [*of_tokens.values()], axis), None

    return call


_PACKABLE = {
    rotation: _packable(rotation)
    for rotation in (
        nn.RoPE,
        rope_utils.Llama3RoPE,
        rope_utils.ProportionalRoPE,
        rope_utils.SuScaledRoPE,
        rope_utils.YarnRoPE,
    )
}
_PACKABLE[nn.Conv1d] = type(
    "Conv1d", (nn.Conv1d,), {"__call__": _convolve, "__module__": nn.Conv1d.__module__}
)


@functools.wraps(base.scaled_dot_product_attention)
def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if isinstance(cache, PackedLayer):
        return cache.attend(compute_attention, queries, keys, values, scale, mask, sinks)
    return compute_attention(queries, keys, values, cache, scale, mask, sinks)
