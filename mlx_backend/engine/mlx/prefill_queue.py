"""The queue of prompts to prefill: their order, what the prefix cache has of them, and the runs that prefill them.

All but their last chunks, that is: those run with the next tokens of the replies (decode.py). Prompts get here once
their requests are admitted; before that they are in the scheduler's queue. Knows nothing of replies.
"""

from __future__ import annotations

import logging
from bisect import insort
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.device.mlx import trim_buffers
from mlx_backend.engine.base import Progress
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx.arrays import evaluate_async
from mlx_backend.engine.mlx.chunk_sizes import padded_sizes
from mlx_backend.engine.mlx.kv_cache import rewind
from mlx_backend.engine.mlx.packed_forward import ForwardError, run_packed
from mlx_backend.engine.mlx.prefill_plan import (
    PrefillJob,
    PrefillPacer,
    share_chunk,
    spaced_checkpoints,
    will_extend_prefix,
)
from mlx_backend.engine.mlx.sequences import PrefilledSequence
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.images import PreparedImage
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.prefix_store import PrefixStore
    from mlx_backend.engine.mlx.runtime import Runtime
    from mlx_backend.engine.mlx.sequences import DecodingSequence

    type OnCheckpoint = Callable[[PrefillJob, int, LayerCaches, int, int], None]

log = logging.getLogger(__name__)

# How many requests may arrive before a prompt of the next better priority, which still overtakes them.
REQUESTS_PER_PRIORITY = 32
MIN_TOKENS_TO_KEEP = 64  # of a prompt that was cancelled half-way


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """What one step prefills: chunks up to positions inside their prompts, and prompts up to their last chunks.

    Before, it sees at most one image, of a prompt that then is not among those: replies wait for no more of them.
    """

    chunks: list[tuple[PrefillJob, int]]
    finishing: list[PrefillJob]
    seeing: tuple[PrefillJob, PreparedImage] | None = None


class PrefillQueue:
    """Prefill jobs in the order in which they run.

    `on_gone` is called with a sequence that failed or needs no reply. `shared` is whether other processes run the same
    steps: a failure here cannot then be repaired here, because they know nothing of it.
    """

    def __init__(
        self,
        runtime: Runtime,
        prefix_store: PrefixStore,
        on_gone: Callable[[DecodingSequence], None],
        *,
        shared: bool,
    ) -> None:
        self.jobs: list[PrefillJob] = []
        cost = runtime.chunk_cost
        self.pacer = PrefillPacer(runtime.options.prefill_chunk, cost.rate, cost.work)
        self._runtime = runtime
        self._prefix_store = prefix_store
        self._on_gone = on_gone
        self._shared = shared

    def add(self, sequence: DecodingSequence) -> None:
        """Queue a sequence's prompt."""
        end = len(sequence.tokens)
        boundaries = {*sequence.request.checkpoints, end - 1} if self._prefix_store.enabled else {end - 1}
        if sequence.request.max_tokens == 0:  # only the whole prompt is to be stored
            boundaries = set()
        checkpoints = sorted(each for each in boundaries if each > 0 and sequence.can_store(each))
        if not self._runtime.can_rewind:
            checkpoints = spaced_checkpoints(checkpoints)
        job = PrefillJob(sequence, (*checkpoints, end))
        insort(self.jobs, job, key=_queue_order)

    def remove(self, sequence: DecodingSequence) -> bool:
        """Drop a sequence's prompt; False if it is not queued."""
        for job in self.jobs:
            if job.sequence is sequence:
                self.jobs.remove(job)
                job.forget_images()
                if job.layers is not None and job.num_prefilled - sequence.num_cached >= MIN_TOKENS_TO_KEEP:
                    self._prefix_store.store(sequence, job.num_prefilled, job.layers)
                return True
        return False

    def plan_step(self, *, is_decoding: bool) -> PrefillStep:
        """Choose what is prefilled now; `is_decoding` is whether replies wait for their next tokens meanwhile."""
        # A warm-up, or a request that others should precede, is prefilled in small chunks: one that arrives does not
        # wait long for it. Chat pages ask for a title just before the user's own message.
        first = self.jobs[0]
        is_urgent = first.has_reply and first.sequence.request.priority <= 0
        others_wait = is_decoding or len(self.jobs) > 1 or not is_urgent
        shares = share_chunk(
            list(self.jobs),
            partial(
                self._chunk_size, others_wait, first.has_reply
            ),  # a warm-up takes nothing from other models
            count_remaining=self._count_remaining,
            estimate_remaining=self._estimate_remaining,
            should_wait=self._should_wait,
        )
        first, _ = shares[0]
        self._prefix_store.evict_to_fit(first.num_prefilled, sum(share for _, share in shares))
        ends = [(job, job.whole_end(job.num_prefilled + share)) for job, share in shares]
        unseen = {job: image for job, end in ends if (image := job.unseen_image(end)) is not None}
        ends = [(job, end) for job, end in ends if job not in unseen]
        finishing = [job for job, end in ends if end == job.boundaries[-1] and job.has_reply]
        chunks = [(job, end) for job, end in ends if job not in finishing]
        return PrefillStep(chunks, finishing, next(iter(unseen.items()), None))

    def prefill(self, step: PrefillStep) -> Iterator[tuple[int, Outcome]]:
        """Prefill what was planned, up to the last chunks of the prompts that finish."""
        if step.seeing is not None:
            yield from self._see(*step.seeing)
        for job, until in step.chunks:
            yield from self._prefill_chunk(job, until)
        max_spare_logits = self._runtime.max_spare_logits
        if sum(job.remaining for job in step.finishing) > max_spare_logits:
            max_spare_logits = 0
        runs: dict[tuple[str, int], list[tuple[PrefillJob, int]]] = {}  # by adapter, and number of the chunk
        for job in step.finishing:
            *ends, _ = self._chunk_ends(job, job.boundaries[-1], max_spare_logits)
            for number, end in enumerate(ends):
                runs.setdefault((job.sequence.adapter, number), []).append((job, end))
        for run in runs.values():
            for chunks in [run] if self._runtime.can_pack else [[chunk] for chunk in run]:
                if alive := [(job, end) for job, end in chunks if job in self.jobs]:
                    yield from self._prefill_ahead(alive)

    def prefilled_sequence(self, job: PrefillJob) -> PrefilledSequence:
        """Return the sequence and its last chunk."""
        assert job.layers is not None
        return PrefilledSequence(job.sequence, job.sequence.tokens[job.num_prefilled :], job.layers)

    def complete(self, job: PrefillJob) -> Iterator[tuple[int, Outcome]]:
        """Note that a job's last chunk has run."""
        sequence = job.sequence
        self.jobs.remove(job)
        _advance(job, job.boundaries[-1], self._on_checkpoint, job.remaining)
        if sequence.images is not None:
            job.forget_images()
            self._runtime.cache_budget.reserve_seeing(sequence.key, 0)  # some may have been seen before
        if not sequence.num_emitted:
            yield sequence.key, Progress(job.num_prefilled, len(sequence.tokens), sequence.num_cached)

    def on_packed_failure(self, error: ForwardError) -> None:
        """Log that prompts are now tried one by one. Raises the cause if other processes run them too."""
        if self._shared:
            raise error.__cause__ or error
        log.warning("Prompts could not be prefilled together; trying one by one: %r", error.__cause__)

    def fail(self, job: PrefillJob, error: Exception) -> tuple[int, Outcome]:
        """Drop a prompt that cannot be prefilled even alone. Raises the cause if other processes run it too."""
        cause = error.__cause__ or error
        if self._shared:
            raise cause
        log.error("A prompt could not be prefilled.", exc_info=cause)
        self.jobs.remove(job)
        self._on_gone(job.sequence)
        return job.sequence.key, EngineError(f"The prompt could not be prefilled: {cause}")

    @property
    def _on_checkpoint(self) -> OnCheckpoint | None:
        return self._prefix_store.store_checkpoint if self._prefix_store.enabled else None

    def _see(self, job: PrefillJob, image: PreparedImage) -> Iterator[tuple[int, Outcome]]:
        sequence = job.sequence
        try:
            assert sequence.images is not None
            sequence.images.see(image)
        except Exception as error:
            yield self.fail(job, error)
            return
        self._runtime.cache_budget.reserve_seeing(sequence.key, sequence.seeing_bytes(job.num_prefilled))
        if not sequence.num_emitted:
            yield sequence.key, Progress(job.num_prefilled, len(sequence.tokens), sequence.num_cached)

    def _prefill_chunk(self, job: PrefillJob, until: int) -> Iterator[tuple[int, Outcome]]:
        """Prefill a chunk that does not end its prompt, or ends one without a reply."""
        sequence, started, before = job.sequence, perf_counter(), job.num_prefilled
        try:
            # A prompt without a reply may be in the prefix cache already, and leave nothing to do.
            ends = self._chunk_ends(job, until, self._runtime.max_spare_logits) if until > before else ()
            for end in ends:
                mx.eval(self._run([(job, end)]))
                trim_buffers()
        except Exception as error:
            yield self.fail(job, error)
            return
        self.pacer.record(job.num_prefilled - before, perf_counter() - started)
        if not sequence.num_emitted:
            yield sequence.key, Progress(job.num_prefilled, len(sequence.tokens), sequence.num_cached)
        if not job.remaining:
            self.jobs.remove(job)
            self._on_gone(sequence)
            yield sequence.key, Ended("length")

    def _prefill_ahead(self, chunks: list[tuple[PrefillJob, int]]) -> Iterator[tuple[int, Outcome]]:
        """Prefill prompts up to their last chunks, without waiting for the computation."""
        try:
            evaluate_async(self._run(chunks))
        except ForwardError as error:
            if len(chunks) == 1:
                yield self.fail(chunks[0][0], error)
                return
            self.on_packed_failure(error)
            for chunk in chunks:
                yield from self._prefill_ahead([chunk])
        except Exception as error:  # what of their caches has changed is not known
            for job, _ in chunks:
                yield self.fail(job, error)

    def _run(self, chunks: Sequence[tuple[PrefillJob, int]]) -> list[mx.array]:
        network = self._runtime.networks[chunks[0][0].sequence.adapter]
        with self._runtime.filling_caches():
            return _run_chunks(network, chunks, self._on_checkpoint, pad=self._runtime.pads_chunks)

    def _chunk_ends(self, job: PrefillJob, until: int, max_spare_logits: int) -> list[int]:
        ends = job.chunk_ends(
            until,
            can_rewind=self._runtime.can_rewind,
            max_spare_logits=max_spare_logits,
            window=self._runtime.options.max_kv_size,
            pad=self._runtime.pads_chunks,
        )
        return list(dict.fromkeys(map(job.whole_end, ends)))

    def _chunk_size(self, others_wait: bool, asks: bool, start: int, share: float) -> int:
        size = self.pacer.chunk_size(start, others_wait=others_wait, share=share)
        return self._runtime.cache_budget.fitting_chunk(start, size, asks=asks)

    def _count_remaining(self, job: PrefillJob) -> int:
        if job.layers is None:
            sequence = job.sequence
            end = job.boundaries[-1]
            known, layers = self._prefix_store.find(sequence, end - 1 if job.has_reply else end)
            job.layers = layers if layers is not None else self._runtime.fresh_layers(sequence.adapter)
            job.num_prefilled = sequence.num_cached = known
            self._runtime.cache_budget.reserve_seeing(sequence.key, sequence.seeing_bytes(known))
        return job.remaining

    def _estimate_remaining(self, job: PrefillJob) -> int:
        if job.layers is not None:
            return job.remaining
        return job.remaining - self._prefix_store.covered_tokens(job.sequence)

    def _should_wait(self, group: Sequence[PrefillJob], other: PrefillJob) -> bool:
        covered = len(other.sequence.tokens) - self._estimate_remaining(other)
        return self._prefix_store.enabled and will_extend_prefix(group, other, covered)


def _queue_order(job: PrefillJob) -> int:
    """Return what the queue is sorted by. Time is left out: it would differ between processes that share a model."""
    return job.sequence.key + REQUESTS_PER_PRIORITY * job.sequence.request.priority


def _run_chunks(
    network: Any,
    chunks: Sequence[tuple[PrefillJob, int]],
    on_checkpoint: OnCheckpoint | None,
    *,
    pad: bool,
) -> list[mx.array]:
    """Prefill prompts up to positions in them, in one run; return the arrays to compute: the caches, no logits.

    With `pad` chunks are filled up with tokens that are taken back from the caches. Nothing before them sees those.
    """
    segments, spare = [], []
    for job, end in chunks:
        assert job.layers is not None
        start = job.num_prefilled
        # Several sizes where an image that may not be cut has made the chunk longer.
        spare.append(sum(padded_sizes(end - start)) - (end - start) if pad else 0)
        segments.append(job.sequence.segment(network, start, end, job.layers, spare[-1]))
    run_packed(network, segments)
    total = sum(end - job.num_prefilled for job, end in chunks) + sum(spare)
    for (job, end), segment, count in zip(chunks, segments, spare, strict=True):
        rewind(segment.layers, count)
        _advance(job, end, on_checkpoint, total)
    return [layer.state for segment in segments for layer in segment.layers]


def _advance(job: PrefillJob, end: int, on_checkpoint: OnCheckpoint | None, total: int) -> None:
    """Note that a prompt has been prefilled up to `end`, in a run of so many tokens, and pass on the checkpoints there.

    The prompt's own end is a checkpoint only if no reply follows: a reply appends to the same caches.
    """
    start, job.num_prefilled = job.num_prefilled, end
    layers = job.layers
    assert layers is not None
    for boundary in job.boundaries:
        is_reply_start = boundary == len(job.sequence.tokens) and job.has_reply
        if on_checkpoint is not None and start < boundary <= end and not is_reply_start:
            on_checkpoint(job, boundary, layers, end - boundary, total - (boundary - start))
