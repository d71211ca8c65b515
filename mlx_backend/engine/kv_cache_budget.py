"""How much memory the sequences of an engine may take: what is set aside for their caches, and whether more fits.

A prompt needs caches, and working memory while a chunk of it is computed. If that does not fit, cached prefixes
are dropped and chunks get shorter; a prompt is refused only if not even the shortest chunk has room. The same is done
while the system is short of memory, for whatever reason: it may then be about to stop this process, or itself.

Images need memory too: what waits to be seen, and working memory while one is seen, which cannot be made less.

Counts tokens by a cost function and reserves bytes on the device; knows no MLX and no caches.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.device.memory import format_bytes, step_margin
from mlx_backend.errors import CONTEXT_LENGTH_EXCEEDED, EngineBusy, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mlx_backend.device.machine import Pressure
    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.engine.base import GenerationRequest

RETRY_AFTER = 10
"""Seconds after which a client may try again, where other models leave no memory for its request."""
MIN_CHUNK = 8
"""Tokens; shorter chunks save little."""
MAX_PRESSED_CHUNK: dict[Pressure, int] = {"warning": 512, "critical": 128}
"""Tokens of a chunk while the system is short of memory."""
RESERVED_REPLY_TOKENS = 2048
"""Tokens for which memory is reserved at a time, for a reply that outgrows its reservation."""
MAX_TOKENS = 1 << 30
"""Tokens of any sequence."""


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """The bytes that a request's images need: `waiting`, and `seeing` while the largest of them is seen."""

    waiting: int = 0
    seeing: int = 0


NO_IMAGES = ImageBytes()


class KVCacheBudget:
    """The memory set aside for each sequence of one engine, and for prefixes that are cached.

    `cost` gives the bytes of one sequence's caches for a number of tokens, and `chunk_bytes` the working memory of a
    chunk, by its number of tokens and the position at which it ends. Sequences that are decoded together, those of one
    adapter, are padded to the longest of them, but to no more than `max_padded` tokens. `pressure` says how short of
    memory the system is, and `waiting` how many bytes the images of all requests take. With `gives_up` other models may
    ask for the memory of cached prefixes.
    """

    def __init__(
        self,
        reservation: MemoryReservation,
        cost: Callable[[int], int],
        *,
        max_padded: int,
        chunk_bytes: Callable[[int, int], int] = lambda _tokens, _end: 0,
        pressure: Callable[[], Pressure] = lambda: "none",
        waiting: Callable[[], int] = lambda: 0,
        gives_up: bool = True,
    ) -> None:
        self.reservation = reservation
        self._cost = cost
        self._chunk_bytes = chunk_bytes
        self._pressure = pressure
        self._max_padded = max_padded
        self._waiting = waiting
        self._gives_up = gives_up
        self._may_ask = True
        self._prefix_bytes = self._noted_waiting = 0
        self._sequences: dict[int, tuple[str, int]] = {}
        self._seeing: dict[int, int] = {}
        """Bytes for seeing the images of a sequence, by its key, while some are still to be seen."""

    @property
    def used(self) -> int:
        """The bytes that are set aside for sequences, and for images."""
        return self._caches_and_images + self._beyond_margin(self._most_seeing)

    @property
    def lacks_room(self) -> bool:
        """Whether more is set aside than there is room for.

        What other models only have cached is room: they were asked for it, and give it up within a step of theirs.
        """
        return self.used > self.reservation.reclaimable_room

    @property
    def keeps_prefixes(self) -> bool:
        """Whether the system has memory for cached prefixes at all."""
        return self._pressure() != "critical"

    @contextmanager
    def without_asking(self) -> Iterator[None]:
        """Leave other models what they have cached, as for requests that no client made."""
        self._may_ask = False
        try:
            yield
        finally:
            self._may_ask = True

    def set_on_change(self, on_change: Callable[[], None]) -> None:
        """Set what is called, on any thread, when other models need memory or have freed some."""
        self.reservation.on_change = on_change

    def set_prefix_bytes(self, nbytes: int) -> None:
        """Note how much the cached prefixes take, and what was made of images."""
        if (nbytes, self._waiting()) != (self._prefix_bytes, self._noted_waiting):
            self._prefix_bytes = nbytes
            self._update()

    def check(self, tokens: int, subject: str, images: ImageBytes = NO_IMAGES) -> None:
        """Raise EngineRefused for what could not run even alone, EngineBusy while other models need the memory.

        What other models have cached does not count: they give it up.
        """
        needed, room = self._needed(tokens, images), self.reservation.reclaimable_room
        if needed <= room:
            return
        max_room, limit = self.reservation.max_room, format_bytes(self.reservation.limit)
        purpose, fewer = "its cache", "fewer tokens"
        if images != NO_IMAGES:
            purpose, fewer = "its cache and its images", "fewer tokens, send fewer or smaller images"
        if needed > max_room:
            fitting = self._fitting_tokens(max_room, images)
            raise EngineRefused(
                f"{subject} would need {format_bytes(needed)} of memory for {purpose}; the model leaves "
                f"{format_bytes(max(0, max_room))} of {limit}, enough for {fitting} tokens of prompt and reply "
                f"together. Ask for {fewer}, or raise the memory limit: now the maximum context length is {fitting} "
                "tokens.",
                code=CONTEXT_LENGTH_EXCEEDED,
                numbers={"prompt_tokens": tokens, "max_model_len": fitting},
            )
        raise EngineBusy(
            f"{subject} would need {format_bytes(needed)} of memory for {purpose}; other models' work leaves "
            f"{format_bytes(max(0, room))} of {limit} now, enough for {self._fitting_tokens(room, images)} tokens of "
            f"prompt and reply together. Try again in {RETRY_AFTER} s.",
            RETRY_AFTER,
        )

    def fitting_tokens(self) -> int:
        """Return how many tokens, of prompt and reply together, a request can have now. Callable from any thread."""
        return self._fitting_tokens(self.reservation.reclaimable_room)

    def fitting_reply(self, tokens: int, max_tokens: int) -> int:
        """Return for how many tokens to set memory aside for a sequence that has some already, and goes on."""
        more = min(max_tokens, tokens + RESERVED_REPLY_TOKENS)
        return self._fitting(more, tokens + 1, NO_IMAGES, self.reservation.reclaimable_room)

    def needed_tokens(self, request: GenerationRequest, images: ImageBytes) -> int:
        """Return for how many tokens, of prompt and reply together, a request needs memory.

        Where a reply's length is only expected, and not asked for, it needs no more than this model leaves; at least
        one token. What other models' requests leave now is no measure: the reply would grow into their memory, since
        none is cut short for them.
        """
        prompt, reply = len(request.prompt), request.max_tokens
        if request.expected_tokens is None:
            return prompt + reply
        tokens = prompt + min(reply, max(request.expected_tokens, 1))
        return self._fitting(tokens, prompt + 1, images, self.reservation.max_room)

    def _fitting(self, tokens: int, min_tokens: int, images: ImageBytes, room: int) -> int:
        if self._needed(tokens, images) <= room:
            return tokens
        return max(min_tokens, min(tokens, self._fitting_tokens(room, images)))

    def fitting_chunk(self, start: int, tokens: int, *, asks: bool = True) -> int:
        """Return `tokens`, or how many fewer a chunk from position `start` has to have to fit into working memory.

        With `asks` other models are asked, for the chunks to come, for what they have cached: as much as makes chunks
        longer.
        """
        taken = self._caches_and_images - self._margin
        tokens = min(tokens, MAX_PRESSED_CHUNK.get(self._pressure(), tokens))
        tokens = self._shortened(start, tokens, self.reservation.reclaimable_room - taken)
        room = self.reservation.room - taken
        if asks and (missing := self._chunk_bytes(tokens, start + tokens) - room) > 0:
            self._ask(missing)
        return self._shortened(start, tokens, room)

    def _shortened(self, start: int, tokens: int, room: int) -> int:
        while tokens > MIN_CHUNK and self._chunk_bytes(tokens, start + tokens) > room:
            tokens = max(MIN_CHUNK, tokens // 2)
        return tokens

    def prefix_room(self, start: int = 0, tokens: int = 0) -> int:
        """Return the bytes that cached prefixes may take next to a chunk of `tokens` from position `start`."""
        if not self.keeps_prefixes:
            return 0
        working = max(self._chunk_bytes(tokens, start + tokens), self._most_seeing)
        return max(0, self.reservation.room - self._caches_and_images - self._beyond_margin(working))

    def fits(self, tokens: int, adapter: str = "", seeing: int = 0, *, asks: bool = True) -> bool:
        """Whether there is room for one more sequence of `tokens`, whose waiting images are counted already.

        If there is none, with `asks`, other models are asked to give up what they have cached.
        """
        every = [*self._sequences.values(), (adapter, tokens)]
        longest = max(each for _, each in every)
        working = max(self._chunk_bytes(MIN_CHUNK, longest), self._most_seeing, seeing)
        needed = self._total(every) + self._waiting() + self._beyond_margin(working)
        return self._has_room(needed, asks=asks)

    def fits_alone(self, tokens: int, images: ImageBytes, *, asks: bool) -> bool:
        """Whether there is room for one sequence alone. If not, with `asks`, other models are asked, as by `fits`."""
        return self._has_room(self._needed(tokens, images), asks=asks)

    def reserve(self, key: int, tokens: int, adapter: str = "", seeing: int = 0) -> None:
        """Set memory aside for a sequence, or change how much is."""
        self._sequences[key] = (adapter, tokens)
        self.reserve_seeing(key, seeing)

    def reserve_seeing(self, key: int, nbytes: int) -> None:
        """Change how much is set aside for seeing the images of a sequence that are still to be seen."""
        if nbytes:
            self._seeing[key] = nbytes
        else:
            self._seeing.pop(key, None)
        self._update()

    def extend(self, key: int, tokens: int, max_tokens: int) -> bool:
        """Set more aside for a sequence of so many tokens, if it has outgrown what is; return whether it has."""
        adapter, reserved = self._sequences[key]
        if tokens < reserved:
            return False
        self.reserve(key, self.fitting_reply(tokens, max_tokens), adapter)
        return True

    def release(self, key: int) -> None:
        """Give back what was set aside for a sequence."""
        if self._sequences.pop(key, None) is not None:
            self.reservation.withdraw()  # whoever still lacks memory asks again
            self.reserve_seeing(key, 0)

    def _ask(self, nbytes: int) -> None:
        if self._may_ask:
            self.reservation.ask(nbytes)

    def _has_room(self, needed: int, *, asks: bool) -> bool:
        if (missing := needed - self.reservation.room) > 0 and asks:
            self._ask(missing)
        # The room is looked at again: no one is woken by what was freed before it was asked for.
        has_room = needed <= self.reservation.room
        if has_room:
            self.reservation.withdraw()
        return has_room

    @property
    def _margin(self) -> int:
        return step_margin(self.reservation.limit)

    @property
    def _caches_and_images(self) -> int:
        return self._total(self._sequences.values()) + self._waiting()

    @property
    def _most_seeing(self) -> int:
        """The working memory for seeing one image after the other."""
        return max(self._seeing.values(), default=0)

    def _beyond_margin(self, working: int) -> int:
        """Return the bytes of working memory for which the limit's margin is not enough."""
        return max(0, working - self._margin)

    def _needed(self, tokens: int, images: ImageBytes = NO_IMAGES) -> int:
        working = max(self._chunk_bytes(MIN_CHUNK, tokens), images.seeing)
        return self._cost(tokens) + images.waiting + self._beyond_margin(working)

    def _fitting_tokens(self, room: int, images: ImageBytes = NO_IMAGES) -> int:
        """Return how many tokens of one sequence fit into `room` bytes."""
        if self._needed(MAX_TOKENS, images) <= room:
            return MAX_TOKENS
        fitting = bisect_right(range(MAX_TOKENS), room, key=lambda tokens: self._needed(tokens, images))
        return max(0, fitting - 1)

    def _update(self) -> None:
        self._noted_waiting = self._waiting()
        cached = self._prefix_bytes if self._gives_up else 0
        self.reservation.set_working(self._prefix_bytes + self.used, cached)
        if (missing := self.used - self.reservation.room) > 0:  # a reply has outgrown what was expected of it
            self._ask(missing)

    def _total(self, sequences: Iterable[tuple[str, int]]) -> int:
        groups: dict[str, list[int]] = {}
        for adapter, tokens in sequences:
            groups.setdefault(adapter, []).append(tokens)
        return sum(map(self._group_bytes, groups.values()))

    def _group_bytes(self, lengths: Sequence[int]) -> int:
        padded = min(max(lengths), self._max_padded)
        return sum(self._cost(max(tokens, padded)) for tokens in lengths)
