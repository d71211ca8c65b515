"""The JSON objects of Anthropic's API as types, for /openapi.json."""

from typing import Any, Literal, NotRequired, TypedDict

from mlx_backend.api.openai.objects import OutputConfigInput, ThinkingInput


class ThinkingConfig(ThinkingInput, total=False):
    """How much is reasoned, and whether that is shown."""

    display: Literal["summarized", "omitted", "updates", "highlights"]


class JSONOutput(TypedDict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(OutputConfigInput, total=False):
    """The effort, and what the answer is held to."""

    format: JSONOutput | None


class AnthropicErrorFields(TypedDict):
    """What went wrong."""

    type: str
    message: str
    details: NotRequired[dict[str, Any]]


class AnthropicError(TypedDict):
    """The body of every response that is an error."""

    type: Literal["error"]
    error: AnthropicErrorFields


class TextBlock(TypedDict):
    """A text of an answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(TypedDict):
    """Reasoning. With `display: omitted` the text is empty, and the signature holds it."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    """A call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


type ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock
type StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingTokens(TypedDict):
    """How much of a reply was reasoning."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """Tokens. Those of the prompt that were found in the cache are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingTokens]


class MessageObject(TypedDict):
    """A reply."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(TypedDict):
    """A reply begins: its content is empty."""

    type: Literal["message_start"]
    message: MessageObject


class BlockStart(TypedDict):
    """A block begins: it is empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class BlockDelta(TypedDict):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: dict[str, str]


class BlockStop(TypedDict):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


class StopFields(TypedDict):
    """Why a reply has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """A reply has ended; the usage is that of all of it."""

    type: Literal["message_delta"]
    delta: StopFields
    usage: MessageUsage


class Mark(TypedDict):
    """The end of a stream."""

    type: Literal["message_stop"]


class Ping(TypedDict):
    """A sign of life: how many of the prompt's tokens are read, or where in the queue the request waits."""

    type: Literal["ping"]
    processed: NotRequired[int]
    total: NotRequired[int]
    queue_position: NotRequired[int]


type Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | Mark | Ping | AnthropicError


class TokenCount(TypedDict):
    """How many tokens a prompt has."""

    input_tokens: int


class HelloObject(TypedDict):
    """A greeting."""

    message: str


class AnthropicModel(TypedDict):
    """A model that can be served, under one of its names; without `capabilities` where it has yet to be downloaded."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: NotRequired[int]
    max_tokens: NotRequired[int]
    capabilities: NotRequired[dict[str, Any]]


class ModelPage(TypedDict):
    """The models that can be served."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool
