"""The JSON objects of Anthropic's API as types, for /openapi.json: what is sent to clients."""

from typing import Any, Literal, NotRequired, TypedDict


class ErrorFields(TypedDict):
    """What went wrong."""

    type: str
    message: str


class ErrorObject(TypedDict):
    """The body of every response that is an error."""

    type: Literal["error"]
    error: ErrorFields


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
type StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputTokensDetails(TypedDict):
    """How much of a reply was reasoning."""

    thinking_tokens: int


class Usage(TypedDict):
    """Tokens. Those of the prompt that were found in the cache are not among `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]


class Message(TypedDict):
    """A reply."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class MessageStart(TypedDict):
    """A reply begins: its content is empty."""

    type: Literal["message_start"]
    message: Message


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
    usage: Usage


class Mark(TypedDict):
    """The end of a stream, or a sign of life."""

    type: Literal["message_stop", "ping"]


type Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | Mark | ErrorObject


class TokenCount(TypedDict):
    """How many tokens a prompt has."""

    input_tokens: int


class ModelInfo(TypedDict):
    """A model that can be served, under one of its names."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: NotRequired[int]


class ModelPage(TypedDict):
    """The models that can be served."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: bool
