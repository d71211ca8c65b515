"""How many tokens an answer may have, and whether one that was cut off there can be used.

The setting *Max tokens* says it, or the extra body, or else the server's own default. Where none of them does there is
a limit all the same, because a reply that is not read must end (`servers.base`). Of every limit a part is kept for the
answer, so that a small one does not end in the middle of the reasoning: what *Tokens kept for the answer* says, but at
most half. Background requests keep more. Servers other than mlx-backend keep nothing: `servers.requests` leaves it out.

A text that ends early is still worth reading. But where the reasoning took every token there is no answer, even though
a thinking block was shown: a workflow would go on with an empty text. And JSON that was cut off is worse than none:
Dify repairs it silently, with values that the model never finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.chat.dify_requests import json_in
from dify_mlx_provider.servers.mlx_backend import DEFAULT_ANSWER_RESERVE
from dify_mlx_provider.servers.requests import parse_extra_body
from dify_mlx_provider.upstream.errors import Refused
from mlx_backend.conversation.background_requests import answer_reserve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dify_mlx_provider.chat.stream_reader import StreamResult
    from dify_mlx_provider.chat.think_block import ThinkBlockWriter
    from dify_mlx_provider.servers.base import ServedModel

# Any of them in the extra body is the user's own limit.
_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict", "num_predict")


def limit_tokens(
    parameters: Mapping[str, Any],
    model: ServedModel | None,
    default: int | None,
    *,
    is_background: bool = False,
) -> dict[str, Any]:
    """Return the parameters with a limit, and with what is kept of it for the answer.

    `default` is sent where neither the user nor `model`, which is what the server says of it, has a limit. Raises
    ValueError for an extra body that cannot be used.
    """
    limited = dict(parameters)
    reserve = _number(limited.pop("answer_reserve", None), DEFAULT_ANSWER_RESERVE)
    limit = chosen_limit(limited)
    if limit is None:
        limit = model.default_max_tokens if model is not None else None
    if limit is None and default is not None:
        limit = limited["max_tokens"] = default
    if limit is not None and limit >= 1:  # -1 in an extra body: no limit
        limited["answer_reserve"] = answer_reserve(limit) if is_background else min(reserve, limit // 2)
    return limited


def chosen_limit(parameters: Mapping[str, Any]) -> int | None:
    """Return the limit that the user has set; one below 1 means none. Raises ValueError for a bad extra body."""
    extra = parameters.get("extra_body")
    fields = parse_extra_body(extra) if extra not in (None, "") else {}
    named = next((fields[name] for name in _LIMIT_FIELDS if name in fields), parameters.get("max_tokens"))
    return None if named is None else _number(named, 0)


def _number(value: Any, default: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


@dataclass(frozen=True, slots=True, kw_only=True)
class CutAnswerCheck:
    """What is needed to judge one answer: whether it is to be JSON, and the limit that was sent, in tokens."""

    wants_json: bool = False
    has_tools: bool = False
    max_tokens: int | None = None

    def check(self, result: StreamResult, writer: ThinkBlockWriter) -> None:
        """Raise Refused if the answer that was written was cut off and cannot be used."""
        if result.finish_reason != "length" or result.calls:
            return
        written = result.usage.get("completion_tokens")
        if result.has_repeated:
            cause, remedy = (
                "the model was stopped because it repeated the same words over and over",
                "Ask again, or in other words",
            )
        elif self.max_tokens is not None and isinstance(written, int) and 0 < written < self.max_tokens:
            cause, remedy = (
                "the model's context was full",
                "Start a new conversation or shorten the text",
            )
        else:
            number = "" if self.max_tokens is None else f" ({self.max_tokens:,})"
            cause, remedy = f"the limit of Max tokens{number} was reached", "Raise Max tokens"
        if not writer.has_answer and not writer.has_reasoning:
            raise Refused(f"there is no answer: {cause} before it began. {remedy}.")
        if not writer.has_answer:
            unfinished = ", or on a tool call that it could not finish" if self.has_tools else ""
            raise Refused(
                f"there is no answer: {cause}, and the model had spent all of its tokens thinking{unfinished}. "
                f"{remedy}, or lower the reasoning effort."
            )
        if self.wants_json and not json_in("".join(writer.data), 1):
            raise Refused(
                f"the answer was to be JSON, and it was cut off before its end: {cause}. {remedy}, or ask for less."
            )
