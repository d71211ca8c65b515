"""The requests of a loaded model, stepped together: chunked prefill, batched decoding, preemption for want of memory.

A step prefills at most one chunk and generates one token for every reply, so a running stream never waits for more
than that chunk. Prompts that end in the chunk run together with the replies' next tokens where the network can be run
packed, so admitting them hardly delays the replies. A failure in one prompt is that request's failure alone.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import mlx.core as mx

from mlx_backend.device.mlx import is_gpu
from mlx_backend.engine.base import TokenDelta
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx.admission import check_window, needed_memory, new_sequence
from mlx_backend.engine.mlx.decode import Decoder
from mlx_backend.engine.mlx.decode_errors import BatchError, LostCachesError
from mlx_backend.engine.mlx.draft_pacer import DraftPacer
from mlx_backend.engine.mlx.drafting import Drafting
from mlx_backend.engine.mlx.packed_forward import ForwardError
from mlx_backend.engine.mlx.prefill_queue import PrefillQueue
from mlx_backend.engine.mlx.prefix_store import PrefixStore
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Sequence

    from mlx_backend.device.lock import FairLock
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.kv_cache_budget import KVCacheBudget
    from mlx_backend.engine.mlx.collectives import Ranks
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.prefill_plan import PrefillJob
    from mlx_backend.engine.mlx.runtime import Runtime
    from mlx_backend.engine.mlx.sequences import DecodingSequence, GeneratedToken

log = logging.getLogger(__name__)

RESERVED_REPLY_TOKENS = 2048  # at a time, for replies that outgrow their reservations
STEPS_PER_CACHE_CLEAR = 512
SHORT_REPLY_TOKENS = 32  # up to which a CPU's tokens do not wait for another step


class LoadedBatch:
    """The queued, running and preempted requests of one loaded model. `lock` is held while a step computes."""

    def __init__(self, runtime: Runtime, lock: FairLock, ranks: Ranks | None) -> None:
        self.runtime = runtime
        self.steps = 0
        self._lock = lock
        self._ranks = ranks
        self._options = runtime.options
        self._cache_budget = runtime.cache_budget
        self.sequences: dict[int, DecodingSequence] = {}  # queued, running and preempted, by key
        disk_adapter = self._options.adapter or ""  # most requests use it
        self.prefix_store = PrefixStore(
            runtime.prefixes, runtime.disk, self._cache_budget, disk_adapter, runtime.vision
        )
        # No bound method: in a circle of references an unloaded model would wait for the garbage collector.
        self._forget = partial(_forget, self.sequences, self._cache_budget, self.prefix_store)
        self.prefill_queue = PrefillQueue(runtime, self.prefix_store, self._forget, shared=ranks is not None)
        # Processes that share a model have to draft alike, whatever their times are.
        clock = perf_counter if ranks is None else None
        self.draft_pacer = DraftPacer(self._options.draft_tokens, clock, replays=runtime.replays_drafts)
        # A CPU has nearly finished a step once it is started; a GPU can be given the next one meanwhile.
        self._computes_ahead = is_gpu()
        self._decoders: dict[str, list[Decoder]] = {}  # by adapter
        self._preempted: deque[DecodingSequence] = deque()  # in mid-reply, for want of memory

    # -- requests --------------------------------------------------------------------------------------------

    def admits(self, request: GenerationRequest) -> bool:
        """Whether the request's caches fit beside those of the other requests.

        Raises EngineRefused if they never can, EngineBusy if other models leave no room for them even alone.
        """
        if request.max_tokens == 0 and not self.prefix_store.enabled:
            raise EngineRefused("No prefixes are cached here, so there is nothing to warm up.")
        check_window(request, self._options)
        tokens, images = needed_memory(request, self.runtime)
        reply = tokens - len(request.prompt)
        subject = f"{len(request.prompt)} tokens of prompt and {reply} of reply"
        self._cache_budget.check(tokens, subject, images)
        if self._preempted:
            return False
        asks = request.max_tokens > 0  # a warm-up takes nothing from other models
        if not self.sequences:
            return self._cache_budget.fits_alone(tokens, images, asks=asks)
        return self._cache_budget.fits(tokens, self._adapter_of(request), images.seeing, asks=asks)

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Queue a request for prefill."""
        sequence = new_sequence(key, request, self.runtime, self._adapter_of(request))
        tokens, _ = needed_memory(request, self.runtime)
        self._enqueue(sequence, tokens)

    def remove(self, key: int) -> None:
        """Drop a cancelled request."""
        sequence = self.sequences[key]
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._detach(sequence)
        self._forget(sequence)

    def _enqueue(self, sequence: DecodingSequence, tokens: int) -> None:
        self._cache_budget.reserve(sequence.key, tokens, sequence.adapter, sequence.seeing_bytes(0))
        try:
            self.prefix_store.evict_to_fit()
        except Exception:  # as it may be where other processes share the model
            self._forget(sequence)
            raise
        self.prefill_queue.add(sequence)
        self.sequences[sequence.key] = sequence

    def _detach(self, sequence: DecodingSequence) -> None:
        """Take a sequence out of the prefill queue, or out of its decoder."""
        if self.prefill_queue.remove(sequence):
            return
        for decoder in self._decoders.get(sequence.adapter, ()):
            if sequence in decoder.all_sequences:
                self._leave(decoder, [sequence])
        self._drop_empty_decoders(sequence.adapter)

    def _adapter_of(self, request: GenerationRequest) -> str:
        return request.adapter or self._options.adapter or ""

    # -- the step --------------------------------------------------------------------------------------------

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Prefill one chunk, admit the prompts that are due, and generate one token for every reply.

        In this order, because sequences are admitted between two decode steps: so their first tokens do not wait for
        one more step of the others.
        """
        with self._lock:
            self.steps += 1
            if self.steps % STEPS_PER_CACHE_CLEAR == 0:
                mx.clear_cache()
            self._resume_preempted()
            due = (yield from self._prefill()) if self.prefill_queue.jobs else []
            for adapter in dict.fromkeys([*self._decoders, *(job.sequence.adapter for job in due)]):
                own = [
                    job for job in due if job.sequence.adapter == adapter and job in self.prefill_queue.jobs
                ]
                yield from self._decode(adapter, own)
            if due and not (self.prefill_queue.jobs and self._computes_ahead):
                # If prompts are queued, their run is started before these are emitted, so that the device never idles.
                yield from self._emit_first_tokens()
            if not self._computes_ahead:
                yield from self._emit_sampled()
            self.prefix_store.report_usage()

    def _prefill(self) -> Generator[tuple[int, Outcome], None, list[PrefillJob]]:
        """Prefill one chunk; return the prompts of which only the last chunks are left, which are due now."""
        step = self.prefill_queue.plan_step(is_decoding=bool(self._decoders))
        if step.chunks or step.seeing:  # no first token waits for those
            yield from self._emit_first_tokens()
            self.draft_pacer.on_interruption()
        yield from self.prefill_queue.prefill(step)
        return step.finishing

    def _decode(self, adapter: str, due: Sequence[PrefillJob]) -> Iterator[tuple[int, Outcome]]:
        """Generate one token for every reply of an adapter, and admit the prompts whose last chunks are due."""
        self._merge_admitted(adapter)
        stepped: Decoder | None = None
        if due and self.runtime.can_pack and not any(job.sequence.is_alone for job in due):
            decoder = self._decoder_for(due[0].sequence)
            try:
                generated = decoder.step([self.prefill_queue.prefilled_sequence(job) for job in due])
            except ForwardError as error:
                if not decoder.all_sequences and len(due) == 1:
                    yield self.prefill_queue.fail(due[0], error)
                    return
                self.prefill_queue.on_packed_failure(error)
            else:
                stepped = decoder
                yield from self._admit(adapter, decoder, due)
                yield from self._deliver(adapter, decoder, generated)
        for job in due if stepped is None else ():
            self._merge_admitted(adapter)
            decoder = self._decoder_for(job.sequence)
            try:
                decoder.admit([self.prefill_queue.prefilled_sequence(job)])
            except ForwardError as error:
                yield self.prefill_queue.fail(job, error)
            else:
                yield from self._admit(adapter, decoder, [job])
        if stepped is None:
            self._merge_admitted(adapter)
        for decoder in list(self._decoders.get(adapter, ())):
            # The one before may have had to preempt its only reply.
            if decoder is not stepped and decoder.all_sequences:
                yield from self._step(adapter, decoder)

    def _step(self, adapter: str, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        try:
            generated = decoder.step()
        except BatchError as error:
            log.warning(
                "Replies could not be decoded together, and are now decoded alone: %r", error.__cause__
            )
            try:
                alone = decoder.split()
            except LostCachesError as lost:
                alone = []
                self._prefill_again(lost)
            self._decoders[adapter] += alone
            for each in alone:
                if each.all_sequences:  # the one before may have had to preempt it
                    yield from self._step(adapter, each)
            self._drop_empty_decoders(adapter)
        except LostCachesError as lost:
            if lost.sequences[0].is_alone:
                yield self._fail(lost.sequences[0], lost.__cause__)
            else:
                self._prefill_again(lost)
            self._drop_empty_decoders(adapter)
        else:
            yield from self._deliver(adapter, decoder, generated)

    def _merge_admitted(self, adapter: str) -> None:
        """Merge the caches of sequences admitted last with those of the replies they join."""
        for decoder in list(self._decoders.get(adapter, ())):
            self._decoders[adapter] += decoder.merge_admitted()
        self._drop_empty_decoders(adapter)

    def _decoder_for(self, sequence: DecodingSequence) -> Decoder:
        """Return the sequence's decoder: the one that runs its network, if it can be batched, or a new one."""
        decoders = [
            decoder
            for decoder in self._decoders.get(sequence.adapter, ())
            if not any(each.is_alone for each in decoder.all_sequences)
        ]
        if decoders and self.runtime.can_batch and not sequence.is_alone:
            return decoders[-1]
        return Decoder(
            self.runtime.networks[sequence.adapter],
            can_pack=self.runtime.can_pack,
            drafting=Drafting(self.draft_pacer) if sequence.drafter is not None else None,
            agree=self._ranks.broadcast if self._ranks is not None else None,
        )

    def _admit(
        self, adapter: str, decoder: Decoder, jobs: Sequence[PrefillJob]
    ) -> Iterator[tuple[int, Outcome]]:
        for job in jobs:
            yield from self.prefill_queue.complete(job)
        if decoder not in self._decoders.setdefault(adapter, []):
            self._decoders[adapter].append(decoder)

    def _emit_first_tokens(self) -> Iterator[tuple[int, Outcome]]:
        """Emit the first tokens of the sequences admitted last, which are still being computed."""
        for adapter, decoders in list(self._decoders.items()):
            for decoder in list(decoders):
                yield from self._deliver(adapter, decoder, decoder.emit_first_tokens())

    def _emit_sampled(self) -> Iterator[tuple[int, Outcome]]:
        """Emit the tokens sampled last before they are fed, so that none waits for another step.

        Where all replies are long already, their next step is started first: it runs beside what is done here.
        """
        for adapter, decoders in list(self._decoders.items()):
            for decoder in list(decoders):
                if any(sequence.num_emitted < SHORT_REPLY_TOKENS for sequence in decoder.sequences):
                    yield from self._deliver(adapter, decoder, decoder.emit_sampled())

    def _deliver(
        self, adapter: str, decoder: Decoder, generated: Sequence[GeneratedToken]
    ) -> Iterator[tuple[int, Outcome]]:
        """Yield generated tokens as outcomes, and remove the sequences that have ended or failed."""
        ended: list[DecodingSequence] = []
        for each in generated:
            sequence = each.sequence
            if sequence.sampler.error is not None:
                continue
            text = sequence.detokenizer.push(each.token)
            yield sequence.key, TokenDelta(each.token, text, each.logprobs)
            if each.finish_reason is not None:
                ended.append(sequence)
                drafts = sequence.drafts
                yield sequence.key, Ended(each.finish_reason, drafts.proposed, drafts.accepted)
        failed = [sequence for sequence in decoder.sequences if sequence.sampler.error is not None]
        for sequence in failed:
            yield (
                sequence.key,
                EngineError(f"Choosing the next token failed: {sequence.sampler.error}"),
            )
        if ended or failed:
            kept = ended if self.prefix_store.enabled else ()
            caches = self._leave(decoder, [*ended, *failed], keep_caches=kept)
            for sequence in [*ended, *failed]:
                if sequence.key in caches:
                    self.prefix_store.store(sequence, sequence.cache_length, caches.pop(sequence.key))
                self._forget(sequence)
            self._drop_empty_decoders(adapter)
        yield from self._extend_reservations(decoder)

    def _leave(
        self,
        decoder: Decoder,
        leaving: Collection[DecodingSequence],
        keep_caches: Collection[DecodingSequence] = (),
    ) -> dict[int, LayerCaches]:
        """Have sequences leave a decoder; return the caches that are to be kept."""
        try:
            return decoder.remove(leaving, keep_caches)
        except LostCachesError as error:
            self._prefill_again(error)
            return {}

    def _prefill_again(self, lost: LostCachesError) -> None:
        """Resume replies whose caches are lost, each by itself from now on."""
        if self._ranks is not None:  # the other processes may have lost nothing
            raise lost.__cause__ or lost
        log.warning(
            "The caches of %d replies were lost in decoding. Their prompts are prefilled again, and they are decoded "
            "alone: %r",
            len(lost.sequences),
            lost.__cause__,
        )
        for sequence in lost.sequences:
            sequence.is_alone = True
            self._suspend(sequence)

    def _fail(self, sequence: DecodingSequence, cause: BaseException | None) -> tuple[int, Outcome]:
        log.error("A reply could not be continued, even alone.", exc_info=cause)
        self._forget(sequence)
        return sequence.key, EngineError(f"The reply could not be continued: {cause}")

    def _drop_empty_decoders(self, adapter: str) -> None:
        running = [decoder for decoder in self._decoders.pop(adapter, ()) if decoder.all_sequences]
        if running:
            self._decoders[adapter] = running

    # -- memory ----------------------------------------------------------------------------------------------

    def _extend_reservations(self, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        """Reserve more for replies that outgrow their reservations, preempting the least urgent until it fits."""
        for sequence in list(decoder.sequences):
            if sequence in self._preempted or len(sequence.tokens) < self._cache_budget.reserved_tokens(
                sequence.key
            ):
                continue
            max_tokens = len(sequence.request.prompt) + sequence.request.max_tokens
            tokens = min(max_tokens, len(sequence.tokens) + RESERVED_REPLY_TOKENS)
            tokens = self._cache_budget.fitting(tokens, len(sequence.tokens) + 1)
            self._cache_budget.reserve(sequence.key, tokens, sequence.adapter)
            self.prefix_store.evict_to_fit()
            while self._cache_budget.lacks_room and sequence not in self._preempted:
                others = [other for other in self.sequences.values() if other not in self._preempted]
                if len(others) > 1:
                    self.preempt(max(others, key=lambda other: (other.request.priority, other.key)))
                    continue
                if self._cache_budget.used > self._cache_budget.max_room:  # alone: it cannot get any longer
                    self._leave(decoder, [sequence])
                    self._drop_empty_decoders(sequence.adapter)
                    self._forget(sequence)
                    yield sequence.key, Ended("length")
                break

    def preempt(self, sequence: DecodingSequence) -> None:
        """Take a reply out; when there is room it is resumed, by prefilling its prompt and its reply so far."""
        log.info("Memory is short: a reply of %d tokens so far is preempted.", sequence.num_emitted)
        self._detach(sequence)
        self._suspend(sequence)

    def _suspend(self, sequence: DecodingSequence) -> None:
        self.prefix_store.settle(sequence)
        self._cache_budget.release(sequence.key)
        sequence.suspend(self.runtime.drafter())
        self._preempted.append(sequence)

    def _resume_preempted(self) -> None:
        while self._preempted:
            sequence = self._preempted[0]
            reply = min(sequence.request.max_tokens - sequence.num_emitted, RESERVED_REPLY_TOKENS)
            tokens = self._cache_budget.fitting(len(sequence.tokens) + reply, len(sequence.tokens) + 1)
            is_alone = len(self._preempted) == len(self.sequences)
            if not (is_alone or self._cache_budget.fits(tokens, sequence.adapter, sequence.seeing_bytes(0))):
                return
            self._enqueue(self._preempted.popleft(), tokens)


def _forget(
    sequences: dict[int, DecodingSequence],
    cache_budget: KVCacheBudget,
    prefix_store: PrefixStore,
    sequence: DecodingSequence,
) -> None:
    sequences.pop(sequence.key, None)
    prefix_store.settle(sequence)
    cache_budget.release(sequence.key)
