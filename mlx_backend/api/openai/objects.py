"""The JSON objects of this API as types: what clients send, and what is sent to them, for code and for /openapi.json.

A field of a request is described here where what clients write is more than what it becomes: a validator makes one form
of several, and what is described is the one that clients are meant to send. In what is sent, keys that are not required
are left out where there is nothing to say; none of them is null then.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import ConfigDict, Field, GetJsonSchemaHandler, TypeAdapter, WithJsonSchema, with_config
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mlx_backend.api.openai.codex_models import CodexModel, LevelObject
from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.events import FinishReason
from mlx_backend.conversation.history import ROLES
from mlx_backend.registry.base import ModelState


@dataclass(frozen=True, slots=True)
class DescribedAs:
    """An annotation: a field is described as another type than the one that validates it."""

    type: Any

    def __get_pydantic_json_schema__(
        self, _schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the other type."""
        return handler(TypeAdapter(self.type).core_schema)


type TokenId = Annotated[int, Field(ge=0)]
type Text = Annotated[str, Field(min_length=1)]


class TextPart(TypedDict):
    """A part of a message that is text."""

    type: Literal["text"]
    text: str


class ImageAddress(TypedDict):
    """Where an image is: a data URI, or an address if the server fetches images."""

    url: str
    detail: NotRequired[Literal["low", "high", "auto"] | None]


class ImagePart(TypedDict):
    """A part of a message that is an image."""

    type: Literal["image_url"]
    image_url: ImageAddress


class CalledFunction(TypedDict):
    """What a call calls. The arguments are JSON, as text."""

    name: str
    arguments: str


class CalledCustomTool(TypedDict):
    """What a call of a custom tool calls, and with which text."""

    name: str
    input: str


class MessageCall(TypedDict):
    """A call of a function in an earlier reply."""

    id: str
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class CustomCall(TypedDict):
    """A whole call of a custom tool."""

    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class ChatMessage(TypedDict):
    """A message of a conversation. What else clients send in it is accepted, and what is broken is repaired."""

    role: Annotated[str, WithJsonSchema({"type": "string", "enum": list(ROLES)})]
    content: NotRequired[str | list[TextPart | ImagePart] | None]
    name: NotRequired[str]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[MessageCall | CustomCall] | None]
    tool_call_id: NotRequired[str]


type Messages = Annotated[list[ChatMessage], Field(min_length=1)]


class FunctionDefinition(TypedDict):
    """A function. Calls match the parameters if it is `strict`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class FunctionInput(TypedDict):
    """A tool that is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class GrammarDefinition(TypedDict):
    """A grammar."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(min_length=1, max_length=100_000)]


class GrammarInput(TypedDict):
    """The input of a custom tool matches a grammar."""

    type: Literal["grammar"]
    grammar: GrammarDefinition


class AnyTextInput(TypedDict):
    """The input of a custom tool is any text."""

    type: Literal["text"]


class CustomDefinition(TypedDict):
    """A custom tool."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: NotRequired[str | None]
    format: NotRequired[AnyTextInput | GrammarInput | None]


class CustomInput(TypedDict):
    """A tool whose input is a text."""

    type: Literal["custom"]
    custom: CustomDefinition


type ToolInput = FunctionInput | CustomInput


class Named(TypedDict):
    """A tool, by its name."""

    name: str


class NamedFunction(TypedDict):
    """The function that has to be called, or that may be."""

    type: Literal["function"]
    function: Named


class NamedCustomTool(TypedDict):
    """The custom tool that has to be called, or that may be."""

    type: Literal["custom"]
    custom: Named


class AllowedTools(TypedDict):
    """Which tools may be called, and whether one of them has to be."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction | NamedCustomTool]


class AllowedToolsChoice(TypedDict):
    """Of all the tools only some may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


type ToolChoiceInput = (
    Literal["auto", "none", "required"] | NamedFunction | NamedCustomTool | AllowedToolsChoice | None
)


class TextFormat(TypedDict):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(TypedDict):
    """A JSON schema and what it is called."""

    schema: dict[str, Any]
    name: NotRequired[str]
    description: NotRequired[str]
    strict: NotRequired[bool | None]


class SchemaFormat(TypedDict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


type ResponseFormatInput = TextFormat | SchemaFormat | None
type StopInput = str | list[str] | None

type EffortInput = Effort | None


class ReasoningInput(TypedDict, total=False):
    """OpenRouter's and the Responses API's object."""

    effort: EffortInput
    max_tokens: Annotated[int | None, Field(ge=0, description="How many tokens may be reasoning.")]
    enabled: bool | None
    exclude: bool | None


class OutputConfigInput(TypedDict, total=False):
    """Anthropic's object."""

    effort: EffortInput


class ThinkingInput(TypedDict, total=False):
    """Anthropic's object."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0)]


EFFORT_FIELDS: dict[str, Any] = {
    "reasoning_effort": EffortInput,
    "reasoning": ReasoningInput | None,
    "output_config": OutputConfigInput | None,
    "think": bool | EffortInput,
    "thinking": ThinkingInput | bool | None,
    "enable_thinking": bool | None,
}
"""The fields that may state an effort: `conversation.effort_sources` looks them up in the request as it was written."""


class TextDocument(TypedDict):
    """A document as an object."""

    text: str


type Document = str | TextDocument
type TokenIds = Annotated[list[TokenId], Field(min_length=1)]
type Prompt = Text | TokenIds
type Prompts = (
    Prompt | Annotated[list[Text], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
)
type Texts = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)

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
    """llama.cpp's `timings`, and some of ours.

    How many of the prompt's tokens the client has sent before, or got as a reply, and which part of the request is the
    first that was not; how long the request was queued, and when its first token was there; of a reply that was ended
    because it repeated itself, that it was, and how many tokens it repeated over and over.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float
    queue_ms: float
    first_token_ms: float
    cache_matched_n: NotRequired[int]
    cache_broken_by: NotRequired[str]
    draft_n: NotRequired[int]
    draft_n_accepted: NotRequired[int]
    stopped_by: NotRequired[Literal["repetition"]]
    repeated_n: NotRequired[int]


class PrefillObject(TypedDict):
    """How much of the prompt is processed, and of it what was cached, by llama.cpp's names."""

    total: int
    cache: int
    processed: int


class ProgressObject(PrefillObject):
    """llama.cpp's `prompt_progress`: also for how long."""

    time_ms: int


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
    """Log probabilities in columns; offsets count characters from the beginning of the text.

    The first token of a prompt that is repeated has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ToolCallObject(TypedDict):
    """A whole call of a function."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class StreamedFunction(TypedDict):
    """What is new of a call in a stream: first the name, with no arguments yet, then pieces of the arguments."""

    name: NotRequired[str]
    arguments: str


class StreamedToolCall(TypedDict):
    """What is new of a tool call in a stream. `id` and `type` come once, with the name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: StreamedFunction


class StreamedInput(TypedDict):
    """What is new of a call of a custom tool: first the name, with no input yet, then pieces of the input."""

    name: NotRequired[str]
    input: str


class StreamedCustomCall(TypedDict):
    """What is new of a call of a custom tool in a stream. `id` and `type` come once, with the name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["custom"]]
    custom: StreamedInput


class ReplyMessage(TypedDict):
    """A reply. With calls alone its content is null."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject | CustomCall]]


class ReplyChoice(TypedDict):
    """One of the replies: there are as many as `n` asks for."""

    index: int
    message: ReplyMessage
    logprobs: NotRequired[ChatLogprobsObject]
    finish_reason: FinishReason


class _ReplyHead(TypedDict):
    id: str
    created: int
    model: str
    system_fingerprint: str


class _WholeReply(_ReplyHead):
    usage: UsageObject
    timings: TimingsObject
    reasoning: NotRequired[ReasoningObject]


class _ReplyChunk(_ReplyHead):
    prompt_progress: NotRequired[ProgressObject]
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
    tool_calls: list[StreamedToolCall | StreamedCustomCall]


class ChunkChoice(TypedDict):
    """The one choice of a chunk; `index` says of which reply it is."""

    index: int
    delta: ReplyDelta
    logprobs: NotRequired[ChatLogprobsObject | None]
    finish_reason: FinishReason | None


class ChatChunk(_ReplyChunk):
    """One event of a streamed reply; `data: [DONE]` follows the last. Without choices it carries the usage."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]


class TextChoice(TypedDict):
    """A completion: of `n` for each prompt, in the order of the prompts."""

    index: int
    text: str
    logprobs: NotRequired[TextLogprobsObject]
    finish_reason: FinishReason


class TextCompletion(_WholeReply):
    """The continuation of a text."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class TextChunkChoice(TypedDict):
    """The one choice of a chunk; `index` says of which completion it is."""

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


class RankingResult(TypedDict):
    """A document's score, from 0 to 1 unless raw scores were asked for."""

    index: int
    relevance_score: float
    document: NotRequired[TextDocument]


class Ranking(TypedDict):
    """The documents, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankingResult]
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
    """Which efforts make a difference to a model, and which are budgets of tokens."""

    efforts: list[Effort]
    default: Effort | None
    preserved: bool
    budgets: NotRequired[dict[Effort, int]]


class DialectObject(TypedDict):
    """The family whose way of writing a model has, and what told it."""

    name: str
    recognised_by: str


class ModelObject(TypedDict):
    """A model that can be served, under one of its names. What is not known is left out."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    state: ModelState
    type: Literal["llm", "embedding", "rerank"]
    root: NotRequired[str]
    shares: NotRequired[str]
    context_length: NotRequired[int]
    max_model_len: NotRequired[int]
    capabilities: list[str]
    dialect: NotRequired[DialectObject]
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
    models: list[CodexModel]


class Loading(TypedDict):
    """What has become of a model that was to be loaded, or becomes of one that is to be unloaded."""

    model: str
    message: str
