"""Maps names of tools to names that a model's family can write, and back.

Every family writes names its own way, and some names would not be read back as they are: a Python call cannot have the
name `get-weather`, nor Mistral's a name with blanks. Such a tool gets another name in everything the model sees
(definitions, history, grammar), and calls go out under the name that the client knows. Whether a name can be written is
found by having the family write a call and read it.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.events import ToolCallStart
from mlx_backend.conversation.parser import parse_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Event

MAX_NAME = 64
"""Characters, as OpenAI limits names; every family can write as many."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_DOUBTFUL = frozenset({*keyword.kwlist, *keyword.softkwlist, "print", "function", "name", "arguments"})
"""Plain names that have a meaning in some family's calls."""


class ToolNames:
    """The names of one request's tools in one dialect."""

    def __init__(self, names: Iterable[str], dialect: Dialect) -> None:
        self._dialect = dialect
        self._for_model: dict[str, str] = {}
        offered = [*dict.fromkeys(names)]
        taken = {name for name in offered if can_write(name, dialect)}
        for name in offered:
            if name not in taken:
                self._for_model[name] = written = _free(_writable(name, dialect), taken)
                taken.add(written)
        self._offered = {written: name for name, written in self._for_model.items()}

    @property
    def differ(self) -> bool:
        """Whether any tool has another name for the model."""
        return bool(self._for_model)

    def for_model(self, name: str) -> str:
        """Return a tool's name for the model; that of a tool that is no longer offered is changed in the same way."""
        if name in self._for_model or can_write(name, self._dialect):
            return self._for_model.get(name, name)
        return _writable(name, self._dialect)

    def definitions(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return definitions with the names for the model."""
        if not self._for_model:
            return tools
        return [
            {**tool, "function": {**tool["function"], "name": self.for_model(tool["function"]["name"])}}
            for tool in tools
        ]

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a canonical history with the names for the model."""
        rewritten = [dict(message) for message in messages]
        for message in rewritten:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [
                    {
                        **call,
                        "function": {**call["function"], "name": self.for_model(call["function"]["name"])},
                    }
                    for call in calls
                ]
            elif message["role"] == "tool" and message.get("name"):
                message["name"] = self.for_model(message["name"])
        return rewritten

    def restored(self, events: list[Event]) -> list[Event]:
        """Return the events of a reply with the names that the client knows."""
        return [
            replace(event, name=self._offered.get(event.name, event.name))
            if isinstance(event, ToolCallStart)
            else event
            for event in events
        ]


@lru_cache(maxsize=4096)
def can_write(name: str, dialect: Dialect) -> bool:
    """Whether a call of this name is read as it is written."""
    if dialect.calls is None:
        return True
    if _PLAIN.match(name) and name not in _DOUBTFUL:
        return True
    if dialect.tool_prompt is not None and not name.isidentifier():
        return False  # a call may be read, but the family is told functions, and this is no function's name
    written = "".join(piece.text for piece in dialect.calls.encode(name, {"a": "b"}))
    read = parse_text(written, dialect, tools=[name])
    return [(call.name, call.complete) for call in read.tool_calls] == [(name, True)] and not read.content


def _writable(name: str, dialect: Dialect) -> str:
    """Make a name that can be written of one that cannot, as similar to it as possible."""
    like = re.sub(r"\W+", "_", name).strip("_")
    plain = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")
    digest = sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    for candidate in (like, plain, f"{plain}_", f"tool_{plain}"):
        if candidate and len(candidate) <= MAX_NAME and can_write(candidate, dialect):
            return candidate
    return f"tool_{plain[: MAX_NAME - 14]}_{digest}"


def _free(name: str, taken: set[str]) -> str:
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name[: MAX_NAME - 6]}_{count}"
    return free
