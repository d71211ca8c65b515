"""Events to bytes: the items of a response as they are written, and the response object that they end as.

    reasoning ─▶ a reasoning item        text ─▶ a message, one for each channel
    call      ─▶ a function_call or custom_tool_call item

Each event has the next `sequence_number`, from 0. Knows nothing of HTTP and requests.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.api.openai.stream import timings_object
from mlx_backend.api.sealed_reasoning import seal
from mlx_backend.api.tools import Arguments, ToolName
from mlx_backend.api.writers import BlockWriter, reason_fields, sse
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.openai.stream import ChatLogprobs
    from mlx_backend.api.tools import Tools
    from mlx_backend.api.writers import Block
    from mlx_backend.chat.reply import Usage
    from mlx_backend.conversation.events import StreamEnd
    from mlx_backend.engine.base import Progress, Queued


def usage_object(usage: Usage) -> dict[str, Any]:
    """Build the API's `usage`."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(frozen=True)
class _TextPart:
    """A part of an item, and the names of its events and of its index in them."""

    type: str
    part_event: str
    text_event: str
    index: str


_SUMMARY = _TextPart("summary_text", "reasoning_summary_part", "reasoning_summary_text", "summary_index")
_REASONING = _TextPart("reasoning_text", "content_part", "reasoning_text", "content_index")
_TEXT = _TextPart("output_text", "content_part", "output_text", "content_index")

_PREFIXES = {"reasoning": "rs", "text": "msg"}
"""Of the ids of items that are no calls."""


class ResponseWriter(BlockWriter):
    """Writes a response. `head` are the fields of the response that do not change.

    `call_id` gives the id of a call by its index. Reasoning is streamed as a summary with `summarises`, as text with
    `streams_text`; with `seals` its item has an `encrypted_content`. `on_end` is called with the whole response object.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        tools: Tools,
        *,
        call_id: Callable[[int], str],
        logprobs: ChatLogprobs | None = None,
        summarises: bool = False,
        streams_text: bool = True,
        seals: bool = False,
        on_end: Callable[[dict[str, Any]], None] = lambda _response: None,
    ) -> None:
        super().__init__("resp_", splits_channels=True)
        self._response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **head,
            "output": [],
            "usage": None,
        }
        self._tools = tools
        self._call_id = call_id
        self._logprobs = logprobs
        self._summarises, self._seals = summarises, seals
        wanted = ((_SUMMARY, summarises), (_REASONING, streams_text))
        self._reasoning_parts = [part for part, is_wanted in wanted if is_wanted]
        self._on_end = on_end
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._item_id = ""
        self._all_logprobs: list[dict[str, Any]] = []
        self._call: tuple[ToolName, Arguments] = ToolName(""), Arguments()

    def open(self) -> bytes:
        """Return the first two events."""
        begun = {"response": self._response}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the end of the last item, and the whole response."""
        data = self.close(end)
        response = self.whole(end, usage)
        return data + self._event(f"response.{response['status']}", {"response": response})

    def keepalive(self, reason: Progress | Queued | None = None) -> bytes:
        """Return an event with the reason: Codex gives up after a time without one, and counts no comments."""
        return self._event("response.in_progress", {"response": self._response, **reason_fields(reason)})

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream. By its code clients know whether to send the request again, or to compact."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.code == "context_length_exceeded":
            code = error.code
        fields = {"code": code, "message": error.message}
        failed = {**self._response, "status": "failed", "error": fields, "output": self._output}
        return self._event("response.failed", {"response": failed})

    def whole(self, end: StreamEnd, usage: Usage) -> dict[str, Any]:
        """Return the response object that the stream ends with."""
        is_cut = end.finish == "length"
        response = {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else int(time.time()),
            "output": self._output,
            "usage": usage_object(usage),
            "timings": timings_object(usage),
        }
        self._on_end(response)
        return response

    # -- items ------------------------------------------------------------------------------------------------

    def begin(self, block: Block) -> bytes:
        """Write that an item begins, and its parts."""
        self._all_logprobs = []
        if block.kind == "call":
            tool = self._tools.named(block.name)
            self._call = tool, tool.text()
        prefix = _PREFIXES.get(block.kind) or ("ctc" if self._call[0].is_custom else "fc")
        self._item_id = f"{prefix}_{uuid.uuid4().hex}"
        data = self._item_event("added", block, self._item(block, "in_progress"))
        for part in self._parts(block):
            data += self._text_event(
                f"{part.part_event}.added", block, {part.index: 0, "part": self._part(part, "")}
            )
        return data

    def delta(self, block: Block, text: str) -> bytes:
        """Write more of an item."""
        if block.kind == "call":
            return self._call_delta(block, self._call[1].feed(text))
        data, more = b"", {"logprobs": self._take_logprobs()} if block.kind == "text" else {}
        for part in self._parts(block):
            data += self._text_event(
                f"{part.text_event}.delta", block, {part.index: 0, "delta": text, **more}
            )
        return data

    def end(self, block: Block, *, is_cut: bool) -> bytes:
        """Write that an item and its parts are complete, or cut."""
        data, text = b"", block.text
        if block.kind == "call":
            tool, given = self._call
            more, text = given.close()
            name = {} if tool.is_custom else {"name": tool.name}
            data = self._call_delta(block, more)
            data += self._text_event(f"{tool.call_event}.done", block, {given.name: text, **name})
        for part in self._parts(block):
            whole = self._part(part, text)
            done: dict[str, Any] = {key: whole[key] for key in ("text", "logprobs") if key in whole}
            data += self._text_event(f"{part.text_event}.done", block, {part.index: 0, **done})
            data += self._text_event(f"{part.part_event}.done", block, {part.index: 0, "part": whole})
        item = self._item(block, "incomplete" if is_cut else "completed", text)
        self._output.append(item)
        return data + self._item_event("done", block, item)

    def _item(self, block: Block, status: str, text: str | None = None) -> dict[str, Any]:
        """Return an item that begins, or ends with a text."""
        head = {"id": self._item_id, "type": block.kind, "status": status}
        match block.kind:
            case "reasoning":
                shown = {"summary": _SUMMARY if self._summarises else None, "content": _REASONING}
                item = {key: self._content(part, text) for key, part in shown.items()}
                sealed = {"encrypted_content": seal(text)} if self._seals and text is not None else {}
                return {**head, **item, **sealed}
            case "text":
                phase = {"phase": "commentary"} if block.channel is Channel.COMMENTARY else {}
                content = self._content(_TEXT, text)
                return {**head, "type": "message", "role": "assistant", "content": content, **phase}
            case _:
                tool, given = self._call
                namespace = {"namespace": tool.namespace} if tool.namespace else {}
                called = {"call_id": self._call_id(block.call), "name": tool.name, **namespace}
                return {**head, "type": tool.call_type, **called, given.name: text or ""}

    def _content(self, part: _TextPart | None, text: str | None) -> list[dict[str, Any]]:
        return [] if part is None or text is None else [self._part(part, text)]

    def _part(self, part: _TextPart, text: str) -> dict[str, Any]:
        more = {"annotations": [], "logprobs": self._all_logprobs} if part is _TEXT else {}
        return {"type": part.type, "text": text, **more}

    def _parts(self, block: Block) -> Sequence[_TextPart]:
        """Return the parts of an item that are streamed."""
        return {"reasoning": self._reasoning_parts, "text": [_TEXT]}.get(block.kind, [])

    def _take_logprobs(self) -> list[dict[str, Any]]:
        if self._logprobs is None:
            return []
        tokens, self._tokens = self._tokens, ()
        written: list[dict[str, Any]] = self._logprobs.chunk(tokens)["content"]
        self._all_logprobs += written
        return written

    # -- events -----------------------------------------------------------------------------------------------

    def _call_delta(self, block: Block, more: str) -> bytes:
        kind = f"{self._call[0].call_event}.delta"
        return self._text_event(kind, block, {"delta": more}) if more else b""

    def _text_event(self, kind: str, block: Block, fields: Mapping[str, Any]) -> bytes:
        where = {"item_id": self._item_id, "output_index": block.position}
        return self._event(f"response.{kind}", {**where, **fields})

    def _item_event(self, kind: str, block: Block, item: Mapping[str, Any]) -> bytes:
        return self._event(f"response.output_item.{kind}", {"output_index": block.position, "item": item})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse(kind, {"sequence_number": number, **fields})
