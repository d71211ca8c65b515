"""mlx-vlm's own network as a `Batch`: any family that it loads, one reply at a time.

    insert ──▶ a reply ── step: a chunk of its prompt, later a token ──▶ outcomes

For families whose images the engine proper (`engine/mlx/batch.py`) does not know, and for families that mlx-lm has not.
Their networks hold the positions of one request, so no other is begun before it ends. All else of a reply is that of
the engine proper: how a token is drawn, seeds, constraints, log probabilities, the memory that is set aside. No prompts
are cached: what they leave in the network next to its caches is not known.

When a model is loaded it is tried: the same text at once and token by token has to get the same logits, and a picture
has to change them. A prompt is computed in chunks only if that was right as well.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_backend.device.mlx import weight_bytes
from mlx_backend.engine.base import Progress, TokenDelta
from mlx_backend.engine.batch import Ended, ModelInfo
from mlx_backend.engine.images import ImageSupport, PromptImage
from mlx_backend.engine.kv_cache_budget import NO_IMAGES, ImageBytes, KVCacheBudget
from mlx_backend.engine.mlx.arrays import as_ints, coarsest_dtype, evaluate_async
from mlx_backend.engine.mlx.batch_trial import MAX_DIFFERENCE, MAX_NOISE, differences
from mlx_backend.engine.mlx.chunk_cost import CacheCost
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.engine.mlx.sampling import RequestSampler, sample, text_token_mask
from mlx_backend.engine.mlx.sequences import DecodingSequence
from mlx_backend.engine.mlx.vision.families import ONE_AT_A_TIME, lacking_options
from mlx_backend.engine.mlx.vision.image_memory import PreparedImages, TowerCost
from mlx_backend.engine.mlx.vision.vlm_processor import PROBE_SIDE, VLMProcessor
from mlx_backend.errors import EngineError, EngineRefused, first_line
from mlx_backend.images import Picture
from mlx_backend.layers.architecture import WeightGlob
from mlx_backend.models.files import read_json_or_empty
from mlx_backend.models.tasks import is_of_mlx_lm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are computed in a step."""
RESERVED_REPLY_TOKENS = 2048
"""Tokens for which memory is reserved at a time, for a reply that outgrows its reservation."""
TRIED_TEXT = "The quick brown fox jumps over 12 dogs."
TRIED_CHUNK = 5
MEASURED_SIDES = (224, 448)
"""Sides of the pictures that are seen to measure, in pixels."""


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

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        """Load the model on this thread, and try it."""
        options, memory = self._options, self._device.memory
        if lacking := lacking_options(options):
            raise EngineError(
                f"Only mlx-vlm has a network of this family, and does not support {', '.join(lacking)}: leave that out."
            )
        reservation = memory.reserve(0, limit=options.memory_bytes)
        self._cleanup.callback(reservation.close)
        model = load_model(
            self._source,
            options,
            on_progress,
            check_size=lambda _name, nbytes: reservation.set_weights(nbytes),
            caches=memory.host_caches,
            read=_read,
        )
        self._model, self._network = model, model.network
        self._wired = self._device.wired.add(weight_bytes(model.network))
        self._cleanup.callback(self._wired.close)
        self._text_mask = text_token_mask(
            model.tokenizer.vocabulary_size, model.tokenizer.special_tokens.keys()
        )
        self._prompts_are_cut = True
        self._cost = TowerCost()
        with self._device.lock:  # MLX counts the memory of all models together
            cost = self._try_text()
            self._processor = self._load_processor()
            if self._processor is not None:
                self._measure(self._processor)
        if self._processor is None and is_of_mlx_lm(read_json_or_empty(model.folder / "config.json")):
            raise EngineError("It cannot be shown images, and mlx-lm's network answers text faster.")
        self._budget = self._make_budget(reservation, cost)
        log.info("%s runs on mlx-vlm's own network, one reply at a time.", model.name)
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

    def ready(self) -> bool:
        """Whether a step would do anything. It does, as long as there is a reply."""
        return True

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
        length = len(request.prompt)
        images = self._check_images(request)
        if request.expected_tokens is None:
            return length + request.max_tokens, images
        tokens = length + min(request.max_tokens, max(request.expected_tokens, 1))
        return self._budget.fitting_ever(tokens, length + 1, images), images

    def _check_images(self, request: GenerationRequest) -> ImageBytes:
        if not request.images:
            return NO_IMAGES
        if self._processor is None or any(each.image.written is None for each in request.images):
            raise EngineRefused("This model cannot see images here.", "images")
        images = {id(each.image): each.image for each in request.images}.values()
        total = sum(each.nbytes for each in images)
        return ImageBytes(total, max(map(self._cost.working_bytes, images)))

    # -- the network -----------------------------------------------------------------------------------------

    def _reply(self, sequence: DecodingSequence) -> Iterator[Outcome]:
        """Yield a reply's outcomes, each after a step's work."""
        run = _Run(self._network, sequence.request.prompt, self._inputs(sequence.request))
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
        length, budget = len(sequence.tokens), self._budget
        if length < budget.reserved_tokens(sequence.key):
            return True
        most = len(sequence.request.prompt) + sequence.request.max_tokens
        budget.reserve(sequence.key, budget.fitting(min(most, length + RESERVED_REPLY_TOKENS), length + 1))
        return budget.used <= budget.reservation.max_room

    # -- loading ---------------------------------------------------------------------------------------------

    def _try_text(self) -> CacheCost:
        """Try the network with a text; return what its caches cost. Raises EngineError if it cannot answer."""
        text = self._model.tokenizer.encode(TRIED_TEXT, control_tokens=False)
        try:
            run = _Run(self._network, text, {})
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

    def _load_processor(self) -> VLMProcessor | None:
        """Load what prepares images, and try it; None if the model cannot see here, which is logged."""
        name, tokenizer = self._model.name, self._model.tokenizer
        processor: VLMProcessor | None = None
        try:
            processor = VLMProcessor(
                self._model.folder,
                self._network,
                tokenizer,
                trust_remote_code=self._options.trust_remote_code,
            )
            self._try_image(processor)
        except Exception as error:
            log.warning("%s cannot be shown images here; it answers text only: %s", name, first_line(error))
            log.debug("The model's processor or vision tower failed.", exc_info=error)
            if processor is not None:
                processor.close()
            return None
        self._cleanup.callback(processor.close)
        return processor

    def _try_image(self, processor: VLMProcessor) -> None:
        """Try the network with a picture. Raises whatever it raises, EngineRefused for one that it does not see."""
        side = PROBE_SIDE
        noise = np.random.default_rng(0).bytes(3 * side * side)
        seen: list[mx.array] = []
        for rgb in (noise, bytes(3 * side * side)):
            prompt, inputs = self._with_image(processor, Picture(side, side, rgb))
            run = _Run(self._network, prompt, inputs)
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

    def _with_image(self, processor: VLMProcessor, picture: Picture) -> tuple[list[int], dict[str, Any]]:
        """Return a prompt with a picture in the middle, and its inputs."""
        tokenizer = self._model.tokenizer
        image = processor.prepare(picture)
        assert image.written is not None
        text = tokenizer.encode(TRIED_TEXT, control_tokens=False)
        body = tokenizer.encode(image.written.text, control_tokens=True)
        prompt = [*text, *body, *text]
        found = PromptImage(len(text) + image.written.before, image)
        return prompt, processor.inputs(prompt, [found])

    def _may_cut(self, run: _Run, prompt: Sequence[int], inputs: dict[str, Any], at_once: mx.array) -> bool:
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
        run = _Run(self._network, prompt, inputs)
        while run.length > 1:
            run.prefill(chunk)
        return max(differences(run.logits(), at_once))

    def _measure(self, processor: VLMProcessor) -> None:
        """See two pictures that show nothing, to know what others will take."""
        taken = []
        for side in MEASURED_SIDES:
            picture = Picture(side, side, bytes(3 * side * side))
            prompt, inputs = self._with_image(processor, picture)
            before = mx.get_active_memory()
            mx.reset_peak_memory()
            _Run(self._network, prompt, inputs)
            taken.append((processor.prepare(picture).nbytes, max(0, mx.get_peak_memory() - before)))
        self._cost = TowerCost.of(taken)

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


class _Run:
    """A prompt that is run through mlx-vlm's network, as mlx-vlm's own generation does it."""

    def __init__(self, network: Any, prompt: Sequence[int], inputs: Mapping[str, Any]) -> None:
        from mlx_vlm.models.cache import make_prompt_cache

        self._language = network.language_model
        for name in ("_position_ids", "_rope_deltas"):  # of the request before
            if hasattr(self._language, name):
                setattr(self._language, name, None)
        self._tokens = mx.array([list(prompt)])
        given = {name: value for name, value in inputs.items() if name != "pixel_values"}
        found = network.get_input_embeddings(
            self._tokens, inputs.get("pixel_values"), mask=mx.ones_like(self._tokens), **given
        )
        self._embeddings: mx.array | None = found.inputs_embeds
        more = {name: value for name, value in found.to_dict().items() if value is not None}
        del more["inputs_embeds"]
        self._given: dict[str, Any] = {**given, **more}
        self.caches = make_prompt_cache(self._language)
        self.may_be_cut = all(map(self._is_cut_by, (network, self._language)))
        mx.eval(self._embeddings)

    def _is_cut_by(self, part: Any) -> bool:
        """Whether a part of the network takes a prompt in chunks."""
        if (policy := getattr(part, "chunked_prefill_policy", None)) is None:
            return not getattr(part, "no_chunked_prefill", False)
        allowed = policy(
            input_ids=self._tokens,
            inputs_embeds=self._embeddings,
            prompt_cache=self.caches,
            draft_model=None,
            draft_kind=None,
            prefill_kwargs=self._given,
        )
        return bool(getattr(allowed, "enabled", allowed))

    @property
    def length(self) -> int:
        """How many embeddings of the prompt have not been run."""
        return 0 if self._embeddings is None else self._embeddings.shape[1]

    def prefill(self, count: int) -> None:
        """Run so many of them, but not the last."""
        assert self._embeddings is not None
        count = min(count, self.length - 1)
        self._language(
            inputs=self._tokens[:, :count],
            inputs_embeds=self._embeddings[:, :count],
            cache=self.caches,
            n_to_process=count,
            **self._given,
            logits_to_keep=1,
        )
        mx.eval([layer.state for layer in self.caches])
        mx.clear_cache()
        self._tokens, self._embeddings = self._tokens[:, count:], self._embeddings[:, count:]

    def logits(self, token: mx.array | None = None) -> mx.array:
        """Run what is left of the prompt, or a token ([1]) after it; return the logits ([1, vocabulary])."""
        if token is None:
            found = self._language(
                self._tokens,
                inputs_embeds=self._embeddings,
                cache=self.caches,
                **self._given,
                logits_to_keep=1,
            )
            self._embeddings = None
        else:
            found = self._language(
                token[None], inputs_embeds=None, cache=self.caches, **self._given, logits_to_keep=1
            )
        self._given = {}
        for name in ("cross_attention_states", "encoder_outputs"):
            if (states := getattr(found, name)) is not None:
                self._given = {name: states}
                break
        logits: mx.array = found.logits[:, -1, :]
        return logits


def _read(folder: Path, *, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """Return mlx-vlm's network of a folder, with weights that are not read yet, and its configuration."""
    import mlx_vlm.utils

    mlx_vlm.utils.glob = WeightGlob
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = mlx_vlm.utils.load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
    return network, mlx_vlm.utils.load_config(folder)
