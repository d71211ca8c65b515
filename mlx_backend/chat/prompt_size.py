"""Refuses a prompt that is far too long for the context before tokens are made of all of it.

Tokenising takes a hundred times the memory of a text, and seconds for each megabyte. How many tokens a text has is not
known before: a token may be one byte, or a line of 128 blanks. So a text that is long for the context is counted in
pieces, and refused once these alone are twice what fits: a cut in a text makes a few tokens more, not twice as many.

Knows texts, tokens and the context; no templates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.errors import RequestError
from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.chat.limits import ReplyLimits
    from mlx_backend.engine.base import Tokenizer

CHARACTERS_PER_TOKEN = 8
"""Texts with fewer for each token of the context are not counted beforehand; words of English have 4 to 5."""
MIN_TOKENIZED = 1 << 18
"""Tokens of one request that is tokenised and not answered; more where the context holds more."""
_PIECE = 1 << 16  # characters


class TokenizedSize:
    """Implements `TextSize`. Checks texts of which only the tokens are wanted: they may be longer than the context."""

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._most = max(context_length, MIN_TOKENIZED)

    def check_text(self, text: str, field: str = "messages") -> None:
        """Raise the RequestError for a text of more tokens than are made for one request."""
        tokens, characters = _count(self._tokenizer, text, self._most, at_least=self._most)
        if tokens > self._most:
            raise RequestError(
                f"The request has about {tokens * len(text) // characters} tokens; at most {self._most} are "
                "tokenised in one request: send the text in parts.",
                field,
            )

    def check_texts(self, texts: Sequence[str], field: str) -> None:
        """Raise the same for several texts, which count together."""
        if sum(map(len, texts)) > self._most:
            self.check_text("".join(texts), field)


class PromptSize:
    """Implements `TextSize`. Checks the prompts of one model. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, limits: ReplyLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def check_messages(self, messages: Sequence[object]) -> None:
        """Raise the RequestError for more messages than the context has tokens, before they are rendered."""
        if not self._limits.has_room_after(len(messages)):
            raise self._limits.too_many_messages(len(messages))

    def check_text(self, text: str, field: str = "messages") -> None:
        """Raise the RequestError for a text of far more tokens than the context; it says about how many."""
        most = 2 * self._limits.context_length
        tokens, characters = _count(self._tokenizer, text, most, at_least=most * CHARACTERS_PER_TOKEN // 2)
        if tokens > most:
            raise self._limits.too_long(field, tokens * len(text) // characters, is_estimate=True)


def _count(tokenizer: Tokenizer, text: str, most: int, *, at_least: int) -> tuple[int, int]:
    """Return how many tokens the pieces of a text have until there are more than `most`, and of how many characters.

    0 of 0 for a text of fewer than `at_least` characters.
    """
    tokens = counted = 0
    while counted < len(text) > at_least and tokens <= most:
        current().check()
        piece = text[counted : counted + _PIECE]
        tokens += len(tokenizer.encode(piece, control_tokens=True))
        counted += len(piece)
    return tokens, counted
