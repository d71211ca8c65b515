"""Everything this engine replaces in mlx-lm, or takes from under its public surface, with the reason for each.

Tried with mlx-lm 0.32.2 on mlx 0.32.4. A test compares the digests in `KNOWN_SOURCES` with the installed source,
so that an upgrade is a decision and not an accident.

1. Packed attention (`patch_for_packing`; `--no-packing` leaves it out). mlx-lm can batch sequences only as equally long
   rows. To run prompt chunks and replies as one row without padding (packed_forward.py says what that gains), attention
   and rotary embeddings must know which token belongs to which sequence. mlx-lm has no hook for it. So the attention
   function, where a model's module imported it by name, and the classes of its rotary embeddings are replaced by ones
   that act on this module's `PackedLayer` and `TokenPositions` and pass every other call on unchanged. A model that
   does not fit is run without packing: batch_trial.py tries each one when it is loaded. What images need of a network
   comes in by the same two: masks with blocks that attend in both directions, and positions in two dimensions. What
   Qwen3-VL's first layers get more of an image is added by replaced classes of those layers (`patch_for_added`), and
   the images' embeddings come from a replaced class of what embeds tokens (`patch_for_embeddings`): half of mlx-lm's
   networks take none as an argument.

   A recurrent layer goes on from a state, and attention may have masks and positions of its own kind (MLA). So the
   classes of all modules that take a cache are replaced, too. One that is given a `PackedLayer` runs once for all
   tokens, with convolutions and the functions that go on from a state (`_CORES`) run segment by segment: projections
   are then computed at once. A module that cannot run so, as it raises when it is tried, is itself run segment by
   segment (`Packing`).

2. Rewinding a sliding window (`RewindableRotatingKVCache`). Speculative decoding and checkpoints inside a chunk take
   back the last tokens of a step. mlx-lm's `RotatingKVCache` refuses that once the window is full, although it still
   holds them; to do it, its private write index `_idx` must be set.

3. Shrinking a sliding window (`is_in_order`, `holds_every_token`, `set_write_index`). After a chunk of S tokens a
   rotating cache holds window - 1 + S of them; a stored prefix needs only the window. `_idx` says whether they are in
   order, and whether none has left it yet.

4. Many rows (layers/many_rows.py). The classes of quantised layers, and of a mixture's experts, are replaced by ones
   with an implementation of their own for many rows.

5. Rows of merged caches (`MergedKVCache`, `MergedRotatingKVCache`). mlx-lm keeps the rows' padding and lengths in
   arrays that every step changes. To take a row out, or to drop rows, its `BatchKVCache` and `BatchRotatingKVCache`
   read them back, and so wait for the step that is being computed: once for every layer, whenever a reply ends. But all
   of it follows from the lengths that the rows had when they were merged, which are plain numbers. Subclasses know
   these. They use `_idx`, `_offset`, `rotated` and `_temporal_order`, and replace `merge` of one row, which mlx-lm
   first copies into a batch of one, `filter` and `extract`.

6. What mlx-lm's tokenizer wraps (`wrapped_tokenizer`, `python_template`). Conversations are rendered by templates, but
   for some models by a Python function of mlx-lm's, which its wrapper has in `_chat_template`, or by the tokenizer's
   own method, which the class of its `_tokenizer` tells.

7. Which files are a model's weights (layers/architecture.py). mlx-lm loads whatever in a folder looks like weights, and
   no file in a folder with a bracket in its name. What it finds them with, the `glob` of its `utils`, is replaced;
   so is mlx-vlm's, which otherwise loads every safetensors file there is.

8. Keys and values that are shared (`GrowingKVCache`, `SharedArrays`). mlx-lm's `KVCache` grows by 256 tokens, and
   copies all that it holds each time; so does a write to arrays that a stored prefix refers to. A turn of some hundred
   tokens after a long context would copy that twice. Here both the cache that appends and the stored prefixes refer
   to one object that holds the arrays, so that appending writes in place; and room grows with the length.

9. Quantised keys and values (`SharedArrays` with a `quantization`, `DequantizedArray`, `_attend`). mlx-lm's
   `QuantizedKVCache` gives attention tuples, which only its own function for them reads: not one with sinks (gpt-oss),
   nor layers that compute attention by themselves (MLA). And for a prompt's chunk that function holds a number for each
   pair of tokens, in every head. Here the cache gives arrays, dequantised when they are computed, so that every network
   runs on it as on any other and prompts take MLX's fused attention; for a few tokens, as of a reply, attention reads
   what is held as it is, where MLX can. Files hold mlx-lm's own kind.

One more thing rests on mlx-lm's sources and is in `KNOWN_SOURCES` too: how the cache classes behave. All their state is
in instance attributes, `merge`, `extract`, `filter` and `extend` make batches and take them apart, and
`save_prompt_cache` lays files out in a certain way.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import inspect
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base, rope_utils
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_backend.device.mlx import prepares_for_lengths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mlx_lm.tokenizer_utils import TokenizerWrapper

KNOWN_SOURCES: dict[str, str] = {
    "mlx.nn.Conv1d": "8a6ffc53d31f365c",
    "mlx.nn.QuantizedLinear": "bd5bdef45d3be81e",
    "mlx.nn.RoPE": "627d3750e5aab4b7",
    "mlx_lm.models.base.create_attention_mask": "a8ebacf963b3f96e",
    "mlx_lm.models.base.scaled_dot_product_attention": "8deba4a8a8fb4e29",
    "mlx_lm.models.cache.ArraysCache": "57f70ab445ac06a4",
    "mlx_lm.models.cache.BatchKVCache": "474e6fe46261a118",
    "mlx_lm.models.cache.BatchRotatingKVCache": "ce5df245ade3e814",
    "mlx_lm.models.cache.CacheList": "ccf928f229ddf1df",
    "mlx_lm.models.cache.KVCache": "9e33b1620e278398",
    "mlx_lm.models.cache.QuantizedKVCache": "d24f51c8c3ec664c",
    "mlx_lm.models.cache.RotatingKVCache": "0ccede170f3532a2",
    "mlx_lm.models.cache._BaseCache": "bbc0249f16c8c226",
    "mlx_lm.models.cache.load_prompt_cache": "1a64604fd5bd03f4",
    "mlx_lm.models.cache.make_prompt_cache": "ae8ee8ce5ac69f2a",
    "mlx_lm.models.cache.save_prompt_cache": "30590484ea78ffe4",
    "mlx_lm.models.deepseek_v3.DeepseekV3Attention": "2fdb470c022448ec",
    "mlx_lm.models.gated_delta.gated_delta_update": "261212fc0a75471f",
    "mlx_lm.models.glm4_moe_lite.Glm4MoeLiteAttention": "82ac3bbe3e1c0104",
    "mlx_lm.models.rope_utils.Llama3RoPE": "0308fc565df55065",
    "mlx_lm.models.rope_utils.ProportionalRoPE": "98abc69972f2c90a",
    "mlx_lm.models.rope_utils.SuScaledRoPE": "9b6b1c87968a0be7",
    "mlx_lm.models.rope_utils.YarnRoPE": "0d55b251820dfcf6",
    "mlx_lm.models.ssm.ssm_update": "f5b9ba938efe5a86",
    "mlx_lm.models.switch_layers.QuantizedSwitchLinear": "831d2e1eed0af008",
    "mlx_lm.models.switch_layers.SwitchLinear": "7316d3764459dff4",
    "mlx_lm.tokenizer_utils.TokenizerWrapper": "99b30b4093dc627d",
    "mlx_lm.utils.load_model": "7ee59ae12366f86b",
}


def changed_sources() -> dict[str, str]:
    """Return the names in `KNOWN_SOURCES` whose installed source is another one, with the digests of that."""
    return {name: found for name, known in KNOWN_SOURCES.items() if (found := _source_digest(name)) != known}


def _source_digest(name: str) -> str:
    """Return the digest of a function's or class's source, "missing" if there is none of this name."""
    module, _, attribute = name.rpartition(".")
    try:
        source = inspect.getsource(getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError):
        return "missing"
    return hashlib.sha256(source.encode()).hexdigest()[:16]


# -- 1. packed attention ----------------------------------------------------------------------------------------

_ATTENTION = "scaled_dot_product_attention"
MAX_SINGLE_QUERIES = 16
"""The most tokens of a segment for each of which attention is computed by itself."""


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """The position of each token in its own sequence ([tokens]); stands for the `offset` of a cache.

    With images they may be by time, row and column ([3, tokens]): `axes` says by which of these each element of a head
    is rotated ([size]).
    """

    of_tokens: mx.array
    axes: mx.array | None = None


class BySegment(list[Any]):
    """What each segment of a packed run has of its own, such as a mask. Networks only pass it on.

    `packed` are the caches of a layer in that run.
    """

    def __init__(self, packed: PackedLayer, values: Iterable[Any]) -> None:
        super().__init__(values)
        self.packed = packed


class PackedLayer:
    """One layer's caches of all segments of a packed run, in the order of their tokens.

    Stands for one cache where a network expects it. `shapes` are the segments' rows, and tokens in each row. `blocks`
    are for each segment None, or the number of the block that each token belongs to, -1 for none ([tokens]): in a block
    tokens attend in both directions, as in an image of Gemma 3. `shifts` are what is added to the positions of each
    segment's rows ([rows]), and is in `positions` already. `added` is what is added to the layer's output
    ([tokens, width]), as for an image of Qwen3-VL; `patch_for_added` has to be called before. With `single_queries`
    the attention of a few tokens, as of drafts, is computed token by token: MLX's CUDA backend plans that of several
    anew for every number of keys, which takes longer than many steps, but that of one only once for 256 of them.
    """

    lengths = None  # of rows that are padded, as states' caches have them: segments are not

    def __init__(
        self,
        caches: Sequence[Any],
        shapes: Sequence[tuple[int, int]],
        positions: TokenPositions,
        blocks: Sequence[mx.array | None] | None = None,
        added: mx.array | None = None,
        *,
        shifts: Sequence[mx.array | None] | None = None,
        single_queries: bool = False,
    ) -> None:
        self.offset = positions
        self.shapes = shapes
        self.added = added
        self.num_tokens = sum(rows * length for rows, length in shapes)
        self._caches = caches
        self._blocks = blocks or [None] * len(caches)
        self._shifts = shifts or [None] * len(caches)
        self._single_queries = single_queries
        self.innermost: type[Any] | None = None  # the kind of module that ran last, which may be in others
        self._num_cores = 0  # that have run

    def __getitem__(self, index: int) -> Any:
        """Return a part of the caches; None for a state, which only what runs segment by segment sees.

        Raises TypeError for one of which nobody would know that it was read.
        """
        if isinstance(self._caches[0], CacheList):
            part = copy.copy(self)
            part._caches = [each[index] for each in self._caches]
            return part
        if _RUNNING.get() is not self:
            raise TypeError("states are read where no cores can be told apart")
        self._caches[0][index]  # raises what ends an iteration
        return None

    def __setitem__(self, index: int, state: object) -> None:
        """Do nothing: `run_core` has kept each segment's state."""

    def advance(self, _: int) -> None:
        """Do nothing: there is no padding."""

    @property
    def state(self) -> list[Any]:
        """What the caches hold."""
        return [cache.state for cache in self._caches]

    @property
    def num_states(self) -> int:
        """How many states the layer has; 0 if it has keys and values."""
        return len(self._caches[0].cache) if isinstance(self._caches[0], ArraysCache) else 0

    def make_mask(self, _: int, **named: Any) -> Any:
        """Return each segment's own mask. None where states go on from one token to the next."""
        if self.num_states:
            return None
        return BySegment(
            self,
            (
                _mask(cache, length, blocks, **named)
                for cache, (_, length), blocks in zip(self._caches, self.shapes, self._blocks, strict=True)
            ),
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[list[mx.array], list[mx.array]]:
        """Append to every segment's cache its own keys and values, and return all that each cache holds."""
        fetched = [
            cache.update_and_fetch(*pair)
            for cache, pair in zip(
                self._caches,
                zip(_split(keys, self.shapes, 2), _split(values, self.shapes, 2), strict=True),
                strict=True,
            )
        ]
        return [pair[0] for pair in fetched], [pair[1] for pair in fetched]

    def attend(
        self,
        attention: Callable[..., mx.array],
        queries: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        scale: float,
        mask: list[Any],
        sinks: mx.array | None,
    ) -> mx.array:
        """Compute attention for every segment by itself, just as it would be computed alone."""
        segments = zip(_split(queries, self.shapes, 2), keys, values, self._caches, mask, strict=True)

        def compute(q: mx.array, k: Any, v: Any, cache: Any, own: Any) -> mx.array:
            return attention(q, k, v, cache, scale, own, sinks)

        attend = functools.partial(_attend_singly, compute) if self._single_queries else compute
        return _join([attend(*segment) for segment in segments], 2)

    def run_at_once(self, run: Callable[..., Any], given: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run a module for all tokens. Raises TypeError if it goes on from a state otherwise than by its cores."""
        self._num_cores = 0
        with _running(self):
            output = run(*given, **named)
        if self._num_cores != self.num_states:
            raise TypeError("states are used by something else than the known cores")
        return output

    def run_by_segment(self, run: Callable[..., Any], given: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run a module for every segment by itself, with its own part of what is given, just as it would be alone."""
        parts = [self._parts(each) for each in given]
        named_parts = {name: self._parts(each) for name, each in named.items()}
        with _running(None):
            outputs = [
                run(*(each[at] for each in parts), **{name: each[at] for name, each in named_parts.items()})
                for at in range(len(self.shapes))
            ]
        self._num_cores = self.num_states
        return self._together(outputs)

    def run_core(
        self, run: Callable[[Any, Sequence[mx.array]], Any], arrays: Sequence[mx.array], axis: int
    ) -> mx.array:
        """Run the next core of a layer for every segment, with its state and its part of the arrays' tokens.

        A core returns its output and the next state. A layer runs its cores in the order of its states. Adjacent
        segments of one token, as replies are, are rows of one batch: a core takes many operations, and copying the
        states for it fewer.
        """
        number = self._num_cores
        self._num_cores += 1
        batches = self._core_batches(number)
        shapes = [(rows, length) for _, rows, length in batches]
        outputs = []
        for (caches, _, _), own in zip(
            batches, zip(*(_split(each, shapes, axis) for each in arrays), strict=True), strict=True
        ):
            states = [each[number] for each in caches]
            output, after = run(joined(states), own)
            outputs.append(output)
            ends = list(accumulate(each.shape[0] for each in states[:-1]))
            for cache, state in zip(caches, mx.split(after, ends) if ends else [after], strict=True):
                cache[number] = state
        return _join(outputs, axis)

    def _core_batches(self, number: int) -> list[tuple[list[Any], int, int]]:
        """Return the caches that a core is run with at once, each time with their rows and the tokens of a row."""
        batches = list[tuple[list[Any], int, int]]()
        was_reply = False
        for cache, (rows, length) in zip(self._caches, self.shapes, strict=True):
            is_reply = length == 1 and cache[number] is not None
            if is_reply and was_reply:
                caches, rows_before, _ = batches[-1]
                batches[-1] = [*caches, cache], rows_before + rows, 1
            else:
                batches.append(([cache], rows, length))
            was_reply = is_reply
        return batches

    def _parts(self, value: Any) -> Sequence[Any]:
        """Return what each segment gets in place of something that a module is given."""
        if isinstance(value, PackedLayer):
            return [value._view(at) for at in range(len(self.shapes))]
        if isinstance(value, BySegment):
            return value
        if isinstance(value, tuple):  # such as keys and values that layers share
            return list(zip(*map(self._parts, value), strict=True))
        if isinstance(value, TokenPositions):
            parts = _split(value.of_tokens, self.shapes, -1)
            return [
                part if rows > 1 else TokenPositions(part, value.axes)
                for part, (rows, _) in zip(parts, self.shapes, strict=True)
            ]
        if isinstance(value, mx.array) and value.ndim in (2, 3) and value.shape[:2] == (1, self.num_tokens):
            return _split(value, self.shapes, 1)
        return [value] * len(self.shapes)

    def _view(self, at: int) -> Any:
        """Return a segment's cache as a module that runs it by itself has to see it."""
        cache, shift, blocks = self._caches[at], self._shifts[at], self._blocks[at]
        if isinstance(cache, ArraysCache):
            return cache
        if self.offset.axes is not None:
            raise TypeError("positions with rows and columns are only possible in packed attention")
        return cache if shift is None and blocks is None else LayerView(cache, shift, blocks)

    def _together(self, outputs: Sequence[Any]) -> Any:
        """Return what a module returned for each segment as if it had run once."""
        [first, *_] = outputs
        if isinstance(first, tuple):
            return tuple(self._together(each) for each in zip(*outputs, strict=True))
        if isinstance(first, mx.array) and first.ndim == 3:
            return _join(outputs, 1)
        return BySegment(self, outputs)


def _split(tokens: mx.array, shapes: Sequence[tuple[int, int]], axis: int) -> list[mx.array]:
    """Split an array with all tokens on an axis into [rows, ..., length, ...] for every segment."""
    ends = list(accumulate(rows * length for rows, length in shapes[:-1]))  # of all but the last
    segments = mx.split(tokens, ends, axis=axis) if ends else [tokens]
    return [
        segment.swapaxes(0, axis) if rows > 1 else segment
        for segment, (rows, _) in zip(segments, shapes, strict=True)
    ]


def _join(segments: Sequence[mx.array], axis: int) -> mx.array:
    """Join what `_split` splits. Only rows of one token are batched."""
    return joined([each.swapaxes(0, axis) if each.shape[0] > 1 else each for each in segments], axis=axis)


_RUNNING: ContextVar[PackedLayer | None] = ContextVar("_RUNNING", default=None)
"""The caches of the module that is being run for all tokens at once."""


@contextmanager
def _running(packed: PackedLayer | None) -> Iterator[None]:
    before = _RUNNING.set(packed)
    try:
        yield
    finally:
        _RUNNING.reset(before)


class LayerView:
    """A layer's cache as a network that is not run packed sees it.

    `shift` is added to the positions of each row's tokens ([rows]), and in `blocks`, as of a PackedLayer's segment,
    tokens attend in both directions.
    """

    def __init__(self, cache: Any, shift: mx.array | None, blocks: mx.array | None) -> None:
        self._cache = cache
        self._shift = shift
        self._blocks = blocks

    @property
    def offset(self) -> Any:
        """The positions of the rows' next tokens."""
        return self._cache.offset if self._shift is None else self._cache.offset + self._shift

    def make_mask(self, length: int, **named: Any) -> Any:
        """Return the mask of the next tokens."""
        return _mask(self._cache, length, self._blocks, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _mask(cache: Any, length: int, blocks: mx.array | None, **named: Any) -> Any:
    if blocks is None:
        return cache.make_mask(length, **named)
    window = named.get("window_size") or getattr(cache, "max_size", None)
    return _with_blocks(cache.make_mask(length, **{**named, "return_array": True}), blocks, window)


def _with_blocks(mask: mx.array | None, blocks: mx.array, window: int | None) -> mx.array | None:
    """Return a mask of the last tokens ([tokens, keys]) in which those of one block see each other.

    Of those before it a token sees no more than the window has, as in transformers.
    """
    if mask is None:  # a single token sees all before it, and there is none after it
        return None
    together = (blocks[:, None] == blocks[None]) & (blocks[:, None] >= 0)
    if window is not None:
        places = mx.arange(blocks.size)
        together &= places[None] > places[:, None] - window
    earlier = mask.shape[-1] - blocks.size
    return mask | mx.pad(together, [(0, 0), (earlier, 0)])


def _attend_singly(
    compute: Callable[..., mx.array], queries: mx.array, keys: Any, values: Any, cache: Any, mask: Any
) -> mx.array:
    """Compute the attention of each of a few tokens by itself, where each sees all keys up to its own."""
    length = queries.shape[2]
    if not 1 < length <= MAX_SINGLE_QUERIES or not isinstance(mask, str) or not isinstance(keys, mx.array):
        return compute(queries, keys, values, cache, mask)
    ends = range(keys.shape[2] - length + 1, keys.shape[2] + 1)
    singles = zip(mx.split(queries, length, axis=2), ends, strict=True)
    return mx.concatenate(
        [compute(q, keys[:, :, :end], values[:, :, :end], cache, None) for q, end in singles], axis=2
    )


def joined(arrays: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Concatenate arrays; one alone is passed on, without an operation on the device."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)


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
        elif module is not network and "cache" in inspect.signature(kind.__call__).parameters:
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
    return packing


@functools.cache
def _taking_packed(kind: Any) -> type[Any]:
    def call(self: Any, *given: Any, **named: Any) -> Any:
        passed, packing = (*given, *named.values()), vars(self)["packing"]
        packed = next((each for each in passed if type(each) is PackedLayer), None)
        if packed is None and kind in packing.by_segment:  # it has no cache of its own
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


def patch_for_added(layers: Iterable[Any]) -> None:
    """Make a network's layers add to their outputs what `PackedLayer` says; other calls work as before."""
    for layer in layers:
        layer.__class__ = _adding(layer.__class__)


def patch_for_embeddings(network: Any) -> None:
    """Make a network take embeddings in place of tokens (`give_embeddings`); other calls work as before."""
    embedding = embedding_of(network)
    embedding.__class__ = _embedding_images(embedding.__class__)
    embedding.next_embeddings = _NextEmbeddings()


def give_embeddings(network: Any, embeddings: mx.array) -> None:
    """Have the next call of a network begin with these ([1, tokens, width]), whatever its tokens are."""
    embedding_of(network).next_embeddings.given = embeddings


def given_embeddings(embedding: Any) -> mx.array | None:
    """Return what was given to a network's module that embeds tokens, and not taken yet."""
    waiting: _NextEmbeddings | None = getattr(embedding, "next_embeddings", None)
    return waiting.given if waiting is not None else None


def embedding_of(network: Any) -> Any:
    """Return the module that embeds a network's tokens."""
    named = {name.rpartition(".")[2]: module for name, module in network.named_modules()}
    return named["embed_tokens"]


@dataclass(slots=True)
class _NextEmbeddings:
    given: mx.array | None = None  # in an object of its own, or it would be one of the module's weights


@functools.cache
def _embedding_images(kind: Any) -> type[Any]:
    def call(self: Any, tokens: mx.array) -> Any:
        given, self.next_embeddings.given = self.next_embeddings.given, None
        return kind.__call__(self, tokens) if given is None else given

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


@functools.cache
def _adding(kind: Any) -> type[Any]:
    def call(self: Any, hidden: mx.array, mask: Any = None, cache: Any = None) -> Any:
        output = kind.__call__(self, hidden, mask, cache)
        if isinstance(cache, PackedLayer) and cache.added is not None:
            output = output + cache.added
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
            attention = functools.partial(_attend, cache=own, scale=scale, mask=scores, sinks=None)
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
    packed = _RUNNING.get()
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
        packed = _RUNNING.get()
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
        return cache.attend(_attend, queries, keys, values, scale, mask, sinks)
    return _attend(queries, keys, values, cache, scale, mask, sinks)


# -- 2. rewinding a sliding window ------------------------------------------------------------------------------


class RewindableRotatingKVCache(RotatingKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """A sliding window from which the tokens of the last step can be taken back, all but one.

    After a step of S > 1 tokens mlx-lm's rotating cache holds the last `window - 1 + S` in order. Taking back S - 1 of
    them leaves the whole window of the token before.
    """

    @classmethod
    def of(cls, layer: Any) -> Any:
        """Return a rewindable cache with the same contents, or the layer itself if it is not a rotating cache."""
        if type(layer) is not RotatingKVCache:
            return layer
        ours = cls(layer.max_size, layer.keep)
        ours.__dict__.update(layer.__dict__)
        return ours

    def is_trimmable(self) -> bool:
        """Return True, which holds directly after a step of several tokens."""
        return True

    def trim(self, n: int) -> int:
        """Take back the last n tokens of the last step."""
        if n:
            self.keys: mx.array = self.keys[..., :-n, :]
            self.values: mx.array = self.values[..., :-n, :]
            self.offset -= n
            self._idx = self.keys.shape[2]
        return n


# -- 3. shrinking a sliding window ------------------------------------------------------------------------------


def is_in_order(layer: RotatingKVCache) -> bool:
    """Whether a cache that is not empty holds its tokens in order, as a prefill chunk leaves them."""
    return bool(layer._idx == layer.keys.shape[2])


def holds_every_token(layer: RotatingKVCache) -> bool:
    """Whether no token has left a window yet, so that all are in order from the first."""
    return bool(layer._idx == layer.offset)


def set_write_index(layer: RotatingKVCache, index: int) -> None:
    """Say where the next token goes, after the keys and values were replaced."""
    layer._idx = index


# -- 5. rows of merged caches -----------------------------------------------------------------------------------


class MergedKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """The caches of several rows. Each row ends where all do, and begins after its padding."""

    keys: Any
    values: Any
    offset: mx.array
    left_padding: mx.array

    def __init__(self, left_padding: Sequence[int]) -> None:
        super().__init__(list(left_padding))
        self._paddings = list(left_padding)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """Return the caches of several sequences as one batch's, in their order."""
        [first, *others] = caches
        if all(each.empty() for each in caches):
            return cls([0] * len(caches))
        if others:
            merged: Self = super().merge(caches)
            return merged
        alone = cls([0])
        alone.keys, alone.values = first.keys[..., : first.offset, :], first.values[..., : first.offset, :]
        alone.offset = mx.array([first.offset])
        alone._idx = first.offset
        return alone

    def extend(self, other: Any) -> None:
        """Add the rows of another."""
        end = max(self._idx, other._idx)
        paddings = [each + end - rows._idx for rows in (self, other) for each in rows._paddings]
        super().extend(other)
        self._paddings = paddings

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep some rows, and of their padding what the longest does not need."""
        rows = list(batch_indices)
        paddings = [self._paddings[row] for row in rows]
        shift = min(paddings)
        self.offset, self.left_padding = self.offset[rows], self.left_padding[rows]
        if self.keys is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]
        if shift:
            if self.keys is not None:
                self.keys, self.values = self.keys[..., shift:, :], self.values[..., shift:, :]
            self.left_padding = self.left_padding - shift
            self._idx -= shift
        self._paddings = [each - shift for each in paddings]

    def extract(self, idx: int) -> Any:
        """Return a row's cache, of the model's own kind."""
        if self.keys is None:
            return GrowingKVCache()
        arrays = SharedArrays(_row(self, idx, self._paddings[idx], self._idx))
        return GrowingKVCache(arrays, self._idx - self._paddings[idx])


class MergedRotatingKVCache(BatchRotatingKVCache):  # type: ignore[misc]  # as above
    """The sliding windows of several rows."""

    keys: Any
    values: Any

    def __init__(self, max_size: int, left_padding: Sequence[int]) -> None:
        super().__init__(max_size, list(left_padding))
        # How many tokens each row has had more than `_offset` counts, which every step adds to.
        self._ahead = [-each for each in left_padding]

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Self:
        """Return the caches of several sequences as one batch's, in their order."""
        [first, *others] = caches
        if all(each.empty() for each in caches):
            return cls(first.max_size, [0] * len(caches))
        merged: Self
        if others:
            merged = super().merge(caches)
        else:
            merged, length = cls(first.max_size, [0]), first.size()
            merged.keys = first._temporal_order(first.keys)[..., -length:, :]
            merged.values = first._temporal_order(first.values)[..., -length:, :]
            merged.offset = mx.array([first.offset])
            merged._idx = merged._offset = length
        merged._ahead = [each.offset - merged._offset for each in caches]
        return merged

    def extend(self, other: Any) -> None:
        """Add the rows of another."""
        offsets = [rows._offset + each for rows in (self, other) for each in rows._ahead]
        super().extend(other)
        self._ahead = [each - self._offset for each in offsets]

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep some rows."""
        super().filter(list(batch_indices))
        self._ahead = [self._ahead[row] for row in batch_indices]

    def extract(self, idx: int) -> Any:
        """Return a row's cache, of the model's own kind."""
        own = RotatingKVCache(self.max_size)
        if self.keys is None:
            return own
        own.offset = self._offset + self._ahead[idx]
        length = min(own.offset, self.max_size)
        if self.rotated:  # the token that is overwritten next is the oldest
            row = slice(idx, idx + 1)
            own.keys, own.values = (
                mx.contiguous(
                    mx.concatenate([each[row, :, self._idx :], each[row, :, : self._idx]], axis=2)[
                        :, :, self.max_size - length :
                    ]
                )
                for each in (self.keys, self.values)
            )
        else:
            own.keys, own.values = _row(self, idx, self._idx - length, self._idx)
        own._idx = length
        return own


def _row(rows: Any, index: int, start: int, end: int) -> list[mx.array]:
    """Return copies of a row's keys and values: slices would hold on to all rows."""
    return [mx.contiguous(each[index : index + 1, :, start:end]) for each in (rows.keys, rows.values)]


def merge_rows(caches: Sequence[Any]) -> Any:
    """Return one layer's caches of several sequences as one batch's, in their order."""
    match caches[0]:
        case KVCache():
            return MergedKVCache.merge(caches)
        case RotatingKVCache():
            return MergedRotatingKVCache.merge(caches)
    return caches[0].merge(list(caches))


# -- 8. keys and values that are shared -------------------------------------------------------------------------

GROWTH_TOKENS = 256
"""The least number of tokens by which caches grow, as in mlx-lm."""


def allocated_tokens(tokens: int) -> int:
    """Return for how many tokens a cache that holds so many has room: up to an eighth more.

    To grow copies all, so that happens ever more rarely. There are few such numbers, as MLX's CUDA backend wants: it
    prepares for each number of keys.
    """
    step = max(GROWTH_TOKENS, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


class Quantization(NamedTuple):
    """How keys and values are quantised, by the names that MLX's functions take."""

    group_size: int
    bits: int


class SharedArrays:
    """One layer's keys and values, which one cache appends to while stored prefixes refer to their first tokens.

    `arrays` are the two; with a `quantization` they are the codes, scales and biases of the keys, and of the values.
    """

    __slots__ = ("arrays", "quantization")

    def __init__(self, arrays: Iterable[mx.array] = (), quantization: Quantization | None = None) -> None:
        self.arrays = list(arrays)
        self.quantization = quantization

    @property
    def keys(self) -> Any:
        """The keys, as they are held; None if nothing is."""
        return self._half(self.arrays[: len(self.arrays) // 2])

    @property
    def values(self) -> Any:
        """The values, as they are held; None if nothing is."""
        return self._half(self.arrays[len(self.arrays) // 2 :])

    @property
    def nbytes(self) -> int:
        """The bytes of all, room for more tokens included."""
        return sum(each.nbytes for each in self.arrays)

    @property
    def room(self) -> int:
        """For how many tokens there is room."""
        return self.arrays[0].shape[2] if self.arrays else 0

    def copy(self) -> SharedArrays:
        """Return arrays with the same contents, which are copied when either is written to."""
        return SharedArrays(map(copy.copy, self.arrays), self.quantization)

    def part(self, start: int, end: int) -> SharedArrays:
        """Return those of some tokens as slices: of what is here now, whatever is written later."""
        return SharedArrays((each[..., start:end, :] for each in self.arrays), self.quantization)

    def own_memory(self) -> SharedArrays:
        """Have slices hold only what they show."""
        self.arrays = [mx.contiguous(each) for each in self.arrays]
        return self

    def beginning(self, tokens: int) -> SharedArrays:
        """Return copies of those of the first tokens, with room for more."""
        own = SharedArrays((), self.quantization)
        own.write(0, self.part(0, tokens))
        return own

    def followed_by(self, others: SharedArrays) -> SharedArrays:
        """Return copies of these and of those of the tokens after them."""
        pairs = zip(self.arrays, others.arrays, strict=True)
        return SharedArrays((mx.concatenate([*pair], axis=2) for pair in pairs), self.quantization)

    def of(self, keys: mx.array, values: mx.array) -> SharedArrays:
        """Return keys and values as they would be held here."""
        if self.quantization is None:
            return SharedArrays((keys, values))
        codes = (*mx.quantize(keys, *self.quantization), *mx.quantize(values, *self.quantization))
        return SharedArrays(codes, self.quantization)

    def write(self, start: int, added: SharedArrays) -> None:
        """Write the keys and values of tokens from position `start`: in place, if nothing refers to the arrays."""
        end = start + added.room
        if end > self.room:
            more = allocated_tokens(end) - self.room
            room = [_zeros(each, more) for each in added.arrays]
            held = zip(self.arrays, room, strict=True)
            self.arrays = [mx.concatenate([*each], axis=2) for each in held] if self.arrays else room
        for each, new in zip(self.arrays, added.arrays, strict=True):
            each[..., start:end, :] = new

    def fetched(self, tokens: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the first tokens, as a network reads them."""
        held = self if tokens == self.room else self.part(0, tokens)
        if held.quantization is None:
            return held.keys, held.values
        return DequantizedArray.of(held.keys, held.quantization), DequantizedArray.of(
            held.values, held.quantization
        )

    def _half(self, arrays: Sequence[mx.array]) -> Any:
        if not arrays:
            return None
        return arrays[0] if self.quantization is None else tuple(arrays)


def _zeros(like: mx.array, tokens: int) -> mx.array:
    rows, heads, _, size = like.shape
    return mx.zeros((rows, heads, tokens, size), like.dtype)


def _parts(held: Any) -> Iterable[mx.array]:
    return [held] if isinstance(held, mx.array) else held


class AppendLease:
    """Lives as long as a cache that may write to its arrays."""


class GrowingKVCache(KVCache):  # type: ignore[misc]  # as above
    """A cache of all tokens, whose arrays stored prefixes may share, and with room in proportion to its length.

    Whether these are quantised only they know.
    """

    offset: int

    def __init__(
        self, arrays: SharedArrays | None = None, offset: int = 0, lease: AppendLease | None = None
    ) -> None:
        self.arrays = arrays or SharedArrays()
        self.offset = offset
        self.lease = lease or AppendLease()

    @classmethod
    def of(cls, layer: Any) -> Any:
        """Return such a cache with the same contents, or the layer itself if it is not one of all tokens."""
        if type(layer) is QuantizedKVCache:
            quantization = Quantization(layer.group_size, layer.bits)
            return cls(SharedArrays((*layer.keys, *layer.values), quantization), layer.offset)
        if type(layer) is not KVCache:
            return layer
        return cls(SharedArrays(() if layer.empty() else (layer.keys, layer.values)), layer.offset)

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are held quantised."""
        return self.arrays.quantization is not None

    @property
    def keys(self) -> Any:
        """The keys as they are held, and room for more."""
        return self.arrays.keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self.arrays = SharedArrays([*_parts(keys), *_parts(self.values)], self.arrays.quantization)

    @property
    def values(self) -> Any:
        """The values as they are held, and room for more."""
        return self.arrays.values

    @values.setter
    def values(self, values: Any) -> None:
        self.arrays = SharedArrays([*_parts(self.keys), *_parts(values)], self.arrays.quantization)

    @property
    def nbytes(self) -> int:
        """The bytes of the tokens that it holds."""
        return self.arrays.nbytes * self.offset // max(1, self.arrays.room)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append keys and values; return all."""
        self.append(self.arrays.of(keys, values))
        return self.keys_and_values()

    def append(self, added: SharedArrays) -> None:
        """Append keys and values as they are held."""
        self.arrays.write(self.offset, added)
        self.offset += added.room

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all, as a network reads them."""
        return self.arrays.fetched(self.offset)

    def to_file(self) -> Any:
        """Return a cache of a kind that mlx-lm reads from a file, with the same contents."""
        if self.arrays.quantization is None:
            return self
        stored = QuantizedKVCache(*self.arrays.quantization)
        stored.keys, stored.values, stored.offset = self.keys, self.values, self.offset
        return stored

    def reader(self) -> GrowingKVCache:
        """Return a cache on the same arrays, for which nothing is copied and which must not be written to."""
        return GrowingKVCache(self.arrays, self.offset, self.lease)


# -- 9. quantised keys and values -------------------------------------------------------------------------------


class DequantizedArray(mx.array):
    """Keys or values that are held as `codes`, scales and biases.

    It is computed only if something reads it, and what is made of it is a plain array. It may not be changed in place,
    which networks do with none that a cache returns.
    """

    codes: tuple[mx.array, mx.array, mx.array]
    quantization: Quantization

    @classmethod
    def of(cls, codes: tuple[mx.array, mx.array, mx.array], quantization: Quantization) -> Self:
        """Return what the codes stand for."""
        array = cls(mx.dequantize(*codes, *quantization))
        array.codes, array.quantization = codes, quantization
        return array

    def times(self, rows: mx.array, *, transpose: bool) -> mx.array:
        """Multiply rows with it, as it is held."""
        return mx.quantized_matmul(rows, *self.codes, transpose=transpose, **self.quantization._asdict())


def _attend(
    queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """Compute attention as mlx-lm does, but that of a few tokens on quantised keys and values as they are held.

    Not with CUDA: MLX's products with quantised matrices take no slices there, as keys with room for more are.
    """
    is_held = isinstance(keys, DequantizedArray) and isinstance(values, DequantizedArray)
    if is_held and queries.shape[2] <= MAX_SINGLE_QUERIES and not prepares_for_lengths():
        return _attend_quantized(queries, keys, values, scale, mask, sinks)
    attended: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks)
    return attended


def _attend_quantized(
    queries: mx.array,
    keys: DequantizedArray,
    values: DequantizedArray,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Compute attention with each key-value head's queries as the rows of one matrix."""
    rows, heads, length, size = queries.shape
    _, kv_heads, context, _ = keys.shape
    by_head = (rows, kv_heads, heads // kv_heads, length, context)
    scores = keys.times((queries * scale).reshape(rows, kv_heads, -1, size), transpose=True).reshape(by_head)
    if isinstance(mask, str) and length > 1:  # "causal"
        places = mx.arange(context)
        mask = places[context - length :, None] >= places
    if isinstance(mask, mx.array):
        own = mx.broadcast_to(mask, (rows, heads, length, context)).reshape(by_head)
        scores = mx.where(own, scores, mx.finfo(scores.dtype).min) if mask.dtype == mx.bool_ else scores + own
    weights = mx.softmax(scores, axis=-1, precise=True)
    attended = values.times(weights.reshape(rows, kv_heads, -1, context), transpose=False)
    attended = attended.reshape(rows, heads, length, -1)
    if sinks is None:
        return attended
    # A sink is one more score, of a key whose value is zero.
    total = mx.logsumexp(scores.astype(mx.float32), axis=-1).reshape(rows, heads, length, 1)
    share = mx.sigmoid(total - sinks.astype(mx.float32)[:, None, None])
    return attended * share.astype(attended.dtype)


# -- 6. what mlx-lm's tokenizer wraps ---------------------------------------------------------------------------


def wrapped_tokenizer(wrapper: TokenizerWrapper) -> Any:
    """Return the tokenizer of transformers."""
    return wrapper._tokenizer


def python_template(wrapper: TokenizerWrapper) -> Callable[..., str] | None:
    """Return the function that renders conversations in place of a chat template; None if the model has none."""
    render: Callable[..., str] | None = wrapper._chat_template
    return render
