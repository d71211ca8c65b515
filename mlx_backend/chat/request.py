"""What a service can be asked: frozen requests, each field already read and of the right type, and how it refuses.

Who writes them (the bodies in `api/`, the tests) knows nothing of prompts; who answers them (`service.py`,
`embedding/service.py`) knows nothing of HTTP. Holds data alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNLIMITED = -1  # a thinking budget that is none, whatever the model's or the server's is


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """What an answer is held to; `field` is where the request said so.

    `value` is a schema, a regular expression or a list of texts; nothing for any JSON object.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice"]
    value: Any = None
    strict: bool = False
    field: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Which calls a reply has to make: any at all if `required`, that of one tool if named."""

    required: bool = False
    name: str | None = None
    strict: frozenset[str] = frozenset()  # tools whose calls are held to their parameters in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """What is wished of any reply; a lower `priority` goes first."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # by the names of `Sampling`
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    adapter: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(ReplyRequest):
    """A conversation to answer. `fields` is the request as the client wrote it: effort is looked up there."""

    messages: Sequence[Mapping[str, Any]]
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
    thinking_budget: int | None = None  # most tokens of reasoning, or UNLIMITED
    answer_reserve: int | None = None  # tokens of the reply that are kept for the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(ReplyRequest):
    """A text or token ids to continue, without a template. Markers in a text are control tokens here."""

    prompt: str | tuple[int, ...]
