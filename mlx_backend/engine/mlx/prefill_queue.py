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
from mlx_backend.engine.mlx.kv_cache import rewind_copies
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, run
from mlx_backend.engine.mlx.prefill_plan import PrefillJob, PrefillPacer, plan_step, will_share_prefix
from mlx_backend.engine.mlx.sequences import PrefilledSequence
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.prefix_store import PrefixStore
    from mlx_backend.engine.mlx.runtime import Runtime
    from mlx_backend.engine.mlx.sequences import DecodingSequence

    type Keep = Callable[[PrefillJob, int, LayerCaches], None]

log = logging.getLogger(__name__)

REQUESTS_PER_PRIORITY = (
    32  # requests that a prompt of the next better priority may come later and still be read first
)
MIN_TOKENS_TO_KEEP = 64  # tokens of a prompt that was given up half-way


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What is read in a step: pieces of prompts up to some positions, and prompts to their ends."""

    chunks: list[tuple[PrefillJob, int]]
    due: list[PrefillJob]


class PrefillQueue:
    """Readings in the order of their turns. What cannot be read is told to `forget`, like what needs no reply."""

    def __init__(
        self,
        runtime: Runtime,
        prefix_store: PrefixStore,
        forget: Callable[[DecodingSequence], None],
        *,
        shared: bool,
    ) -> None:
        self.waiting: list[PrefillJob] = []
        self.pace = PrefillPacer(runtime.options.prefill_chunk)
        self._runtime = runtime
        self._prefix_store = prefix_store
        self._release = forget
        self._shared = shared  # with other processes, which know nothing of what fails here

    def add(self, sequence: DecodingSequence) -> None:
        """Let a prompt wait for its turn."""
        end = len(sequence.tokens)
        boundaries = {*sequence.request.checkpoints, end - 1} if self._prefix_store.enabled else {end - 1}
        if sequence.request.max_tokens == 0:  # to be kept whole, and nothing said behind it
            boundaries = set()
        job = PrefillJob(
            sequence, tuple(sorted({boundary for boundary in boundaries if boundary > 0} | {end}))
        )
        insort(self.waiting, job, key=_turn)

    def remove(self, sequence: DecodingSequence) -> bool:
        """Let a prompt go that nobody wants any more; False if it does not wait here."""
        for job in self.waiting:
            if job.sequence is sequence:
                self.waiting.remove(job)
                if job.layers is not None and job.done - sequence.cached >= MIN_TOKENS_TO_KEEP:
                    self._prefix_store.keep(sequence, sequence.tokens[: job.done], job.layers)
                return True
        return False

    def plan_step(self, *, talking: bool) -> PrefillStep:
        """Choose what is read now; `talking` is whether anybody waits for his next token meanwhile."""
        # A warm-up is read in small pieces: whoever comes should not wait for it.
        others = talking or len(self.waiting) > 1 or not self.waiting[0].has_reply
        dealt = plan_step(
            list(self.waiting),
            self.pace.chunk(others=others),
            to_read=self._to_read,
            at_most=self._at_most,
            waits=self._waits,
        )
        due = [job for job, share in dealt if share == job.left and job.has_reply]
        return PrefillStep([(each, each.done + share) for each, share in dealt if each not in due], due)

    def read(self, dealt: PrefillStep) -> Iterator[tuple[int, Outcome]]:
        """Read what was chosen, up to the last pieces of those that are due."""
        for job, until in dealt.chunks:
            yield from self._read_chunk(job, until)
        max_spare_logits = self._runtime.max_spare_logits
        if sum(job.left for job in dealt.due) > max_spare_logits:
            max_spare_logits = 0
        ahead: dict[str, list[tuple[PrefillJob, int]]] = {}
        for job in dealt.due:
            *stops, _ = self._stops(job, job.boundaries[-1], max_spare_logits)
            if self._runtime.can_pack:
                ahead.setdefault(job.sequence.adapter, []).extend((job, stop) for stop in stops)
                continue
            for stop in stops:
                if job in self.waiting:
                    yield from self._read_ahead([(job, stop)])
        for pieces in ahead.values():
            if pieces:
                yield from self._read_ahead(pieces)

    def prefilled_sequence(self, job: PrefillJob) -> PrefilledSequence:
        """Return the last piece of a prompt that is due."""
        assert job.layers is not None
        return PrefilledSequence(job.sequence, job.sequence.tokens[job.done :], job.layers)

    def complete(self, job: PrefillJob) -> Iterator[tuple[int, Outcome]]:
        """Note that a last piece was read."""
        sequence = job.sequence
        self.waiting.remove(job)
        advance_job(
            job,
            job.boundaries[-1],
            self._prefix_store.store_checkpoint if self._prefix_store.enabled else None,
        )
        if not sequence.said:
            yield sequence.key, Progress(job.done, len(sequence.tokens), sequence.cached)

    def on_packed_failure(self, error: ForwardError) -> None:
        """Say that prompts have to be read one by one."""
        if self._shared:
            raise error.__cause__ or error
        log.warning("Prompts could not be read together: each is read by itself. %r", error.__cause__)

    def fail(self, job: PrefillJob, error: Exception) -> tuple[int, Outcome]:
        """Let a prompt go that cannot be read even by itself."""
        cause = error.__cause__ or error
        if self._shared:
            raise cause
        log.error("A prompt could not be read.", exc_info=cause)
        self.waiting.remove(job)
        self._release(job.sequence)
        return job.sequence.key, EngineError(f"The prompt could not be read: {cause}")

    def _read_chunk(self, job: PrefillJob, until: int) -> Iterator[tuple[int, Outcome]]:
        """Read a piece of a prompt that does not end in it, or of which nothing but the caches is wanted."""
        sequence, started, done = job.sequence, perf_counter(), job.done
        try:
            # Nothing is left of a prompt that is only to be kept, and is kept already.
            stops = self._stops(job, until, self._runtime.max_spare_logits) if until > done else ()
            for stop in stops:
                mx.eval(self._pieces([(job, stop)]))
                mx.clear_cache()
        except Exception as error:
            yield self.fail(job, error)
            return
        self.pace.measured(job.done - done, perf_counter() - started)
        if not sequence.said:
            yield sequence.key, Progress(job.done, len(sequence.tokens), sequence.cached)
        if not job.left:
            self.waiting.remove(job)
            self._release(sequence)
            yield sequence.key, Ended("length")

    def _read_ahead(self, pieces: list[tuple[PrefillJob, int]]) -> Iterator[tuple[int, Outcome]]:
        """Read prompts up to their last pieces, without waiting until that is computed."""
        try:
            mx.async_eval(self._pieces(pieces))  # type: ignore[no-untyped-call]
        except ForwardError as error:
            if len(pieces) == 1:
                yield self.fail(pieces[0][0], error)
                return
            self.on_packed_failure(error)
            for piece in pieces:
                yield from self._read_ahead([piece])

    def _pieces(self, pieces: Sequence[tuple[PrefillJob, int]]) -> list[mx.array]:
        network = self._runtime.networks[pieces[0][0].sequence.adapter]
        return read(
            network, pieces, self._prefix_store.store_checkpoint if self._prefix_store.enabled else None
        )

    def _stops(self, job: PrefillJob, until: int, max_spare_logits: int) -> list[int]:
        return job.stops(until, can_rewind=self._runtime.can_rewind, max_spare_logits=max_spare_logits)

    def _to_read(self, job: PrefillJob) -> int:
        if job.layers is None:
            sequence = job.sequence
            most = job.boundaries[-2] if len(job.boundaries) > 1 else 0
            known, layers = self._prefix_store.find(sequence, most if job.has_reply else job.boundaries[-1])
            job.layers = layers if layers is not None else self._runtime.fresh_layers(sequence.adapter)
            job.done = sequence.cached = known
        return job.left

    def _at_most(self, job: PrefillJob) -> int:
        return (
            job.left if job.layers is not None else job.left - self._prefix_store.covered_tokens(job.sequence)
        )

    def _waits(self, group: Sequence[PrefillJob], other: PrefillJob) -> bool:
        known = len(other.sequence.tokens) - self._at_most(other)
        return self._prefix_store.enabled and will_share_prefix(group, other, known)


def _turn(job: PrefillJob) -> int:
    """Whose prompt is read first. Time has no part in it: it would differ between processes that share a model."""
    sequence = job.sequence
    return sequence.key + REQUESTS_PER_PRIORITY * sequence.request.priority


def read(network: Any, pieces: Sequence[tuple[PrefillJob, int]], keep: Keep | None) -> list[mx.array]:
    """Read prompts up to positions in them, in one run; return what is then to be computed: no logits."""
    parts = []
    for job, stop in pieces:
        assert job.layers is not None
        parts.append(Segment(mx.array([job.sequence.tokens[job.done : stop]]), job.layers))
    run(network, parts)
    for job, stop in pieces:
        advance_job(job, stop, keep)
    return [layer.state for part in parts for layer in part.layers]


def advance_job(job: PrefillJob, stop: int, keep: Keep | None) -> None:
    """Note that a prompt has been read up to a position, and keep the checkpoints on the way.

    The prompt's own end is one only if no reply follows: that adds to the same caches.
    """
    start, job.done = job.done, stop
    layers, sequence = job.layers, job.sequence
    assert layers is not None
    for boundary in job.boundaries:
        ends = boundary == len(sequence.tokens) and job.has_reply
        if keep is not None and start < boundary <= stop and not ends:
            keep(job, boundary, rewind_copies(layers, stop - boundary) if boundary < stop else layers)
