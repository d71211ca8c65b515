"""POST /v1/responses/compact: the model sums up a conversation, which goes on from the user's messages and the summary.

The summary is sent as the opaque text of one item. When that comes back it is read as something that the user says: a
client can make such a text itself, so it has no more weight than its own. Knows nothing of HTTP.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_backend.api.errors import ApiError
from mlx_backend.api.fields import Refusals, is_one_of
from mlx_backend.api.openai.base import OPENAI
from mlx_backend.api.responses.body import ResponsesBody
from mlx_backend.api.responses.stream import usage_object
from mlx_backend.api.sealed_reasoning import seal
from mlx_backend.api.writers import StreamWriter
from mlx_backend.conversation.events import ContentDelta

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.chat.reply import ReplyEvent, Usage
    from mlx_backend.chat.reply_group import GroupEvent
    from mlx_backend.conversation.events import StreamEnd
    from mlx_backend.engine.base import Progress, Queued

ASKS_FOR_SUMMARY = {
    "type": "message",
    "role": "user",
    "content": (
        "The conversation has become too long and is about to be shortened: of all that came before, only my "
        "messages and what you write now will be left. Write down what you need in order to go on: what I want and "
        "have decided, what has been done and found out (names of files, commands, values, errors), what is still to "
        "be done, and what comes next. Write nothing else, and call no tools."
    ),
}


class CompactBody(ResponsesBody):
    """POST /v1/responses/compact. Tools may be sent as in other requests, and are not called."""

    refused: ClassVar[Refusals] = {
        **ResponsesBody.refused,
        "stream": (is_one_of(False), "a compacted conversation is sent whole"),
    }

    model: str


class CompactionWriter(StreamWriter):
    """Writes the items that a conversation is left with. `items` are those that it had."""

    def __init__(self, items: Sequence[Mapping[str, Any]]) -> None:
        super().__init__("resp_")
        self._items = items
        self._texts: list[str] = []

    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        """Take a piece of the summary."""
        if isinstance(event, ContentDelta):
            self._texts.append(event.text)
        return b""

    def close(self, end: StreamEnd) -> bytes:
        """Write nothing. Raises the ApiError for a summary that is none: the conversation is better kept."""
        if end.finish != "length" and "".join(self._texts).strip():
            return b""
        what = "was cut" if end.finish == "length" else "is empty"
        raise ApiError(
            422,
            f"The model's summary {what}: the conversation is not compacted. Send it with its older items left out, or "
            "with a larger max_output_tokens.",
            param="input",
            code="compaction_failed",
        )

    def whole(self, _end: StreamEnd, usage: Usage) -> dict[str, Any]:
        """Return the compacted conversation."""
        summary = {
            "id": f"cmp_{uuid.uuid4().hex}",
            "type": "compaction",
            "encrypted_content": seal("".join(self._texts)),
        }
        return {
            "id": self.id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*map(_as_output, filter(_is_users, self._items)), summary],
            "usage": usage_object(usage),
        }

    def finish(self, _end: StreamEnd, _usage: Usage) -> bytes:
        """Write nothing: it is not streamed."""
        return b""

    def keepalive(self, _reason: Progress | Queued | None = None) -> bytes:
        """Write nothing."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Write an error."""
        return OPENAI.error(error)


def _is_users(item: Mapping[str, Any]) -> bool:
    return item.get("type") in (None, "message") and item.get("role") == "user"


def _as_output(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    return {
        "id": item.get("id") or f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": parts,
    }
