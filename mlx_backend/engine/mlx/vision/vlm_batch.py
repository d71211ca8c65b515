"""mlx-vlm's own network as a `Batch`: any family that it loads, one reply at a time.

    insert ──▶ a reply ── step: a chunk of its prompt, later a token ──▶ outcomes

For families that mlx-lm has not, and for pictures that the engine proper (`engine/mlx/batch.py`) cannot be shown
(split_batch.py). Such a network holds the positions of one request, so no other is begun before it ends. All else of a
reply is that of the engine proper: how a token is drawn, seeds, constraints, log probabilities, the memory that is set
aside. No prompts are cached: what they leave in the network next to its caches is not known.

When a model is loaded it is tried: the same text at once and token by token has to get the same logits, and a picture
has to change them. A prompt is computed in chunks only if that was right as well.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_backend.device.mlx import set_precision
from mlx_backend.engine.base import Progress, TokenDelta
from mlx_backend.engine.batch import Ended, ModelInfo
from mlx_backend.engine.images import ImageSupport
from mlx_backend.engine.kv_cache_budget import KVCacheBudget
from mlx_backend.engine.mlx.arrays import as_ints, coarsest_dtype, evaluate_async
from mlx_backend.engine.mlx.batch_trial import MAX_DIFFERENCE, MAX_NOISE, differences
from mlx_backend.engine.mlx.chunk_cost import CacheCost
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.engine.mlx.runtime import reserve_weights
from mlx_backend.engine.mlx.sampling import RequestSampler, sample, text_token_mask
from mlx_backend.engine.mlx.sequences import DecodingSequence
from mlx_backend.engine.mlx.vision.families import ONE_AT_A_TIME, lacking_options
from mlx_backend.engine.mlx.vision.image_memory import PreparedImages, TowerCost
from mlx_backend.engine.mlx.vision.prompt_images import check_images
from mlx_backend.engine.mlx.vision.vlm_processor import PROBE_SIDE, TRIED_TEXT, VLMProcessor
from mlx_backend.engine.mlx.vision.whole import VLMRun, own_bytes, read_whole, share_weights
from mlx_backend.errors import EngineError, EngineRefused, first_line
from mlx_backend.images import Picture
from mlx_backend.models.folders import explain_load_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.images import PreparedImage
    from mlx_backend.engine.kv_cache_budget import ImageBytes
    from mlx_backend.engine.mlx.loading import CheckSize, LoadedNetwork
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are computed in a step."""
TRIED_CHUNK = 5


class VLMBatch:
    """A model that may be loaded and unloaded, and the one reply that it runs."""

    def __init__(
        self, model: str | Path, options: EngineOptions, *, device: Device, model_id: str | None = None
    ) -> None:
        self._source = model
        self._options = options
        self._device = device
        self._model_id = model_id
        self._cleanup = ExitStack()
        self._running: tuple[DecodingSequence, Iterator[Outcome]] | None = None
        self._processor: VLMProcessor | None = None

    def load(self, on_progress: Callable[[float], None], text: LoadedNetwork | None = None) -> ModelInfo:
        """Load the model on this thread, and try it; `text` is it with mlx-lm's network, whose weights it shares.

        Raises EngineError, next to that network also if it cannot be shown pictures.
        """
        options, memory = self._options, self._device.memory
        if lacking := lacking_options(options):
            raise EngineError(
                f"Only mlx-vlm has a network of this family, and does not support {', '.join(lacking)}: leave that out."
            )
        reservation = memory.reserve(0, limit=options.memory_bytes)
        self._cleanup.callback(reservation.close)
        check_size = partial(reserve_weights, reservation, options.memory_bytes is not None)
        if text is not None:
            model = _around(text, options, check_size)
        else:
            model = load_model(
                self._source,
                replace(options, draft_tokens=0),  # an MTP head would be of no use here, and take memory
                on_progress,
                check_size=check_size,
                caches=memory.host_caches,
                read=read_whole,
            )
        self._model, self._network = model, model.network
        self._cleanup.callback(self._device.wired.add(reservation.weights).close)
        self._text_mask = text_token_mask(
            model.tokenizer.vocabulary_size, model.tokenizer.special_tokens.keys()
        )
        self._prompts_are_cut = True
        with self._device.lock:  # MLX counts the memory of all models together
            cost = self._try_text()
            try:
                self._processor = self._load_processor()
            except Exception as error:
                log.debug("The model's processor or vision tower failed.", exc_info=error)
                if text is not None:
                    raise EngineError(first_line(error)) from error
                reason = first_line(error)
                log.warning("%s cannot be shown images here; it answers text only: %s", model.name, reason)
        self._budget = self._make_budget(reservation, cost)
        what = model.name if text is None else f"What {model.name} replies about pictures"
        log.info("%s runs on mlx-vlm's own network, one reply at a time.", what)
        context_length = options.context_length or model.context_length
        return ModelInfo(
            model_id=self._model_id or model.name,
            context_length=context_length,
            tokenizer=model.tokenizer,
            sampling_defaults=model.sampling_defaults,
            image_processor=self._processor,
            image_support=ImageSupport.NOT_HERE if self._processor is None else ImageSupport.AVAILABLE,
            unbatched=ONE_AT_A_TIME,
            available_context=lambda: min(context_length, self._budget.fitting_tokens()),
            set_waker=self._budget.set_on_change,
        )

    def unload(self) -> None:
        """Give the memory back, also after a failed load."""
        self._running = self._processor = None
        for name in ("_model", "_network", "_text_mask", "_budget"):  # as far as `load` came
            vars(self).pop(name, None)
        self._cleanup.close()
        mx.clear_cache()

    def close(self) -> None:
        """Clean up this thread's MLX streams, without which the process aborts when the interpreter exits."""
        mx.synchronize()
        mx.clear_streams()

    # -- requests --------------------------------------------------------------------------------------------

    def admits(self, request: GenerationRequest) -> bool:
        """Whether no other reply runs. Raises EngineRefused for what cannot run, EngineBusy while memory is short."""
        if request.prompt_logprobs is not None:
            raise EngineRefused(
                "This model runs on mlx-vlm's own network, which gives no log probabilities of prompts.",
                "prompt_logprobs",
            )
        tokens, images = self._needed_memory(request)
        length = len(request.prompt)
        self._budget.check(tokens, f"{length} tokens of prompt and {tokens - length} of reply", images)
        return self._running is None and self._budget.fits_alone(tokens, images, asks=request.max_tokens > 0)

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a reply."""
        sampler = RequestSampler(request, self._text_mask)
        tokenizer = self._model.tokenizer
        sequence = DecodingSequence(
            key,
            request,
            sampler,
            tokenizer.detokenizer(),
            list(request.prompt),
            tokenizer.end_tokens,
            penalties=sampler.penalty_state(()),
        )
        tokens, images = self._needed_memory(request)
        self._budget.reserve(key, tokens, "", images.seeing)
        self._running = sequence, self._reply(sequence)

    def remove(self, key: int) -> None:
        """Drop the reply, which was cancelled."""
        self._running = None
        self._budget.release(key)

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Compute a chunk of the prompt, or a token of the reply."""
        assert self._running is not None
        sequence, reply = self._running
        outcome: Outcome
        try:
            with self._device.lock:
                outcome = next(reply)
        except EngineError as error:
            outcome = error
        except (RuntimeError, MemoryError, OSError):  # the device's failures
            raise
        except Exception as error:
            log.exception("A reply failed in mlx-vlm's network.")
            outcome = EngineError(f"mlx-vlm's network failed: {first_line(error)}")
        if isinstance(outcome, Ended | EngineError):
            self.remove(sequence.key)
        yield sequence.key, outcome

    def _needed_memory(self, request: GenerationRequest) -> tuple[int, ImageBytes]:
        images = check_images(request, self._cost if self._processor is not None else None)
        return self._budget.needed_tokens(request, images), images

    # -- the network -----------------------------------------------------------------------------------------

    def _reply(self, sequence: DecodingSequence) -> Iterator[Outcome]:
        """Yield a reply's outcomes, each after a step's work."""
        run = VLMRun(self._network, sequence.request.prompt, self._inputs(sequence.request))
        total = len(sequence.tokens)
        chunk = (self._options.prefill_chunk or PREFILL_CHUNK) if self._prompts_are_cut else total
        while run.length > 1:
            run.prefill(chunk)
            yield Progress(total - run.length, total)
        token = self._sample(sequence, run.logits(), None)
        yield Progress(total, total)
        while True:
            logprobs = sequence.logprobs
            ahead: mx.array | None = None
            if sequence.num_sampled < sequence.request.max_tokens and sequence.sampler.constraint is None:
                ahead = self._sample(sequence, run.logits(token), token)
            emitted = sequence.emit(as_ints(token)[0], logprobs)
            if (error := sequence.sampler.error) is not None:
                yield EngineError(f"Choosing the next token failed: {error}")
                return
            yield TokenDelta(emitted.token, sequence.detokenizer.push(emitted.token), emitted.logprobs)
            reason = emitted.finish_reason
            if reason is not None or not self._has_room_for_more(sequence):
                yield Ended(reason or "length")
                return
            if ahead is None:
                sequence.advance_constraint(emitted.token)
                ahead = self._sample(sequence, run.logits(token), token)
            token = ahead

    def _inputs(self, request: GenerationRequest) -> dict[str, Any]:
        if not request.images:
            return {}
        assert self._processor is not None  # `admits` has looked
        return self._processor.inputs(request.prompt, request.images)

    def _sample(self, sequence: DecodingSequence, logits: mx.array, token: mx.array | None) -> mx.array:
        """Sample the token ([1]) that follows this one, or the first, and start computing it."""
        position = sequence.next_position() if token is None else sequence.position_after(token, 0)
        sampled, step = sample(logits, [position])
        sequence.logprobs = (step, 0) if step is not None else None
        evaluate_async(sampled, step.arrays if step is not None else [])
        return sampled

    def _has_room_for_more(self, sequence: DecodingSequence) -> bool:
        """Set more memory aside for a reply that outgrows what was expected; return whether there can be more."""
        max_tokens = len(sequence.request.prompt) + sequence.request.max_tokens
        if not self._budget.extend(sequence.key, len(sequence.tokens), max_tokens):
            return True
        return self._budget.used <= self._budget.reservation.max_room

    # -- loading ---------------------------------------------------------------------------------------------

    def _try_text(self) -> CacheCost:
        """Try the network with a text; return what its caches cost. Raises EngineError if it cannot answer."""
        text = self._model.tokenizer.encode(TRIED_TEXT, control_tokens=False)
        try:
            run = VLMRun(self._network, text, {})
            at_once = run.logits()
            off = self._difference(text, {}, 1, at_once)
        except Exception as error:
            raise EngineError(
                f"The model {self._model.name!r} was loaded with mlx-vlm, but cannot be run: {first_line(error)}."
            ) from error
        if off > MAX_NOISE:
            raise EngineError(
                f"The model {self._model.name!r} cannot be served: in mlx-vlm's network a text gets other logits at "
                f"once than token by token (off by {100 * off:.0f} %)."
            )
        self._prompts_are_cut = self._may_cut(run, text, {}, at_once)
        return CacheCost.of(run.caches, len(text))

    def _load_processor(self) -> VLMProcessor:
        """Load what prepares images, and try it. Raises whatever it raises, if the model cannot see here."""
        processor = VLMProcessor(
            self._model.folder,
            self._network,
            self._model.tokenizer,
            trust_remote_code=self._options.trust_remote_code,
        )
        try:
            self._try_image(processor)
            self._cost = TowerCost.measured(processor.prepare, partial(self._see, processor))
        except Exception:
            processor.close()
            raise
        self._cleanup.callback(processor.close)
        return processor

    def _try_image(self, processor: VLMProcessor) -> None:
        """Try the network with a picture. Raises whatever it raises, EngineRefused for one that it does not see."""
        side = PROBE_SIDE
        noise = np.random.default_rng(0).bytes(3 * side * side)
        seen: list[mx.array] = []
        for rgb in (noise, bytes(3 * side * side)):
            prompt, images = processor.tried_prompt([processor.prepare(Picture(side, side, rgb))])
            inputs = processor.inputs(prompt, images)
            run = VLMRun(self._network, prompt, inputs)
            seen.append(run.logits())
        off = self._difference(prompt, inputs, len(prompt), seen[1])
        if off > MAX_NOISE:
            raise EngineRefused(
                f"what follows a picture gets other logits at once than later (off by {100 * off:.0f} %).",
                "images",
            )
        if not max(differences(seen[0], seen[1])) > 0:
            raise EngineRefused("it answers alike whatever a picture shows.", "images")
        self._prompts_are_cut &= self._may_cut(run, prompt, inputs, seen[1])

    def _see(self, processor: VLMProcessor, image: PreparedImage) -> None:
        prompt, images = processor.tried_prompt([image])
        VLMRun(self._network, prompt, processor.inputs(prompt, images))

    def _may_cut(self, run: VLMRun, prompt: Sequence[int], inputs: dict[str, Any], at_once: mx.array) -> bool:
        """Whether a prompt may be computed in chunks, as mlx-vlm says and a trial shows."""
        if not run.may_be_cut:
            return False
        off = self._difference(prompt, inputs, TRIED_CHUNK, at_once)
        if off > MAX_DIFFERENCE[coarsest_dtype(self._network)]:
            log.debug("Prompts are not cut: in chunks their logits are off by %.0f %%.", 100 * off)
            return False
        return True

    def _difference(
        self, prompt: Sequence[int], inputs: dict[str, Any], chunk: int, at_once: mx.array
    ) -> float:
        """Return by how much logits after a prompt in chunks are off those of the prompt at once."""
        run = VLMRun(self._network, prompt, inputs)
        while run.length > 1:
            run.prefill(chunk)
        return max(differences(run.logits(), at_once))

    def _make_budget(self, reservation: MemoryReservation, cost: CacheCost) -> KVCacheBudget:
        waiting = PreparedImages() if self._processor is None else self._processor.waiting
        waiting.room = lambda: reservation.max_room
        budget = KVCacheBudget(
            reservation,
            cost,
            max_padded=0,
            pressure=self._device.memory.pressure,
            waiting=lambda: waiting.nbytes,
        )
        budget.check(1, f"A single token of {self._model.name!r}")
        return budget


def _around(text: LoadedNetwork, options: EngineOptions, check_size: CheckSize) -> LoadedNetwork:
    """Return a model with mlx-vlm's network, which shares the weights of mlx-lm's. Raises EngineError."""
    with explain_load_errors(text.name):
        network, _ = read_whole(text.folder, trust_remote_code=options.trust_remote_code)
        share_weights(network, text.network)
        set_precision(network, text.name)
    check_size(text.name, own_bytes(network, text.network))
    with explain_load_errors(text.name):
        mx.eval(network.parameters())
    return replace(text, network=network)
