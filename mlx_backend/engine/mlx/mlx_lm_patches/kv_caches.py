"""Keys and values that a cache which appends and stored prefixes share, quantised or not.

mlx-lm's `KVCache` grows by 256 tokens, and copies all that it holds each time; so does a write to arrays that a
stored prefix refers to. A turn of some hundred tokens after a long context would copy that twice. Here both the cache
that appends and the stored prefixes refer to one object that holds the arrays, so that appending writes in place; and
room grows with the length. What networks get of quantised ones is in attention.py; files hold mlx-lm's own kind.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from mlx_backend.engine.mlx.mlx_lm_patches.attention import DequantizedArray, Quantization

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


GROWTH_TOKENS = 256
"""The least number of tokens by which caches grow, as in mlx-lm."""


def allocated_tokens(tokens: int) -> int:
    """Return for how many tokens a cache that holds so many has room: up to an eighth more.

    To grow copies all, so that happens ever more rarely. There are few such numbers, as MLX's CUDA backend wants: it
    prepares for each number of keys.
    """
    step = max(GROWTH_TOKENS, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


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
        """Return such a cache with the same contents, or the layer itself if it is not one of all tokens.

        A layer of several caches gets such parts.
        """
        if isinstance(layer, CacheList):
            return CacheList(*map(cls.of, layer.caches))
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
        quantization = self.arrays.quantization
        stored = KVCache() if quantization is None else QuantizedKVCache(*quantization)
        stored.keys, stored.values, stored.offset = self.keys, self.values, self.offset
        return stored

    def reader(self) -> GrowingKVCache:
        """Return a cache on the same arrays, for which nothing is copied and which must not be written to."""
        return GrowingKVCache(self.arrays, self.offset, self.lease)
