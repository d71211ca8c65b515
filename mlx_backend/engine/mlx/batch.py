"""The batch on MLX: a model, loaded and unloaded, and the requests that it runs together while it is loaded.

A step prefills at most one chunk and generates one token for every reply, so a running stream never waits for more
than that chunk. Prompts that end in the chunk run together with the replies' next tokens where the network can be run
packed, so admitting them hardly delays the replies. A reply for which memory is short is preempted, and resumed later.
A failure in one prompt is that request's failure alone.

Runs on the engine thread only (see scheduler.py), where the model is loaded too: MLX's streams belong to threads.
Requests arrive here checked; nothing of them may raise inside a step.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from mlx_backend.device.mlx import is_gpu
from mlx_backend.engine.base import TokenDelta
from mlx_backend.engine.batch import Ended, ModelInfo
from mlx_backend.engine.mlx.decode import Decoder
from mlx_backend.engine.mlx.draft_pacer import DraftPacer
from mlx_backend.engine.mlx.drafting import Drafting
from mlx_backend.engine.mlx.packed_forward import ForwardError
from mlx_backend.engine.mlx.prefill_queue import PrefillQueue
from mlx_backend.engine.mlx.runtime import load_runtime
from mlx_backend.engine.mlx.sampling import RequestSampler, text_token_mask
from mlx_backend.engine.mlx.sequences import DecodingSequence
from mlx_backend.engine.mlx.tuning import Tuning
from mlx_backend.engine.mlx.vision.image_trial import support_of
from mlx_backend.engine.mlx.vision.prompt_images import PromptImages, check_images
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.device.wired import WiredWeights
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.kv_cache_budget import ImageBytes, KVCacheBudget
    from mlx_backend.engine.mlx.collectives import MLXRanks
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.prefill_queue import PrefillJob
    from mlx_backend.engine.mlx.runtime import Runtime
    from mlx_backend.engine.mlx.sequences import GeneratedToken
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

STEPS_PER_CACHE_CLEAR = 512
SHORT_REPLY_TOKENS = 32
"""Length of a reply up to which its tokens are emitted, on a CPU, before another step is started.

Of longer ones the next step is started first: it runs while tokens are handled here.
"""


class MLXBatch:
    """Implements the scheduler's `Batch`.

    `device` is shared with other models, and its lock is held while a step computes. With `ranks`, this process is one
    of several that share the model. `sequences` are the queued, running and preempted requests, by key. `prefill_queue`
    and `draft_pacer` exist from `load` to `unload`.
    """

    prefill_queue: PrefillQueue
    draft_pacer: DraftPacer

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions,
        *,
        device: Device,
        model_id: str | None = None,
        ranks: MLXRanks | None = None,
    ) -> None:
        if options.prefill_chunk is not None and options.prefill_chunk < 1:
            raise EngineError(f"A prefill chunk of {options.prefill_chunk} tokens is too small.")
        self._source = model
        self._options = options
        self._device = device
        self._model_id = model_id
        self._ranks = ranks
        self._runtime: Runtime | None = None
        self._wired: WiredWeights | None = None
        self._tuning: Tuning | None = None
        self.steps = 0
        self.sequences: dict[int, DecodingSequence] = {}
        self._preempted: deque[DecodingSequence] = deque()
        self._decoders: list[Decoder] = []

    @property
    def runtime(self) -> Runtime:
        """The loaded model. Only between `load` and `unload`."""
        if self._runtime is None:
            raise RuntimeError("No model is loaded.")
        return self._runtime

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        """Load the model on this thread, warm it up, and see how much memory is left."""
        options, ranks = self._options, self._ranks
        runtime = self._load_runtime(on_progress)
        model = runtime.networks.model
        tokenizer = model.tokenizer
        context_length = options.context_length or model.context_length
        self._runtime = runtime
        self._wired = self._device.wired.add(runtime.weight_bytes)
        self._text_mask = text_token_mask(tokenizer.vocabulary_size, tokenizer.special_tokens.keys())
        self.steps = 0
        self.prefill_queue = PrefillQueue(runtime, self._forget, shared=ranks is not None)
        # Processes that share a model have to draft alike, whatever their times are.
        clock = perf_counter if ranks is None else None
        self.draft_pacer = DraftPacer(options.draft_tokens, clock, replays=runtime.abilities.replays_drafts)
        self._computes_ahead = computes_ahead()
        # Processes that share a model have to do the same runs, and do them when it is loaded.
        tuning = self._tuning = Tuning(self, self._device, context_length) if ranks is None else None
        return ModelInfo(
            model_id=self._model_id or model.name,
            context_length=context_length,
            tokenizer=tokenizer,
            sampling_defaults=model.sampling_defaults,
            adapters=tuple(options.adapters),
            unbatched=runtime.abilities.unbatched,
            drafts=runtime.abilities.drafts,
            caches_prompts=runtime.prefix_store.enabled,
            image_processor=runtime.vision.processor if runtime.vision is not None else None,
            image_support=support_of(model.folder, runtime.vision),
            available_context=partial(_available_context, runtime.cache_budget, context_length),
            set_waker=self._set_waker,
            on_wake=self._on_wake,
            tune=tuning.advance if tuning is not None else _nothing_to_tune,
            tuning=(lambda: tuning.doing) if tuning is not None else str,
            tokens_to_prefill=self._tokens_to_prefill,
            prefill_room=lambda priority: self.prefill_queue.room(priority),
        )

    def unload(self) -> None:
        """Give the memory back, also after a failed load."""
        if self._tuning is not None:
            self._tuning.close()
            self._tuning = None
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
        for name in ("prefill_queue", "draft_pacer", "_text_mask"):  # as far as `load` came
            vars(self).pop(name, None)
        self.sequences.clear()
        self._preempted.clear()
        self._decoders.clear()
        mx.clear_cache()
        if self._wired is not None:
            self._wired.close()
            self._wired = None

    def close(self) -> None:
        """Clean up this thread's MLX streams.

        A thread that has used MLX and ends without this makes the process abort when the interpreter exits.
        """
        mx.synchronize()
        mx.clear_streams()

    def _load_runtime(self, on_progress: Callable[[float], None]) -> Runtime:
        return load_runtime(self._source, self._options, self._device, self._ranks, on_progress)

    @property
    def pace(self) -> list[float]:
        """What was measured, and what steps depend on next to the requests."""
        return self.prefill_queue.pacer.pace

    @pace.setter
    def pace(self, pace: list[float]) -> None:
        self.prefill_queue.pacer.pace = pace

    def _set_waker(self, wake: Callable[[], None]) -> None:
        self.runtime.cache_budget.set_on_change(wake)
        if (kernels := self.runtime.kernels) is not None:
            kernels.on_done = wake

    def _on_wake(self) -> None:
        if self._runtime is not None:
            self._runtime.prefix_store.give_up_needed()

    def _tokens_to_prefill(self, request: GenerationRequest) -> int:
        length = len(request.prompt)
        if self._runtime is None or request.images or request.prompt_logprobs is not None:
            return length
        prefixes = self._runtime.prefix_store.prefixes
        return length - prefixes.covered_tokens(request.prompt, self._adapter_of(request), cut=True)

    # -- requests --------------------------------------------------------------------------------------------

    def admits(self, request: GenerationRequest) -> bool:
        """Whether the request's caches fit next to those of the other requests.

        Raises EngineRefused if they never can, EngineBusy if other models leave no room for them even alone.
        """
        length = len(request.prompt)
        tokens, images = self._needed_memory(request)
        subject = f"{length} tokens of prompt and {tokens - length} of reply"
        self.runtime.cache_budget.check(tokens, subject, images)
        if self._preempted:
            return False
        asks = request.max_tokens > 0  # a warm-up takes nothing from other models
        if not self.sequences:
            return self.runtime.cache_budget.fits_alone(tokens, images, asks=asks)
        return self.runtime.cache_budget.fits(tokens, self._adapter_of(request), images.seeing, asks=asks)

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Queue a request for prefill."""
        tokenizer = self.runtime.networks.model.tokenizer
        sampler, tokens = RequestSampler(request, self._text_mask), list(request.prompt)
        sequence = DecodingSequence(
            key,
            request,
            sampler,
            tokenizer.detokenizer(),
            tokens,
            tokenizer.end_tokens,
            self._adapter_of(request),
            images=self._images_of(request, tokens),
            penalties=sampler.penalty_state(()),
            drafter=self.runtime.drafter(self._adapter_of(request)),
        )
        self._enqueue(sequence, self._needed_memory(request)[0])

    def remove(self, key: int) -> None:
        """Drop a cancelled request."""
        sequence = self.sequences[key]
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._detach(sequence)
        self._forget(sequence)

    def _images_of(self, request: GenerationRequest, tokens: Sequence[int]) -> PromptImages:
        """Return a request's images; `tokens` are those of its sequence, the reply's too."""
        return PromptImages(request.images, self.runtime.vision)

    def _needed_memory(self, request: GenerationRequest) -> tuple[int, ImageBytes]:
        """Return for how many tokens and which images a request needs memory. Raises EngineRefused for its images."""
        vision = self.runtime.vision
        images = (
            check_images(request, vision.cost, vision.features) if vision else check_images(request, None)
        )
        return self.runtime.cache_budget.needed_tokens(request, images), images

    def _enqueue(self, sequence: DecodingSequence, tokens: int) -> None:
        self.runtime.cache_budget.reserve(
            sequence.key, tokens, sequence.adapter, sequence.images.seeing_bytes(0)
        )
        self.prefill_queue.add(sequence)
        self.sequences[sequence.key] = sequence
        try:
            self.prefill_queue.look_up_first()  # what it goes on with is then a part of its own memory
            self.runtime.prefix_store.evict_to_fit()
        except Exception:  # as it may be where other processes share the model
            self.prefill_queue.remove(sequence)
            self._forget(sequence)
            raise

    def _detach(self, sequence: DecodingSequence) -> None:
        """Take a sequence out of the prefill queue, or out of its decoder."""
        if self.prefill_queue.remove(sequence):
            return
        for decoder in self._decoders:
            if sequence in decoder.sequences:
                self._leave(decoder, [sequence])
        self._drop_empty_decoders()

    def _adapter_of(self, request: GenerationRequest) -> str:
        return request.adapter or self._options.adapter or ""

    # -- the step --------------------------------------------------------------------------------------------

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Prefill one chunk, admit the prompts that are due, and generate one token for every reply.

        In this order, because sequences are admitted between two decode steps: so their first tokens do not wait for
        one more step of the others.
        """
        with self._device.lock:
            pacer = self.prefill_queue.pacer
            pacer.start_step()
            self.steps += 1
            if self.steps % STEPS_PER_CACHE_CLEAR == 0:
                mx.clear_cache()
            self._resume_preempted()
            decoded, prefilled = bool(self._decoders), bool(self.prefill_queue.jobs)
            due = (yield from self._prefill()) if prefilled else []
            decoding = [decoder.adapter for decoder in self._decoders]
            for adapter in dict.fromkeys([*decoding, *(job.sequence.adapter for job in due)]):
                own = [
                    job for job in due if job.sequence.adapter == adapter and job in self.prefill_queue.jobs
                ]
                yield from self._decode(adapter, own)
            if due and not (self.prefill_queue.jobs and self._computes_ahead):
                # If prompts are queued, their run is started before these are emitted, so that the device never idles.
                yield from self._emit_sampled(before=1)
            if not self._computes_ahead:
                yield from self._emit_sampled(before=SHORT_REPLY_TOKENS)
            self.runtime.prefix_store.report_usage()
            pacer.end_step(prefilled=prefilled, decoded=decoded)

    def _prefill(self) -> Generator[tuple[int, Outcome], None, list[PrefillJob]]:
        """Prefill one chunk; return the prompts of which only the last chunks are left, which are due now."""
        priorities = (each.request.priority for decoder in self._decoders for each in decoder.sequences)
        step = self.prefill_queue.plan_step(min(priorities, default=None))
        if step.chunks or step.seeing:  # no first token waits for those
            yield from self._emit_sampled(before=1)
            self.draft_pacer.on_interruption()
        yield from self.prefill_queue.prefill(step)
        return step.finishing

    def _decode(self, adapter: str, due: Sequence[PrefillJob]) -> Iterator[tuple[int, Outcome]]:
        """Generate one token for every reply of an adapter, and admit the prompts whose last chunks are due."""
        stepped: Decoder | None = None
        if due and self.runtime.abilities.can_pack and not any(job.sequence.is_alone for job in due):
            decoder = self._decoder_for(due[0].sequence)
            try:
                generated = decoder.step([self.prefill_queue.prefilled_sequence(job) for job in due])
            except ForwardError as error:
                if not decoder.sequences and len(due) == 1:
                    yield self.prefill_queue.fail(due[0], error)
                    return
                self.prefill_queue.on_packed_failure(error)
            except Exception as error:
                yield from self._resume_alone(decoder, error)
            else:
                stepped = decoder
                yield from self._admit(decoder, due)
                yield from self._deliver(decoder, generated)
        for job in due if stepped is None else ():
            decoder = self._decoder_for(job.sequence)
            try:
                decoder.admit([self.prefill_queue.prefilled_sequence(job)])
            except ForwardError as error:
                yield self.prefill_queue.fail(job, error)
            else:
                yield from self._admit(decoder, [job])
        for decoder in self._decoders_of(adapter):
            # The one before may have had to preempt its only reply.
            if decoder is not stepped and decoder.sequences:
                yield from self._step(decoder)

    def _step(self, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        try:
            generated = decoder.step()
        except Exception as error:
            yield from self._resume_alone(decoder, error)
        else:
            yield from self._deliver(decoder, generated)

    def _decoder_for(self, sequence: DecodingSequence) -> Decoder:
        """Return the sequence's decoder: the one that runs its network, if it can be packed, or a new one."""
        decoders = [
            decoder
            for decoder in self._decoders_of(sequence.adapter)
            if not any(each.is_alone for each in decoder.sequences)
        ]
        if decoders and self.runtime.abilities.can_pack and not sequence.is_alone:
            return decoders[-1]
        return Decoder(
            self.runtime.networks.by_adapter[sequence.adapter],
            self.runtime.abilities,
            adapter=sequence.adapter,
            drafting=Drafting(self.draft_pacer) if sequence.drafter is not None else None,
            agree=self._ranks.broadcast if self._ranks is not None else None,
        )

    def _decoders_of(self, adapter: str) -> list[Decoder]:
        return [decoder for decoder in self._decoders if decoder.adapter == adapter]

    def _admit(self, decoder: Decoder, jobs: Sequence[PrefillJob]) -> Iterator[tuple[int, Outcome]]:
        for job in jobs:
            yield from self.prefill_queue.complete(job)
        if decoder not in self._decoders:
            self._decoders.append(decoder)

    def _emit_sampled(self, *, before: int) -> Iterator[tuple[int, Outcome]]:
        """Emit the tokens sampled last before they are fed, of replies of fewer tokens than that."""
        for decoder in list(self._decoders):
            try:
                generated = decoder.emit_sampled(before)
            except Exception as error:
                yield from self._resume_alone(decoder, error)
            else:
                yield from self._deliver(decoder, generated)

    def _deliver(
        self, decoder: Decoder, generated: Sequence[GeneratedToken]
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
                yield _ended(sequence, each.finish_reason)
        failed = [sequence for sequence in decoder.sequences if sequence.sampler.error is not None]
        for sequence in failed:
            yield (
                sequence.key,
                EngineError(f"Choosing the next token failed: {sequence.sampler.error}"),
            )
        if ended or failed:
            kept = ended if self.runtime.prefix_store.enabled else []
            abilities = self.runtime.abilities
            # A reply of one token ran nothing else than its prompt, which is stored; of states only what is before it.
            if abilities.can_pack and abilities.can_rewind:
                kept = [each for each in kept if each.num_emitted > 1]
            caches = self._leave(decoder, [*ended, *failed], keep_caches=kept)
            for sequence in [*ended, *failed]:
                if sequence.key in caches:
                    self.runtime.prefix_store.store(sequence, sequence.cache_length, caches.pop(sequence.key))
                self._forget(sequence)
            self._drop_empty_decoders()
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
        except Exception as error:
            self._resume_alone(decoder, error, leaving)  # as above
            return {}

    def _resume_alone(
        self, decoder: Decoder, error: Exception, leaving: Collection[DecodingSequence] = ()
    ) -> list[tuple[int, Outcome]]:
        """Resume the replies of a decoder whose caches are lost, each by itself from now on; one that was fails.

        Returns the outcome of that. Raises the error if the device failed in what had gone well before, or other
        processes may have lost nothing.
        """
        cause = (error.__cause__ or error) if isinstance(error, ForwardError) else error
        if self._ranks is not None or (is_device_failure(cause) and not decoder.is_untried):
            raise cause
        lost = [sequence for sequence in decoder.drop() if sequence not in leaving]
        self._drop_empty_decoders()
        log.warning(
            "The caches of %d replies were lost in decoding. Their prompts are prefilled again, and they are decoded "
            "alone: %r",
            len(lost),
            cause,
        )
        for sequence in lost:
            if sequence.is_alone:
                log.error("A reply could not be continued, even alone.", exc_info=cause)
                self._forget(sequence)
                return [(sequence.key, EngineError(f"The reply could not be continued: {cause}"))]
            sequence.is_alone = True
            self._suspend(sequence)
        return []

    def _drop_empty_decoders(self) -> None:
        self._decoders = [decoder for decoder in self._decoders if decoder.sequences]

    # -- memory ----------------------------------------------------------------------------------------------

    def _extend_reservations(self, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        """Reserve more for replies that outgrow their reservations, preempting the least urgent until it fits."""
        budget = self.runtime.cache_budget
        for sequence in list(decoder.sequences):
            max_tokens = len(sequence.request.prompt) + sequence.request.max_tokens
            if sequence in self._preempted or not budget.extend(
                sequence.key, len(sequence.tokens), max_tokens
            ):
                continue
            self.runtime.prefix_store.evict_to_fit()
            while budget.lacks_room and sequence not in self._preempted:
                others = [other for other in self.sequences.values() if other not in self._preempted]
                if len(others) > 1:
                    self.preempt(max(others, key=lambda other: (other.request.priority, other.key)))
                    continue
                if budget.used > budget.reservation.max_room:  # alone: it cannot get any longer
                    self._leave(decoder, [sequence])
                    self._drop_empty_decoders()
                    self._forget(sequence)
                    yield _ended(sequence, "length")
                break

    def preempt(self, sequence: DecodingSequence) -> None:
        """Take a reply out; when there is room it is resumed, by prefilling its prompt and its reply so far."""
        log.info("Memory is short: a reply of %d tokens so far is preempted.", sequence.num_emitted)
        self._detach(sequence)
        self._suspend(sequence)

    def _suspend(self, sequence: DecodingSequence) -> None:
        self._release(sequence)
        sequence.suspend(self.runtime.drafter(sequence.adapter))
        self._preempted.append(sequence)

    def _resume_preempted(self) -> None:
        budget = self.runtime.cache_budget
        while self._preempted:
            sequence = self._preempted[0]
            max_tokens = len(sequence.request.prompt) + sequence.request.max_tokens
            tokens = budget.fitting_reply(len(sequence.tokens), max_tokens)
            is_alone = len(self._preempted) == len(self.sequences)
            if not (is_alone or budget.fits(tokens, sequence.adapter, sequence.images.seeing_bytes(0))):
                return
            self._enqueue(self._preempted.popleft(), tokens)

    def _forget(self, sequence: DecodingSequence) -> None:
        """Release what is held for a sequence that ended, failed or was cancelled."""
        self.sequences.pop(sequence.key, None)
        self._release(sequence)

    def _release(self, sequence: DecodingSequence) -> None:
        """Give back a sequence's memory, but for what is cached of it, as far as that fits.

        Until now that was a part of the sequence's own, which no other model could have.
        """
        store = self.runtime.prefix_store
        store.report_usage()  # first: what is cached of it has to be counted when other models are woken
        self.runtime.cache_budget.release(sequence.key)
        store.evict_to_fit()
        store.report_usage()


def is_device_failure(error: BaseException) -> bool:
    """Whether a network failed because of the device rather than because of what it was given.

    MLX raises RuntimeError for what goes wrong in a computation, such as want of memory, and others, mostly ValueError,
    when it lays one out for arrays that do not fit each other.
    """
    return isinstance(error, RuntimeError | MemoryError | OSError) and not isinstance(
        error, NotImplementedError
    )


def computes_ahead() -> bool:
    """Whether a step is started before the tokens of the one before are handled.

    A CPU has nearly finished a step once it is started; a GPU can be given the next one meanwhile.
    """
    return is_gpu()


def _nothing_to_tune(*, is_idle: bool) -> bool:
    return False


def _ended(sequence: DecodingSequence, reason: Literal["stop", "length"]) -> tuple[int, Ended]:
    return sequence.key, Ended(reason, sequence.drafts.proposed, sequence.drafts.accepted)


def _available_context(cache_budget: KVCacheBudget, context_length: int) -> int:
    return min(context_length, cache_budget.fitting_tokens())
