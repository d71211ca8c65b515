"""The body of POST /v1/responses, and the request for the chat service that it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Lenient, Refusals, is_one_of
from mlx_backend.api.openai.chat_body import as_answer_format
from mlx_backend.api.openai.objects import EFFORT_FIELDS
from mlx_backend.api.reply_fields import ConversationBody, Limit, accepts, as_whole
from mlx_backend.api.responses.items import ItemConversation, resolved
from mlx_backend.api.responses.objects import ReasoningConfig
from mlx_backend.api.sent import Sent
from mlx_backend.api.tools import KnownTool, Tools
from mlx_backend.chat.request import AnswerFormat, ChatRequest
from mlx_backend.conversation.result_media import with_media_as_parts
from mlx_backend.settings import SAMPLING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.api.responses.store import ConnectionStore, ResponseStore, StoredResponse

INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")
"""What `include` can add here; other values are ignored, and named."""


class TextOptions(Lenient):
    """How the answer is written."""

    format: Annotated[
        AnswerFormat | None,
        BeforeValidator(as_answer_format, json_schema_input_type=dict[str, Any] | None),
    ] = None
    verbosity: Literal["low", "medium", "high"] | None = None


@accepts(*SAMPLING, "repeat_penalty")
class ResponsesBody(ConversationBody):
    """POST /v1/responses. The settings of replies that other addresses take are taken here, too."""

    refused: ClassVar[Refusals] = {
        "background": (is_one_of(False), "a response is generated while its client waits; stream it"),
        "conversation": (is_one_of(), "send previous_response_id, or the whole conversation in input"),
        "prompt": (is_one_of(), "templates of prompts are not stored here; send instructions and input"),
        "context_management": (is_one_of([]), "a conversation is never compacted here; send a shorter one"),
        "moderation": (is_one_of(), "nothing is moderated here"),
    }
    read_elsewhere: ClassVar[dict[str, Any]] = {
        **{name: kind for name, kind in EFFORT_FIELDS.items() if name != "reasoning"},
        "reasoning": ReasoningConfig | None,
    }

    input: str | list[Any] | None = None
    instructions: str | None = None
    stream: bool | None = None
    tools: Annotated[
        Tools | None, BeforeValidator(Tools.parse, json_schema_input_type=list[KnownTool] | None)
    ] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Limit = None
    max_tool_calls: int | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), BeforeValidator(as_whole)] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @property
    def ignored(self) -> list[str]:
        """The fields that have no meaning here."""
        unknown = [f"include.{name}" for name in self.include or () if name not in INCLUDES]
        unmeant = {
            "max_tool_calls": self.max_tool_calls,
            "truncation": "auto" if self.truncation == "auto" else None,
            "text.verbosity": self.text.verbosity if self.text else None,
        }
        names = [name for name, value in unmeant.items() if value is not None]
        return [*unknown, *names, *(name for name in super().ignored if name != "text.verbosity")]

    @property
    def asked_reasoning(self) -> Mapping[str, Any]:
        """What is asked for of the reasoning."""
        asked: Mapping[str, Any] | None = self.written.get("reasoning")
        return {} if asked is None else asked

    def request(
        self, store: ResponseStore | ConnectionStore, owner: str, final: Mapping[str, Any] | None = None
    ) -> ParsedRequest:
        """Return the request for the chat service, and what of it the response needs. Raises ApiError.

        With a `final` item it is that which is answered, by a text of any form. Without tools it goes on with those of
        its conversation, as an agent's own compaction does.
        """
        without_tools = {"tools": self.written.get("tools") or []} if final is not None else {}
        if not isinstance(self.asked_reasoning, Mapping):
            raise Sent(self.asked_reasoning, "reasoning").unlike("an object")
        previous = None
        if self.previous_response_id:
            previous = store.get(self.previous_response_id, owner, field="previous_response_id")
        items = self.items(store, owner)
        conversation = ItemConversation(goes_on=previous is not None)
        if self.instructions:
            conversation.messages.append({"role": "system", "content": self.instructions})
        if previous is not None:
            for item in previous.conversation():
                conversation.add(Sent(item, "previous_response_id"))
        for sent in items:
            conversation.add(sent)
        if not any(message["role"] != "system" for message in conversation.messages):
            raise refuse("input is missing: send a text, or a list of items.", "input")
        tools = self.tools or Tools()
        if final is not None:
            conversation.add(Sent(final, "input"))
        return ParsedRequest(
            ChatRequest(
                messages=with_media_as_parts(conversation.messages),
                images=conversation.images,
                tools=tools.functions,
                tool_paths=tools.paths,
                max_tokens=self.max_output_tokens,
                logprobs=self.top_logprobs if self.wants_logprobs else None,
                answer_format=self._answer_format() if final is None else None,
                tool_choice=tools.choice(self.tool_choice if final is None else "none"),
                parallel_tool_calls=self.parallel_tool_calls is not False,
                is_last_complete=conversation.is_last_complete,
                **self.common("input", "instructions", **without_tools),
            ),
            tools,
            [item.value for item in items],
            previous,
        )

    def items(self, store: ResponseStore | ConnectionStore, owner: str) -> list[Sent]:
        """Return the items of `input`, each reference as what it refers to. Raises ApiError."""
        is_text = isinstance(self.input, str)
        items = [{"type": "message", "role": "user", "content": self.input}] if is_text else self.input
        return list(resolved(Sent(items, "input").entries(), lambda ids: store.items(ids, owner)))

    @property
    def wants_logprobs(self) -> bool:
        """Whether log probabilities are sent."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

    def _answer_format(self) -> AnswerFormat | None:
        found = self.text.format if self.text is not None else None
        return replace(found, field="text.format") if found is not None else None


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request for the chat service; with it the request's tools, its own items, and the response that it follows."""

    chat: ChatRequest
    tools: Tools
    items: Sequence[Mapping[str, Any]]
    previous: StoredResponse | None
