"""The queue of prompts to prefill: their order, what each step prefills of them, and the runs that prefill it.

All but their last chunks, that is: those run with the next tokens of the replies (decode.py). Prompts get here once
their requests are admitted; before that they are in the scheduler's queue, which is fair between clients. So only few
are here at a time (`room`): one of any length, whose turn it is, and others that are short.

Chunks go in turn to the prompt that was admitted first and to the one of which least remains; prompts that can be
completed with the rest of a chunk share it, and one that will find more in the prefix cache after another waits for
that. How long a chunk is, and whether replies wait for one at all, prefill_pacer.py decides; a few tokens, as of a
prompt that was cached but for its end, are prefilled at once, whatever else is.

Knows nothing of replies.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.device.mlx import prepares_for_lengths, trim_buffers
from mlx_backend.engine.base import Progress, PromptLogprobs
from mlx_backend.engine.batch import FEW_TOKENS, Ended
from mlx_backend.engine.mlx.arrays import evaluate_async
from mlx_backend.engine.mlx.chunk_cost import RUN_OVERHEAD, padded_sizes
from mlx_backend.engine.mlx.kv_cache import rewind
from mlx_backend.engine.mlx.packed_forward import ForwardError, run_packed
from mlx_backend.engine.mlx.prefill_pacer import PrefillPacer
from mlx_backend.engine.mlx.sampling import TokenRows
from mlx_backend.engine.mlx.sequences import PrefilledSequence
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.images import PreparedImage
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.runtime import Runtime
    from mlx_backend.engine.mlx.sequences import DecodingSequence

log = logging.getLogger(__name__)


MIN_CHECKPOINT_DISTANCE = 16
"""Tokens between two checkpoints of a prompt, where caches cannot be rewound.

Each is a run of the network there, for which the first token waits, and holds the states of all layers. To prefill a
few tokens again where prompts part between two is cheaper.
"""
MAX_SPARE_LOGITS, MAX_SPARE_LOGITS_BYTES = 32, 64 << 20
"""The most logits, and their bytes, that are computed for nothing in a prompt's last chunk, to save a run."""
MAX_SCORED_BYTES = 64 << 20
"""The most bytes of logits in a chunk of a prompt whose log probabilities are asked for."""
REQUESTS_PER_PRIORITY = 32
"""Number of requests that may arrive before a prompt of the next better priority, which still overtakes them."""
MIN_TOKENS_TO_STORE = 64
"""Tokens prefilled of a prompt that was cancelled half-way, from which on they are cached."""


@dataclass(slots=True, eq=False)
class PrefillJob:
    """A prompt on its way into a KV cache. `layers` is None until its first chunk is planned.

    `scores` are the log probabilities of its own tokens that were not emitted yet, each with its first one's position.
    """

    sequence: DecodingSequence
    boundaries: tuple[int, ...]  # positions of checkpoints, ascending; the last is the prompt's end
    number: int  # of its arrival here
    layers: LayerCaches | None = None
    num_prefilled: int = 0
    scores: list[tuple[int, TokenRows]] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Return how many tokens are still to be prefilled."""
        return self.boundaries[-1] - self.num_prefilled

    @property
    def has_reply(self) -> bool:
        """Whether a reply follows; if not, the prompt is only prefilled for the prefix cache."""
        return self.sequence.request.max_tokens > 0

    def score(self, logits: mx.array) -> list[mx.array]:
        """Have the tokens after those of the next chunk scored by its logits; return the arrays to compute."""
        start = self.num_prefilled + 1
        tokens = mx.array(self.sequence.tokens[start : start + logits.shape[0]])
        scored = TokenRows(logits, tokens, self.sequence.request.prompt_logprobs or 0)
        self.scores.append((start, scored))
        return scored.arrays


def spaced_checkpoints(positions: Sequence[int]) -> list[int]:
    """Return positions, which ascend, without those too close after another, which does in their place."""
    spaced: list[int] = []
    for position in positions:
        if not spaced or position - spaced[-1] >= MIN_CHECKPOINT_DISTANCE:
            spaced.append(position)
    return spaced


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
        on_gone: Callable[[DecodingSequence], None],
        *,
        shared: bool,
    ) -> None:
        self.jobs: list[PrefillJob] = []
        cost = runtime.chunk_cost
        self.pacer = PrefillPacer(runtime.options.prefill_chunk, cost.rate, cost.work)
        self._runtime = runtime
        self._prefix_store = runtime.prefix_store
        self.pads_chunks = runtime.abilities.can_rewind and prepares_for_lengths()
        vocabulary_size = runtime.networks.model.tokenizer.vocabulary_size
        self.max_spare_logits = min(MAX_SPARE_LOGITS, MAX_SPARE_LOGITS_BYTES // (4 * vocabulary_size))
        self._num_added = 0
        self._serves_shortest = False
        """Whether the next chunk goes to the prompt of which least remains."""
        self._max_scored = max(1, MAX_SCORED_BYTES // (4 * vocabulary_size))
        self._on_gone = on_gone
        self._shared = shared

    def add(self, sequence: DecodingSequence) -> None:
        """Queue a sequence's prompt."""
        end = len(sequence.tokens)
        boundaries = {end - 1}  # the last token runs with the replies' next ones
        if self._prefix_store.enabled and not sequence.needs_prompt_logprobs:
            boundaries |= {*sequence.request.checkpoints}
        if sequence.request.max_tokens == 0:  # only the whole prompt is to be stored
            boundaries = set()
        checkpoints = sorted(each for each in boundaries if each > 0 and sequence.images.can_store(each))
        if not self._runtime.abilities.can_rewind:
            checkpoints = spaced_checkpoints(checkpoints)
        job = PrefillJob(sequence, (*checkpoints, end), self._num_added)
        self._num_added += 1
        insort(self.jobs, job, key=_queue_order)

    def remove(self, sequence: DecodingSequence) -> bool:
        """Drop a sequence's prompt; False if it is not queued."""
        for job in self.jobs:
            if job.sequence is sequence:
                self.jobs.remove(job)
                sequence.images.forget()
                if job.layers is not None and job.num_prefilled - sequence.num_cached >= MIN_TOKENS_TO_STORE:
                    self._prefix_store.store(sequence, job.num_prefilled, job.layers)
                return True
        return False

    def look_up_first(self) -> None:
        """Look the first prompt up in the prefix cache."""
        self._look_up(self.jobs[0])

    def room(self, priority: int) -> float:
        """Return how many tokens the next prompt may have, for it to be worth having here already.

        Any number while those that it would not overtake do not fill half of a chunk. Otherwise it has to fit next to
        them, or be shorter than each, and so be next.
        """
        chunk = self.pacer.max_chunk
        lengths = [self._max_remaining(job) for job in self.jobs if job.sequence.request.priority <= priority]
        if not lengths or sum(lengths) < chunk // 2:
            return math.inf
        self.pacer.is_full = True
        beside = max(chunk // 2, RUN_OVERHEAD)
        return max(min(lengths) - 1, beside - sum(length for length in lengths if length <= beside))

    def plan_step(self, decoding_priority: int | None) -> PrefillStep:
        """Choose what is prefilled now, while replies of this priority at best wait for their next tokens."""
        jobs = self._in_turn()
        request = jobs[0].sequence.request
        others_wait = decoding_priority is not None and decoding_priority <= request.priority
        # Not the ends of long ones, which take from the credit.
        few = [
            job
            for job in jobs
            if job.num_prefilled == job.sequence.num_cached and self._max_remaining(job) <= FEW_TOKENS
        ]
        others = [job for job in jobs if job not in few]
        if len(others) == 1:
            self.pacer.note_waiting(others[0].number, self._max_remaining(others[0]))
        else:
            self.pacer.note_waiting(None)
        shares = self._complete([], few, RUN_OVERHEAD)
        if self.pacer.may_prefill or not (shares or others_wait):
            shares = self._share_chunk(jobs, shares, others_wait=others_wait or len(self.jobs) > 1)
            self._serves_shortest = not self._serves_shortest
            if others_wait or decoding_priority is None:
                self.pacer.spend()
        if not shares:
            return PrefillStep([], [])
        first, _ = shares[0]
        self._prefix_store.evict_to_fit(first.num_prefilled, sum(share for _, share in shares))
        ends = [(job, job.sequence.images.whole_end(job.num_prefilled + share)) for job, share in shares]
        unseen = {
            job: image
            for job, end in ends
            if (image := job.sequence.images.unseen(job.num_prefilled, end)) is not None
        }
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
        max_spare_logits = self.max_spare_logits
        if sum(job.remaining for job in step.finishing) > max_spare_logits:
            max_spare_logits = 0
        runs: dict[tuple[str, int], list[tuple[PrefillJob, int]]] = {}  # by adapter, and number of the chunk
        for job in step.finishing:
            spare_logits = 0 if job.sequence.needs_prompt_logprobs else max_spare_logits
            *ends, _ = self._chunk_ends(job, job.boundaries[-1], spare_logits)
            for number, end in enumerate(ends):
                runs.setdefault((job.sequence.adapter, number), []).append((job, end))
        for run in runs.values():
            for chunks in [run] if self._runtime.abilities.can_pack else [[chunk] for chunk in run]:
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
        self._advance(job, job.boundaries[-1])
        if sequence.images:
            sequence.images.forget()
            self._runtime.cache_budget.reserve_seeing(sequence.key, 0)  # some may have been seen before
        yield from _scored(job)
        yield from _progress(job)

    def on_packed_failure(self, error: ForwardError) -> None:
        """Log that prompts are now tried one by one. Raises the cause if other processes run them too."""
        if self._shared:
            raise error.__cause__ or error
        log.warning("Prompts could not be prefilled together; trying one by one: %r", error.__cause__)

    def fail(self, job: PrefillJob, error: Exception) -> tuple[int, Outcome]:
        """Drop a prompt that cannot be prefilled even alone. Raises the cause if other processes run it too."""
        cause = (error.__cause__ or error) if isinstance(error, ForwardError) else error
        if self._shared:
            raise cause
        self.jobs.remove(job)
        self._on_gone(job.sequence)
        if isinstance(cause, EngineError):
            return job.sequence.key, cause
        log.error("A prompt could not be prefilled.", exc_info=cause)
        return job.sequence.key, EngineError(f"The prompt could not be prefilled: {cause}")

    def _see(self, job: PrefillJob, image: PreparedImage) -> Iterator[tuple[int, Outcome]]:
        sequence = job.sequence
        try:
            sequence.images.see(image)
        except Exception as error:
            yield self.fail(job, error)
            return
        self._runtime.cache_budget.reserve_seeing(
            sequence.key, sequence.images.seeing_bytes(job.num_prefilled)
        )
        yield from _progress(job)

    def _prefill_chunk(self, job: PrefillJob, until: int) -> Iterator[tuple[int, Outcome]]:
        """Prefill a chunk that does not end its prompt, or ends one without a reply."""
        sequence, started, before = job.sequence, perf_counter(), job.num_prefilled
        try:
            # A prompt without a reply may be in the prefix cache already, and leave nothing to do.
            ends = self._chunk_ends(job, until, self.max_spare_logits) if until > before else ()
            for end in ends:
                mx.eval(self._run([(job, end)]))
                trim_buffers(shares_model=self._shared)
        except Exception as error:
            yield self.fail(job, error)
            return
        self.pacer.record(job.num_prefilled - before, perf_counter() - started)
        yield from _scored(job)
        yield from _progress(job)
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
        """Prefill prompts up to positions in them, in one run; return the arrays to compute: the caches, no logits.

        Prompts that need log probabilities run with others of their kind only, and what is asked for of their logits is
        among the arrays. Chunks may be filled up with tokens that are taken back from the caches. Nothing before them
        sees those.
        """
        network = self._runtime.networks.by_adapter[chunks[0][0].sequence.adapter]
        segments, spare = [], []
        for job, end in chunks:
            assert job.layers is not None
            start = job.num_prefilled
            # Several sizes where an image that may not be cut has made the chunk longer.
            spare.append(sum(padded_sizes(end - start)) - (end - start) if self.pads_chunks else 0)
            segments.append(job.sequence.segment(network, start, end, job.layers, spare[-1]))
        is_scored = chunks[0][0].sequence.needs_prompt_logprobs
        many_rows = self._runtime.many_rows
        caches = [layer for segment in segments for layer in segment.layers]
        with nullcontext() if is_scored or many_rows is None else many_rows.filling(caches):
            # One prompt that fails is not tried again.
            logits = run_packed(network, segments, restore=len(segments) > 1)
        scores, row = [], 0
        for (job, end), count in zip(chunks, spare, strict=True) if is_scored else ():
            scores += job.score(logits[row : row + end - job.num_prefilled])
            row += end - job.num_prefilled + count
        for (job, end), segment, count in zip(chunks, segments, spare, strict=True):
            rewind(segment.layers, count)
            self._advance(job, end)
        return [*(layer.state for layer in caches), *scores]

    def _advance(self, job: PrefillJob, end: int) -> None:
        """Note that a prompt is prefilled up to `end`, and store the checkpoints there.

        The prompt's own end is a checkpoint only if no reply follows: a reply appends to the same caches.
        """
        start, job.num_prefilled = job.num_prefilled, end
        assert job.layers is not None
        for boundary in job.boundaries if self._prefix_store.enabled else ():
            is_reply_start = boundary == len(job.sequence.tokens) and job.has_reply
            if start < boundary <= end and not is_reply_start:
                self._prefix_store.store_checkpoint(
                    job.sequence, boundary, job.layers, surplus=end - boundary
                )

    def _chunk_ends(self, job: PrefillJob, until: int, max_spare_logits: int) -> list[int]:
        """Return where the chunks end that prefill a prompt up to `until`, which is the last of these positions.

        Every chunk costs a run of the whole network. Where caches can be rewound, no chunk has to end at a boundary: a
        checkpoint is then what the chunk leaves, with some tokens taken back. So the rest of a prompt is one chunk, as
        long as that computes at most `max_spare_logits` logits (all but the last are thrown away), which is cheaper
        than another run. If it is longer it is two, of which the second is the last token, as in mlx-lm: a run of one
        token is what devices do best. Every chunk but the last token's can be filled up to one of `PADDED_SIZES`.
        """
        whole_end = job.sequence.images.whole_end
        if not self._runtime.abilities.can_rewind:
            ends = {end for end in job.boundaries if job.num_prefilled < end < until} | {until}
            return list(dict.fromkeys(map(whole_end, sorted(ends))))
        is_last = until == job.boundaries[-1] and job.has_reply
        if is_last and job.remaining <= (1 if self.pads_chunks else max(1, max_spare_logits)):
            return [until]
        ahead = until - 1 if is_last else until
        sizes = padded_sizes(ahead - job.num_prefilled) if self.pads_chunks else []
        positions = [*accumulate(sizes[:-1], initial=job.num_prefilled), ahead][1:]
        return list(dict.fromkeys(map(whole_end, [*positions, until])))

    def _in_turn(self) -> list[PrefillJob]:
        """Return the jobs, that one first whose turn it is: in turn the first, and that of which least remains."""
        first = self.jobs[0]
        if self._serves_shortest:
            first = min(
                (
                    job
                    for job in self.jobs
                    if job.sequence.request.priority <= first.sequence.request.priority
                    and not self._will_find_more(self.jobs, job)
                ),
                key=self._max_remaining,
                default=first,
            )
        return [first, *(job for job in self.jobs if job is not first)]

    def _share_chunk(
        self, jobs: Sequence[PrefillJob], few: list[tuple[PrefillJob, int]], *, others_wait: bool
    ) -> list[tuple[PrefillJob, int]]:
        """Share a chunk out; return the jobs that get some of it, and how many tokens, with the `few` that do anyway.

        The first job gets all that it needs, or half of the chunk if others can be completed with the other half.
        """
        chosen = [job for job, _ in few]
        rest = [job for job in jobs if job not in chosen]
        if not rest:
            return few
        first, *others = rest
        if {job.sequence.needs_prompt_logprobs for job in (first, *chosen)} == {False, True}:
            if self._serves_shortest:  # they cannot run together, and have steps in turn
                return few
            few = []
        share = self._look_up(first)
        budget = self._chunk_size(first, 1.0, others_wait=others_wait)
        if share > budget:
            half = self._chunk_size(first, 0.5, others_wait=others_wait)
            others = [other for other in others if self._max_remaining(other) <= budget - half]
            share = half if others else budget
        return self._complete([(first, share), *few], others, budget - share)

    def _complete(
        self, shares: list[tuple[PrefillJob, int]], jobs: Sequence[PrefillJob], budget: int
    ) -> list[tuple[PrefillJob, int]]:
        """Add jobs that can be completed together with `budget` tokens, if the log probabilities of all are wanted.

        One that will find more in the prefix cache once those before it are prefilled gets nothing yet.
        """
        for job in jobs:
            needs_scores = job.sequence.needs_prompt_logprobs
            if any(each.sequence.needs_prompt_logprobs != needs_scores for each, _ in shares):
                continue
            if self._max_remaining(job) > budget or self._will_find_more([each for each, _ in shares], job):
                continue
            share = self._look_up(job)
            if share > budget:
                continue
            shares.append((job, share))
            budget -= share
        return shares

    def _chunk_size(self, first: PrefillJob, share: float, *, others_wait: bool) -> int:
        # Chat pages ask for a title just before the user's own message: that one does not wait long for the title's.
        asks = first.has_reply  # a warm-up takes nothing from other models
        is_background = not asks or first.sequence.request.priority > 0
        start = first.num_prefilled
        size = self.pacer.chunk_size(start, others_wait=others_wait, is_background=is_background, share=share)
        if first.sequence.needs_prompt_logprobs:
            size = min(size, max(1, int(self._max_scored * share)))
        return self._runtime.cache_budget.fitting_chunk(start, size, asks=asks)

    def _look_up(self, job: PrefillJob) -> int:
        """Look a prompt up in the prefix cache, the first time; return how many of its tokens remain."""
        if job.layers is None:
            sequence = job.sequence
            end = job.boundaries[-1]
            known, layers = 0, None
            if not sequence.needs_prompt_logprobs:
                known, layers = self._prefix_store.find(sequence, end - 1 if job.has_reply else end)
            job.layers = (
                layers if layers is not None else self._runtime.networks.fresh_layers(sequence.adapter)
            )
            job.num_prefilled = sequence.num_cached = known
            self._runtime.cache_budget.reserve_seeing(sequence.key, sequence.images.seeing_bytes(known))
        return job.remaining

    def _max_remaining(self, job: PrefillJob) -> int:
        """Return how many tokens remain of a prompt at most; it is not looked up, which would count as a use."""
        if job.layers is not None or job.sequence.needs_prompt_logprobs:
            return job.remaining
        return job.remaining - self._prefix_store.covered_tokens(job.sequence)

    def _will_find_more(self, before: Sequence[PrefillJob], job: PrefillJob) -> bool:
        """Whether a prompt will find more in the prefix cache once these before it are prefilled."""
        sequence = job.sequence
        if not self._prefix_store.enabled or sequence.needs_prompt_logprobs:
            return False
        length = len(sequence.tokens)
        covered = length - self._max_remaining(job)
        return any(
            covered < boundary < length and each.sequence.packed(boundary) == sequence.packed(boundary)
            for each in before
            if each.sequence.adapter == sequence.adapter
            for boundary in each.boundaries
        )


def _scored(job: PrefillJob) -> Iterator[tuple[int, Outcome]]:
    """Emit log probabilities of the prompt, without those that were emitted before it was preempted."""
    sequence = job.sequence
    for start, scores in job.scores:
        count = sequence.request.prompt_logprobs or 0
        first = max(start, sequence.num_scored)
        if rows := scores.rows(first - start, None, count):
            yield sequence.key, PromptLogprobs(first, tuple(rows))
            sequence.num_scored = first + len(rows)
    job.scores.clear()


def _progress(job: PrefillJob) -> Iterator[tuple[int, Outcome]]:
    sequence = job.sequence
    if not sequence.num_emitted:  # it is not a reply that was preempted
        yield sequence.key, Progress(job.num_prefilled, len(sequence.tokens), sequence.num_cached)


def _queue_order(job: PrefillJob) -> int:
    """Return what the queue is sorted by. Time is left out: it would differ between processes that share a model."""
    return job.number + REQUESTS_PER_PRIORITY * job.sequence.request.priority
