"""Drafters for speculative decoding: they guess the next tokens from the text itself, with a smaller model or a head.

A guess costs time and can never change a reply: decode.py verifies it. A smaller model's tokens are chosen as the
reply's own are at the same positions, with the same random keys (sampling.py). Knows nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Sequence

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sampling import SamplePosition


@dataclass(frozen=True, slots=True)
class DraftTask:
    """Where tokens are to be drafted: after `tokens`, the prompt and the reply so far, from `position` on.

    `layers` are the reply's caches, which hold all tokens but the last one and `num_to_replay` before it; `shift` is
    added to their positions.
    """

    drafter: Drafter
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

    def propose(self, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Guess what follows `tokens`, the prompt and the reply so far; return at most `max_drafts` tokens."""
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
        self._fresh: list[int] = []  # tokens of the text that run first
        self._width = 0  # of the other model's logits

    def num_to_prefill(self, tokens: Sequence[int]) -> int:
        """Return how many tokens there are after those in its caches."""
        return len(tokens) - self._num_known

    def begin(self, task: DraftTask) -> list[int] | None:
        """Rewind the caches to the text; return what follows in it. None: that was too long and is being prefilled.

        Nothing is returned if the text has ids that the model does not know.
        """
        tokens, self._width = task.tokens, task.position.sampler.text_mask.size
        end = min(len(self._cached), len(tokens) - 1)
        same = min(self._num_known, end)
        while same < end and self._cached[same] == tokens[same]:
            same += 1
        if excess := len(self._cached) - same:
            same -= self._rewind(excess)
            del self._cached[same:]
        self._num_known, self._point = same, None
        self._fresh = list(tokens[same:])
        if max(self._fresh) >= self.num_tokens:
            return []
        if len(self._fresh) > self.CHUNK:
            self._prefill(self._fresh[: self.CHUNK])
            return None
        if self.pads and len(self._fresh) > MAX_SINGLE_QUERIES:
            self._prefill(self._fresh[:-1])
            self._fresh = self._fresh[-1:]
        return self._fresh

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

    @staticmethod
    def next_logits(drafters: Sequence[ModelDrafter], inputs: Sequence[mx.array]) -> mx.array:
        """Run tokens ([1, tokens]) of several texts; return the logits after each ([texts, vocabulary]).

        They are as wide as the other model's: random noise depends on that. Ids that this one does not know are
        impossible.
        """
        first = drafters[0]
        segments = [Segment(each, own.layers) for own, each in zip(drafters, inputs, strict=True)]
        if not first.can_pack or (len(segments) == 1 and not first.pads):
            runs = [first.network(segment.tokens, cache=segment.layers)[:, -1] for segment in segments]
            logits = mx.concatenate(runs)
        else:
            ends = accumulate(segment.tokens.shape[1] for segment in segments)
            every = run_packed(first.network, segments, single_queries=first.pads)
            logits = every[mx.array([end - 1 for end in ends])]
        for own in drafters:
            if own._replays and own._point is None:  # its caches hold the text now, and drafts follow
                own._point = RewindPoint(own.layers)
        missing = [(0, 0), (0, max(0, first._width - first.num_tokens))]
        return mx.pad(logits[:, : first.num_tokens], missing, constant_values=-mx.inf)

    def end(self, drafts: Sequence[int]) -> None:
        """Note what its caches hold now: what followed in the text, and all drafts but the last."""
        self._cached += self._fresh
        self._num_known = len(self._cached)
        self._cached += drafts[:-1]


class HeadDrafter:
    """What a network's MTP head guesses for one reply."""

    def __init__(self, network: Any) -> None:
        self.network = network
        self._verified: mx.array | None = None
        self._hidden: Any = None  # the hidden vectors before the tokens that it runs next
        self._cache: Any = None

    def num_to_prefill(self, tokens: object) -> int:
        """Return 0: the model's own runs have written all that a head needs."""
        return 0

    def on_verified(self, hidden: mx.array) -> None:
        """Note the hidden vectors of the right tokens of a run ([1, tokens, width]), which may have to run again."""
        self._verified = hidden

    def begin(self, task: DraftTask) -> list[int] | None:
        """Return the tokens that it runs first. None: a vector that it takes is not known, as after a failed run."""
        *_, pairs, last = task.layers
        hidden, again = last_vector(last), task.num_to_replay
        if hidden is None:
            return None
        if again:
            if self._verified is None or self._verified.shape[1] != again:
                return None
            hidden = mx.concatenate([hidden, self._verified], axis=1)
        self._hidden, self._cache = hidden, HeadCache(pairs, task.shift)
        return list(task.tokens[-1 - again :])

    @staticmethod
    def next_logits(drafters: Sequence[HeadDrafter], inputs: Sequence[mx.array]) -> mx.array:
        """Run tokens ([1, tokens]) of several texts; return the logits after each ([texts, vocabulary])."""
        hidden, caches = [own._hidden for own in drafters], [own._cache for own in drafters]
        logits, after = run_head(drafters[0].network, inputs, hidden, caches)
        for own, vector in zip(drafters, after, strict=True):
            own._hidden = vector
        return logits

    def end(self, drafts: Sequence[int]) -> None:
        """Take back from the cache what drafting appended."""
        self._cache.take_back()
        self._hidden = self._cache = None


type Drafter = TextDrafter | ModelDrafter | HeadDrafter
"""Drafts for one reply, whose text only ever gets longer. All of a model's replies have one kind."""


def propose(tasks: Sequence[DraftTask]) -> list[list[int] | None]:
    """Draft for several replies, which one model or one head does for all of them at once; wait only once.

    None: nothing could be drafted yet, as while a text is prefilled. Nothing is returned for a text that has ids that
    the drafter does not know.
    """
    drafts: list[list[int] | None] = [None] * len(tasks)
    texts: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        if not isinstance(task.drafter, (ModelDrafter, HeadDrafter)):
            drafts[index] = task.drafter.propose(task.tokens, task.max_drafts)
            continue
        if (text := task.drafter.begin(task)) is None:
            if isinstance(task.drafter, ModelDrafter):
                break  # one chunk at a time: all replies wait for it
        elif text:
            texts[index] = text
        else:
            drafts[index] = []
    if not texts:
        return drafts
    drafters: dict[int, Any] = {index: tasks[index].drafter for index in texts}  # of one class
    try:
        guessed = _draft([*drafters.values()], [*texts.values()], [tasks[index] for index in texts])
        found = iter(as_ints(mx.concatenate([token for tokens in guessed for token in tokens])))
        for index, tokens in zip(texts, guessed, strict=True):
            drafts[index] = [next(found) for _ in tokens]
    finally:
        for index, drafter in drafters.items():
            drafter.end(drafts[index] or [])
    return drafts


def draft_layers(network: Any) -> list[Any]:
    """Return empty caches for a draft model. It is small, so windows are kept whole and can be rewound anywhere."""
    return [
        KVCache() if isinstance(layer, RotatingKVCache) else layer for layer in make_prompt_cache(network)
    ]


def _draft(
    drafters: Sequence[Any], texts: Sequence[list[int]], tasks: Sequence[DraftTask]
) -> list[list[mx.array]]:
    """Draft as many tokens after each text as is asked, all step by step together, without waiting for any."""
    drafts: list[list[mx.array]] = [[] for _ in texts]
    inputs, positions = [mx.array([text]) for text in texts], [task.position for task in tasks]
    while rows := [row for row, task in enumerate(tasks) if len(drafts[row]) < task.max_drafts]:
        logits = drafters[0].next_logits([drafters[row] for row in rows], [inputs[row] for row in rows])
        chosen = choose(logits, [positions[row] for row in rows])
        for at, row in enumerate(rows):
            token = chosen[at : at + 1]
            drafts[row].append(token)
            inputs[row], positions[row] = token[None], positions[row].after(token)
    return drafts
