"""The names of tools as a model can say them, and back.

Every family writes names its own way, and some names would not be read back as they are: a Python call cannot say
`get-weather`, nor Mistral a name with blanks. Such a tool gets a name that can be said, in everything the model sees
(definitions, history, grammar), and calls go out under the name that the client knows. Whether a name can be said is
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
"""Characters that every family says, as OpenAI's own limit is."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}\Z")
_DOUBTFUL = frozenset({*keyword.kwlist, *keyword.softkwlist, "print", "function", "name", "arguments"})
"""Plain names that have a meaning in some family's calls."""


class ToolNames:
    """The names of one request's tools in one dialect."""

    def __init__(self, names: Iterable[str], dialect: Dialect) -> None:
        self._dialect = dialect
        self._said: dict[str, str] = {}
        offered = [*dict.fromkeys(names)]
        taken = {name for name in offered if can_say(name, dialect)}
        for name in offered:
            if name not in taken:
                self._said[name] = said = _free(_sayable(name, dialect), taken)
                taken.add(said)
        self._offered = {said: name for name, said in self._said.items()}

    @property
    def differ(self) -> bool:
        """Whether the model says any of the offered names in another way."""
        return bool(self._said)

    def say(self, name: str) -> str:
        """Return how the model says a name; one of a tool that is no longer offered is changed alike."""
        if name in self._said or can_say(name, self._dialect):
            return self._said.get(name, name)
        return _sayable(name, self._dialect)

    def definitions(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return definitions with the names the model says."""
        if not self._said:
            return tools
        return [
            {**tool, "function": {**tool["function"], "name": self.say(tool["function"]["name"])}}
            for tool in tools
        ]

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a canonical history with the names the model says."""
        rewritten = [dict(message) for message in messages]
        for message in rewritten:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [
                    {**call, "function": {**call["function"], "name": self.say(call["function"]["name"])}}
                    for call in calls
                ]
            elif message["role"] == "tool" and message.get("name"):
                message["name"] = self.say(message["name"])
        return rewritten

    def offered(self, events: list[Event]) -> list[Event]:
        """Return the events of a reply with the names that the client knows."""
        return [
            replace(event, name=self._offered.get(event.name, event.name))
            if isinstance(event, ToolCallStart)
            else event
            for event in events
        ]


@lru_cache(maxsize=4096)
def can_say(name: str, dialect: Dialect) -> bool:
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


def _sayable(name: str, dialect: Dialect) -> str:
    """Make a name that can be said of one that cannot: as like it as possible."""
    like = re.sub(r"\W+", "_", name).strip("_")
    plain = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_")
    digest = sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
    for candidate in (like, plain, f"{plain}_", f"tool_{plain}"):
        if candidate and len(candidate) <= MAX_NAME and can_say(candidate, dialect):
            return candidate
    return f"tool_{plain[: MAX_NAME - 14]}_{digest}"


def _free(name: str, taken: set[str]) -> str:
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name[: MAX_NAME - 6]}_{count}"
    return free
