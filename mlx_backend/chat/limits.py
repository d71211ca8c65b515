"""How long a request and its reply may be, and how much of it may be reasoning: a request's limits over the model's.

A prompt that is far too long for the context is refused before tokens are made of all of it. Tokenising takes a hundred
times the memory of a text, and seconds for each megabyte; how many tokens a text has is not known before: a token may
be one byte, or a line of 128 blanks. So a text that is long for the context is counted in pieces, and refused once
these alone are twice what fits: a cut in a text makes a few tokens more, not twice as many. Knows no templates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.request import UNLIMITED, ChatRequest, CompletionRequest
from mlx_backend.conversation.effort import Effort
from mlx_backend.errors import CONTEXT_LENGTH_EXCEEDED, RequestError, overflow_sentence
from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.chat.request import ReplyRequest
    from mlx_backend.conversation.effort_sources import Resolution
    from mlx_backend.engine.base import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLimits:
    """The limits of one model, in tokens: its context's, and those of its settings."""

    context_length: int
    settings: ModelSettings = field(default_factory=ModelSettings)

    def check(self, request: ChatRequest) -> None:
        """Raise the RequestError for a request of more messages or tools than the server takes."""
        self._check_count("messages", len(request.messages), self.settings.max_messages)
        self._check_count("tools", len(request.tools), self.settings.max_tools)

    @staticmethod
    def _check_count(name: str, count: int, limit: int) -> None:
        if count > limit:
            raise RequestError(
                f"The request has {count} {name}; this server takes at most {limit} (--max-{name}).",
                name,
                f"too_many_{name}",
                numbers={f"max_{name}": limit},
            )

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise the RequestError for more messages than the server takes, or than the context has tokens.

        Each call counts as one: for many templates it is, and some compare each message with all that follow.
        """
        count = sum(max(1, len(message.get("tool_calls") or ())) for message in messages)
        if not self.has_room_after(count):
            raise self._too_many_messages(count)
        self._check_count("messages", count, self.settings.max_messages)

    def check_choices(self, n: int, prompts: int = 1) -> None:
        """Raise the RequestError for a request of more replies than the server gives, or than its queue holds."""
        limit, option = min(
            (self.settings.max_choices, "--max-choices"),
            (self.settings.max_requests, "--max-concurrent and --max-queue"),
        )
        if n * prompts > limit:
            each = f"{prompts} prompts with n = {n} are" if prompts > 1 else f"n = {n} is"
            raise RequestError(
                f"{each} more replies than this server gives to one request, which is {limit} ({option}). "
                "Send several requests.",
                "n" if n > 1 else "prompt",
                "too_many_choices",
                numbers={"max_choices": limit},
            )

    def max_tokens_of(self, request: ReplyRequest, length: int) -> int:
        """Return how many tokens the reply to a prompt of `length` may have. Raises RequestError if none fits."""
        if not self.has_room_after(length):
            raise self.too_long("prompt" if isinstance(request, CompletionRequest) else "messages", length)
        limit = request.max_tokens or self.settings.max_tokens or self.context_length
        return min(limit, self.context_length - length)

    def has_room_after(self, prompt_tokens: int, reserved: int = 1) -> bool:
        """Whether a reply of the `reserved` tokens fits after a prompt of this length."""
        return prompt_tokens + reserved <= self.context_length

    def reserved_of(self, request: ChatRequest) -> int:
        """Return how many tokens a prompt has to leave for the reply."""
        if not request.reserves_reply:
            return 1
        return min(request.max_tokens or MAX_RESERVED, self.context_length // 4, MAX_RESERVED)

    def _too_many_messages(self, messages: int) -> RequestError:
        """Make the error for more messages than the context has tokens."""
        text = (
            f"The request has {messages} messages; the context holds {self.context_length} tokens for all of them. "
            + overflow_sentence("messages", f"at least {messages}", self.context_length)
        )
        numbers = {"prompt_tokens": messages, "max_model_len": self.context_length}
        return RequestError(text, "messages", CONTEXT_LENGTH_EXCEEDED, numbers=numbers)

    def too_long(
        self,
        field: str,
        prompt_tokens: int,
        *,
        is_estimate: bool = False,
        reserved: int = 1,
        tools: int = 0,
        tool_tokens: int = 0,
    ) -> RequestError:
        """Make the error for a prompt that leaves no room; `tool_tokens` of it describe `tools` tools."""
        about = "about " if is_estimate else ""
        room = "room too" if reserved == 1 else f"room for {reserved}"
        text = (
            f"The prompt has {about}{prompt_tokens} tokens; the context holds {self.context_length}, "
            f"and the reply needs {room}."
        )
        numbers = {"prompt_tokens": prompt_tokens, "max_model_len": self.context_length}
        if reserved > 1:
            numbers["max_prompt_tokens"] = self.context_length - reserved
        if tool_tokens > 0:
            described = "the tool that was" if tools == 1 else f"the {tools} tools that were"
            text += f" {tool_tokens} of its tokens describe {described} sent with it: turn off what is not needed."
            numbers["tool_tokens"] = tool_tokens
        text += " " + overflow_sentence(field, f"{about}{prompt_tokens}", self.context_length)
        return RequestError(text, field, CONTEXT_LENGTH_EXCEEDED, numbers=numbers)

    def thinking_budget_of(self, request: ChatRequest, resolution: Resolution) -> int | None:
        """Return how many tokens may be reasoning; None for as many as the model likes.

        0 at effort none, whether or not the template knows that effort. Otherwise what the request says, or the smaller
        of the level's own budget and the model's or server's limit.
        """
        if resolution.effort is Effort.NONE:
            return 0
        limits = (resolution.budget, self.settings.thinking_budget)
        if request.thinking_budget is not None:
            limits = (request.thinking_budget, None)
        return min((limit for limit in limits if limit is not None and limit != UNLIMITED), default=None)

    def thinking_budget_message_of(self, request: ChatRequest) -> str:
        """Return what the reasoning ends with when its budget is used up: nothing, unless it is set."""
        message = request.thinking_budget_message
        return (self.settings.thinking_budget_message if message is None else message) or ""

    def max_repeated_tokens_of(self, request: ReplyRequest) -> int:
        """Return for how many tokens a reply may repeat itself; 0 for as many as it likes."""
        wanted = request.max_repeated_tokens
        return self.settings.max_repeated_tokens if wanted is None else wanted

    def answer_reserve_of(self, request: ChatRequest, max_tokens: int) -> int | None:
        """Return how many of the reply's tokens are kept for the answer: by default at most half of them."""
        reserve, default = request.answer_reserve, self.settings.answer_reserve
        if reserve is None and default is not None:
            reserve = min(default, max_tokens // 2)
        return reserve or None


MAX_RESERVED = 8192
"""Tokens that are kept for a reply at most: enough for a call that writes a file."""
CHARACTERS_PER_TOKEN = 8
"""Texts with fewer for each token of the context are not counted beforehand; words of English have 4 to 5."""
MIN_TOKENIZED = 1 << 18
"""Tokens of one request that is tokenised and not answered; more where the context holds more."""
_PIECE = 1 << 16
"""Characters that are tokenised at a time."""


class TextSize:
    """Refuses a text of more than `max_tokens` before tokens are made of all of it. Safe to use from several threads.

    A text of at most `uncounted` characters is not counted. `refuse` makes the error for a text, in a field, that has
    about a number of tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_tokens: int,
        uncounted: int,
        refuse: Callable[[str, int], RequestError],
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._uncounted = uncounted
        self._refuse = refuse

    @classmethod
    def of_prompts(cls, tokenizer: Tokenizer, limits: ReplyLimits) -> Self:
        """Make that of texts which a model is to read."""
        length = limits.context_length
        refuse = partial(limits.too_long, is_estimate=True)
        return cls(tokenizer, 2 * length, CHARACTERS_PER_TOKEN * length, refuse)

    @classmethod
    def of_tokenized(cls, tokenizer: Tokenizer, context_length: int) -> Self:
        """Make that of texts of which only the tokens are wanted: they may be longer than the context."""
        most = max(context_length, MIN_TOKENIZED)

        def refuse(field: str, tokens: int) -> RequestError:
            return RequestError(
                f"The request has about {tokens} tokens; at most {most} are tokenised in one request: send the text "
                "in parts.",
                field,
            )

        return cls(tokenizer, most, most, refuse)

    def check(self, text: str, field: str = "messages") -> None:
        """Raise the RequestError for a text that is too long."""
        tokens = counted = 0
        while counted < len(text) > self._uncounted:
            current().check()
            piece = text[counted : counted + _PIECE]
            tokens += len(self._tokenizer.encode(piece, control_tokens=True))
            counted += len(piece)
            if tokens > self._max_tokens:
                raise self._refuse(field, tokens * len(text) // counted)
