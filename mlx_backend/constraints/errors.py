"""What is raised when a reply cannot be constrained as was asked."""

from __future__ import annotations


class GrammarError(ValueError):
    """A grammar, a schema or a choice of tools that cannot be used to constrain replies; the text is for people.

    `pointer` is where in the schema the error is, as a JSON Pointer ("" is the whole of it); `tool` is the index of the
    tool, if the schema is that of a tool's parameters.
    """

    def __init__(self, message: str, pointer: str = "") -> None:
        super().__init__(message)
        self.pointer = pointer
        self.tool: int | None = None
