"""The engine to read first: mlx-lm's own batch generator as a `Batch`, and nothing that makes it faster.

    insert ──▶ prompts that wait ── step: a chunk of each ──▶ replies ── step: a token of each ──▶ outcomes

All that an engine has to do is here: load a model, take requests, step, deliver text, let a request go. The engine
proper (`batch.py`) adds cached prefixes, packed steps, drafts, adapters, images, log probabilities and a budget for the
caches; the tokens are the same. So the engine's tests compare it with this one, which shares no more with it than
loading, the tokenizer and how a token is drawn, and `mlx-backend serve --engine plain` shows what the rest is worth on
a machine.

What it lacks is refused by name. Memory for caches is not counted: only the weights are reserved, and as many requests
run as the scheduler lets in. macOS's limit of wired memory is the generator's to set.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from mlx_backend.engine.base import Progress, TokenDelta
from mlx_backend.engine.batch import Ended, ModelInfo
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.engine.mlx.sampling import RequestSampler, SamplePosition, draw, text_token_mask
from mlx_backend.engine.mlx.vision.image_trial import support_of
from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.models.engine_options import given_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.batch import Outcome
    from mlx_backend.engine.mlx.tokenizer import Detokenizer
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

PREFILL_CHUNK = 2048
"""Tokens of each prompt that are prefilled in a step, as in mlx-lm."""
UNSUPPORTED = ("adapters", "draft_model", "draft_from_text", "kv_bits", "cache_folder")
"""The engine options that would change what it does, and that it does not have."""


class PlainBatch:
    """A model that may be loaded and unloaded, and the requests it runs. `device` is shared with other models."""

    def __init__(
        self, model: str | Path, options: EngineOptions, *, device: Device, model_id: str | None = None
    ) -> None:
        if lacking := given_options(options, UNSUPPORTED):
            raise EngineError(
                f"The plain engine does not support {', '.join(lacking)}: leave that out, or --engine plain."
            )
        self._source = model
        self._options = options
        self._device = device
        self._model_id = model_id
        self._generator: BatchGenerator | None = None
        self._reservation: MemoryReservation | None = None
        self._replies: dict[int, _RunningReply] = {}
        """By the generator's numbers."""
        self._numbers: dict[int, int] = {}
        """The generator's numbers by the scheduler's keys."""

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        """Load the model on this thread."""
        log.warning(
            "The plain engine caches no prompts, wires no memory, has no faster layers, and does not limit the memory "
            "of KV caches, whatever the options say."
        )
        options, memory = self._options, self._device.memory
        self._reservation = reservation = memory.reserve(0, limit=options.memory_bytes)
        model = load_model(
            self._source,
            options,
            on_progress,
            check_size=lambda _name, nbytes: reservation.set_weights(nbytes),
            caches=memory.host_caches,
        )
        self._new_detokenizer = model.tokenizer.detokenizer
        self._text_mask = text_token_mask(
            model.tokenizer.vocabulary_size, model.tokenizer.special_tokens.keys()
        )
        self._generator = BatchGenerator(
            model.network,
            stop_tokens=[[token] for token in model.tokenizer.end_tokens],
            completion_batch_size=options.max_concurrent,
            prefill_step_size=options.prefill_chunk or PREFILL_CHUNK,
        )
        return ModelInfo(
            model_id=self._model_id or model.name,
            context_length=options.context_length or model.context_length,
            tokenizer=model.tokenizer,
            sampling_defaults=model.sampling_defaults,
            image_support=support_of(model.folder, None),
        )

    def unload(self) -> None:
        """Give the memory back."""
        if self._generator is not None:
            self._generator.close()
        self._generator = None
        self._replies.clear()
        self._numbers.clear()
        mx.clear_cache()
        reservation, self._reservation = self._reservation, None
        if reservation is not None:
            reservation.close()

    def close(self) -> None:
        """Clean up this thread's MLX streams, without which the process aborts when the interpreter exits."""
        mx.synchronize()
        mx.clear_streams()

    def admits(self, request: GenerationRequest) -> bool:
        """Say yes to every request that it can run. Raises EngineRefused for the others."""
        if request.images or request.logprobs is not None or request.prompt_logprobs is not None:
            raise EngineRefused("The plain engine sees no images, and gives no log probabilities.")
        return True

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Queue a request for prefill."""
        assert self._generator is not None  # between `load` and `unload`
        reply = _RunningReply(key, request, self._text_mask, self._new_detokenizer())
        [number] = self._generator.insert(
            [list(request.prompt)],
            [request.max_tokens],
            samplers=[None if reply.sampler.params is None else reply.draw],  # None is greedy
            logits_processors=[reply.processors],
        )
        self._replies[number], self._numbers[key] = reply, number

    def remove(self, key: int) -> None:
        """Drop a request."""
        assert self._generator is not None
        number = self._numbers.pop(key)
        del self._replies[number]
        self._generator.remove([number])

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Generate one token for every reply, and prefill a chunk of every prompt."""
        assert self._generator is not None
        with self._device.lock:
            prompts, tokens = self._generator.next()
        for each in prompts:
            yield self._replies[each.uid].key, Progress(*each.progress)
        for each in tokens:
            reply = self._replies[each.uid]
            if (error := reply.sampler.error) is not None:
                self.remove(reply.key)
                yield reply.key, EngineError(f"Choosing the next token failed: {error}")
                continue
            text = reply.detokenizer.push(each.token)
            yield reply.key, TokenDelta(each.token, text)
            if each.finish_reason is not None:
                self.remove(reply.key)
                yield reply.key, Ended(each.finish_reason)


class _RunningReply:
    """A request that runs, and what the generator calls for it: neither may raise, which would harm the others."""

    def __init__(
        self, key: int, request: GenerationRequest, text_mask: mx.array, detokenizer: Detokenizer
    ) -> None:
        self.key = key
        self.sampler = RequestSampler(request, text_mask)
        self.detokenizer = detokenizer
        self._request = request
        self._num_drawn = 0

    @property
    def processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """What the generator calls with logits before a token is drawn."""
        constraint, bias = self._request.constraint, self._request.sampling.logit_bias
        is_used = constraint is not None or bias or self.sampler.penalty_state(()) is not None
        return [self._process] if is_used else []

    def _process(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return the logits ([1, vocabulary]) of the token after `tokens`, the prompt's and the reply's so far."""
        reply = as_ints(tokens[len(self._request.prompt) :])
        if reply:
            self.sampler.advance(reply[-1])
        return self.sampler.process(logits, self.sampler.penalty_state(reply))

    def draw(self, logprobs: mx.array) -> mx.array:
        """Return a token ([1]) with the random key that the request's seed gives it."""
        position = SamplePosition(self.sampler, self._num_drawn, None)
        self._num_drawn += 1
        return draw(logprobs, self.sampler.params, [position])
