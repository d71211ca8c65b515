"""Characters that a server's JSON has cut in half.

JSON may spell a character beyond the first 65,536, such as an emoji, as two escapes; a server that cuts its text
between them sends each half in a delta of its own. Half a character cannot be sent on: it is no text in UTF-8.
"""

from __future__ import annotations

import re

_HALF = re.compile("[\ud800-\udfff]")
_FIRST_HALF = re.compile("[\ud800-\udbff]\\Z")


def mended(text: str) -> str:
    """Put halves that stand beside each other together; what has lost its other half becomes U+FFFD."""
    if _HALF.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Halves:
    """Mends a text that comes in pieces."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return what is whole; the first half of a character waits for the second."""
        text, self._held = self._held + piece, ""
        if _FIRST_HALF.search(text):
            text, self._held = text[:-1], text[-1]
        return mended(text)
