"""Calls as JSON in `<tool_call>` blocks, as Qwen, Hermes and many others write them.

    <tool_call>
    {"name": "f", "arguments": {…}}
    </tool_call>

The name may stand behind the arguments. A block that is not JSON but names a tool is a call with the arguments as
they were written.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import BlockCalls, Piece

if TYPE_CHECKING:
    from mlx_backend.conversation.tools import ToolSet

_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
# What stands in the block where a template teaches another form than JSON (Qwen3-Coder, GLM).
_OTHER_FORMS = ("<function=", "<arg_key>")


class JsonCalls(BlockCalls):
    """A block holds one JSON object with the tool's name and its arguments."""

    opener = "<tool_call>"
    closer = "</tool_call>"

    def is_taught_by(self, template: str) -> bool:
        """Whether a template has the block, and none of the forms that are not JSON."""
        return self.opener in template and not any(form in template for form in _OTHER_FORMS)

    def opening(self, name: str) -> tuple[Piece, ...]:
        """Write the block up to the arguments."""
        spelling = json.dumps(name, ensure_ascii=False)
        return Piece(self.opener, marker=True), Piece(f'\n{{"name": {spelling}, "arguments": ')

    @property
    def closing(self) -> tuple[Piece, ...]:
        """The rest of the block."""
        return Piece("}\n"), Piece(self.closer, marker=True)

    def decode(self, body: str, tools: ToolSet) -> tuple[str, str]:
        """Return the name and the arguments. JSON has types, so the schemas are not needed."""
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return _decode_broken(body)
        if not isinstance(call, dict):
            return "", ""
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(name, str):
            return "", ""
        return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _decode_broken(body: str) -> tuple[str, str]:
    named = _NAME.search(body)
    if not named:
        return "", ""
    try:
        name = json.loads(named[1])
    except ValueError:
        return "", ""
    arguments = _ARGUMENTS.search(body)
    return name, body[arguments.end() :].strip() if arguments else ""


JSON_CALLS = JsonCalls()
