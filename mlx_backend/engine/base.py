"""What an engine is: the protocols between the service and whatever generates tokens.

Knows no HTTP, no channels and no MLX. Everything here is plain data or a protocol; `threaded.py`
makes an engine of a `Batch`, which `scheduler.py` runs on one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from mlx_backend.engine.images import PromptImage

UNBOUNDED_TOKENS = 1 << 40
"""More tokens than any reply has."""
MAX_PRIORITY = 2**31 - 1
"""The highest priority number of a request; the lowest is its opposite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. The defaults are neutral: greedy, without penalties."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    logit_bias: tuple[tuple[int, float], ...] = ()


class Constraint(Protocol):
    """What a reply may still contain: a grammar or a budget, advanced token by token on the engine thread.

    An exception fails its own request and no other. `never_raises` promises that there will be none: where processes
    share a model, a rank could not inform the others in time.
    """

    @property
    def never_raises(self) -> bool:
        """Whether none of its methods can raise."""
        ...

    def unconstrained_tokens(self) -> int:
        """How many tokens from the next one on are certainly not masked, whichever they turn out to be.

        For that many the engine may sample ahead of `advance`.
        """
        ...

    def allowed_mask(self) -> Sequence[int] | None:
        """Return the next token's mask, 32 tokens to a word, lowest bit first; None if any token is allowed."""
        ...

    def advance(self, token: int) -> None:
        """Take note of the token that was chosen."""
        ...


@dataclass(frozen=True, slots=True)
class QueueClient:
    """Whose a request is: the queue is fair between clients of different names.

    With a `priority` of its own, a client's requests can only ask for a later turn than that; None leaves it to them.
    """

    name: str = ""
    priority: int | None = None

    def priority_of(self, wanted: int) -> int:
        """Return the priority of a request that wants this one."""
        return wanted if self.priority is None else min(self.priority + max(0, wanted), MAX_PRIORITY)


ANYONE = QueueClient()
"""Whose a request is where clients are not told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue.

    `prompt` is not empty and every id is in the vocabulary (`EngineRefused` otherwise). `checkpoints` are
    positions in the prompt (0 < p < len) after which other requests are likely to differ: the end of the
    system part, the end of the history. An engine may cache its state there; it may also ignore them.

    `expected_tokens` is how long the reply is likely to be, for a caller whose max_tokens is only a limit; memory is
    reserved for that many, or for what fits. `logprobs` asks for the log probability of the chosen token, and for those
    of as many of the most likely tokens; `prompt_logprobs` for the same of each of the prompt's tokens but the first,
    which has nothing before it: such a prompt is computed whole, whatever is cached. `adapter` names a LoRA adapter the
    engine knows. `queue_timeout` is how many seconds the request may be queued; at 0 it is started at once or refused.
    A lower `priority` number is served sooner. `client` is whose request it is. `images` are in the order in which they
    stand in the prompt, prepared by the engine's `image_processor`.
    """

    prompt: Sequence[int]
    max_tokens: int
    checkpoints: Sequence[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    expected_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    adapter: str | None = None
    queue_timeout: float | None = None
    priority: int = 0
    client: str = ""
    images: Sequence[PromptImage] = ()


@dataclass(frozen=True, slots=True)
class PromptStart:
    """The beginning of a prompt that is likely to come. Its images may be without what it takes to see them."""

    tokens: Sequence[int]
    images: Sequence[PromptImage] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill: `processed` of `total` prompt tokens are in the cache, `cached` of them were there before."""

    processed: int
    total: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits, and is likely to be the `position`-th to begin, from 1."""

    position: int


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One generated token and the text it completes ("" while a character is still incomplete).

    End tokens are delivered too, with their marker as text, because a parser needs to see them. Special
    tokens always come with exactly their own marker as text.
    """

    token: int
    text: str
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """A token's log probability (natural), before penalties, bias and temperature.

    `top` holds the most likely tokens at its position, most likely first, as many as were asked for.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Those of the prompt's tokens from position `start` on. All of them come before the first generated token."""

    start: int
    logprobs: tuple[Logprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The generation is over; always the last item. Times are in seconds, measured by the engine thread.

    `drafted_tokens` were proposed by speculative decoding, of which `accepted_tokens` became part of the reply.
    """

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


type EngineItem = Progress | PromptLogprobs | TokenDelta | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """What an engine is doing at this moment; `detail` is for people."""

    state: Literal["loading", "ready", "restarting", "stopped"]
    running: int = 0
    waiting: int = 0
    detail: str = ""
    unbatched: str = ""
    """Why replies are not decoded together; empty if they are, or if nothing is loaded."""
    drafts: str = ""
    """What the loaded model's MTP head does, or why it does nothing; empty if it is not said to have one."""
    available_context: int | None = None
    """Tokens of prompt and reply that fit into memory now, if that is known."""
    prewarmed_tokens: int = 0
    """Tokens of prompts that were only likely to come and have been prefilled since the engine was started."""


@dataclass(frozen=True, slots=True)
class GenerationTimes:
    """How long a request was queued, prefilled and decoded, in seconds, up to now or its end."""

    queue: float
    prefill: float = 0.0
    decode: float = 0.0


class Tokenizer(Protocol):
    """Text to tokens and back, and the model's chat template. Safe to use from any thread."""

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template; None if it has none."""
        ...

    @property
    def response_template(self) -> Any:
        """What the model's files say of its output (transformers' `response_template`, as it is); None: nothing."""
        ...

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """Every control token: id -> its text."""
        ...

    @property
    def end_tokens(self) -> Set[int]:
        """The tokens with which a reply ends, as the model's files say."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Valid token ids are 0 … vocabulary_size - 1."""
        ...

    @property
    def bos_tokens(self) -> Sequence[int]:
        """What a prompt begins with where no chat template writes it: the BOS token, for a model that needs one."""
        ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render the chat template to text. Raises EngineRefused if the template rejects the conversation."""
        ...

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Tokenise. With control_tokens False a marker spelt in the text becomes ordinary text tokens."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token; they need not be whole characters."""
        ...
