"""The prompts that wait to be read: whose turn it is, what is known of them already, and the runs that read them.

All but their last pieces, that is: those are run with the replies (decoding.py). Knows nothing of replies.
"""

from __future__ import annotations

import logging
from bisect import insort
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.base import Progress
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx.kv_cache import rewound
from mlx_backend.engine.mlx.packed_forward import NotRun, Part, run
from mlx_backend.engine.mlx.prefill_plan import Pace, Reading, deal, waits_for
from mlx_backend.engine.mlx.sequences import Newcomer
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.mlx.kv_cache import Layers
    from mlx_backend.engine.mlx.prefix_store import Keeping
    from mlx_backend.engine.mlx.runtime import Machine
    from mlx_backend.engine.mlx.sequences import Row

    type Keep = Callable[[Reading, int, Layers], None]

log = logging.getLogger(__name__)

OVERTAKEN = 32  # requests that a prompt of the next better priority may come later and still be read first
WORTH_KEEPING = 64  # tokens of a prompt that was given up half-way


@dataclass(frozen=True, slots=True)
class Dealt:
    """What is read in a step: pieces of prompts up to some positions, and prompts to their ends."""

    chunks: list[tuple[Reading, int]]
    due: list[Reading]


class Prompts:
    """Readings in the order of their turns. What cannot be read is told to `forget`, like what needs no reply."""

    def __init__(
        self, machine: Machine, keeping: Keeping, forget: Callable[[Row], None], *, shared: bool
    ) -> None:
        self.waiting: list[Reading] = []
        self.pace = Pace(machine.options.prefill_chunk)
        self._machine = machine
        self._keeping = keeping
        self._forget = forget
        self._shared = shared  # with other processes, which know nothing of what fails here

    def add(self, row: Row) -> None:
        """Let a prompt wait for its turn."""
        end = len(row.tokens)
        marks = {*row.request.checkpoints, end - 1} if self._keeping.enabled else {end - 1}
        if row.request.max_tokens == 0:  # to be kept whole, and nothing said behind it
            marks = set()
        reading = Reading(row, tuple(sorted({mark for mark in marks if mark > 0} | {end})))
        insort(self.waiting, reading, key=_turn)

    def take_out(self, row: Row) -> bool:
        """Let a prompt go that nobody wants any more; False if it does not wait here."""
        for reading in self.waiting:
            if reading.row is row:
                self.waiting.remove(reading)
                if reading.layers is not None and reading.done - row.cached >= WORTH_KEEPING:
                    self._keeping.keep(row, row.tokens[: reading.done], reading.layers)
                return True
        return False

    def deal(self, *, talking: bool) -> Dealt:
        """Choose what is read now; `talking` is whether anybody waits for his next token meanwhile."""
        # A warm-up is read in small pieces: whoever comes should not wait for it.
        others = talking or len(self.waiting) > 1 or not self.waiting[0].replies
        dealt = deal(
            list(self.waiting),
            self.pace.chunk(others=others),
            to_read=self._to_read,
            at_most=self._at_most,
            waits=self._waits,
        )
        due = [reading for reading, share in dealt if share == reading.left and reading.replies]
        return Dealt([(each, each.done + share) for each, share in dealt if each not in due], due)

    def read(self, dealt: Dealt) -> Iterator[tuple[int, Outcome]]:
        """Read what was chosen, up to the last pieces of those that are due."""
        for reading, until in dealt.chunks:
            yield from self._read_chunk(reading, until)
        most_logits = self._machine.most_logits
        if sum(reading.left for reading in dealt.due) > most_logits:
            most_logits = 0
        ahead: dict[str, list[tuple[Reading, int]]] = {}
        for reading in dealt.due:
            *stops, _ = self._stops(reading, reading.marks[-1], most_logits)
            if self._machine.packs:
                ahead.setdefault(reading.row.space, []).extend((reading, stop) for stop in stops)
                continue
            for stop in stops:
                if reading in self.waiting:
                    yield from self._read_ahead([(reading, stop)])
        for pieces in ahead.values():
            if pieces:
                yield from self._read_ahead(pieces)

    def newcomer(self, reading: Reading) -> Newcomer:
        """Return the last piece of a prompt that is due."""
        assert reading.layers is not None
        return Newcomer(reading.row, reading.row.tokens[reading.done :], reading.layers)

    def come_in(self, reading: Reading) -> Iterator[tuple[int, Outcome]]:
        """Note that a last piece was read."""
        row = reading.row
        self.waiting.remove(reading)
        passed(reading, reading.marks[-1], self._keeping.keep_read if self._keeping.enabled else None)
        if not row.said:
            yield row.key, Progress(reading.done, len(row.tokens), row.cached)

    def complain(self, error: NotRun) -> None:
        """Say that prompts have to be read one by one."""
        if self._shared:
            raise error.__cause__ or error
        log.warning("Prompts could not be read together: each is read by itself. %r", error.__cause__)

    def give_up(self, reading: Reading, error: Exception) -> tuple[int, Outcome]:
        """Let a prompt go that cannot be read even by itself."""
        cause = error.__cause__ or error
        if self._shared:
            raise cause
        log.error("A prompt could not be read.", exc_info=cause)
        self.waiting.remove(reading)
        self._forget(reading.row)
        return reading.row.key, EngineError(f"The prompt could not be read: {cause}")

    def _read_chunk(self, reading: Reading, until: int) -> Iterator[tuple[int, Outcome]]:
        """Read a piece of a prompt that does not end in it, or of which nothing but the caches is wanted."""
        row, started, done = reading.row, perf_counter(), reading.done
        try:
            # Nothing is left of a prompt that is only to be kept, and is kept already.
            stops = self._stops(reading, until, self._machine.most_logits) if until > done else ()
            for stop in stops:
                mx.eval(self._pieces([(reading, stop)]))
                mx.clear_cache()
        except Exception as error:
            yield self.give_up(reading, error)
            return
        self.pace.measured(reading.done - done, perf_counter() - started)
        if not row.said:
            yield row.key, Progress(reading.done, len(row.tokens), row.cached)
        if not reading.left:
            self.waiting.remove(reading)
            self._forget(row)
            yield row.key, Ended("length")

    def _read_ahead(self, pieces: list[tuple[Reading, int]]) -> Iterator[tuple[int, Outcome]]:
        """Read prompts up to their last pieces, without waiting until that is computed."""
        try:
            mx.async_eval(self._pieces(pieces))  # type: ignore[no-untyped-call]
        except NotRun as error:
            if len(pieces) == 1:
                yield self.give_up(pieces[0][0], error)
                return
            self.complain(error)
            for piece in pieces:
                yield from self._read_ahead([piece])

    def _pieces(self, pieces: Sequence[tuple[Reading, int]]) -> list[mx.array]:
        network = self._machine.networks[pieces[0][0].row.space]
        return read(network, pieces, self._keeping.keep_read if self._keeping.enabled else None)

    def _stops(self, reading: Reading, until: int, most_logits: int) -> list[int]:
        return reading.stops(until, rewinds=self._machine.rewinds, most_logits=most_logits)

    def _to_read(self, reading: Reading) -> int:
        if reading.layers is None:
            row = reading.row
            most = reading.marks[-2] if len(reading.marks) > 1 else 0
            known, layers = self._keeping.find(row, most if reading.replies else reading.marks[-1])
            reading.layers = layers if layers is not None else self._machine.fresh_layers(row.space)
            reading.done = row.cached = known
        return reading.left

    def _at_most(self, reading: Reading) -> int:
        return (
            reading.left if reading.layers is not None else reading.left - self._keeping.covered(reading.row)
        )

    def _waits(self, group: Sequence[Reading], other: Reading) -> bool:
        known = len(other.row.tokens) - self._at_most(other)
        return self._keeping.enabled and waits_for(group, other, known)


def _turn(reading: Reading) -> int:
    """Whose prompt is read first. Time has no part in it: it would differ between processes that share a model."""
    row = reading.row
    return row.key + OVERTAKEN * row.request.priority


def read(network: Any, pieces: Sequence[tuple[Reading, int]], keep: Keep | None) -> list[mx.array]:
    """Read prompts up to positions in them, in one run; return what is then to be computed: no logits."""
    parts = []
    for reading, stop in pieces:
        assert reading.layers is not None
        parts.append(Part(mx.array([reading.row.tokens[reading.done : stop]]), reading.layers))
    run(network, parts)
    for reading, stop in pieces:
        passed(reading, stop, keep)
    return [layer.state for part in parts for layer in part.layers]


def passed(reading: Reading, stop: int, keep: Keep | None) -> None:
    """Note that a prompt has been read up to a position, and keep the checkpoints on the way.

    The prompt's own end is one only if no reply follows: that adds to the same caches.
    """
    start, reading.done = reading.done, stop
    layers, row = reading.layers, reading.row
    assert layers is not None
    for mark in reading.marks:
        ends = mark == len(row.tokens) and reading.replies
        if keep is not None and start < mark <= stop and not ends:
            keep(reading, mark, rewound(layers, stop - mark) if mark < stop else layers)
