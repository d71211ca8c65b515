"""The JSON objects of the Responses API as types, for /openapi.json."""

from typing import Any, Literal, NotRequired, TypedDict

from mlx_backend.api.openai.objects import ErrorFields, PrefillObject, ReasoningInput, TimingsObject


class ReasoningConfig(ReasoningInput, total=False):
    """How much is reasoned, and whether that is sent as a summary, too."""

    summary: Literal["auto", "concise", "detailed"] | None
    generate_summary: Literal["auto", "concise", "detailed"] | None


class OutputText(TypedDict):
    """A text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class ReasoningText(TypedDict):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryText(TypedDict):
    """Reasoning as its summary, which is all of it."""

    type: Literal["summary_text"]
    text: str


type Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(TypedDict):
    """An answer, or what is said before a call (`commentary`)."""

    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]
    phase: NotRequired[Literal["commentary", "final_answer"]]


class ReasoningItem(TypedDict):
    """Reasoning. `encrypted_content` is sent where `include` asks for it, and is read when it comes back."""

    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class FunctionCallItem(TypedDict):
    """A call of a function."""

    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CustomToolCallItem(TypedDict):
    """A call of a custom tool."""

    id: str
    type: Literal["custom_tool_call"]
    status: Status
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


type OutputItem = MessageItem | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(TypedDict):
    """How much of a prompt was found in the cache. Writing to it costs nothing here."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    """How much of a response was reasoning."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The API's `usage`, in tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class FailedWith(TypedDict):
    """What ended a response."""

    code: str
    message: str


class ReasoningSettings(TypedDict):
    """What was decided about a response's reasoning."""

    effort: str | None
    summary: str | None


class Response(TypedDict):
    """A response. Fields of the request are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: NotRequired[int | None]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: FailedWith | None
    incomplete_details: IncompleteDetails | None
    background: Literal[False]
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    timings: NotRequired[TimingsObject]


class _Event(TypedDict):
    sequence_number: int


class ResponseEvent(_Event):
    """The response as it is now; in a silence also how far the prompt is read, or where in the queue it waits."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response
    prompt_progress: NotRequired[PrefillObject]
    queue_position: NotRequired[int]


class ItemEvent(_Event):
    """An item begins or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PieceEvent(_Event):
    """Something of an item: a part begins or is complete, or there is more of its text."""

    type: Literal[
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
    ]
    item_id: str
    output_index: int
    content_index: NotRequired[int]
    summary_index: NotRequired[int]
    part: NotRequired[OutputText | ReasoningText | SummaryText]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[Any]]
    arguments: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[str]


type Event = ResponseEvent | ItemEvent | PieceEvent


class InputTokens(TypedDict):
    """How many tokens a prompt has."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class UserMessage(TypedDict):
    """A message of the user's, as it was."""

    id: str
    type: Literal["message"]
    status: Literal["completed"]
    role: Literal["user"]
    content: list[dict[str, Any]]


class CompactionItem(TypedDict):
    """What the model has written down of a conversation, as an opaque text."""

    id: str
    type: Literal["compaction"]
    encrypted_content: str


class CompactedResponse(TypedDict):
    """What a conversation is left with: the user's messages, and one item for the rest."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[UserMessage | CompactionItem]
    usage: ResponseUsage


class SocketError(TypedDict):
    """What went wrong with a message of a WebSocket."""

    type: Literal["error"]
    status: int
    error: ErrorFields


class DeletedResponse(TypedDict):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    """A page of items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
