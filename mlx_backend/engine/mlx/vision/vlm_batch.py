"""mlx-vlm's own network in the engine's batch: any family that it loads, one reply at a time.

For families that mlx-lm has not, and for pictures that the engine proper cannot be shown (split_batch.py). Such a
network holds the positions of one request, so no other is begun before it ends, and it sees all pictures of a prompt
when that is begun. No prompts are cached: what they leave in the network next to its caches is not known.

When a model is loaded it is tried: the same text at once and token by token has to get the same logits, and a picture
has to change them. A prompt is computed in chunks only if that was right as well.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_backend.device.mlx import set_precision
from mlx_backend.engine.mlx.arrays import coarsest_dtype
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.batch_trial import MAX_DIFFERENCE, MAX_NOISE, Abilities, differences
from mlx_backend.engine.mlx.chunk_cost import CacheCost, ChunkCost, WorkingMemory
from mlx_backend.engine.mlx.loading import Networks, load_model
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, token_ids
from mlx_backend.engine.mlx.prefix_cache import PrefixCache, PrefixStore
from mlx_backend.engine.mlx.runtime import Runtime, check_room, make_budget, make_warm_up, reserve_weights
from mlx_backend.engine.mlx.vision.families import ONE_AT_A_TIME, lacking_options
from mlx_backend.engine.mlx.vision.image_memory import TowerCost
from mlx_backend.engine.mlx.vision.prompt_images import PromptImages
from mlx_backend.engine.mlx.vision.vlm_processor import PROBE_SIDE, TRIED_TEXT, VLMProcessor
from mlx_backend.engine.mlx.vision.whole import WholeNetwork, own_bytes, read_whole, share_weights
from mlx_backend.errors import EngineError, EngineRefused, first_line
from mlx_backend.images import Picture
from mlx_backend.models.folders import explain_load_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.images import PreparedImage, PromptImage
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.loading import CheckSize, LoadedNetwork
    from mlx_backend.engine.mlx.vision.whole import VLMRun
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

PREFILL_CHUNK = 1024
"""Tokens of a prompt that are computed in a step."""
TRIED_CHUNK = 5


class VLMBatch(MLXBatch):
    """A model that may be loaded and unloaded, and the one reply that it runs."""

    text: LoadedNetwork | None = None
    """The model with mlx-lm's network, to be given before it is loaded if it is to share its weights.

    Loading then also fails if the model cannot be shown pictures.
    """

    def admits(self, request: GenerationRequest) -> bool:
        """Whether no other reply runs. Raises EngineRefused for what cannot run, EngineBusy while memory is short."""
        if request.prompt_logprobs is not None:
            raise EngineRefused(
                "This model runs on mlx-vlm's own network, which gives no log probabilities of prompts.",
                "prompt_logprobs",
            )
        return super().admits(request) and not self.sequences

    def _load_runtime(self, on_progress: Callable[[float], None]) -> Runtime:
        """Load the network, try it, and measure what its caches and images take. Raises EngineError."""
        if lacking := lacking_options(self._options):
            raise EngineError(
                f"Only mlx-vlm has a network of this family, and does not support {', '.join(lacking)}: leave that out."
            )
        options = replace(
            self._options,
            draft_tokens=0,  # an MTP head would be of no use here, and take memory
            warm_up_seconds=0.0,
            prefill_chunk=self._options.prefill_chunk or PREFILL_CHUNK,
        )
        memory, text, self.text = self._device.memory, self.text, None
        with ExitStack() as cleanup:  # if a step fails, undoes those before it
            reservation = memory.reserve(0, limit=options.memory_bytes)
            cleanup.callback(reservation.close)
            check_size = partial(reserve_weights, reservation, options.memory_bytes is not None)
            if text is not None:
                model = _around(text, options, check_size)
            else:
                model = load_model(
                    self._source,
                    options,
                    on_progress,
                    check_size=check_size,
                    caches=memory.host_caches,
                    read=_read,
                )
            trial = WholeTrial(model)
            vision: Any = None  # in place of a Vision
            with self._device.lock:  # MLX counts the memory of all models together
                cost = trial.try_text()
                try:
                    vision = trial.load_vision(trust_remote_code=options.trust_remote_code)
                    cleanup.callback(vision.processor.close)
                except Exception as error:
                    log.debug("The model's processor or vision tower failed.", exc_info=error)
                    if text is not None:
                        raise EngineError(first_line(error)) from error
                    reason = first_line(error)
                    log.warning(
                        "%s cannot be shown images here; it answers text only: %s", model.name, reason
                    )
            what = model.name if text is None else f"What {model.name} replies about pictures"
            log.info("%s runs on mlx-vlm's own network, one reply at a time.", what)
            networks = Networks(model, {"": model.network}, None, options)
            abilities = Abilities(unbatched=ONE_AT_A_TIME)
            chunk_cost = ChunkCost(PREFILL_CHUNK, WorkingMemory())
            budget = make_budget(reservation, self._device, None, cost, chunk_cost, abilities, vision)
            check_room(budget, cost, networks)
            return Runtime(
                options=options,
                networks=networks,
                kernels=None,
                many_rows=None,
                warm_up=make_warm_up(networks, None, 0),
                abilities=abilities,
                vision=vision,
                weight_bytes=reservation.weights,
                chunk_cost=chunk_cost,
                cache_budget=budget,
                prefix_store=PrefixStore(PrefixCache(0), None, budget),
                close=cleanup.pop_all().close,
            )

    def _images_of(self, request: GenerationRequest, tokens: Sequence[int]) -> PromptImages:
        vision: Any = self.runtime.vision
        return WholePrompt(request.images, tokens, self.runtime.networks.model.network, vision)


@dataclass(frozen=True, slots=True)
class WholeVision:
    """What mlx-vlm's network sees with. Nothing that is made of images is cached."""

    processor: VLMProcessor
    cost: TowerCost
    features: None = None


class WholePrompt(PromptImages):
    """A prompt for mlx-vlm's network, with its images.

    `tokens` are those of its sequence, which grow with the reply: a prompt that was preempted is begun again.
    """

    def __init__(
        self,
        images: Sequence[PromptImage],
        tokens: Sequence[int],
        network: WholeNetwork,
        vision: WholeVision | None,
    ) -> None:
        super().__init__()
        self._images = images
        self._starts = [each.start for each in images]
        self._tokens = tokens
        self._network = network
        self._seen_with = vision
        self._run: VLMRun | None = None

    @property
    def _is_begun(self) -> bool:
        """Whether the rest of the prompt can be run. Once all of it was, it has to be begun again."""
        run = self._run
        return run is not None and run is self._network.run and run.embeddings is not None

    def unseen(self, start: int, end: int) -> PreparedImage | None:
        """Return the first image, before the prompt is begun."""
        return self._images[0].image if self._images and not self._is_begun else None

    def see(self, image: PreparedImage) -> None:
        """Begin the prompt: see all its images."""
        assert self._seen_with is not None  # `admits` has looked
        self._begin(self._seen_with.processor.inputs(self._tokens, self._images))

    def forget(self) -> None:
        """Let go of what is left of the prompt. The reply needs what its last run has left."""
        if self._run is not None and self._run.embeddings is not None:
            self._run = None

    def seeing_bytes(self, start: int) -> int:
        """Return the working memory for seeing all images, before the prompt is begun."""
        if self._seen_with is None or self._is_begun:
            return 0
        return sum(self._seen_with.cost.working_bytes(each.image) for each in self._images)

    def can_store(self, position: int) -> bool:
        """Whether a chunk may end here for the next to begin: nothing is stored."""
        return True

    def whole_end(self, position: int) -> int:
        """Return where a chunk may end that was to end here: before the last token, if prompts are not cut."""
        return position if self._network.cuts_prompts else max(position, len(self._tokens) - 1)

    def segment(
        self, network: Any, tokens: Sequence[int], start: int, end: int, layers: LayerCaches
    ) -> Segment:
        """Return what runs these tokens. Raises ForwardError."""
        if not self._is_begun:
            try:
                self._begin({})
            except Exception as error:
                raise ForwardError from error
        return Segment(token_ids([tokens]), layers)

    def _begin(self, inputs: dict[str, Any]) -> None:
        self._run = self._network.begin(self._tokens, inputs)


class WholeTrial:
    """Tries a model with mlx-vlm's network."""

    def __init__(self, model: LoadedNetwork) -> None:
        self._model = model
        self._network: WholeNetwork = model.network

    def try_text(self) -> CacheCost:
        """Try the network with a text; return what its caches cost. Raises EngineError if it cannot answer."""
        name, text = self._model.name, self._model.tokenizer.encode(TRIED_TEXT, control_tokens=False)
        try:
            at_once, caches = self._logits(text, {}, len(text))
            off = self._difference(text, {}, 1, at_once)
        except Exception as error:
            raise EngineError(
                f"The model {name!r} was loaded with mlx-vlm, but cannot be run: {first_line(error)}."
            ) from error
        if off > MAX_NOISE:
            raise EngineError(
                f"The model {name!r} cannot be served: in mlx-vlm's network a text gets other logits at once than "
                f"token by token (off by {100 * off:.0f} %)."
            )
        self._try_chunks(text, {}, at_once)
        return CacheCost.of(caches, len(text))

    def load_vision(self, *, trust_remote_code: bool) -> WholeVision:
        """Load what prepares images, and try it. Raises whatever it raises, if the model cannot see here."""
        model, whole = self._model, self._network.whole
        processor = VLMProcessor(model.folder, whole, model.tokenizer, trust_remote_code=trust_remote_code)
        try:
            self._try_image(processor)
            return WholeVision(
                processor, TowerCost.measured(processor.prepare, partial(self._see, processor))
            )
        except Exception:
            processor.close()
            raise

    def _try_image(self, processor: VLMProcessor) -> None:
        """Try the network with a picture. Raises whatever it raises, EngineRefused for one that it does not see."""
        side = PROBE_SIDE
        noise = np.random.default_rng(0).bytes(3 * side * side)
        seen: list[mx.array] = []
        for rgb in (noise, bytes(3 * side * side)):
            prompt, images = processor.tried_prompt([processor.prepare(Picture(side, side, rgb))])
            inputs = processor.inputs(prompt, images)
            seen.append(self._logits(prompt, inputs, len(prompt))[0])
        off = self._difference(prompt, inputs, len(prompt) - 1, seen[1])
        if off > MAX_NOISE:
            raise EngineRefused(
                f"what follows a picture gets other logits at once than later (off by {100 * off:.0f} %).",
                "images",
            )
        if not max(differences(seen[0], seen[1])) > 0:
            raise EngineRefused("it answers alike whatever a picture shows.", "images")
        self._try_chunks(prompt, inputs, seen[1])

    def _see(self, processor: VLMProcessor, image: PreparedImage) -> None:
        prompt, images = processor.tried_prompt([image])
        self._network.begin(prompt, processor.inputs(prompt, images))

    def _try_chunks(self, prompt: Sequence[int], inputs: dict[str, Any], at_once: mx.array) -> None:
        """Note whether a prompt may be computed in chunks, as mlx-vlm says and a trial shows."""
        network = self._network
        run = network.begin(prompt, inputs)
        if network.cuts_prompts and network.may_cut(run, network.make_cache()):
            off = self._difference(prompt, inputs, TRIED_CHUNK, at_once)
            if off <= MAX_DIFFERENCE[coarsest_dtype(network)]:
                return
            log.debug("Prompts are not cut: in chunks their logits are off by %.0f %%.", 100 * off)
        network.cuts_prompts = False

    def _difference(
        self, prompt: Sequence[int], inputs: dict[str, Any], chunk: int, at_once: mx.array
    ) -> float:
        """Return by how much logits after a prompt in chunks are off those of the prompt at once."""
        ends = [*range(chunk, len(prompt) - 1, chunk), len(prompt) - 1]
        return max(differences(self._logits(prompt, inputs, *ends, len(prompt))[0], at_once))

    def _logits(
        self, prompt: Sequence[int], inputs: dict[str, Any], *ends: int
    ) -> tuple[mx.array, LayerCaches]:
        """Run a prompt in chunks up to these ends; return the logits after it ([1, vocabulary]), and the caches."""
        run = self._network.begin(prompt, inputs)
        start, caches = 0, self._network.make_cache()
        for end in ends:
            logits = run(mx.array([list(prompt[start:end])]), caches)
            mx.eval(logits, [layer.state for layer in caches])
            start = end
        return logits[:, -1], caches


def _read(folder: Path, *, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    whole, config = read_whole(folder, trust_remote_code=trust_remote_code)
    return WholeNetwork(whole), config


def _around(text: LoadedNetwork, options: EngineOptions, check_size: CheckSize) -> LoadedNetwork:
    """Return a model with mlx-vlm's network, which shares the weights of mlx-lm's. Raises EngineError."""
    with explain_load_errors(text.name):
        whole, _ = read_whole(text.folder, trust_remote_code=options.trust_remote_code)
        share_weights(whole, text.network)
        set_precision(whole, text.name)
    check_size(text.name, own_bytes(whole, text.network))
    with explain_load_errors(text.name):
        mx.eval(whole.parameters())
    return replace(text, network=WholeNetwork(whole))
