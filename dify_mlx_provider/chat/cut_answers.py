"""Whether an answer that its token limit cut off can be used, and the sentence for the user if it cannot.

A text that ends early is still worth reading. But where the reasoning took every token there is no answer, even though
a thinking block was shown: a workflow would go on with an empty text. And JSON that was cut off is worse than none:
Dify repairs it silently, with values that the model never finished. Knows no streams and no HTTP.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dify_mlx_provider.upstream.errors import Refused

if TYPE_CHECKING:
    from dify_mlx_provider.chat.stream_reader import StreamResult
    from dify_mlx_provider.chat.think_block import ThinkBlockWriter

_JSON_START = re.compile(r"[{\[]")


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
        if not writer.has_answer:
            raise Refused(self._no_answer(result, has_reasoning=writer.has_reasoning))
        if self.wants_json and not holds_json("".join(writer.data)):
            cause, remedy = self._cause(result)
            raise Refused(
                f"the answer was to be JSON, and it was cut off before its end: {cause}. {remedy}, or ask for less."
            )

    def _no_answer(self, result: StreamResult, *, has_reasoning: bool) -> str:
        cause, remedy = self._cause(result)
        if not has_reasoning:
            return f"there is no answer: {cause} before it began. {remedy}."
        unfinished = ", or on a tool call that it could not finish" if self.has_tools else ""
        return (
            f"there is no answer: {cause}, and the model had spent all of its tokens thinking{unfinished}. "
            f"{remedy}, or lower the reasoning effort."
        )

    def _cause(self, result: StreamResult) -> tuple[str, str]:
        """What ended the answer, and what to do: the limit, or else the end of the context."""
        written = result.usage.get("completion_tokens")
        if self.max_tokens is not None and isinstance(written, int) and 0 < written < self.max_tokens:
            return "the model's context was full", "Start a new conversation or shorten the text"
        number = "" if self.max_tokens is None else f" ({self.max_tokens:,})"
        return f"the limit of Max tokens{number} was reached", "Raise Max tokens"


def holds_json(text: str) -> bool:
    """Whether a text holds a whole JSON object or list, as Dify looks for it: also behind words or in a code fence."""
    start = _JSON_START.search(text)
    if start is None:
        return False
    try:
        json.JSONDecoder().raw_decode(text, start.start())
    except (ValueError, RecursionError):
        return False
    return True
