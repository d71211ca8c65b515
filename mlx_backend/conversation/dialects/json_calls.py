"""Calls as JSON in `<tool_call>` blocks, as they are written: what constraints and histories need of them.

<tool_call>
{"name": "f", "arguments": {…}}
</tool_call>
"""

from __future__ import annotations

import json

from mlx_backend.conversation.dialects.base import JsonCallCodec, Piece
from mlx_backend.conversation.dialects.calls.base import SyntaxCodec
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects

# What stands in the block where a template teaches another form than JSON (Qwen3-Coder, GLM).
_OTHER_FORMS = ("<function=", "<arg_key>")


class JsonCalls(JsonCallCodec, SyntaxCodec):
    """A block holds one JSON object with the tool's name and its arguments."""

    syntax = JsonObjects()
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


JSON_CALLS = JsonCalls()
