"""The replies that are being decoded, as data: a sequence, one whose prompt has just been read, a generated token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlx_backend.engine.mlx.sampling import SamplePosition

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import mlx.core as mx

    from mlx_backend.engine.base import GenerationRequest, Logprobs
    from mlx_backend.engine.mlx.detokenizer import Detokenizer
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.sampling import PenaltyState, RequestSampler, StepLogprobs
    from mlx_backend.engine.mlx.speculative import Drafter


@dataclass(slots=True, eq=False)
class DecodingSequence:
    """One reply on its way. `tokens` is the prompt and what has been said.

    A token is chosen, fed to the network to choose the next, and said. One that ends the reply, or that somebody
    cannot wait for, is said before it is fed.
    """

    key: int
    request: GenerationRequest
    choice: RequestSampler
    text: Detokenizer
    tokens: list[int]
    ends: Collection[int]
    adapter: str = ""  # whose network says it, and who has its prefixes: an adapter's, or the model's
    drafter: Drafter | None = None
    cached: int = 0
    said: int = 0
    chosen: int = 0
    memory: PenaltyState | None = None
    report: tuple[StepLogprobs, int] | None = None  # of the token chosen last

    @property
    def has_pending_token(self) -> bool:
        """Whether the token chosen last has not been said yet."""
        return self.said < self.chosen

    @property
    def fed(self) -> int:
        """How many of the tokens are in the caches, once the first has been chosen: all but the one chosen last."""
        return len(self.request.prompt) + self.chosen - 1

    def position_after(self, tokens: mx.array, at: int) -> SamplePosition:
        """Take a chosen token (`tokens[at]`) as read, and return the place behind it."""
        if self.memory is not None:
            self.memory = self.memory.after(tokens[at : at + 1])
        return self.place()

    def place(self) -> SamplePosition:
        """Return the place of the next choice; the choice counts as made."""
        self.chosen += 1
        return SamplePosition(self.choice, self.chosen - 1, self.memory)

    def read(self, token: int) -> None:
        """Let the constraint read a token that was fed."""
        if token not in self.ends:
            self.choice.advance(token)

    def say(self, token: int, report: tuple[StepLogprobs, int] | None) -> GeneratedToken:
        """Take a token as said."""
        self.tokens.append(token)
        self.said += 1
        reason: Literal["stop", "length"] | None = None
        if token in self.ends:
            reason = "stop"
        elif self.said >= self.request.max_tokens:
            reason = "length"
        logprobs = None
        if report is not None and (count := self.request.logprobs) is not None:
            logprobs = report[0].of(report[1], count)
        return GeneratedToken(self, token, logprobs, reason)


@dataclass(frozen=True, slots=True)
class PrefilledSequence:
    """A row and the last piece of its prompt, which follows what is in the caches."""

    sequence: DecodingSequence
    tokens: Sequence[int]
    layers: LayerCaches


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of a row; with a reason, its last."""

    sequence: DecodingSequence
    token: int
    logprobs: Logprobs | None
    reason: Literal["stop", "length"] | None
