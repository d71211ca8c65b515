"""Events to bytes: the content blocks of a message as they are written, and the message that they end as.

    ReasoningDelta ─▶ thinking, with a signature at its end       ContentDelta ─▶ text
    ToolCallStart … ToolCallEnd ─▶ tool_use

A message that is not streamed is the object that a stream's events describe. A call that was cut is never ended, and is
not part of the whole: it must not be run. Knows nothing of HTTP and requests.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from mlx_backend.api import json_text
from mlx_backend.api.anthropic.base import error_object
from mlx_backend.api.json_text import dumps
from mlx_backend.api.sealed_reasoning import seal, sign
from mlx_backend.conversation.events import (
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.api.errors import ApiError
    from mlx_backend.chat.reply import Reply, ReplyEvent, Usage
    from mlx_backend.chat.reply_group import GroupEvent
    from mlx_backend.engine.base import Progress

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Build the API's `usage`: what was cached is not among the `input_tokens`."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class MessageWriter:
    """Implements api/base.py's `ReplyWriter`. With `omits_thinking` reasoning is sent as its signature alone."""

    def __init__(
        self, model: str, reply: Reply, context_length: int, *, omits_thinking: bool = False
    ) -> None:
        self.id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._reply = reply
        self._context_length = context_length
        self._omits_thinking = omits_thinking
        self._is_begun = False
        self._content: list[dict[str, Any]] = []
        self._block: dict[str, Any] | None = None
        self._texts: list[str] = []
        self._num_blocks = 0

    # -- api/base.py's ReplyWriter ----------------------------------------------------------------------------

    def open(self) -> bytes:
        """Return a comment: the first event says how much of the prompt was cached, which is not known yet."""
        return b": accepted\n\n"

    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        """Write an event but the last."""
        match event:
            case ReasoningDelta(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                shown = "" if self._omits_thinking else text
                delta = {"type": "thinking_delta", "thinking": shown}
                return self._begin(block) + self._delta(text, delta, is_shown=bool(shown))
            case ContentDelta(text):
                return self._begin({"type": "text", "text": ""}) + self._delta(
                    text, {"type": "text_delta", "text": text}
                )
            case ToolCallStart(index, name):
                call: dict[str, Any] = {
                    "type": "tool_use",
                    "id": self._reply.call_id(index),
                    "name": name,
                    "input": {},
                }
                return self._begin(call, is_new=True)
            case ToolCallDelta(_, arguments):
                return self._delta(arguments, {"type": "input_json_delta", "partial_json": arguments})
            case ToolCallEnd(_, complete):
                return self._end() if complete else b""
        return b""

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the end of the last block and of the message."""
        data = self._start() + self._end_text()
        stopped = {"delta": self._stopped(end, usage), "usage": usage_object(usage)}
        return data + _event("message_delta", stopped) + _event("message_stop", {})

    def keepalive(self, progress: Progress | None = None) -> bytes:
        """Return a ping; during prefill it says how far that is."""
        fields = {"processed": progress.processed, "total": progress.total} if progress else {}
        return _event("ping", fields)

    def progress(self, _progress: Progress) -> bytes:
        """Begin the message: with the first progress it is known how much of the prompt was cached."""
        return self._start()

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream."""
        return _event("error", error_object(error))

    def fold(self, events: Iterable[ReplyEvent | GroupEvent], usage: Usage) -> bytes:
        """Return the message that the stream would have described."""
        end: StreamEnd | None = None
        for event in events:
            if isinstance(event, StreamEnd):
                end = event
            else:
                self.feed(event)
        assert end is not None  # or `events` raises
        self._end_text()
        message = {**self._message(usage), "content": self._content, **self._stopped(end, usage)}
        return json_text.body(message)

    # -- blocks -----------------------------------------------------------------------------------------------

    def _message(self, usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(usage),
        }

    def _stopped(self, end: StreamEnd, usage: Usage) -> dict[str, Any]:
        found, reason = self._reply.stop_string, _STOP_REASONS[end.finish]
        if found is not None:
            reason = "stop_sequence"
        elif end.finish == "length" and usage.prompt_tokens + usage.completion_tokens >= self._context_length:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": found}

    def _start(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        return _event("message_start", {"message": self._message(self._reply.usage)})

    def _begin(self, block: dict[str, Any], *, is_new: bool = False) -> bytes:
        """Begin a block, unless it is of the kind of the open one."""
        if self._block is not None and self._block["type"] == block["type"] and not is_new:
            return b""
        data = self._start() + self._end_text()
        self._block, self._texts = block, []
        self._num_blocks += 1
        return data + self._block_event("content_block_start", {"content_block": block})

    def _delta(self, text: str, delta: dict[str, str], *, is_shown: bool = True) -> bytes:
        self._texts.append(text)
        return self._block_event("content_block_delta", {"delta": delta}) if is_shown else b""

    def _end_text(self) -> bytes:
        """End the open block. A call that is open has been cut: it is not ended."""
        if self._block is not None and self._block["type"] == "tool_use":
            self._block = None
        return self._end() if self._block is not None else b""

    def _end(self) -> bytes:
        block, text = self._block, "".join(self._texts)
        assert block is not None
        data = b""
        whole: dict[str, Any]
        match block["type"]:
            case "thinking":
                signature = seal(text) if self._omits_thinking else sign(text)
                whole = {"thinking": "" if self._omits_thinking else text, "signature": signature}
                signed = {"delta": {"type": "signature_delta", "signature": signature}}
                data = self._block_event("content_block_delta", signed)
            case "text":
                whole = {"text": text}
            case _:
                whole = {"input": json_text.arguments_object(text)}
        self._content.append({**block, **whole})
        data += self._block_event("content_block_stop", {})
        self._block = None
        return data

    def _block_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        return _event(kind, {"index": self._num_blocks - 1, **fields})


def _event(kind: str, fields: Any) -> bytes:
    return f"event: {kind}\ndata: {dumps({'type': kind, **fields})}\n\n".encode()
