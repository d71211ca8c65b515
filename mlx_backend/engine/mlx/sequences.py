"""The data of decoding: a sequence, one whose prompt has just been prefilled, and a generated token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import mlx.core as mx

from mlx_backend.engine.mlx.arrays import evaluate_async
from mlx_backend.engine.mlx.draft_pacer import DraftRecord
from mlx_backend.engine.mlx.kv_cache import TOKEN_BYTES
from mlx_backend.engine.mlx.sampling import SamplePosition
from mlx_backend.engine.mlx.vision.prompt_images import PromptImages

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mlx_backend.engine.base import GenerationRequest, Logprobs
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.packed_forward import Segment
    from mlx_backend.engine.mlx.sampling import PenaltyState, RequestSampler, StepLogprobs
    from mlx_backend.engine.mlx.speculative import Drafter
    from mlx_backend.engine.mlx.tokenizer import Detokenizer


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """A prompt and the reply to it so far. `tokens` are the prompt and the tokens that have been emitted.

    A token is sampled, fed to the network to sample the next one, and emitted. One that ends the reply, or that the
    constraint has to see first, is emitted before it is fed. `adapter` says which network runs the sequence and
    whose prefixes it shares; "" is the model without an adapter. `is_alone` says that it is never decoded with others,
    because that went wrong before.
    """

    key: int
    request: GenerationRequest
    sampler: RequestSampler
    detokenizer: Detokenizer
    tokens: list[int]
    end_tokens: Collection[int]
    adapter: str = ""
    is_alone: bool = False
    drafter: Drafter | None = None
    drafts: DraftRecord = field(default_factory=DraftRecord)
    num_cached: int = 0  # tokens of the prompt that were in the prefix cache
    num_sampled: int = 0
    num_emitted: int = 0
    num_scored: int = 1  # tokens of the prompt whose log probabilities were emitted; the first has none
    # Tokens before the last sampled one that were taken back from the caches (rewinding.py).
    num_to_replay: int = 0
    penalties: PenaltyState | None = None
    logprobs: tuple[StepLogprobs, int] | None = None  # of the token sampled last: its step, and its row there
    images: PromptImages = field(default_factory=PromptImages)
    _packed: bytes = field(default=b"", repr=False)

    @property
    def has_pending_token(self) -> bool:
        """Whether the token sampled last has not been emitted yet."""
        return self.num_emitted < self.num_sampled

    @property
    def cache_length(self) -> int:
        """How many tokens are in the caches, once the first was sampled.

        All but the last sampled one and those that have to run again before it.
        """
        return len(self.request.prompt) + self.num_sampled - 1 - self.num_to_replay

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt's tokens are asked for and still missing."""
        request = self.request
        return request.prompt_logprobs is not None and self.num_scored < len(request.prompt)

    @property
    def to_replay(self) -> list[int]:
        """The tokens that have to run again before the last sampled one. All of them have been emitted."""
        start = self.cache_length
        return self.tokens[start : start + self.num_to_replay]

    def packed(self, count: int) -> bytes:
        """Return the first tokens as bytes, as the prefix cache compares them; each is packed once."""
        known = len(self._packed) // TOKEN_BYTES
        if count > known:
            more = self.tokens[known:]
            self._packed += self.images.keyed(known, more).tobytes()
        return self._packed[: count * TOKEN_BYTES]

    def segment(self, network: Any, start: int, end: int, layers: LayerCaches, spare: int = 0) -> Segment:
        """Return what runs the tokens from `start` to `end`, and `spare` zeros after them. Raises ForwardError."""
        return self.images.segment(network, self.tokens[start:end] + [0] * spare, start, end, layers)

    def next_position(self) -> SamplePosition:
        """Return the position to sample at, and count it as sampled."""
        self.num_sampled += 1
        return SamplePosition(self.sampler, self.num_sampled - 1, self.penalties)

    def position_after(self, tokens: mx.array, index: int) -> SamplePosition:
        """Return the position that follows the sampled token `tokens[index]`, and count it as sampled."""
        if self.penalties is not None:
            self.penalties = self.penalties.with_token(tokens[index : index + 1])
        return self.next_position()

    def draft_position(self) -> SamplePosition:
        """Return the position that follows the token sampled last, which has been emitted. Counts nothing."""
        last = SamplePosition(self.sampler, self.num_sampled - 1, self.penalties, is_draft=True)
        return last.after(mx.array(self.tokens[-1:]))

    def advance_constraint(self, token: int) -> None:
        """Advance the constraint by a token that was fed."""
        if token not in self.end_tokens:
            self.sampler.advance(token)

    def emit(self, token: int, logprobs: tuple[StepLogprobs, int] | None) -> GeneratedToken:
        """Append a token to the reply, with the step and the row that its log probabilities are in."""
        self.tokens.append(token)
        self.num_emitted += 1
        finish_reason: Literal["stop", "length"] | None = None
        if token in self.end_tokens:
            finish_reason = "stop"
        elif self.num_emitted >= self.request.max_tokens:
            finish_reason = "length"
        found = None
        if logprobs is not None and (count := self.request.logprobs) is not None:
            step, row = logprobs
            found = step.of(row, count)
        return GeneratedToken(self, token, found, finish_reason)

    def suspend(self, drafter: Drafter | None) -> None:
        """Forget what was sampled and not emitted: the sequence is prefilled again, and continued from there."""
        if self.sampler.num_seen < self.num_emitted:  # the last token was emitted before it was fed
            self.sampler.advance(self.tokens[-1])
        elif self.sampler.num_seen > self.num_emitted:  # of drafts, some of which were taken back
            self.sampler.error = RuntimeError("a step failed after its constraint had seen the next tokens")
        self.num_sampled, self.num_to_replay = self.num_emitted, 0
        self.penalties = self.sampler.penalty_state(self.tokens[len(self.request.prompt) :])
        self.logprobs = None
        self.drafter = drafter  # the old one has caches of its own

    def take_back(self, count: int) -> None:
        """Take the tokens emitted last back, which nobody has got."""
        self.num_emitted -= count
        del self.tokens[len(self.tokens) - count :]
        self._packed = self._packed[: len(self.tokens) * TOKEN_BYTES]


@dataclass(frozen=True, slots=True)
class PrefilledSequence:
    """A sequence that is prefilled up to its last chunk: that chunk, and the caches of what precedes it."""

    sequence: DecodingSequence
    last_chunk: Sequence[int]
    layers: LayerCaches

    def segment(self, network: Any) -> Segment:
        """Return what runs the last chunk. Raises ForwardError."""
        end = len(self.sequence.tokens)
        return self.sequence.segment(network, end - len(self.last_chunk), end, self.layers)


class GeneratedToken(NamedTuple):
    """A token of a sequence; with a `finish_reason` it is the last one."""

    sequence: DecodingSequence
    token: int
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None


def start_computing(sequences: Sequence[DecodingSequence], sampled: mx.array) -> None:
    """Start computing the tokens, and all that would otherwise pile up uncomputed."""
    steps = {
        id(sequence.logprobs[0]): sequence.logprobs[0]
        for sequence in sequences
        if sequence.logprobs is not None
    }
    penalties = [
        (sequence.penalties.seen, sequence.penalties.counts)
        for sequence in sequences
        if sequence.penalties is not None
    ]
    evaluate_async(sampled, [step.arrays for step in steps.values()], penalties)
