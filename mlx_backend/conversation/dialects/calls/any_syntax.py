"""Whatever stands in a `<tool_call>` block: JSON, XML tags, or a name with pairs of keys and values.

Many families share the block and differ in what they write there, and fine-tunes write what another family does. Which
it is shows in its first characters.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.calls.base import CallSyntax
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.calls.pairs import PairCalls
from mlx_backend.conversation.dialects.calls.xml import XmlCalls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.conversation.dialects.base import Piece
    from mlx_backend.conversation.dialects.calls.base import CallReader, DecodedCall, StreamedCall
    from mlx_backend.conversation.tools import ToolSet

_FENCE = r"```(?:json)?\s*"
_FENCED = re.compile(rf"\A\s*{_FENCE}(?=[{{\[])")
_BEGUN = re.compile(r"<[a-z|_]{0,16}")
"""What may become the first tag."""
_PAIRS = re.compile(r"<(?:longcat_|ifm\|)?arg_key|<tool_sep")


class AnySyntax(CallSyntax):
    """`own` is the family's own syntax: what is written, and read where the text does not tell."""

    def __init__(self, own: CallSyntax) -> None:
        self.head = re.compile(
            rf"\s*(?:(?:{_FENCE})?[<{{\[].*|`{{1,3}}|```(?:j(?:s(?:on?)?)?)?\s*|[\w.:/-]{{1,128}}\s*(?:[<{{\[].*)?)?",
            re.DOTALL,
        )
        self.own = own
        self._json = own if isinstance(own, JsonObjects) else JsonObjects()
        self._xml = own if isinstance(own, XmlCalls) else XmlCalls()
        self._pairs = own if isinstance(own, PairCalls) else PairCalls()

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return self.own.encode(name, arguments)

    def begin(self, body: str) -> StreamedCall | None:
        fence = _FENCED.match(body)
        at = fence.end() if fence else 0
        call = self._json.begin(body[at:])
        return replace(call, arguments_at=call.arguments_at + at) if call else None

    def is_open(self, body: str) -> bool:
        return self._syntax_of(body).is_open(body)

    def is_whole(self, body: str) -> bool:
        return self._syntax_of(body).is_whole(body)

    def stream(self, body: str, tools: ToolSet) -> CallReader | None:
        syntax = self._syntax_of(body)
        return None if _BEGUN.fullmatch(body.lstrip()) else syntax.stream(body, tools)

    def decode(self, body: str, tools: ToolSet) -> Sequence[DecodedCall]:
        """Return the calls. A name alone is a call if there is such a tool."""
        body = _FENCED.sub("", body)
        syntax = self._syntax_of(body)
        if syntax is self._pairs and self.own is not syntax and not tools.names and not _PAIRS.search(body):
            return []
        return syntax.decode(body, tools)

    def _syntax_of(self, body: str) -> CallSyntax:
        match body.lstrip()[:1]:
            case "{" | "[" | "`":
                return self._json
            case "<":
                return self._pairs if _PAIRS.match(body.lstrip()) else self._xml
            case _:
                return self._pairs
