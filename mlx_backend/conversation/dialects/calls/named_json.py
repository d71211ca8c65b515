"""Calls as a name, a separator, and JSON arguments.

get_age[ARGS]{…}                                        Mistral (also with [CALL_ID]…, also without [ARGS])
get_age<｜tool▁sep｜>{…}                                 DeepSeek V3.1
function<｜tool▁sep｜>get_age\\n```json\\n{…}\\n```        DeepSeek V3, R1
a1b2c3d4e5<|tool_call:name|>get_age<|tool_call:args|>{…} Solar Open: the id is the call's own
functions.get_age:0<|tool_call_argument_begin|>{…}      Kimi K2: name and index are the call's own id
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.base import Piece
from mlx_backend.conversation.dialects.calls.base import (
    CallSyntax,
    DecodedCall,
    StreamedCall,
    to_json,
)
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.json_arguments import repair_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.tools import ToolSet

_NAME = r"[\w.:/-]{1,256}"
_OBJECTS = JsonObjects()


class NamedJson(CallSyntax):
    """`beginnings` match everything before the arguments, with the groups `name` and, if it has one, `id`.

    They are tried in order. `before` and `after` are how it is written.
    """

    def __init__(
        self,
        *beginnings: str,
        before: tuple[Piece, ...],
        after: tuple[Piece, ...] = (),
        head: str = "",
        counters: Mapping[str, str] | None = None,
    ) -> None:
        self._beginnings = [re.compile(beginning, re.DOTALL) for beginning in beginnings]
        self._before, self._after = before, after
        self.counters = counters or {}
        self.head = re.compile(head, re.DOTALL) if head else None

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        written = [Piece(piece.text.replace("{name}", name), marker=piece.marker) for piece in self._before]
        return *written, Piece(to_json(arguments)), *self._after

    def begin(self, body: str) -> StreamedCall | None:
        """Find the arguments after the separator."""
        match = self._match(body)
        if match is None:
            return _OBJECTS.begin(body)
        if body[match.end() : match.end() + 1] not in ("{", '"', "'"):
            return None
        return StreamedCall(match["name"].strip(), match.end(), match.groupdict().get("id") or "")

    def decode(self, body: str, tools: ToolSet) -> list[DecodedCall]:
        """Return the call; what stands there instead of JSON objects is its arguments as they were written."""
        match = self._match(body)
        if match is None:
            name = body.strip()
            if name in tools.names:  # it needs no arguments
                return [DecodedCall(name, "{}")]
            return _OBJECTS.decode(body, tools) if body.lstrip()[:1] in ("{", "[") else []
        name, own_id = match["name"].strip(), match.groupdict().get("id") or ""
        arguments = body[match.end() :].strip().removesuffix("```")
        return [DecodedCall(name, repair_arguments(arguments), own_id)]

    def _match(self, body: str) -> re.Match[str] | None:
        found = (beginning.match(body) for beginning in self._beginnings)
        return next((match for match in found if match), None)


_MISTRAL_BEGINNING = (
    rf"\s*(?P<name>{_NAME})\s*(?:\[CALL_ID\]\s*(?P<id>[^\[\]{{\s]{{1,128}})\s*)?(?:\[ARGS\]\s*|(?=\{{))"
)
_MISTRAL_HEAD = r"\s*(?:[\[{].*|[\w.:/-]{1,256}\s*(?:[\[{].*)?)?"
MISTRAL_ARGS = NamedJson(
    _MISTRAL_BEGINNING,
    before=(Piece("{name}"), Piece("[ARGS]", marker=True)),
    head=_MISTRAL_HEAD,
)
MISTRAL_CALL_IDS = NamedJson(
    _MISTRAL_BEGINNING,
    before=(
        *(Piece("{name}"), Piece("[CALL_ID]", marker=True)),
        *(Piece("000000000"), Piece("[ARGS]", marker=True)),
    ),
    head=_MISTRAL_HEAD,
    counters={"000000000": "[a-zA-Z0-9]{9}"},
)
_SEPARATOR = Piece("<｜tool▁sep｜>", marker=True)
_DEEPSEEK_BEGINNINGS = (
    r"\s*function\s*<｜tool▁sep｜>\s*(?P<name>[^\s`{<]{1,256})\s*(?:```(?:json)?\s*|(?=\{))",
    r"\s*(?P<name>[^\s<]{1,256})\s*<｜tool▁sep｜>\s*(?:```(?:json)?\s*)?",
)
DEEPSEEK_V3 = NamedJson(
    *_DEEPSEEK_BEGINNINGS,
    before=(Piece("function"), _SEPARATOR, Piece("{name}\n```json\n")),
    after=(Piece("\n```"),),
)
DEEPSEEK_V31 = NamedJson(*_DEEPSEEK_BEGINNINGS, before=(Piece("{name}"), _SEPARATOR))
SOLAR_OPEN = NamedJson(
    r"\s*(?P<id>[^\s<]{0,128})\s*<\|tool_call:name\|>\s*(?P<name>[^\s<]{1,256})\s*<\|tool_call:args\|>\s*",
    before=(
        *(Piece("0000000000"), Piece("<|tool_call:name|>", marker=True)),
        *(Piece("{name}"), Piece("<|tool_call:args|>", marker=True)),
    ),
    counters={"0000000000": "[a-z0-9]{1,10}"},
)
KIMI_K2 = NamedJson(
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<]{1,256}?)(?::\d{1,9})?)\s*<\|tool_call_argument_begin\|>\s*",
    before=(Piece("functions.{name}:0"), Piece("<|tool_call_argument_begin|>", marker=True)),
    counters={":0": ":[0-9]{1,3}"},
)
