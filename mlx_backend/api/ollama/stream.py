"""Events to bytes: one JSON object a line as a reply is generated, and the whole of it as one object.

A call is sent once it is complete: one that was cut must not be run. Knows nothing of HTTP and requests.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mlx_backend.api import json_text
from mlx_backend.api.ollama.base import as_time, error_object, nanoseconds
from mlx_backend.api.writers import BlockWriter, reason_fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.openai.stream import ChatLogprobs
    from mlx_backend.api.writers import Block
    from mlx_backend.chat.reply import Usage
    from mlx_backend.conversation.events import StreamEnd
    from mlx_backend.engine.base import Progress, Queued


class LineWriter(BlockWriter):
    """Writes a reply.

    `part` puts a text, `thinking` and `tool_calls` where the address has them, `silence` is what a line holds that says
    nothing. `started` is when the request came (`time.perf_counter`), `load_seconds` how long it waited for its model.
    """

    def __init__(
        self,
        model: str,
        part: Callable[..., dict[str, Any]],
        call_id: Callable[[int], str],
        *,
        started: float,
        load_seconds: float,
        logprobs: ChatLogprobs | None,
        silence: dict[str, list[Any]],
    ) -> None:
        super().__init__("ollama-", splits_channels=False)
        self._model = model
        self._part = part
        self._call_id = call_id
        self._started = started
        self._load_seconds = load_seconds
        self._logprobs = logprobs
        self._silence = silence
        self._said: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_calls": [], "logprobs": []}

    def begin(self, _block: Block) -> bytes:
        """Write nothing: a line holds what is new of a block."""
        return b""

    def delta(self, block: Block, text: str) -> bytes:
        """Write a line with more of a text."""
        match block.kind:
            case "reasoning":
                return self._say({"thinking": [text]})
            case "text":
                return self._say({"text": [text], **self._rest()})
            case _:
                return b""

    def end(self, block: Block, *, is_cut: bool) -> bytes:
        """Write a line with a call that is complete."""
        if block.kind != "call":
            return b""
        called = json_text.arguments_object(block.text)
        function = {"index": block.call, "name": block.name, "arguments": called}
        return self._say({"tool_calls": [{"id": self._call_id(block.call), "function": function}]})

    def whole(self, end: StreamEnd, usage: Usage) -> dict[str, Any]:
        """Return the reply whose parts the stream would have been."""
        self._said["logprobs"] += self._rest().get("logprobs", [])
        return self._object(self._said, done=True, **self._ending(end, usage))

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the last line."""
        return self._line(self._rest(), done=True, **self._ending(end, usage))

    def keepalive(self, reason: Progress | Queued | None = None) -> bytes:
        """Return a line that adds nothing, with the reason: every line has to be a part of a reply."""
        return self._line(self._silence, done=False, **reason_fields(reason))

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream."""
        return json_text.body(error_object(error))

    def _say(self, said: dict[str, list[Any]]) -> bytes:
        for key, value in said.items():
            self._said[key] += value
        return self._line(said, done=False)

    def _rest(self) -> dict[str, list[Any]]:
        """Return the log probabilities of the tokens that were held for the text that comes next."""
        tokens, self._tokens = self._tokens, ()
        return {"logprobs": self._logprobs.chunk(tokens)["content"]} if self._logprobs and tokens else {}

    def _line(self, said: dict[str, list[Any]], *, done: bool, **more: Any) -> bytes:
        return json_text.body(self._object(said, done=done, **more))

    def _object(self, said: dict[str, list[Any]], *, done: bool, **more: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if thinking := said.get("thinking"):
            fields["thinking"] = "".join(thinking)
        if calls := said.get("tool_calls"):
            fields["tool_calls"] = calls
        line = {
            "model": self._model,
            "created_at": as_time(time.time()),
            **self._part("".join(said.get("text", ())), **fields),
            "done": done,
            **more,
        }
        if logprobs := said.get("logprobs"):
            line["logprobs"] = logprobs
        return line

    def _ending(self, end: StreamEnd, usage: Usage) -> dict[str, Any]:
        return {
            "done_reason": "length" if end.finish == "length" else "stop",
            "total_duration": nanoseconds(time.perf_counter() - self._started),
            "load_duration": nanoseconds(self._load_seconds),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(usage.prefill_seconds),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(usage.decode_seconds),
        }
