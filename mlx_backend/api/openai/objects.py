"""The JSON objects that this API sends, as types: for code that builds them, and for /openapi.json.

Keys that are not required are left out where there is nothing to say; none of them is null then.
"""

from typing import Any, Literal, NotRequired, TypedDict

from pydantic import ConfigDict, with_config

from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.events import FinishReason
from mlx_backend.registry.base import ModelState

# -- errors ---------------------------------------------------------------------------------------------------


@with_config(ConfigDict(extra="allow"))
class ErrorFields(TypedDict):
    """What went wrong. `param` is the field to blame; the numbers of the message follow under names of their own."""

    message: str
    type: Literal["invalid_request_error", "server_error", "requests", "tokens"]
    param: str | None
    code: str | None


class ErrorObject(TypedDict):
    """The body of every response that is an error."""

    error: ErrorFields


# -- replies --------------------------------------------------------------------------------------------------


class PromptTokens(TypedDict):
    """How much of a prompt was found in the cache, and, if there are images in it, how much of it they are."""

    cached_tokens: int
    image_tokens: NotRequired[int]


class ReasoningTokens(TypedDict):
    """How much of a reply was reasoning."""

    reasoning_tokens: int


class UsageObject(TypedDict):
    """OpenAI's `usage`, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: ReasoningTokens


class TimingsObject(TypedDict):
    """llama.cpp's `timings`, and two of ours: how long the request was queued, and when its first token was there."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float
    first_token_ms: float
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]


class ReasoningObject(TypedDict):
    """What was decided about a reply's reasoning.

    `effort` is what was asked for, `source` who asked, `level` which of the model's own levels it comes to (null if it
    does not reason), `budget` how many tokens may be reasoning (null: as many as it likes).
    """

    effort: Effort
    level: Effort | None
    source: str
    budget: int | None


class TopLogprob(TypedDict):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and those that were likely in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobsObject(TypedDict):
    """Log probabilities of the answer's tokens."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobsObject(TypedDict):
    """Log probabilities in columns; offsets count characters from the beginning of the reply."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class FunctionObject(TypedDict):
    """A tool's name, and its arguments as JSON in a text."""

    name: str
    arguments: str


class ToolCallObject(TypedDict):
    """A tool call, always whole."""

    id: str
    type: Literal["function"]
    function: FunctionObject


class ToolCallDelta(ToolCallObject):
    """A tool call in a stream, always whole too."""

    index: int


class ReplyMessage(TypedDict):
    """A reply. With calls alone its content is null."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject]]


class ReplyChoice(TypedDict):
    """The one choice of a reply."""

    index: int
    message: ReplyMessage
    logprobs: NotRequired[ChatLogprobsObject]
    finish_reason: FinishReason


class _Reply(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class _WholeReply(_Reply):
    usage: UsageObject
    timings: TimingsObject
    reasoning: NotRequired[ReasoningObject]


class _ReplyChunk(_Reply):
    usage: NotRequired[UsageObject]
    timings: NotRequired[TimingsObject]
    reasoning: NotRequired[ReasoningObject]


class ChatCompletion(_WholeReply):
    """A reply to a conversation."""

    object: Literal["chat.completion"]
    choices: list[ReplyChoice]


class ReplyDelta(TypedDict, total=False):
    """What is new in a stream: one of these."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class ChunkChoice(TypedDict):
    """The one choice of a chunk."""

    index: int
    delta: ReplyDelta
    logprobs: NotRequired[ChatLogprobsObject | None]
    finish_reason: FinishReason | None


class ChatChunk(_ReplyChunk):
    """One event of a streamed reply; `data: [DONE]` follows the last. Without choices it carries the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class TextChoice(TypedDict):
    """The one choice of a text completion."""

    index: int
    text: str
    logprobs: NotRequired[TextLogprobsObject]
    finish_reason: FinishReason


class TextCompletion(_WholeReply):
    """The continuation of a text."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunkChoice(TypedDict):
    """The one choice of a chunk."""

    index: int
    text: str
    logprobs: NotRequired[TextLogprobsObject | None]
    finish_reason: FinishReason | None


class TextChunk(_ReplyChunk):
    """One event of a streamed continuation; `data: [DONE]` follows the last."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


# -- models that read -----------------------------------------------------------------------------------------


class ReadUsage(TypedDict):
    """How many tokens were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(TypedDict):
    """A text's vector: numbers, or their 32-bit little-endian bytes in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """A vector for each text."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: ReadUsage


class DocumentObject(TypedDict):
    """A document's text."""

    text: str


class RankedDocument(TypedDict):
    """A document's score, from 0 to 1 unless raw scores were asked for."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentObject]


class Ranking(TypedDict):
    """The documents, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedDocument]
    usage: ReadUsage


# -- tokens ---------------------------------------------------------------------------------------------------


class Tokenized(TypedDict):
    """The tokens of a text or of a conversation's prompt; of several texts, a list of each."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: NotRequired[list[str] | list[list[str]]]


class Detokenized(TypedDict):
    """The text of tokens."""

    prompt: str


# -- models ---------------------------------------------------------------------------------------------------


class EffortsObject(TypedDict):
    """Which efforts make a difference to a model, and which are budgets of so many tokens."""

    efforts: list[Effort]
    default: Effort | None
    preserved: bool
    budgets: NotRequired[dict[Effort, int]]


class LevelObject(TypedDict):
    """An effort, as Codex reads it."""

    effort: Effort
    description: str


class ModelObject(TypedDict):
    """A model that can be served, under one of its names. What is not known is left out."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    state: ModelState
    type: Literal["llm", "embedding", "rerank"]
    root: NotRequired[str]
    context_length: NotRequired[int]
    max_model_len: NotRequired[int]
    capabilities: list[str]
    reasoning: NotRequired[EffortsObject]
    supported_reasoning_levels: NotRequired[list[LevelObject]]
    default_reasoning_level: NotRequired[Effort | None]
    sampling_defaults: NotRequired[dict[str, Any]]
    default_max_tokens: NotRequired[int]
    adapters: NotRequired[list[str]]
    available_context: NotRequired[int]
    unbatched: NotRequired[str]
    info: NotRequired[dict[str, Any]]


class ModelList(TypedDict):
    """The models that can be served, each once for every name it has."""

    object: Literal["list"]
    data: list[ModelObject]


class Unloading(TypedDict):
    """What becomes of a model that is to be unloaded."""

    model: str
    message: str
