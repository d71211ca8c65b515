"""The grammar of calls that are written as elements in each other (`calls/elements`): MiniMax M3.

Every tag stands behind one marker, so a text ends where the marker comes: no text needs an escape, and none may hold
the marker. Objects and lists are elements that hold others; numbers, booleans and null are JSON.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.constraints.call_bodies import CallBody, unknown_format
from mlx_backend.constraints.call_values import Notation, Report, properties_of, report_unwritable_name
from mlx_backend.constraints.lark import ANY_TEXT, Lark, is_mark, literal, pattern, without
from mlx_backend.conversation.argument_values import resolve
from mlx_backend.conversation.dialects.calls.elements import ITEM, NAMESPACE, RESERVED_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

_NAME = re.compile(r"[^\s<>/=]{1,256}")
_FREE_NAME = pattern(r"[A-Za-z_][A-Za-z0-9_]{0,40}")
_WORDS = {"True": "true", "False": "false", "None": "null"}


class ElementBody(CallBody):
    """An element for each parameter."""

    def write(self, lark: Lark, name: str, parameters: Mapping[str, Any], report: Report) -> str:
        """Write the elements between the tags of a call."""
        parameters = resolve(parameters, parameters)
        head, found, tail = self.written({}).partition(f"{self.marked.text(NAMESPACE)}</")
        if not found:
            raise unknown_format()
        elements = _Elements(lark, report, parameters, self.marked.text(NAMESPACE), self)
        # The marker of the next tag is written with what stands before it.
        inner = elements.members(parameters, "")
        return self.call(head, name, inner, self.lark(f"</{tail}"))


class _Elements(Notation):
    """How values are written as elements. Each rule ends with the marker of the tag behind the value."""

    def __init__(
        self, lark: Lark, report: Report, root: Mapping[str, Any], namespace: str, body: ElementBody
    ) -> None:
        super().__init__(
            lark, report, root, words=_WORDS, text=self._marked_text, key=self._name, between=("", "")
        )
        self._namespace = body.lark(namespace)
        self._is_token = is_mark(namespace)

    def members(self, schema: Mapping[str, Any], pointer: str) -> str:
        """Return the rule of an object's elements, each behind a marker, and of the marker behind the last."""
        known = {"type", "properties", "required", "additionalProperties"}
        self._report.unknown(pointer, self.of_type(schema, "object"), known)
        items = []
        for name, part, must in properties_of(schema, self._report, pointer):
            where = f"{pointer}/properties/{name}"
            if self._name(name) is None:
                report_unwritable_name(self._report, where, name, is_required=must)
            else:
                items.append((self._element(literal(name), self.value(part, where)), must))
        others = schema.get("additionalProperties")
        if not items and others is not False and not schema.get("properties"):
            part = others if isinstance(others, dict) else {"type": "string"}
            items = [(self._element(self._lark.terminal(_FREE_NAME), self.value(part, pointer)), False)]
            return self._lark.rule(f"{self._namespace} ({items[0][0]} {self._namespace}){{0,64}}")
        rule = self._namespace
        for element, must in items:
            written = f"{element} {self._namespace}"
            rule += f" {written}" if must else f" ({written})?"
        return self._lark.rule(rule)

    def constant(self, value: Any) -> str:
        """Write one value."""
        match value:
            case list():
                elements = [self._element(literal(ITEM), self.constant(item)) for item in value]
            case dict():
                elements = [self._element(literal(key), self.constant(item)) for key, item in value.items()]
            case str():
                return self._marked_text(literal(value))
            case _:
                return f"{super().constant(value)} {self._namespace}"
        return " ".join([self._namespace, *(f"{element} {self._namespace}" for element in elements)])

    def _typed(self, kind: str, schema: Mapping[str, Any], pointer: str) -> str:
        written = super()._typed(kind, schema, pointer)
        # Texts, lists and objects have written the marker themselves.
        return written if kind in ("string", "array", "object") else f"{written} {self._namespace}"

    def _array(self, schema: Mapping[str, Any], pointer: str) -> str:
        self._report.unknown(
            pointer, self.of_type(schema, "array"), {"type", "items", "minItems", "maxItems"}
        )
        item = self._element(literal(ITEM), self.value(schema.get("items", {}), f"{pointer}/items"))
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        return self._lark.rule(
            f"{self._namespace} ({item} {self._namespace}){{{low},{'' if high is None else high}}}"
        )

    def _object(self, schema: Mapping[str, Any], pointer: str) -> str:
        return self.members(schema, pointer)

    def _any(self) -> str:
        return self._marked_text(None)

    def _element(self, name: str, value: str) -> str:
        """Write an element without the marker before its first tag: its name, what it holds, its name again."""
        # A name that is free need not be written twice alike: the reader closes the element that is open.
        return self._lark.rule(f'"<" {name} ">" {value} "</" {name} ">"')

    def _marked_text(self, limits: str | None) -> str:
        if self._is_token:
            return f"{self._lark.terminal(f'({limits})' if limits else ANY_TEXT)} {self._namespace}"
        free = without(re.escape(NAMESPACE))
        inner = f"({limits}) & {free}" if limits else free
        return self._lark.terminal(f"({inner}) {literal(NAMESPACE)}")

    @staticmethod
    def _name(name: str) -> str | None:
        return literal(name) if _NAME.fullmatch(name) and name not in RESERVED_NAMES else None
