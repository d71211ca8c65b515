"""Text that comes in pieces and is looked at as a whole, now and then: each look copies it once at most.

Knows nothing of what the text is.
"""

from __future__ import annotations


class TextBuffer:
    """Gathers pieces of text. `length` is the number of their characters."""

    __slots__ = ("_pieces", "length")

    def __init__(self, text: str = "") -> None:
        self._pieces = [text] if text else []
        self.length = len(text)

    def append(self, text: str) -> None:
        """Add a piece."""
        self._pieces.append(text)
        self.length += len(text)

    def drop_end(self, length: int) -> None:
        """Take characters off the end."""
        if length:
            whole = str(self)
            self._pieces = [whole[:-length]]
            self.length = len(self._pieces[0])

    def __str__(self) -> str:
        """Return the text. It is the same object until a piece is added."""
        if len(self._pieces) != 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]
