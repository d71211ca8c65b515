"""The batch on mlx-lm's `BatchGenerator`: prompts read in chunks, decoded together, prefixes reused.

Runs on the engine thread only (see scheduler.py), where the model is loaded too: MLX's streams belong to
threads. Requests arrive here checked; nothing of them may raise inside a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from ..base import EngineError, Progress, TokenDelta
from ..scheduler import Ended, ModelFacts
from .caches import PrefixCache
from .loading import load_model
from .sampling import Chooser

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ..base import GenerationRequest
    from ..scheduler import Outcome
    from .detokenizing import TextStream
    from .sampling import Choice

# Prompts read at the same time. A running stream waits for a chunk of each of them.
PREFILL_TOGETHER = 4


@dataclass(frozen=True, slots=True)
class _Running:
    key: int
    request: GenerationRequest
    cached: int
    checkpoints: frozenset[int]
    choice: Choice
    text: TextStream


def cut(length: int, *, after: int, at: Iterable[int], chunk: int) -> list[int]:
    """Cut the part of a prompt that is still to be read: the ends of its pieces, from `after` to `length`.

    A piece ends at each position of `at` and holds at most `chunk` tokens; the last token is a piece by itself,
    as the generator wants it. No piece but that and the one before it is a single token, and a cut that would
    make one is left out: after a step of one token the rotating caches of mlx-lm are in decoding order, and the
    mask they make for the next longer step (0.32.2) hides a token too many.
    """
    last = length - 1
    cuts = [after]
    for end in sorted({position for position in at if after < position < last} | {last}):
        size = end - cuts[-1]
        if size > 1 or end == last:
            count = -(-size // chunk)
            cuts += [cuts[-1] + size * part // count for part in range(1, count + 1)]
    return [*cuts, length]


class MLXBatch:
    """Implements the scheduler's `Batch`."""

    def __init__(
        self,
        model: str | Path,
        *,
        model_id: str | None = None,
        context_length: int | None = None,
        max_concurrent: int,
        prefill_chunk: int,
        cache_bytes: int,
        chooser: type[Chooser] = Chooser,
    ) -> None:
        if prefill_chunk < 4:
            raise EngineError(f"A prefill chunk of {prefill_chunk} tokens is too small; 4 are the least.")
        self._source = model
        self._model_id = model_id
        self._context_length = context_length
        self._max_concurrent = max_concurrent
        self._prefill_chunk = prefill_chunk
        self._chooser_type = chooser
        self._prefixes = PrefixCache(cache_bytes)
        self._running: dict[int, _Running] = {}  # by the generator's uid
        self._uids: dict[int, int] = {}  # by the scheduler's key

    def load(self) -> ModelFacts:
        """Load the model on this thread."""
        model = load_model(self._source)
        limit = self._context_length
        if limit is not None and not 0 < limit <= model.context_length:
            raise EngineError(
                f"A context of {limit} tokens is not possible: this model's is {model.context_length}."
            )
        self._tokenizer = model.tokenizer
        self._chooser = self._chooser_type(
            model.tokenizer.vocabulary_size, model.tokenizer.special_tokens.keys()
        )
        self._generator = BatchGenerator(
            model.network,
            stop_tokens=[[token] for token in sorted(model.end_tokens)],
            completion_batch_size=self._max_concurrent,
            prefill_batch_size=min(PREFILL_TOGETHER, self._max_concurrent),
            prefill_step_size=self._prefill_chunk,
        )
        return ModelFacts(
            model_id=self._model_id or model.name,
            context_length=limit or model.context_length,
            tokenizer=model.tokenizer,
        )

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a request, with the longest prefix of its prompt that is known already."""
        prompt = list(request.prompt)
        cached, layers = self._prefixes.longest(prompt)
        wanted = (*request.checkpoints, len(prompt) - 1) if self._prefixes.enabled else ()
        cuts = cut(len(prompt), after=cached, at=wanted, chunk=self._prefill_chunk)
        choice = self._chooser(request.sampling, len(prompt))
        [uid] = self._generator.insert_segments(
            [[prompt[start:end] for start, end in pairwise(cuts)]],
            max_tokens=[request.max_tokens],
            caches=[layers],
            all_tokens=[prompt[:cached]],  # a list of its own: the generator appends to it
            samplers=[choice.sampler],
            logits_processors=[list(choice.processors)],
        )
        text = self._tokenizer.text_stream()
        self._running[uid] = _Running(key, request, cached, frozenset(wanted) & frozenset(cuts), choice, text)
        self._uids[key] = uid

    def ready(self) -> bool:
        """There is always a token or a chunk to compute."""
        return True

    def step(self) -> Iterable[tuple[int, Outcome]]:
        """Decode one token for everybody, then read one chunk of the prompts that wait."""
        prompts, tokens = self._generator.next()
        for response in tokens:
            running = self._running[response.uid]
            yield running.key, TokenDelta(response.token, running.text.push(response.token))
            if response.finish_reason is not None:
                self._keep(response.all_tokens, response.prompt_cache)
                self._forget(response.uid)
                yield running.key, Ended(response.finish_reason)
        for response in prompts:
            running = self._running[response.uid]
            done = running.cached + response.progress[0]
            if response.end_of_segment and done in running.checkpoints:
                self._checkpoint(response.uid, running.request, done)
            yield running.key, Progress(done, len(running.request.prompt), running.cached)
        for uid, running in list(self._running.items()):
            if running.choice.error is not None:
                self._generator.remove([uid])
                self._forget(uid)
                yield running.key, EngineError(f"Choosing the next token failed: {running.choice.error}")

    def remove(self, key: int) -> None:
        """Drop a request that nobody wants any more."""
        uid = self._uids[key]
        self._generator.remove([uid])
        self._forget(uid)

    def unload(self) -> None:
        """Give the memory back, and leave MLX's streams of this thread in order.

        A thread that used MLX and ends without this aborts the process when the interpreter exits.
        """
        generator = self.__dict__.pop("_generator", None)
        if generator is not None:
            generator.close()
        self._prefixes.clear()
        self._running.clear()
        mx.synchronize()
        mx.clear_streams()

    def _forget(self, uid: int) -> None:
        del self._uids[self._running.pop(uid).key]

    def _checkpoint(self, uid: int, request: GenerationRequest, position: int) -> None:
        prefix = request.prompt[:position]
        if not self._prefixes.has(prefix):
            layers, _ = self._generator.extract_cache([uid])[uid]
            self._prefixes.keep(prefix, layers)

    def _keep(self, tokens: list[int], layers: list[Any]) -> None:
        if self._prefixes.enabled:
            self._prefixes.keep(tokens, layers)
