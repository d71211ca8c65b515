"""The requests to a chat service: frozen, with fields that are already parsed and of the right type.

api/ and the tests make them and know nothing of prompts; service.py answers them and knows nothing of HTTP. Holds
data alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.conversation.background_requests import BackgroundPrompt
    from mlx_backend.images.source import ImageSource

UNLIMITED = -1
"""A thinking budget that limits nothing, whatever the model's or the server's is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What the answer must match; `field` is the request's field that says so.

    `value` is a schema, a regular expression or a list of texts; None for any JSON object. `name` and `description` are
    the client's words for a schema.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    value: Any = None
    strict: bool = False
    field: str = "response_format"
    name: str = ""
    description: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which tool a reply must call: any if `required`, the one that is named, or none."""

    required: bool = False
    name: str | None = None
    strict: frozenset[str] = frozenset()
    """Tools whose calls must match their parameters in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """What any reply may be asked for. `sampling` has the names of `Sampling`.

    A lower `priority` goes first; None is 0, or what a background request gets.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    adapter: str | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReplyRequest):
    """A conversation to answer.

    `fields` are the others of the body as the client wrote it: effort is looked up there. In messages, an image is a
    part {"type": "image", "image": its place in `images`}.
    """

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[ImageSource] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    role_mapping: Mapping[str, str] | None = None
    answer_format: AnswerFormat | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    continue_last: bool = True
    add_generation_prompt: bool = True
    raw: bool = False
    thinking_budget: int | None = None  # max tokens of reasoning, or UNLIMITED
    answer_reserve: int | None = None  # tokens of the reply kept for the answer
    background_detection: bool | None = None  # whether to look for a client's own prompt; None: as configured
    background: BackgroundPrompt | None = None  # the one this was recognised as


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ReplyRequest):
    """A text or token ids to continue, without a template. Markers in a text are control tokens here."""

    prompt: str | tuple[int, ...]
