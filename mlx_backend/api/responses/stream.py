"""Events to bytes: the items of a response as they are written, and the response object that they end as.

    ReasoningDelta ─▶ a reasoning item         ContentDelta ─▶ a message, one for each channel
    ToolCallStart … ToolCallEnd ─▶ a function_call or custom_tool_call item

Each event has the next `sequence_number`, from 0. A response that is not streamed is the object that the stream would
have ended with. A call that was cut is not among the output: it must not be run. Knows nothing of HTTP and requests.
"""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from mlx_backend.api import json_text
from mlx_backend.api.json_text import dumps
from mlx_backend.api.openai.stream import timings_object
from mlx_backend.api.sealed_reasoning import seal
from mlx_backend.api.tools import Arguments, ToolName
from mlx_backend.chat.reply import ContentLogprobs
from mlx_backend.conversation.events import (
    Channel,
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.openai.stream import ChatLogprobs
    from mlx_backend.api.tools import Tools
    from mlx_backend.chat.reply import ReplyEvent, TokenLogprobs, Usage
    from mlx_backend.chat.reply_group import GroupEvent
    from mlx_backend.engine.base import Progress


def usage_object(usage: Usage) -> dict[str, Any]:
    """Build the API's `usage`."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class _Item:
    """An output item that is being written."""

    def __init__(self, kind: str, prefix: str, index: int) -> None:
        self.kind, self.index = kind, index
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.text: list[str] = []


class ResponseWriter:
    """Implements api/base.py's `ReplyWriter`. `head` are the fields of the response that do not change.

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
        self.id = f"resp_{uuid.uuid4().hex}"
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
        self._summarises, self._streams_text, self._seals = summarises, streams_text, seals
        self._on_end = on_end
        self._number = 0
        self._num_items = 0
        self._output: list[dict[str, Any]] = []
        self._item: _Item | None = None
        self._channel = Channel.FINAL
        self._tokens: list[TokenLogprobs] = []
        self._all_logprobs: list[dict[str, Any]] = []
        self._is_cut = False
        self._call: tuple[ToolName, Arguments] = ToolName(""), Arguments()

    # -- api/base.py's ReplyWriter ----------------------------------------------------------------------------

    def open(self) -> bytes:
        """Return the first two events."""
        begun = {"response": self._response}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        """Write an event but the last."""
        match event:
            case ReasoningDelta(text):
                return self._begin_reasoning() + self._reasoning_delta(text)
            case ContentLogprobs(tokens):
                self._tokens += tokens
            case ContentDelta(text, channel):
                return self._begin_message(channel) + self._text_delta(text)
            case ToolCallStart(index, name):
                return self._end_item() + self._begin_call(index, name)
            case ToolCallDelta(_, arguments):
                return self._call_delta(self._call[1].feed(arguments))
            case ToolCallEnd(index, complete):
                return self._end_call(index) if complete else b""
        return b""

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the end of the last item, and the whole response."""
        data = self._end_item(is_cut=end.finish == "length")
        response = self._ended(end, usage)
        return data + self._event(f"response.{response['status']}", {"response": response})

    def keepalive(self, progress: Progress | None = None) -> bytes:
        """Return an event, with how far prefill is: Codex gives up after a time without one, and counts no comments."""
        fields: dict[str, Any] = {"response": self._response}
        if progress is not None:
            fields["prompt_progress"] = {
                "total": progress.total,
                "cache": progress.cached,
                "processed": progress.processed,
            }
        return self._event("response.in_progress", fields)

    def progress(self, _progress: Progress) -> bytes:
        """Return nothing: it goes out when there was silence for a while."""
        return b""

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream. By its code clients know whether to send the request again, or to compact."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        if error.code == "context_length_exceeded":
            code = error.code
        fields = {"code": code, "message": error.message}
        failed = {**self._response, "status": "failed", "error": fields, "output": self._output}
        return self._event("response.failed", {"response": failed})

    def fold(self, events: Iterable[ReplyEvent | GroupEvent], usage: Usage) -> bytes:
        """Return the response object that the stream would have ended with."""
        end: StreamEnd | None = None
        for event in events:
            if isinstance(event, StreamEnd):
                end = event
            else:
                self.feed(event)
        assert end is not None  # or `events` raises
        self._end_item(is_cut=end.finish == "length")
        return json_text.body(self._ended(end, usage))

    def _ended(self, end: StreamEnd, usage: Usage) -> dict[str, Any]:
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

    def _begin_reasoning(self) -> bytes:
        if self._item is not None and self._item.kind == "reasoning":
            return b""
        data = self._end_item() + self._begin("reasoning", "rs", {"summary": [], "content": []})
        if self._summarises:
            data += self._part_event(
                "response.reasoning_summary_part.added", "summary_index", {"part": _summary("")}
            )
        if self._streams_text:
            data += self._part_event("response.content_part.added", "content_index", {"part": _reasoning("")})
        return data

    def _reasoning_delta(self, text: str) -> bytes:
        assert self._item is not None
        self._item.text.append(text)
        data = b""
        if self._summarises:
            data = self._part_event("response.reasoning_summary_text.delta", "summary_index", {"delta": text})
        if self._streams_text:
            data += self._part_event("response.reasoning_text.delta", "content_index", {"delta": text})
        return data

    def _end_reasoning(self, text: str) -> bytes:
        data = b""
        if self._summarises:
            data += self._part_event("response.reasoning_summary_text.done", "summary_index", {"text": text})
            data += self._part_event(
                "response.reasoning_summary_part.done", "summary_index", {"part": _summary(text)}
            )
        if self._streams_text:
            data += self._part_event("response.reasoning_text.done", "content_index", {"text": text})
            data += self._part_event(
                "response.content_part.done", "content_index", {"part": _reasoning(text)}
            )
        fields: dict[str, Any] = {
            "summary": [_summary(text)] if self._summarises else [],
            "content": [_reasoning(text)],
        }
        if self._seals:
            fields["encrypted_content"] = seal(text)
        return data + self._end(fields)

    def _begin_message(self, channel: Channel) -> bytes:
        if self._item is not None and self._item.kind == "message" and channel is self._channel:
            return b""
        data = self._end_item()
        self._channel = channel
        begun = self._begin("message", "msg", {"role": "assistant", "content": [], **self._phase()})
        self._all_logprobs = []
        part = {"part": self._text_part("")}
        return data + begun + self._part_event("response.content_part.added", "content_index", part)

    def _phase(self) -> dict[str, str]:
        return {"phase": "commentary"} if self._channel is Channel.COMMENTARY else {}

    def _text_delta(self, text: str) -> bytes:
        assert self._item is not None
        self._item.text.append(text)
        logprobs = self._take_logprobs()
        return self._part_event(
            "response.output_text.delta", "content_index", {"delta": text, "logprobs": logprobs}
        )

    def _take_logprobs(self) -> list[dict[str, Any]]:
        if self._logprobs is None:
            return []
        tokens, self._tokens = self._tokens, []
        written: list[dict[str, Any]] = self._logprobs.chunk(tokens)["content"]
        self._all_logprobs += written
        return written

    def _text_part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._all_logprobs}

    def _end_message(self, text: str) -> bytes:
        done = {"text": text, "logprobs": self._all_logprobs}
        part = self._text_part(text)
        return (
            self._part_event("response.output_text.done", "content_index", done)
            + self._part_event("response.content_part.done", "content_index", {"part": part})
            + self._end({"role": "assistant", "content": [part], **self._phase()})
        )

    def _begin_call(self, index: int, name: str) -> bytes:
        tool = self._tools.named(name)
        self._call = tool, tool.text()
        kind, prefix = ("custom_tool_call", "ctc") if tool.is_custom else ("function_call", "fc")
        return self._begin(kind, prefix, self._call_fields(index, ""))

    def _call_fields(self, index: int, text: str) -> dict[str, Any]:
        tool, given = self._call
        namespace = {"namespace": tool.namespace} if tool.namespace else {}
        return {"call_id": self._call_id(index), "name": tool.name, **namespace, given.name: text}

    def _call_delta(self, more: str) -> bytes:
        kind = "custom_tool_call_input" if self._call[0].is_custom else "function_call_arguments"
        return self._item_event(f"response.{kind}.delta", {"delta": more}) if more else b""

    def _end_call(self, index: int) -> bytes:
        tool, given = self._call
        more, text = given.close()
        data = self._call_delta(more)
        if tool.is_custom:
            data += self._item_event("response.custom_tool_call_input.done", {"input": text})
        else:
            done = {"arguments": text, "name": tool.name}
            data += self._item_event("response.function_call_arguments.done", done)
        return data + self._end(self._call_fields(index, text))

    def _end_item(self, *, is_cut: bool = False) -> bytes:
        """End the reasoning or the message that is being written. A call that is cut is not ended: it is no call."""
        if self._item is None:
            return b""
        self._is_cut = is_cut
        text = "".join(self._item.text)
        match self._item.kind:
            case "reasoning":
                data = self._end_reasoning(text)
            case "message":
                data = self._end_message(text)
            case _:
                self._item, data = None, b""
        return data

    def _begin(self, kind: str, prefix: str, fields: Mapping[str, Any]) -> bytes:
        self._item = item = _Item(kind, prefix, self._num_items)
        self._num_items += 1
        begun = {"id": item.id, "type": kind, "status": "in_progress", **fields}
        return self._event("response.output_item.added", {"output_index": item.index, "item": begun})

    def _end(self, fields: Mapping[str, Any]) -> bytes:
        item, self._item = self._item, None
        assert item is not None
        whole = {
            "id": item.id,
            "type": item.kind,
            "status": "incomplete" if self._is_cut else "completed",
            **fields,
        }
        self._output.append(whole)
        return self._event("response.output_item.done", {"output_index": item.index, "item": whole})

    # -- events -----------------------------------------------------------------------------------------------

    def _part_event(self, kind: str, index_name: str, fields: Mapping[str, Any]) -> bytes:
        return self._item_event(kind, {index_name: 0, **fields})

    def _item_event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        item = self._item
        assert item is not None
        return self._event(kind, {"item_id": item.id, "output_index": item.index, **fields})

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        data = dumps({"type": kind, "sequence_number": number, **fields})
        return f"event: {kind}\ndata: {data}\n\n".encode()


def _summary(text: str) -> dict[str, str]:
    return {"type": "summary_text", "text": text}


def _reasoning(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}
