"""A request's tools: their names, to be matched in what a model writes, and the schemas of their parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

type ToolDefinition = str | Mapping[str, Any]
"""A tool in OpenAI's form (`{"type": "function", "function": {…}}`, or flat), or its bare name."""

# Models glue a content type or a channel's word to a name: `shelljson`.
_GLUED = re.compile(r"\A(?:json|code|text|commentary|analysis|final)(?![\w.-])")
_SEPARATOR = re.compile(r"[.:/]+")
"""What stands between a namespace and a name."""
_MAX_SIMILAR = 64
"""Misspelt names that are remembered."""
_MAX_NAME = 256
"""Characters of a name that is compared with others."""


class ToolSet:
    """The tools of one request. None means that they are not known; then any call is one.

    With `unwrapped`, an answer that is nothing but the JSON of a call is one, without its family's markers: not where
    an answer has to be JSON, and not in a history.
    """

    __slots__ = (
        *("_by_folded_name", "_lengths", "_parameters", "_similar", "are_known", "may_be_unwrapped"),
        "names",
    )

    def __init__(self, definitions: Iterable[ToolDefinition] | None, *, unwrapped: bool = False) -> None:
        self.are_known = definitions is not None
        functions = [_function(definition) for definition in definitions or ()]
        self._parameters = {
            name: _schema(function) for function in functions if isinstance(name := function.get("name"), str)
        }
        self.names = frozenset(self._parameters)
        self.may_be_unwrapped = unwrapped and bool(self.names)
        self._lengths = sorted({len(name) for name in self.names if name}, reverse=True)
        self._by_folded_name: dict[str, str] | None = None  # made when a name is first misspelt
        self._similar: dict[tuple[str, bool], str | None] = {}  # a model repeats its mistakes

    @property
    def may_be_called(self) -> bool:
        """Whether what is addressed to a tool is a call: not if the request is known to have no tools."""
        return bool(self.names) or not self.are_known

    def parameters(self, name: str) -> Mapping[str, Any]:
        """Return the JSON Schema of a tool's parameters; an empty one if it is not known."""
        return self._parameters.get(name, {})

    def offered_name(self, name: str) -> str:
        """Return the tool that a model means: models cannot say every name, and change what they cannot say.

        Case, hyphens, a namespace before it. The name as it was written if no tool is like it.
        """
        name = name.strip()
        if name in self.names or not self.names:
            return name
        return self.find_similar(name, in_namespace=True) or name

    def find_prefix(self, text: str) -> str | None:
        """Find the longest name that `text` begins with. A content type or a channel may be glued to it."""
        for length in self._lengths:
            if text[:length] in self.names and not _continues_name(strip_glued(text[length:])):
                return text[:length]
        return None

    def find_similar(self, word: str, *, in_namespace: bool = False) -> str | None:
        """Find the name that differs from `word` in case, hyphens and the like only.

        `in_namespace`: or that is the end of it, after a namespace: `default_api:f`, `ns.f`, `ns/f`.
        """
        if len(word) > _MAX_NAME:
            return self._find_similar(word, in_namespace=in_namespace)
        key = word, in_namespace
        if key not in self._similar:
            if len(self._similar) >= _MAX_SIMILAR:
                self._similar.clear()
            self._similar[key] = self._find_similar(word, in_namespace=in_namespace)
        return self._similar[key]

    def _find_similar(self, word: str, *, in_namespace: bool) -> str | None:
        if self._by_folded_name is None:
            self._by_folded_name = {_folded(name): name for name in sorted(self.names)}
        found = self._by_folded_name.get(_folded(word))
        if found is None and in_namespace:
            inner = [word[separator.end() :] for separator in _SEPARATOR.finditer(word)]
            exact = (name for name in inner if name in self.names)
            alike = (self._by_folded_name.get(_folded(name)) for name in inner)
            found = next((name for name in (*exact, *alike) if name), None)
        return found


def strip_glued(text: str) -> str:
    """Return what follows a name, without the content type or channel that is glued to it."""
    return _GLUED.sub("", text, count=1)


def _function(definition: ToolDefinition) -> Mapping[str, Any]:
    if isinstance(definition, str):
        return {"name": definition}
    function = definition.get("function")
    return function if isinstance(function, Mapping) else definition


def _schema(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters")
    return schema if isinstance(schema, Mapping) else {}


def _continues_name(text: str) -> bool:
    return bool(text) and (text[0].isalnum() or text[0] in "_-" or (text[0] == "." and text[1:2].isalnum()))


def _folded(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()
