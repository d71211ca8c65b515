"""What is raised when a reply cannot be held to what was asked for."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar, a schema or a choice of tools that replies cannot be held to; the text is for people.

    `place` is where in the schema the trouble is, as a JSON Pointer ("" is all of it).
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place
