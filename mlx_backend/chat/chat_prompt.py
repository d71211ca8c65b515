"""From a chat request to its prompt: canonical history, effort, reasoning the client has lost, template arguments.

    request ─history, effort─▶ Conversation ─▶ Prompt

How messages become tokens is prompt.py's. Knows no replies, no engine and no HTTP.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_backend.chat.effort_probe import with_part
from mlx_backend.chat.generated_replies import Reading
from mlx_backend.chat.prompt import (
    PromptBuilder,
    Rendering,
    with_marker_stand_ins,
    with_stand_ins,
    without_numbers,
)
from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.conversation.dialects.tool_prompts import json_tool_prompt
from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.effort_sources import DEFAULT, USUAL_ARGUMENTS, resolve
from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.message_parts import REASONING_CONTENT
from mlx_backend.conversation.template import for_template, tools_for_template
from mlx_backend.conversation.tool_names import ToolNames
from mlx_backend.conversation.tools import ToolSet
from mlx_backend.engine.base import PromptStart
from mlx_backend.errors import RequestError
from mlx_backend.models.templates import variables_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.chat.capabilities import ChatFormat
    from mlx_backend.chat.generated_replies import GeneratedReplies
    from mlx_backend.chat.limits import ReplyLimits, TextSize
    from mlx_backend.chat.prompt import ImagePlaces, Prompt
    from mlx_backend.chat.request import ChatRequest
    from mlx_backend.chat.request_images import SeenImages
    from mlx_backend.conversation.effort import EffortScale
    from mlx_backend.conversation.effort_sources import Resolution
    from mlx_backend.engine.base import Tokenizer


log = logging.getLogger(__name__)

_MAX_LOGGED_WORDS = 256
"""Unknown words for efforts that the log names; a client may send any number of them."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request's messages in canonical form, and the effort with which they are answered."""

    messages: list[dict[str, Any]]
    resolution: Resolution
    is_continued: bool
    """The reply goes on where the last message, the assistant's, ends."""

    @property
    def begun_answer(self) -> str:
        """The text of the answer that is already there."""
        text: str = self.messages[-1]["content"] if self.is_continued else ""
        return text


class ChatPrompts:
    """Builds the prompts of one model's chat requests. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: ChatFormat,
        limits: ReplyLimits,
        replies: GeneratedReplies,
        caches: CacheBudget | None = None,
    ) -> None:
        self._template = tokenizer.chat_template
        self._variables = variables_of(tokenizer.chat_template)
        self._dialect = form.dialect
        self._traits = form.traits
        self._scale = form.scale
        self._limits = limits
        self._settings = limits.settings
        self._replies = replies
        self._logged_words: set[str] = set()
        self._has_logged_tools = False
        self._builder = PromptBuilder(tokenizer, form.dialect, caches)

    def with_settings(self, limits: ReplyLimits, scale: EffortScale) -> ChatPrompts:
        """Return these with other settings and an effort scale made of them."""
        changed = copy.copy(self)
        changed._limits, changed._settings, changed._scale = limits, limits.settings, scale
        return changed

    def conversation(self, request: ChatRequest) -> Conversation:
        """Bring the history into canonical form and decide the effort. Raises HistoryError or EffortError."""
        messages = sanitise(request.messages, tools=list(request.tools) or None, dialect=self._dialect)
        resolution = resolve(
            request.fields,
            messages,
            scale=self._scale,
            background=request.background,
            name_effort=self._settings.name_effort,
            model_default=self._settings.model_effort,
            server_default=self._settings.server_effort,
        )
        self._log_unknown_words(resolution)
        messages = self._replies.restored(
            request.owner,
            resolution.messages,
            request.tools,
            request.image_hashes,
            # That of answered turns only where the template may render it.
            everywhere=self._traits.may_keep_answered_reasoning(self._dialect.history),
        )
        last = messages[-1]
        is_over = last.get("tool_calls") or (request.is_last_complete and last.get("content"))
        is_continued = request.continue_last and last["role"] == "assistant" and not is_over
        return Conversation(messages, resolution, is_continued)

    def prompt(
        self,
        request: ChatRequest,
        conversation: Conversation,
        *,
        images: SeenImages | None = None,
        size: TextSize | None = None,
    ) -> Prompt:
        """Build the prompt, with the images that its messages number. Raises RequestError without a chat template.

        With `size` it also raises for a prompt that is far too long, before it is tokenised.
        """
        names = self.tool_names(request)
        messages = self._with_answer_format(request, names.messages(conversation.messages))
        if self._template is None:
            if request.role_mapping is None:
                raise RequestError(
                    "This model has no chat template. Start the server with --chat-template, send a "
                    "role_mapping, or use /v1/completions.",
                    "messages",
                )
            if images is not None:
                raise RequestError(
                    "Images need a chat template, and this model has none. Start the server with --chat-template.",
                    "messages",
                )
            mapped = Rendering(messages, add_generation_prompt=request.add_generation_prompt, size=size)
            return self._builder.mapped(mapped, request.role_mapping)
        kwargs = self.template_kwargs(request, conversation)
        told = [tool for tool in request.tools if tool["function"]["name"] not in request.deferred_tools]
        tools = list(tools_for_template(names.definitions(told), self._traits)) or None
        messages, stand_ins = (messages, {}) if images is None else with_stand_ins(messages, self._traits)
        own_markers: dict[str, str] = {}
        if tools is not None and not self._traits.has_tools:
            messages, own_markers = self._with_tool_prompt(messages, tools)
            # What else of the prompt depends on there being tools, the template decides.
            tools = None if self._traits.refuses_tools else tools
        # Templates cannot render an empty history: an answer without a question gets an empty one.
        asked = messages[:-1] or [{"role": "user", "content": ""}] if conversation.is_continued else messages
        rendered = for_template(asked, self._traits, self._dialect)
        places: ImagePlaces | None = None
        if images is not None:
            places = images.places(rendered, stand_ins)
            rendered = without_numbers(rendered)
        given = Rendering(
            rendered,
            tools,
            kwargs,
            add_generation_prompt=request.add_generation_prompt or conversation.is_continued,
            own_markers=own_markers,
            images=places,
            size=size,
            take_over=partial(
                self._replies.taken_over,
                reading=Reading(request.owner, ToolSet(names.definitions(request.tools) or None), names),
            ),
        )
        if not conversation.is_continued:
            return self._builder.build(given)
        return self._builder.continued(
            given,
            reasoning=messages[-1].get(REASONING_CONTENT, ""),
            content=conversation.begun_answer,
            closes_reasoning=request.is_last_complete,
        )

    def tool_names(self, request: ChatRequest) -> ToolNames:
        """Return the names of the request's tools for the model."""
        return ToolNames((tool["function"]["name"] for tool in request.tools), self._dialect)

    def _with_tool_prompt(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return the messages with what the template does not tell of the tools, and the stand-ins for its markers."""
        calls = self._dialect.calls
        if calls is None:
            raise RequestError("This model cannot call tools. Send the request without them.", "tools")
        if not self._has_logged_tools:
            self._has_logged_tools = True
            log.info(
                "The chat template does not tell the model of tools: they are put into its instructions."
            )
        write = self._dialect.tool_prompt or json_tool_prompt
        text, own_markers = with_marker_stand_ins(write(tools, calls), [messages, tools])
        return _with_instructions(messages, text), own_markers

    def _with_answer_format(
        self, request: ChatRequest, messages: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the messages with the answer's schema after the instructions, where the family is told of it."""
        answer_format, write = request.answer_format, self._dialect.response_format
        if answer_format is None or answer_format.kind != "json_schema" or write is None:
            return messages
        section = write(answer_format.name, answer_format.description, answer_format.value)
        return _with_instructions(messages, section)

    def next_turn(
        self, request: ChatRequest, answer: Mapping[str, Any], images: SeenImages | None = None
    ) -> PromptStart:
        """Return what the prompt after this answer will begin with: the common prefix of any two of them."""
        prompts = []
        for text in ("a", "1"):
            replies: list[Mapping[str, Any]] = [
                {"role": "tool", "tool_call_id": call["id"], "content": text}
                for call in answer.get("tool_calls", ())
            ] or [{"role": "user", "content": text}]
            following = replace(request, messages=[*request.messages, answer, *replies])
            prompts.append(self.prompt(following, self.conversation(following), images=images))
        first, second = prompts
        length = common_prefix_length(first.tokens, second.tokens)
        return PromptStart(first.tokens[:length], [each for each in first.images if each.end <= length])

    def _log_unknown_words(self, resolution: Resolution) -> None:
        for word in resolution.unknown_words:
            if word not in self._logged_words and len(self._logged_words) < _MAX_LOGGED_WORDS:
                self._logged_words.add(word)
                log.info("A system prompt says Reasoning: %s, which is no effort: it stays text.", word)

    def template_kwargs(self, request: ChatRequest, conversation: Conversation) -> dict[str, Any]:
        """Return what the template is given with messages and tools."""
        resolution = conversation.resolution
        given = {**self._settings.template_kwargs, **request.template_kwargs}
        if resolution.level is not None and resolution.source != DEFAULT:
            # A stronger source has decided what these were to say.
            overruled = self._scale.arguments | resolution.overruled_arguments
            given = {name: value for name, value in given.items() if name not in overruled}
        told = {**self._history_kwargs(request), **given, **resolution.template_kwargs}
        return self._with_budget(told, request, resolution)

    def unread(self, request: ChatRequest) -> list[str]:
        """Return which of the request's fields mean nothing to the model's template."""
        unread = ["role_mapping"] if request.role_mapping is not None and self._template is not None else []
        if self._variables is None:
            return unread
        known = {*self._variables, *self._scale.arguments, *USUAL_ARGUMENTS, "thinking_budget"}
        return unread + [
            f"chat_template_kwargs.{name}" for name in request.template_kwargs if name not in known
        ]

    def _history_kwargs(self, request: ChatRequest) -> dict[str, bool]:
        """Return the template's switch for the reasoning of answered turns, set as the family needs it for agents."""
        is_set = bool(request.tools) and self._dialect.history.keeps_with_tools
        return dict(self._traits.keep_switches) if is_set else {}

    def _with_budget(
        self, kwargs: dict[str, Any], request: ChatRequest, resolution: Resolution
    ) -> dict[str, Any]:
        """Return the arguments with the budget that will be held, for a template that is told of it (Seed-OSS)."""
        name = self._scale.budget_argument
        if name is None or resolution.effort is Effort.NONE:
            return kwargs
        budget = self._limits.thinking_budget_of(request, resolution)
        if budget is None and request.thinking_budget is None:
            return kwargs
        return with_part(kwargs, name, budget)


def _with_instructions(messages: list[dict[str, Any]], section: str) -> list[dict[str, Any]]:
    """Return the messages with a section after the first system message's text, or as that message."""
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": section}, *messages]
    instructions = f"{first['content']}\n\n{section}" if first["content"] else section
    return [{**first, "content": instructions}, *messages[1:]]
