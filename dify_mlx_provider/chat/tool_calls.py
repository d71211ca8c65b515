"""Assembles tool calls from the pieces servers send.

In OpenAI's streams each call has an index, is named once, and its arguments come as text in pieces. Other servers leave
out indices or ids, give every call index 0, repeat the name in each piece, or send the arguments as an object. Dify
gets each call once and complete, with an id of its own, under the name of the tool that was offered, and with arguments
that are a JSON object if the model meant one.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream.errors import Unavailable
from dify_mlx_provider.upstream.sse import join_surrogates
from mlx_backend.conversation.json_arguments import is_json_object, repair_arguments
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Collection

    from mlx_backend.conversation.tools import ToolDefinition

MAX_CALLS_LENGTH = 2**20
"""Characters of all calls of an answer: Dify takes them in one line, of 5 MiB at most."""


@dataclass
class ServerToolCall:
    """A tool call being assembled."""

    id: str = ""
    name: str = ""
    arguments: str = ""


class ToolCallAssembler:
    """The calls of one answer, in the order they started. `tools` are those that the model was offered."""

    def __init__(self, tools: Collection[ToolDefinition] = ()) -> None:
        self._tools = ToolSet(tools)
        self._calls: list[ServerToolCall] = []
        self._by_index: dict[int, ServerToolCall] = {}
        self._length = 0

    @property
    def has_any(self) -> bool:
        """Whether a call was started."""
        return bool(self._calls)

    def start_call(self, name: str) -> ServerToolCall:
        """Add a call and return it, to be filled in by the caller."""
        call = ServerToolCall(name=name)
        self._calls.append(call)
        return call

    def discard(self, call: ServerToolCall) -> None:
        """Remove a call."""
        self._calls = [other for other in self._calls if other is not call]

    def add_delta(self, delta: Any) -> None:
        """Add an entry of `tool_calls`; anything else is ignored. Raises Unavailable beyond MAX_CALLS_LENGTH."""
        if not isinstance(delta, Mapping):
            return
        nested = delta.get("function")
        function = nested if isinstance(nested, Mapping) else delta
        piece = ServerToolCall(
            _word(delta.get("id")), _word(function.get("name")), _arguments(function.get("arguments"))
        )
        self._length += len(piece.id) + len(piece.name) + len(piece.arguments)
        if self._length > MAX_CALLS_LENGTH:
            raise Unavailable(
                f"the model's tool calls have more than {MAX_CALLS_LENGTH:,} characters. The answer was stopped. A "
                "limit of Max tokens keeps a model from repeating itself without end."
            )
        index = delta.get("index")
        if isinstance(index, int) and not isinstance(index, bool):
            self._add_indexed(index, piece)
        else:
            self._add_to(self._call_for(piece), piece)

    def finish(self, *, cut: bool) -> list[ServerToolCall]:
        """Return the calls, but not one that the token limit cut: it must not be run."""
        calls = [call for call in self._calls if call.name]
        if cut and calls and calls[-1] is self._calls[-1] and not _is_whole(calls[-1].arguments):
            calls.pop()
        taken: set[str] = set()
        for call in calls:
            if not call.id or call.id in taken:
                call.id = f"call_{uuid.uuid4().hex[:24]}"
            taken.add(call.id)
            call.id, call.name = (
                join_surrogates(call.id),
                self._tools.offered_name(join_surrogates(call.name)),
            )
            call.arguments = repair_arguments(join_surrogates(call.arguments))
        return calls

    def _add_indexed(self, index: int, piece: ServerToolCall) -> None:
        call = self._by_index.get(index)
        if call is not None and _starts_new_call(call, piece):
            call = None
        if call is not None and not call.arguments and not piece.id and piece.name not in ("", call.name):
            call.name += piece.name  # a name in pieces
        self._by_index[index] = self._add_to(call, piece)

    def _add_to(self, call: ServerToolCall | None, piece: ServerToolCall) -> ServerToolCall:
        call = self.start_call("") if call is None else call
        call.id = call.id or piece.id
        call.name = call.name or piece.name
        call.arguments += piece.arguments
        return call

    def _call_for(self, piece: ServerToolCall) -> ServerToolCall | None:
        """Return the call a piece without an index continues: by its id, or the last one; None if it starts a call."""
        if piece.id:
            return next((call for call in self._calls if call.id == piece.id), None)
        last = self._calls[-1] if self._calls else None
        if last is None or not piece.name:
            return last
        continues = piece.name == last.name and last.arguments and not _is_whole(last.arguments)
        return last if continues else None


def _starts_new_call(call: ServerToolCall, piece: ServerToolCall) -> bool:
    """Whether a piece starts a call although its index is taken: some servers give every call index 0."""
    if not piece.name:
        return False
    if piece.id and call.id:
        return piece.id != call.id and (not call.arguments or _is_whole(call.arguments))
    return bool(piece.arguments) and _is_whole(call.arguments)


def _word(value: Any) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _arguments(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)  # some servers send the object itself


def _is_whole(arguments: str) -> bool:
    return bool(arguments) and is_json_object(repair_arguments(arguments))
