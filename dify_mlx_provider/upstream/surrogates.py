"""Joins characters that a server's JSON has cut in half.

JSON may spell a character beyond U+FFFF, such as an emoji, as two escapes (a surrogate pair); a server that cuts its
text between them sends each half in a delta of its own. A lone half cannot be sent on: UTF-8 has no bytes for it.
"""

from __future__ import annotations

import re

_SURROGATE = re.compile("[\ud800-\udfff]")
_HIGH_SURROGATE_AT_END = re.compile("[\ud800-\udbff]\\Z")


def join_surrogates(text: str) -> str:
    """Join adjacent halves; a half without its other becomes U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class SurrogateJoiner:
    """Joins the halves of a text that comes in pieces."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, piece: str) -> str:
        """Return the text that is complete; a first half waits for the second."""
        text, self._pending = self._pending + piece, ""
        if _HIGH_SURROGATE_AT_END.search(text):
            text, self._pending = text[:-1], text[-1]
        return join_surrogates(text)
