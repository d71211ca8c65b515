"""Drafters for speculative decoding: they guess the next tokens from the text itself, with a smaller model or a head.

A guess costs time and can never change a reply: decode.py verifies it. A smaller model's tokens are chosen as the
reply's own are at the same positions, with the same random keys (sampling.py). Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.chunk_cost import padded_sizes
from mlx_backend.engine.mlx.mlx_lm_patches.attention import MAX_SINGLE_QUERIES
from mlx_backend.engine.mlx.mtp import HeadCache, last_vector, run_head
from mlx_backend.engine.mlx.packed_forward import Segment, run_packed
from mlx_backend.engine.mlx.rewinding import RewindPoint, has_to_replay
from mlx_backend.engine.mlx.sampling import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sampling import SamplePosition


class Drafter(Protocol):
    """Drafts for one reply, whose text only ever gets longer."""

    def propose(self, tokens: Sequence[int], max_drafts: int, position: SamplePosition) -> list[int] | None:
        """Guess what follows `tokens`, the prompt and the reply so far; return at most `max_drafts` tokens.

        The first one stands at `position` of the reply. None: the text still has to be prefilled.
        """
        ...

    def num_to_prefill(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens it has to run before it can draft what follows them."""
        ...


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Where tokens are to be drafted: after `tokens`, at `position` and those that follow it.

    `layers` are the reply's caches, which hold all tokens but the last one and `num_to_replay` before it; `shift` is
    added to their positions.
    """

    drafter: Drafter | HeadDrafter
    tokens: Sequence[int]
    max_drafts: int
    position: SamplePosition
    layers: LayerCaches = field(default_factory=list)
    num_to_replay: int = 0
    shift: int = 0


class TextDrafter:
    """Prompt lookup (Saxena 2023): what followed the last tokens where they stood in the text before.

    Answers that quote (code that is edited, tool results, summaries) have many such passages.
    """

    NGRAM = 3

    def __init__(self) -> None:
        self.guess: list[int] = []  # made in a rehearsal
        self._guess_start = 0  # its position
        self._end_of: dict[tuple[int, ...], int] = {}  # the last position after each n-gram
        self._indexed = 0

    def propose(self, tokens: Sequence[int], max_drafts: int, position: SamplePosition) -> list[int]:
        """Guess from the text."""
        self.guess = []
        return self._lookup(tokens, max_drafts)

    def num_to_prefill(self, tokens: Sequence[int]) -> int:
        """Return 0: nothing is run."""
        return 0

    def rehearse(self, tokens: Sequence[int], max_drafts: int) -> tuple[int, int]:
        """Guess what follows, without drafting it, and compare the guess before with what did follow.

        Returns how many of its tokens are known by now, and how many of those were right. It takes no time to speak of.
        """
        pairs = list(zip(self.guess, tokens[self._guess_start :], strict=False))
        right = next((at for at, (guessed, known) in enumerate(pairs) if guessed != known), len(pairs))
        self.guess, self._guess_start = self._lookup(tokens, max_drafts), len(tokens)
        return len(pairs), right

    def _lookup(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        length = self.NGRAM
        for end in range(max(self._indexed, length), len(tokens)):
            self._end_of[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)
        if len(tokens) < length:
            return []
        at = self._end_of.get(tuple(tokens[-length:]))
        guess: list[int] = []
        while (
            at is not None and len(guess) < max_drafts
        ):  # a passage that has only begun to repeat itself goes on so
            guess.append(tokens[at] if at < len(tokens) else guess[at - len(tokens)])
            at += 1
        return guess


class ModelDrafter:
    """What a smaller model with the same vocabulary would say. It knows the ids below `num_tokens`.

    `can_pack` says whether the model drafts for several replies in packed runs. With `pads`, for a device that prepares
    for lengths, texts are prefilled in chunks of few lengths, and attention is computed token by token after that.
    A model with states (rewinding.py) does neither. After a wrong draft it runs the right ones before it again.
    """

    CHUNK = 512

    def __init__(self, network: Any, num_tokens: int, *, can_pack: bool = False, pads: bool = False) -> None:
        self.network = network
        self.num_tokens = num_tokens
        self.layers = draft_layers(network)
        self._replays = has_to_replay(self.layers)
        self.can_pack = can_pack and not self._replays
        self.pads = pads and not self._replays
        self._cached: list[int] = []  # the tokens in its caches
        self._num_known = 0  # how many of them are certainly the text's
        self._point: RewindPoint | None = None  # at the end of those, where drafts cannot be trimmed

    def propose(self, tokens: Sequence[int], max_drafts: int, position: SamplePosition) -> list[int] | None:
        """Guess with the model. While it still has to prefill the text, a chunk in each call, it proposes nothing."""
        [drafts] = propose([DraftTask(self, tokens, max_drafts, position)])
        return drafts

    def num_to_prefill(self, tokens: Sequence[int]) -> int:
        """Return how many tokens there are after those in its caches."""
        return len(tokens) - self._num_known

    def begin(self, tokens: Sequence[int]) -> list[int] | None:
        """Rewind the caches to the text; return what follows in it. None: that was too long and is being prefilled.

        Nothing is returned if the text has ids that the model does not know.
        """
        end = min(len(self._cached), len(tokens) - 1)
        same = min(self._num_known, end)
        while same < end and self._cached[same] == tokens[same]:
            same += 1
        if excess := len(self._cached) - same:
            same -= self._rewind(excess)
            del self._cached[same:]
        self._num_known = same
        fresh = list(tokens[same:])
        if max(fresh) >= self.num_tokens:
            return []
        if len(fresh) > self.CHUNK:
            self._prefill(fresh[: self.CHUNK])
            return None
        if self.pads and len(fresh) > MAX_SINGLE_QUERIES:
            self._prefill(fresh[:-1])
            return fresh[-1:]
        return fresh

    def _rewind(self, count: int) -> int:
        """Take the last tokens back from the caches; return how many of those before them have to run again."""
        if not self._replays:
            for layer in self.layers:
                layer.trim(count)
            return 0
        drafted = len(self._cached) - self._num_known
        if self._point is None or count > drafted:  # into the text, as after a failed step
            self.layers = draft_layers(self.network)
            return len(self._cached) - count
        return self._point.rewind(count, drafted)

    def on_text_run(self) -> None:
        """Note that the caches hold the text now, and that drafts follow."""
        self._point = RewindPoint(self.layers) if self._replays else None

    def _prefill(self, tokens: list[int]) -> None:
        """Run tokens of the text."""
        start = 0
        for size in padded_sizes(len(tokens)) if self.pads else [len(tokens)]:
            chunk = tokens[start : start + size]
            padding = size - len(chunk)
            self.network(mx.array([chunk + [0] * padding]), cache=self.layers)
            for layer in self.layers:
                layer.trim(padding)
            mx.eval([layer.state for layer in self.layers])
            start += size
        self._cached += tokens
        self._num_known = len(self._cached)

    def end(self, fresh: Sequence[int], drafts: Sequence[int]) -> None:
        """Note what its caches hold now: what followed in the text, and all drafts but the last."""
        self._cached += fresh
        self._num_known = len(self._cached)
        self._cached += drafts[:-1]


class HeadDrafter:
    """What a network's MTP head guesses for one reply."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self._verified: mx.array | None = None

    def num_to_prefill(self, tokens: object) -> int:
        """Return 0: the model's own runs have written all that a head needs."""
        return 0

    def on_verified(self, hidden: mx.array) -> None:
        """Note the hidden vectors of the right tokens of a run ([1, tokens, width]), which may have to run again."""
        self._verified = hidden

    def begin(self, task: DraftTask) -> HeadText | None:
        """Return what the head starts from. None: a vector that it takes is not known, as after a run that failed."""
        *_, pairs, last = task.layers
        hidden, again = last_vector(last), task.num_to_replay
        if hidden is None:
            return None
        if again:
            if self._verified is None or self._verified.shape[1] != again:
                return None
            hidden = mx.concatenate([hidden, self._verified], axis=1)
        return HeadText(task.tokens[-1 - again :], hidden, HeadCache(pairs, task.shift))


@dataclass(slots=True)
class HeadText:
    """The tokens that a head runs first, the hidden vector of the token before each, and its cache."""

    tokens: Sequence[int]
    hidden: mx.array
    cache: HeadCache


def propose(tasks: Sequence[DraftTask]) -> list[list[int] | None]:
    """Draft for several replies, which one model or one head may do for all of them at once; wait only once."""
    drafts: list[list[int] | None] = [None] * len(tasks)
    with_head: dict[int, HeadText] = {}
    with_model: dict[int, tuple[ModelDrafter, list[int]]] = {}
    is_prefilling = False
    for index, task in enumerate(tasks):
        if isinstance(task.drafter, HeadDrafter):
            if (text := task.drafter.begin(task)) is not None:
                with_head[index] = text
        elif not isinstance(task.drafter, ModelDrafter):
            drafts[index] = task.drafter.propose(task.tokens, task.max_drafts, task.position)
        elif not is_prefilling:  # one chunk at a time: all replies wait for it
            fresh = task.drafter.begin(task.tokens)
            is_prefilling = fresh is None
            if fresh:
                with_model[index] = task.drafter, fresh
            elif fresh is not None:
                drafts[index] = []
    guessed: dict[int, list[mx.array]] = {}
    if with_head:
        own = [tasks[index] for index in with_head]
        guessed |= zip(with_head, _draft_with_head([*with_head.values()], own), strict=True)
    if with_model:
        own = [tasks[index] for index in with_model]
        guessed |= zip(with_model, _draft_with_model([*with_model.values()], own), strict=True)
    if guessed:
        found = iter(as_ints(mx.concatenate([token for tokens in guessed.values() for token in tokens])))
        for index, tokens in guessed.items():
            drafts[index] = [next(found) for _ in tokens]
    for index, (drafter, fresh) in with_model.items():
        drafter.end(fresh, drafts[index] or [])
    return drafts


def num_to_prefill(tasks: Iterable[DraftTask]) -> int:
    """Return how many tokens have to be run before anything can be drafted."""
    return sum(task.drafter.num_to_prefill(task.tokens) for task in tasks)


def draft_layers(network: Any) -> list[Any]:
    """Return empty caches for a draft model. It is small, so windows are kept whole and can be rewound anywhere."""
    return [
        KVCache() if isinstance(layer, RotatingKVCache) else layer for layer in make_prompt_cache(network)
    ]


def _draft_with_head(texts: Sequence[HeadText], tasks: Sequence[DraftTask]) -> list[list[mx.array]]:
    """Draft with the head of the tasks' network, and take back from its caches what that appended."""
    network: Any = tasks[0].drafter.network  # type: ignore[union-attr]  # a HeadDrafter

    def next_logits(rows: Sequence[int], inputs: Sequence[mx.array]) -> mx.array:
        own = [texts[row] for row in rows]
        logits, hidden = run_head(
            network, inputs, [text.hidden for text in own], [text.cache for text in own]
        )
        for text, vector in zip(own, hidden, strict=True):
            text.hidden = vector
        return logits

    try:
        return _draft([text.tokens for text in texts], tasks, next_logits)
    finally:
        for text in texts:
            text.cache.take_back()


def _draft_with_model(
    begun: Sequence[tuple[ModelDrafter, Sequence[int]]], tasks: Sequence[DraftTask]
) -> list[list[mx.array]]:
    """Run what followed in each text, and draft after it."""
    drafters = [drafter for drafter, _ in begun]
    vocabulary_size, has_run = tasks[0].position.sampler.text_mask.size, False

    def next_logits(rows: Sequence[int], inputs: Sequence[mx.array]) -> mx.array:
        nonlocal has_run
        segments = [Segment(each, drafters[row].layers) for row, each in zip(rows, inputs, strict=True)]
        logits = _last_logits(drafters[0], segments, vocabulary_size)
        if not has_run:
            has_run = True
            for drafter in drafters:
                drafter.on_text_run()
        return logits

    return _draft([fresh for _, fresh in begun], tasks, next_logits)


def _draft(
    texts: Sequence[Sequence[int]],
    tasks: Sequence[DraftTask],
    next_logits: Callable[[Sequence[int], Sequence[mx.array]], mx.array],
) -> list[list[mx.array]]:
    """Draft as many tokens after each text as is asked, all step by step together, without waiting for any.

    `next_logits` runs the next tokens ([1, tokens]) of some rows; it returns the logits after them
    ([rows, vocabulary]).
    """
    drafts: list[list[mx.array]] = [[] for _ in texts]
    inputs = [mx.array([list(text)]) for text in texts]
    positions = [task.position for task in tasks]
    while rows := [row for row, task in enumerate(tasks) if len(drafts[row]) < task.max_drafts]:
        logits = next_logits(rows, [inputs[row] for row in rows])
        chosen = choose(logits, [positions[row] for row in rows])
        for at, row in enumerate(rows):
            token = chosen[at : at + 1]
            drafts[row].append(token)
            inputs[row], positions[row] = token[None], positions[row].after(token)
    return drafts


def _last_logits(drafter: ModelDrafter, segments: Sequence[Segment], vocabulary_size: int) -> mx.array:
    """Run segments; return the logits of the last token of each ([rows, vocabulary]), as wide as the other model's.

    Random noise depends on the width. Ids that the draft model does not know are impossible.
    """
    if not drafter.can_pack or (len(segments) == 1 and not drafter.pads):
        runs = [drafter.network(segment.tokens, cache=segment.layers)[:, -1] for segment in segments]
        logits = mx.concatenate(runs)
    else:
        ends = accumulate(segment.tokens.shape[1] for segment in segments)
        every = run_packed(drafter.network, segments, single_queries=drafter.pads)
        logits = every[mx.array([end - 1 for end in ends])]
    missing = [(0, 0), (0, max(0, vocabulary_size - drafter.num_tokens))]
    return mx.pad(logits[:, : drafter.num_tokens], missing, constant_values=-mx.inf)
