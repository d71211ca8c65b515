"""The batch on MLX: prompts read in chunks, replies decoded together, prefixes reused, memory watched.

Runs on the engine thread only (see scheduler.py), where the model is loaded too: MLX's streams belong to
threads. Requests arrive here checked; nothing of them may raise inside a step.

A step reads at most one chunk of prompts and says one token for every reply, so a running stream never waits for
more than that chunk. Prompts that end in it are run together with the replies' next tokens where the network can do
that, so that whoever talks hardly notices who comes; a mistake in one of them is its own all the same.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.base import TokenDelta
from mlx_backend.engine.batch import Ended, ModelFacts
from mlx_backend.engine.mlx.decode import Decoder
from mlx_backend.engine.mlx.packed_forward import ForwardError
from mlx_backend.engine.mlx.prefill_queue import PrefillQueue
from mlx_backend.engine.mlx.prefix_store import PrefixStore
from mlx_backend.engine.mlx.runtime import Runtime
from mlx_backend.engine.mlx.sampling import RequestSampler
from mlx_backend.engine.mlx.sequences import DecodingSequence
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.kv_cache_budget import KVCacheBudget
    from mlx_backend.engine.mlx.collectives import Ranks
    from mlx_backend.engine.mlx.loading import LoadedNetwork
    from mlx_backend.engine.mlx.prefill_plan import PrefillJob
    from mlx_backend.engine.mlx.sequences import GeneratedToken
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

RESERVED_REPLY_TOKENS = 2048  # set aside for a reply whose length nobody knows
STEPS_PER_CACHE_CLEAR = 512


class MLXBatch:
    """Implements the scheduler's `Batch`."""

    _cache_budget: KVCacheBudget  # these three while a model is loaded
    _prefix_store: PrefixStore
    _prefill_queue: PrefillQueue

    def __init__(
        self,
        model: str | Path,
        options: EngineOptions,
        *,
        device: Device,
        model_id: str | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if options.prefill_chunk is not None and options.prefill_chunk < 1:
            raise EngineError(f"A prefill chunk of {options.prefill_chunk} tokens is too small.")
        self._source = model
        self._options = options
        self._device = device
        self._model_id = model_id
        self._ranks = ranks  # the processes that share the model
        self._runtime: Runtime | None = None
        self.steps = 0
        self._reset()

    def _reset(self) -> None:
        self._model: LoadedNetwork | None = None
        self._networks: dict[str, Any] = {}
        self._decoders: dict[str, list[Decoder]] = {}
        self._sequences: dict[int, DecodingSequence] = {}
        self._preempted: deque[DecodingSequence] = (
            deque()
        )  # for want of memory, in the middle of their replies

    # -- the model -------------------------------------------------------------------------------------------

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        """Load the model on this thread, warm it up, and see how much memory is left."""
        runtime = self._runtime = Runtime(
            self._source, self._options, self._device.memory, self._ranks, report
        )
        self._model, self._networks = runtime.model, runtime.networks
        self._cache_budget = runtime.cache_budget
        on_disk = self._options.adapter or ""  # what most requests are about
        self._prefix_store = PrefixStore(runtime.prefixes, runtime.disk, runtime.cache_budget, on_disk)
        self._prefill_queue = PrefillQueue(
            runtime, self._prefix_store, self._release, shared=self._ranks is not None
        )
        return ModelFacts(
            model_id=self._model_id or runtime.model.name,
            context_length=self._options.context_length or runtime.model.context_length,
            tokenizer=runtime.model.tokenizer,
            sampling_defaults=runtime.model.sampling_defaults,
            adapters=tuple(self._options.adapters),
        )

    def unload(self) -> None:
        """Give the memory back."""
        runtime, self._runtime = self._runtime, None
        self._reset()
        if runtime is not None:
            del self._cache_budget, self._prefix_store, self._prefill_queue
            runtime.close()
        mx.clear_cache()

    def close(self) -> None:
        """Leave MLX's streams of this thread in order.

        A thread that used MLX and ends without this aborts the process when the interpreter exits.
        """
        mx.synchronize()
        mx.clear_streams()

    # -- requests --------------------------------------------------------------------------------------------

    def admits(self, request: GenerationRequest) -> bool:
        """Whether its caches fit beside those that are there.

        Raises EngineRefused if they never can, EngineBusy if other models leave no room for them even alone.
        """
        if request.max_tokens == 0 and not self._prefix_store.enabled:
            raise EngineRefused("Nothing is kept here, so there is nothing to warm up.")
        tokens = _expected(request)
        reply = tokens - len(request.prompt)
        self._cache_budget.check(tokens, f"{len(request.prompt)} tokens of prompt and {reply} of reply")
        if self._preempted:
            return False
        return not self._sequences or self._cache_budget.fits(tokens, self._adapter_of(request))

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a request."""
        assert self._runtime is not None
        assert self._model is not None
        choice = RequestSampler(request, self._runtime.text)
        sequence = DecodingSequence(
            key,
            request,
            choice,
            self._model.tokenizer.detokenizer(),
            list(request.prompt),
            self._model.end_tokens,
            self._adapter_of(request),
        )
        sequence.memory = choice.penalty_state(())
        sequence.drafter = self._runtime.drafter()
        self._begin(sequence, _expected(request))

    @property
    def rate(self) -> float | None:
        """How many tokens of prompt a second this machine reads; None before it is known."""
        return self._prefill_queue.pace.rate

    @rate.setter
    def rate(self, rate: float | None) -> None:
        self._prefill_queue.pace.rate = rate

    def ready(self) -> bool:
        """There is always a token or a chunk to compute."""
        return True

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Read one chunk of the prompts that wait, let those in that were read, and say one token for everybody.

        In this order, because newcomers come between two steps: their first token does not wait for one more of
        the others'.
        """
        with self._device.lock:
            self.steps += 1
            if self.steps % STEPS_PER_CACHE_CLEAR == 0:
                mx.clear_cache()
            self._resume_preempted()
            due = (yield from self._read()) if self._prefill_queue.waiting else []
            for adapter in dict.fromkeys([*self._decoders, *(each.sequence.adapter for each in due)]):
                here = [
                    each
                    for each in due
                    if each.sequence.adapter == adapter and each in self._prefill_queue.waiting
                ]
                yield from self._decode(adapter, here)
            if due and not self._prefill_queue.waiting:
                # With others waiting, their run is begun before these are said: the device does not rest.
                yield from self._emit_first_tokens()
            self._prefix_store.report_usage()

    def remove(self, key: int) -> None:
        """Drop a request that nobody wants any more."""
        sequence = self._sequences[key]
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        else:
            self._detach(sequence)
        self._release(sequence)

    def _begin(self, sequence: DecodingSequence, expected: int) -> None:
        self._cache_budget.reserve(sequence.key, expected, sequence.adapter)
        self._prefix_store.evict_to_fit()
        self._prefill_queue.add(sequence)
        self._sequences[sequence.key] = sequence

    def _release(self, sequence: DecodingSequence) -> None:
        self._sequences.pop(sequence.key, None)
        self._cache_budget.release(sequence.key)

    def _adapter_of(self, request: GenerationRequest) -> str:
        return request.adapter or self._options.adapter or ""

    # -- replies ---------------------------------------------------------------------------------------------

    def _read(self) -> Generator[tuple[int, Outcome], None, list[PrefillJob]]:
        """Read one chunk, and return the prompts of which only the last pieces are left, which are due now."""
        dealt = self._prefill_queue.plan_step(talking=bool(self._decoders))
        if dealt.chunks:  # nobody's first word waits for those
            yield from self._emit_first_tokens()
        yield from self._prefill_queue.read(dealt)
        return dealt.due

    def _decode(self, adapter: str, due: Sequence[PrefillJob]) -> Iterator[tuple[int, Outcome]]:
        """Say one token for everybody of a space, and let in those whose last pieces are due."""
        assert self._runtime is not None
        if due and self._runtime.can_pack:
            decoder = self._decoder(due[0].sequence)
            try:
                said = decoder.step([self._prefill_queue.prefilled_sequence(job) for job in due])
            except ForwardError as error:
                if not decoder.all_sequences and len(due) == 1:
                    yield self._prefill_queue.fail(due[0], error)
                    return
                self._prefill_queue.on_packed_failure(error)
            else:
                yield from self._admit(adapter, decoder, due)
                yield from self._said(adapter, decoder, said)
                return
        for job in due:
            decoder = self._decoder(job.sequence)
            try:
                decoder.join([self._prefill_queue.prefilled_sequence(job)])
            except ForwardError as error:
                yield self._prefill_queue.fail(job, error)
            else:
                yield from self._admit(adapter, decoder, [job])
        for decoder in list(self._decoders.get(adapter, ())):
            if decoder.all_sequences:  # the one before may have had to put its only reply off
                yield from self._said(adapter, decoder, decoder.step())

    def _admit(
        self, adapter: str, decoder: Decoder, jobs: Sequence[PrefillJob]
    ) -> Iterator[tuple[int, Outcome]]:
        for job in jobs:
            yield from self._prefill_queue.complete(job)
        if decoder not in self._decoders.setdefault(adapter, []):
            self._decoders[adapter].append(decoder)

    def _emit_first_tokens(self) -> Iterator[tuple[int, Outcome]]:
        """Say the first words of those who came in, which are still being computed."""
        for adapter, decoders in list(self._decoders.items()):
            for decoder in list(decoders):
                yield from self._said(adapter, decoder, decoder.begin())

    def _said(
        self, adapter: str, decoder: Decoder, said: Sequence[GeneratedToken]
    ) -> Iterator[tuple[int, Outcome]]:
        """Report what was said, and let those go who are done."""
        ended: list[DecodingSequence] = []
        for each in said:
            sequence = each.sequence
            if sequence.choice.error is not None:
                continue
            yield sequence.key, TokenDelta(each.token, sequence.text.push(each.token), each.logprobs)
            if each.reason is not None:
                ended.append(sequence)
                yield sequence.key, Ended(each.reason)
        broken = [sequence for sequence in decoder.sequences if sequence.choice.error is not None]
        for sequence in broken:
            yield sequence.key, _failure(sequence)
        kept = decoder.remove([*ended, *broken], wanted=ended if self._prefix_store.enabled else ())
        for sequence in [*ended, *broken]:
            if sequence.key in kept:
                self._prefix_store.keep(sequence, sequence.tokens[: sequence.fed], kept.pop(sequence.key))
            self._release(sequence)
        self._drop_empty_decoders(adapter)
        yield from self._extend_reservations(decoder)

    def _extend_reservations(self, decoder: Decoder) -> Iterator[tuple[int, Outcome]]:
        """Set more aside for replies that grow longer than expected, or put the least urgent off until it fits."""
        for sequence in list(decoder.sequences):
            if sequence in self._preempted:
                continue
            if len(sequence.tokens) < self._cache_budget.reserved_tokens(sequence.key):
                continue
            most = len(sequence.request.prompt) + sequence.request.max_tokens
            self._cache_budget.reserve(
                sequence.key, min(most, len(sequence.tokens) + RESERVED_REPLY_TOKENS), sequence.adapter
            )
            self._prefix_store.evict_to_fit()
            while self._cache_budget.used > self._cache_budget.room and sequence not in self._preempted:
                others = [other for other in self._sequences.values() if other not in self._preempted]
                if len(others) > 1:
                    self._preempt(max(others, key=lambda other: (other.request.priority, other.key)))
                    continue
                if self._cache_budget.used > self._cache_budget.max_room:
                    # It runs alone: this is as long as it can get.
                    decoder.remove([sequence])
                    self._drop_empty_decoders(sequence.adapter)
                    self._release(sequence)
                    yield sequence.key, Ended("length")
                break

    def _preempt(self, sequence: DecodingSequence) -> None:
        """Take a reply out; it is read again, from its prompt to its last word, when there is room."""
        log.info("Memory is short: a reply of %d tokens so far has to wait.", sequence.said)
        self._detach(sequence)
        self._cache_budget.release(sequence.key)
        if sequence.said and not sequence.has_pending_token:  # said and not fed: the grammar has not read it
            sequence.choice.advance(sequence.tokens[-1])
        sequence.chosen = sequence.said
        sequence.memory = sequence.choice.penalty_state(sequence.tokens[len(sequence.request.prompt) :])
        sequence.report = None
        assert self._runtime is not None
        sequence.drafter = self._runtime.drafter()  # the old one has caches of its own
        self._preempted.append(sequence)

    def _resume_preempted(self) -> None:
        while self._preempted:
            sequence = self._preempted[0]
            tokens = len(sequence.tokens) + min(
                sequence.request.max_tokens - sequence.said, RESERVED_REPLY_TOKENS
            )
            alone = len(self._preempted) == len(self._sequences)
            if not (alone or self._cache_budget.fits(tokens, sequence.adapter)):
                return
            self._begin(self._preempted.popleft(), tokens)

    def _detach(self, sequence: DecodingSequence) -> None:
        """Take a row out of wherever it is."""
        if self._prefill_queue.remove(sequence):
            return
        for decoder in self._decoders.get(sequence.adapter, ()):
            if sequence in decoder.all_sequences:
                decoder.remove([sequence])
        self._drop_empty_decoders(sequence.adapter)

    def _drop_empty_decoders(self, adapter: str) -> None:
        running = [decoder for decoder in self._decoders.pop(adapter, ()) if decoder.all_sequences]
        if running:
            self._decoders[adapter] = running

    def _decoder(self, sequence: DecodingSequence) -> Decoder:
        """Return who decodes the row: those of its network who run, or a new one."""
        assert self._runtime is not None
        decoders = self._decoders.get(sequence.adapter)
        if decoders and self._runtime.can_batch:
            return decoders[-1]
        drafts = self._options.draft_tokens if sequence.drafter is not None else 0
        agree = self._ranks.agree if self._ranks is not None else None
        return Decoder(
            self._networks[sequence.adapter], can_pack=self._runtime.can_pack, drafts=drafts, agree=agree
        )


def _failure(sequence: DecodingSequence) -> EngineError:
    return EngineError(f"Choosing the next token failed: {sequence.choice.error}")


def _expected(request: GenerationRequest) -> int:
    """Return how many tokens to set memory aside for."""
    reply = request.max_tokens
    if request.expected_tokens is not None:
        reply = min(reply, max(request.expected_tokens, 1))
    return len(request.prompt) + reply
