"""The fields of requests as clients write them, for /openapi.json: where that is more than what they become here.

A validator (fields.py) makes one form of several. What is described is what clients are meant to send; some further
forms, such as words for efforts in other languages, are accepted too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field, TypeAdapter, WithJsonSchema

from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.history import ROLES

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


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


class MessageCall(TypedDict):
    """A tool call of an earlier reply."""

    id: str
    type: NotRequired[Literal["function"]]
    function: CalledFunction


class Message(TypedDict):
    """A message of a conversation. What else clients send in it is accepted, and what is broken is repaired."""

    role: Annotated[str, WithJsonSchema({"type": "string", "enum": list(ROLES)})]
    content: NotRequired[str | list[TextPart | ImagePart] | None]
    name: NotRequired[str]
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[MessageCall] | None]
    tool_call_id: NotRequired[str]


type Messages = Annotated[list[Message], Field(min_length=1)]


class NamedFunction(TypedDict):
    """A function, by its name."""

    name: str


class NamedTool(TypedDict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


type ToolChoiceInput = Literal["auto", "none", "required"] | NamedTool | None


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
type LogitBiasInput = Annotated[
    dict[str, float] | None,
    WithJsonSchema(
        {
            "type": ["object", "null"],
            "description": "Token id -> what is added to its logit.",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]

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
    "think": bool | None,
    "thinking": ThinkingInput | bool | None,
    "enable_thinking": bool | None,
}
"""The fields that may state an effort: `conversation.effort_sources` looks them up in the request as it was written."""


class TextDocument(TypedDict):
    """A document as an object."""

    text: str


type Document = str | TextDocument
type Prompt = Text | Annotated[list[TokenId], Field(min_length=1)]
type Texts = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)
