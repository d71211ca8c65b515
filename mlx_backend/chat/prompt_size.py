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
MAX_TOKENIZED = 1 << 20
"""Tokens of one request that is tokenised and not answered: as many as the largest contexts hold."""
_PIECE = 1 << 16  # characters


class TokenizedSize:
    """Implements `TextSize`. Checks texts of which only the tokens are wanted: they may be longer than the context."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def check_text(self, text: str, field: str = "messages") -> None:
        """Raise the RequestError for a text of more than `MAX_TOKENIZED` tokens."""
        tokens, characters = _count(self._tokenizer, text, MAX_TOKENIZED, at_least=MAX_TOKENIZED)
        if tokens > MAX_TOKENIZED:
            raise RequestError(
                f"The request has about {tokens * len(text) // characters} tokens; at most {MAX_TOKENIZED} are "
                "tokenised in one request: send the text in parts.",
                field,
            )


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
