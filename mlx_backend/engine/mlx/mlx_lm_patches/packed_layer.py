"""What a network is given in place of a layer's cache and positions when several sequences run as one row of tokens."""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from mlx_backend.engine.mlx.mlx_lm_patches.attention import attend_singly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True)
class TokenPositions:
    """The position of each token in its own sequence ([tokens]); stands for the `offset` of a cache.

    With images they may be by time, row and column ([3, tokens]): `axes` says by which of these each element of a head
    is rotated ([size]).
    """

    of_tokens: mx.array
    axes: mx.array | None = None

    def __add__(self, count: int) -> TokenPositions:
        """Return the positions so many tokens later."""
        return TokenPositions(self.of_tokens + count, self.axes)

    def __getitem__(self, _: Any) -> TokenPositions:
        """Return the same for `offset[..., None]`, with which a number of each row gets an axis for its tokens."""
        return self

    __iter__ = None

    def __mlx_array__(self) -> mx.array:
        """Return what makes positions of `mx.arange(tokens) + offset`, as networks that scale by position compute."""
        if self.axes is not None:
            raise TypeError("positions with rows and columns cannot be added to")
        return self.of_tokens - mx.arange(self.of_tokens.size)


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
        if RUNNING.get() is not self:
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

    def make_masks(self, make: Callable[[Any, int], Any]) -> BySegment:
        """Return what `make` returns for each segment's cache and the number of its next tokens."""
        lengths = (length for _, length in self.shapes)
        return BySegment(self, map(make, self._caches, lengths))

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

    def keys_and_values(self) -> tuple[BySegment, ...]:
        """Return what each cache holds, for layers that attend to what another has kept (AFM)."""
        held = [cache.keys_and_values() for cache in self._caches]
        return tuple(BySegment(self, each) for each in zip(*held, strict=True))

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

        attend = functools.partial(attend_singly, compute) if self._single_queries else compute
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
        # A scale of each token, the same in all heads.
        if isinstance(value, mx.array) and value.shape == (self.num_tokens, 1):
            return _split(value[None, None], self.shapes, 2)
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


RUNNING: ContextVar[PackedLayer | None] = ContextVar("RUNNING", default=None)
"""The caches of the module that is being run for all tokens at once."""


@contextmanager
def _running(packed: PackedLayer | None) -> Iterator[None]:
    before = RUNNING.set(packed)
    try:
        yield
    finally:
        RUNNING.reset(before)


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


def joined(arrays: Sequence[mx.array], axis: int = 0) -> mx.array:
    """Concatenate arrays; one alone is passed on, without an operation on the device."""
    return arrays[0] if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)
