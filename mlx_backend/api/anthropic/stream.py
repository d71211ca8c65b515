"""Events to bytes: the content blocks of a message as they are written, and the message that they end as.

    reasoning ─▶ thinking, with a signature at its end       text ─▶ text       call ─▶ tool_use

Knows nothing of HTTP and requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.api.anthropic.base import error_object
from mlx_backend.api.json_text import arguments_object
from mlx_backend.api.sealed_reasoning import seal, sign
from mlx_backend.api.writers import BlockWriter, reason_fields, sse
from mlx_backend.engine.base import Progress

if TYPE_CHECKING:
    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.writers import Block
    from mlx_backend.chat.reply import Reply, Usage
    from mlx_backend.conversation.events import StreamEnd
    from mlx_backend.engine.base import Queued

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


class MessageWriter(BlockWriter):
    """Writes a message. With `omits_thinking` reasoning is sent as its signature alone."""

    def __init__(
        self, model: str, reply: Reply, context_length: int, *, omits_thinking: bool = False
    ) -> None:
        super().__init__("msg_", splits_channels=False)
        self._model = model
        self._reply = reply
        self._context_length = context_length
        self._omits_thinking = omits_thinking
        self._is_begun = False
        self._content: list[dict[str, Any]] = []

    def open(self) -> bytes:
        """Return a comment: the first event says how much of the prompt was cached, which is not known yet."""
        return b": accepted\n\n"

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the end of the last block and of the message."""
        data = self._start() + self.close(end)
        stopped = {"delta": self._stopped(end, usage), "usage": usage_object(usage)}
        return data + sse("message_delta", stopped) + sse("message_stop", {})

    def keepalive(self, reason: Progress | Queued | None = None) -> bytes:
        """Return a ping: how far prefill is, or where in the queue the request waits."""
        if isinstance(reason, Progress):
            return sse("ping", {"processed": reason.processed, "total": reason.total})
        return sse("ping", reason_fields(reason))

    def progress(self, _progress: Progress) -> bytes:
        """Begin the message: with the first progress it is known how much of the prompt was cached."""
        return self._start()

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream."""
        return sse("error", error_object(error))

    def whole(self, end: StreamEnd, usage: Usage) -> dict[str, Any]:
        """Return the message that the stream would have described."""
        return {**self._message(usage), "content": self._content, **self._stopped(end, usage)}

    def begin(self, block: Block) -> bytes:
        """Write that a block begins."""
        return self._start() + _event("content_block_start", block, content_block=self._object(block))

    def delta(self, block: Block, text: str) -> bytes:
        """Write more of a block."""
        match block.kind:
            case "text":
                delta = {"type": "text_delta", "text": text}
            case "call":
                delta = {"type": "input_json_delta", "partial_json": text}
            case _ if self._omits_thinking or not text:
                return b""
            case _:
                delta = {"type": "thinking_delta", "thinking": text}
        return _event("content_block_delta", block, delta=delta)

    def end(self, block: Block, *, is_cut: bool) -> bytes:
        """Write that a block is complete."""
        data, written, text = b"", self._object(block), block.text
        match block.kind:
            case "text":
                written["text"] = text
            case "call":
                written["input"] = arguments_object(text)
            case _:
                shown, signature = ("", seal(text)) if self._omits_thinking else (text, sign(text))
                written |= {"thinking": shown, "signature": signature}
                signed = {"type": "signature_delta", "signature": signature}
                data = _event("content_block_delta", block, delta=signed)
        self._content.append(written)
        return data + _event("content_block_stop", block)

    def _object(self, block: Block) -> dict[str, Any]:
        """Return a block as it begins."""
        match block.kind:
            case "text":
                return {"type": "text", "text": ""}
            case "call":
                call_id = self._reply.call_id(block.call)
                return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}
            case _:
                return {"type": "thinking", "thinking": "", "signature": ""}

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
        return sse("message_start", {"message": self._message(self._reply.usage)})


def _event(kind: str, block: Block, **fields: Any) -> bytes:
    return sse(kind, {"index": block.position, **fields})
