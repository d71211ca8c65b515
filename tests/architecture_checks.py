"""Whether a model's replies are those that mlx-lm gives to each prompt alone, whatever else runs and is cached.

Used by the tests of the most used architectures, and by `make matrix` for all of them. It knows nothing of an
architecture but its folder.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
import mlx_lm
from drafting import drafting_engine
from engine_models import MARKERS
from engine_requests import together
from mlx_lm.generate import generate_step

from mlx_backend.device import Device
from mlx_backend.device.mlx import set_precision
from mlx_backend.engine.base import Finished, GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.draft_pacer import MAX_REPLIES
from mlx_backend.engine.mlx.kv_cache import fresh_caches
from mlx_backend.engine.threaded import Engine
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    type Check = Callable[[Model], list[Reply]]

REPLY = 10  # tokens
END = MARKERS.index("<|return|>")
LENGTHS = (1, 2, 31, 45, 70)  # of prompts; the windows hold 32


class NotStored(Exception):
    """Nothing of a prompt was written to disk, as the log says why."""


@dataclass(frozen=True)
class Reply:
    """A request, what our engine replied to it, and what it should have."""

    request: GenerationRequest
    found: list[int]
    expected: list[int]


class Model:
    """A model, run by mlx-lm and by an engine of ours with some options.

    `draft` is a folder of another model that drafts for it.
    """

    def __init__(self, folder: Path, draft: Path | None = None, **options: Any) -> None:
        self.folder = folder
        self.options = options
        self.draft = draft
        self.network: Any = mlx_lm.load(str(folder))[0]
        set_precision(self.network, folder.name)  # as in the engine: what is compared is not the rounding
        self._expected: dict[tuple[int, ...], list[int]] = {}
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @cached_property
    def engine(self) -> Engine:
        """The engine that checks without options of their own share."""
        batch = MLXBatch(self.folder, EngineOptions(**self.options), device=Device(8 << 30))
        return self._cleanup.enter_context(Engine(batch))

    def batching(self) -> str:
        """Return how several replies run: packed, or one by one with the reason."""
        return self.engine.status().unbatched or "packed"

    def expected(self, requests: Sequence[GenerationRequest]) -> list[list[int]]:
        """Generate each reply with mlx-lm, alone and from empty caches, up to the tokenizer's end token."""
        return [self._by_mlx_lm(each) for each in requests]

    def _by_mlx_lm(self, request: GenerationRequest) -> list[int]:
        prompt = tuple(request.prompt)
        if prompt not in self._expected:
            layers = self._fresh_layers()
            steps = generate_step(
                mx.array(prompt), self.network, max_tokens=request.max_tokens, prompt_cache=layers
            )
            tokens = [token for token, _ in steps]
            self._expected[prompt] = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        return self._expected[prompt]

    def is_tie(self, reply: Reply) -> bool:
        """Whether the first two tokens that differ are as likely as mlx-lm's own rounding can tell.

        That is how far its logits are apart when the same text is run at once and token by token.
        """
        pairs = zip(reply.found, reply.expected, strict=False)
        at = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
        if at is None:  # one ended before the other
            return False
        tokens = [*reply.request.prompt, *reply.expected[:at]]
        whole = self._last_logits([tokens])
        stepwise = self._last_logits([[token] for token in tokens])
        gap = mx.abs(whole[reply.expected[at]] - whole[reply.found[at]])
        return bool((gap <= 2 * mx.abs(whole - stepwise).max()).item())

    def _last_logits(self, parts: Sequence[Sequence[int]]) -> mx.array:
        layers = self._fresh_layers()
        *before, last = (self.network(mx.array([part]), cache=layers) for part in parts)
        mx.eval(before)
        logits: mx.array = last[0, -1].astype(mx.float32)
        return logits

    def _fresh_layers(self) -> list[Any]:
        return fresh_caches(self.network, EngineOptions(**self.options))


def text(seed: int, length: int) -> list[int]:
    """Return tokens that are no control tokens."""
    return as_ints(mx.random.randint(10, 250, (length,), key=mx.random.key(seed)))


def requests(**fields: Any) -> list[GenerationRequest]:
    """Return requests with prompts of several lengths."""
    return [
        GenerationRequest(prompt=text(at, length), max_tokens=REPLY, **fields)
        for at, length in enumerate(LENGTHS)
    ]


def alone(model: Model) -> list[Reply]:
    """One request after the other."""
    return _paired(model, requests(), lambda each: _replies(model.engine, each)[0])


def crowd(model: Model) -> list[Reply]:
    """All at once."""
    return _paired(model, requests(), lambda each: together(model.engine, each))


def next_turn(model: Model) -> list[Reply]:
    """Conversations go on, from what is cached of them."""
    first = requests()
    # What was replied, which is not mlx-lm's reply where two tokens are as likely as rounding can tell.
    turns = _turns(first, together(model.engine, first))
    found, cached = _replies(model.engine, turns)
    if any(count < len(each.prompt) for count, each in zip(cached, first, strict=True)):
        raise AssertionError(f"only {cached} tokens were cached")
    return _with_expected(model, turns, found)


def edited(model: Model) -> list[Reply]:
    """The ends of prompts are edited, and they are asked at once."""
    first = requests()
    turns = _turns(first, model.expected(first))
    together(model.engine, turns)
    others = [replace(each, prompt=[*each.prompt[:-4], *text(8, 6)]) for each in turns]
    return _paired(model, others, lambda each: together(model.engine, each))


def seeds(model: Model) -> list[Reply]:
    """A seed gives the same reply alone and in a crowd."""
    asked = requests(sampling=Sampling(temperature=1.0, seed=4))
    expected, _ = _replies(model.engine, asked)
    found = together(model.engine, asked)
    return [Reply(*each) for each in zip(asked, found, expected, strict=True)]


def restart(model: Model) -> list[Reply]:
    """A prefix was written to disk, and another engine continues it."""
    first = GenerationRequest(prompt=text(1, 60), max_tokens=REPLY, checkpoints=(40,))
    other = replace(first, prompt=[*first.prompt[:40], *text(2, 9)])
    with tempfile.TemporaryDirectory() as folder:
        with load_engine(model.folder, cache_folder=Path(folder), **model.options) as before:
            found, _ = _replies(before, [first])
        if not any(path.is_file() for path in Path(folder).rglob("*")):
            raise NotStored("its caches cannot be written to disk")
        with load_engine(model.folder, cache_folder=Path(folder), cache_bytes=0, **model.options) as after:
            more, cached = _replies(after, [other])
    if cached != [40]:
        raise AssertionError(f"{cached[0]} tokens came from the disk, not 40")
    return _with_expected(model, [first, other], [*found, *more])


def text_drafts(model: Model) -> list[Reply]:
    """Drafts come from the text itself, which repeats; alone, and in a crowd."""
    return _drafted(model, draft_from_text=True)


def model_drafts(model: Model) -> list[Reply]:
    """Drafts come from a model: one that is right always, which is itself, and one that hardly ever is."""
    right = _drafted(model, draft_model=str(model.folder))
    return right if model.draft is None else right + _drafted(model, draft_model=str(model.draft))


CHECKS: dict[str, Check] = {
    "alone": alone,
    "crowd": crowd,
    "next turn": next_turn,
    "edited": edited,
    "seeds": seeds,
    "restart": restart,
    "text drafts": text_drafts,
    "model drafts": model_drafts,
}


def _drafted(model: Model, **options: Any) -> list[Reply]:
    asked = [replace(each, prompt=[*text(7, 6), *each.prompt, *text(7, 6)]) for each in requests()]
    with drafting_engine(model.folder, **model.options, **options) as engine:
        return [
            *_paired(model, asked, lambda each: _replies(engine, each)[0]),
            *_paired(model, asked[:MAX_REPLIES], lambda each: together(engine, each)),
        ]


def _turns(first: Sequence[GenerationRequest], answers: Sequence[Sequence[int]]) -> list[GenerationRequest]:
    return [
        replace(each, prompt=[*each.prompt, *answer, *text(9, 5)])
        for each, answer in zip(first, answers, strict=True)
    ]


def _paired(
    model: Model,
    asked: Sequence[GenerationRequest],
    run: Callable[[Sequence[GenerationRequest]], list[list[int]]],
) -> list[Reply]:
    return _with_expected(model, asked, run(asked))


def _with_expected(
    model: Model, asked: Sequence[GenerationRequest], found: Sequence[list[int]]
) -> list[Reply]:
    return [Reply(*each) for each in zip(asked, found, model.expected(asked), strict=True)]


def _replies(engine: Engine, asked: Sequence[GenerationRequest]) -> tuple[list[list[int]], list[int]]:
    """Return the replies, one after the other, and how many tokens of each prompt were cached."""
    replies, cached = [], []
    for each in asked:
        *items, last = engine.generate(each)
        assert isinstance(last, Finished)
        replies.append([item.token for item in items if isinstance(item, TokenDelta)])
        cached.append(last.cached_tokens)
    return replies, cached
