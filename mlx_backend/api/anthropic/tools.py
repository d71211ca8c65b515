"""A tool of a request, or one that a message adds.

    no type, custom                 the client says what it does and what it takes
    bash_…, text_editor_…, memory_…   the client runs it, and the API says what it takes
    any other type                  runs at Anthropic

A type ends in the date of its version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mlx_backend.api.fields import Lenient

if TYPE_CHECKING:
    from collections.abc import Mapping


_TEXT = {"type": "string"}
_EDITING = {
    "path": _TEXT,
    "file_text": {**_TEXT, "description": "for create"},
    "old_str": {**_TEXT, "description": "for str_replace: what stands there exactly once"},
    "new_str": {**_TEXT, "description": "for str_replace"},
    "insert_line": {"type": "integer", "description": "for insert: the line before it, 0 at the beginning"},
    "insert_text": {**_TEXT, "description": "for insert"},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "for view: first and last line; -1 is the end",
    },
}
_MOVING = {name: {**_TEXT, "description": "for rename"} for name in ("old_path", "new_path")}


def _commands(*names: str, **others: Any) -> dict[str, Any]:
    properties = {"command": {"type": "string", "enum": list(names)}, **_EDITING, **others}
    return {"type": "object", "properties": properties, "required": ["command"]}


_KNOWN: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a shell that stays open, or restart that.",
        {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": ("View, create and edit files.", _commands("view", "create", "str_replace", "insert")),
    "memory": (
        "Keep files for later under /memories. View that first.",
        _commands("view", "create", "str_replace", "insert", "delete", "rename", **_MOVING),
    ),
}


class ClientTool(Lenient):
    """A tool of the client's own."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: dict[str, Any] | None = None
    """All is cached, and arguments are always streamed as they are written."""
    eager_input_streaming: bool | None = None

    @property
    def is_hosted(self) -> bool:
        """Whether it is one that runs at Anthropic."""
        return self.type not in (None, "custom") and self._known is None

    @property
    def _known(self) -> tuple[str, dict[str, Any]] | None:
        """What it does and takes, if the API says so."""
        return _KNOWN.get((self.type or "").rpartition("_")[0])

    @property
    def unknown(self) -> list[str]:
        """The fields that mean nothing here; of a tool that runs at Anthropic its type."""
        return [str(self.type)] if self.is_hosted else super().unknown

    def as_function(self) -> dict[str, Any]:
        """Return it as a function."""
        description, parameters = self._known or (self.description, self.input_schema)
        said = {"description": description, "parameters": parameters}
        sent = {key: value for key, value in said.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **sent}}
