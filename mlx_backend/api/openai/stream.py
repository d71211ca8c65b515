"""Events to OpenAI's objects. A completion is the fold of the chunks that a stream sends: no second path.

    events ─ChatWriter / TextWriter─▶ chunks ─┬─ Envelope.sse ──▶ bytes of a stream
                                              └─ Envelope.whole ─▶ one JSON object

Knows the shapes of the wire and nothing of HTTP, engines or requests. What clients trip over is kept off it:
a delta says one thing, `role` comes once, a tool call comes whole, with its index, and only if it is
complete, and no key is sent as null for which a client expects an object.
"""

from __future__ import annotations

import html
import json
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlx_backend.chat.logprobs import ContentLogprobs
from mlx_backend.conversation.events import (
    ContentDelta,
    ReasoningDelta,
    StreamEnd,
    ToolCallDelta,
    ToolCallEnd,
    ToolCallStart,
)
from mlx_backend.settings import ReasoningField, ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.api.openai.logprobs import LogprobsFormat
    from mlx_backend.chat.logprobs import TokenLogprobs
    from mlx_backend.chat.reply import ReplyEvent
    from mlx_backend.chat.usage import Usage

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a reply: a delta, or the finish, or what comes after it."""

    delta: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[str, Any] | None = None
    finish: str | None = None
    usage: dict[str, Any] | None = None
    timings: dict[str, Any] | None = None


class ChatWriter:
    """Writes the deltas of one chat reply. `call_id` names a call by its index."""

    def __init__(
        self,
        *,
        call_id: Callable[[int], str],
        reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE,
        reasoning_field: ReasoningField = ReasoningField.REASONING_CONTENT,
        logprobs: LogprobsFormat | None = None,
    ) -> None:
        self._call_id = call_id
        self._logprobs = logprobs
        self._tokens: Sequence[TokenLogprobs] = ()
        self._reasoning = _PLACES[reasoning_format](reasoning_field)
        self._calls: dict[int, tuple[str, list[str]]] = {}

    def open(self) -> list[Chunk]:
        """Say who speaks."""
        return [Chunk({"role": "assistant"})]

    def feed(self, event: ReplyEvent) -> list[Chunk]:
        """Write one event."""
        match event:
            case ReasoningDelta(text):
                return self._reasoning.write(text)
            case ContentLogprobs(tokens):
                self._tokens = tokens
            case ContentDelta(text):
                logprobs = self._logprobs.chunk(self._tokens) if self._logprobs else None
                self._tokens = ()
                return [*self._reasoning.close(), Chunk({"content": text}, logprobs)]
            case ToolCallStart(index, name):
                self._calls[index] = (name, [])
            case ToolCallDelta(index, arguments):
                self._calls[index][1].append(arguments)
            case ToolCallEnd(index, complete):
                name, written = self._calls.pop(index)
                if complete:  # a call that the token limit cut must not be run, so nobody hears of it
                    return [*self._reasoning.close(), self._call(index, name, "".join(written))]
            case StreamEnd(finish):
                return [*self._reasoning.close(), Chunk(finish=finish)]
        return []

    def _call(self, index: int, name: str, arguments: str) -> Chunk:
        function = {"name": name, "arguments": arguments}
        call = {"index": index, "id": self._call_id(index), "type": "function", "function": function}
        return Chunk({"tool_calls": [call]})


class TextWriter:
    """Writes the pieces of one text completion."""

    def __init__(self, logprobs: LogprobsFormat | None = None) -> None:
        self._logprobs = logprobs
        self._tokens: Sequence[TokenLogprobs] = ()

    def open(self) -> list[Chunk]:
        """Nothing goes before the text."""
        return []

    def feed(self, event: ReplyEvent) -> list[Chunk]:
        """Write one event."""
        match event:
            case ContentLogprobs(tokens):
                self._tokens = tokens
            case ContentDelta(text) | ReasoningDelta(text):
                logprobs = self._logprobs.chunk(self._tokens) if self._logprobs else None
                self._tokens = ()
                return [Chunk({"text": text}, logprobs)]
            case StreamEnd(finish):
                return [Chunk(finish=finish)]
        return []


type Writer = ChatWriter | TextWriter


class _Separate:
    """Reasoning in a field of its own, or in two for the clients that look for the other."""

    def __init__(self, where: ReasoningField) -> None:
        both = (ReasoningField.REASONING_CONTENT, ReasoningField.REASONING)
        self._keys = [str(name) for name in (both if where is ReasoningField.BOTH else (where,))]

    def write(self, text: str) -> list[Chunk]:
        return [Chunk(dict.fromkeys(self._keys, text))]

    def close(self) -> list[Chunk]:
        return []


class _Hidden:
    def __init__(self, _where: ReasoningField) -> None:
        pass

    def write(self, _text: str) -> list[Chunk]:
        return []

    def close(self) -> list[Chunk]:
        return []


class _Block:
    """Reasoning as a block in the content. Each tag is a chunk of its own; an open block is always closed."""

    opening: str
    closing: str

    def __init__(self, _where: ReasoningField) -> None:
        self._open = False

    def write(self, text: str) -> list[Chunk]:
        chunks = []
        if not self._open:
            self._open = True
            chunks.append(Chunk({"content": self.opening}))
        body = self.body(text)
        return [*chunks, Chunk({"content": body})] if body else chunks

    def close(self) -> list[Chunk]:
        if not self._open:
            return []
        self._open = False
        return [Chunk({"content": rest}) for rest in (self.rest(), self.closing) if rest]

    def body(self, text: str) -> str:
        raise NotImplementedError

    def rest(self) -> str:
        return ""


class _Think(_Block):
    """`<think>`. A tag spelt inside the reasoning would end the block early, so its `<` becomes `‹`."""

    opening = "<think>\n"
    closing = "\n</think>\n\n"
    _TAGS = ("<think", "</think")

    def __init__(self, where: ReasoningField) -> None:
        super().__init__(where)
        self._held = ""

    def body(self, text: str) -> str:
        text = self._held + text
        for tag in self._TAGS:
            text = text.replace(tag, "‹" + tag[1:])
        at = text.rfind("<")
        unsure = at >= 0 and any(tag.startswith(text[at:]) for tag in self._TAGS)
        self._held = text[at:] if unsure else ""
        return text[: len(text) - len(self._held)]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


class _Details(_Block):
    """What Open WebUI writes itself: escaped, and every line quoted."""

    opening = '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> '
    closing = "\n</details>\n\n"

    def body(self, text: str) -> str:
        return html.escape(text).replace("\n", "\n> ")


_PLACES: dict[ReasoningFormat, Callable[[ReasoningField], _Separate | _Hidden | _Block]] = {
    ReasoningFormat.SEPARATE: _Separate,
    ReasoningFormat.THINK: _Think,
    ReasoningFormat.DETAILS: _Details,
    ReasoningFormat.HIDDEN: _Hidden,
    ReasoningFormat.RAW: _Hidden,  # a raw reply has no reasoning events: everything is content
}


class Envelope:
    """What all chunks of one reply share: its id, time and model, and whether it is chat or text."""

    def __init__(
        self, model: str, fingerprint: str, *, chat: bool, logprobs: LogprobsFormat | None = None
    ) -> None:
        self.model = model
        self.id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self._chat = chat
        self._logprobs = logprobs
        self._head = {
            "id": self.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        # Most chunks differ in their delta alone: the rest is written once.
        choice = '"choices":[{"index":0,' + ('"delta":' if chat else "")
        self._before = "data: " + dumps(self._head)[:-1] + "," + choice
        self._after = ',"finish_reason":null}]}\n\n'

    def sse(self, chunk: Chunk) -> bytes:
        """One chunk as a server-sent event."""
        if chunk.delta and not (chunk.finish or chunk.usage or chunk.timings or chunk.logprobs):
            delta = dumps(chunk.delta)
            return (self._before + (delta if self._chat else delta[1:-1]) + self._after).encode()
        if chunk.usage is not None and chunk.finish is None:
            choices = []
        else:
            logprobs = {"logprobs": chunk.logprobs} if chunk.logprobs is not None else {}
            choices = [{"index": 0, **self._delta(chunk), **logprobs, "finish_reason": chunk.finish}]
        return f"data: {dumps({**self._head, 'choices': choices, **_extras(chunk)})}\n\n".encode()

    def whole(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """Fold all chunks into the object of a reply that is not streamed."""
        told: dict[str, Any] = {}
        finish: str | None = None
        extras: dict[str, Any] = {}
        chunks = list(chunks)
        for chunk in chunks:
            for key, value in chunk.delta.items():
                told.setdefault(key, []).append(value)
            finish = chunk.finish or finish
            extras |= _extras(chunk)
        logprobs = {}
        if self._logprobs is not None:
            read = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
            logprobs["logprobs"] = self._logprobs.whole(read)
        choice = {"index": 0, **self._message(told), **logprobs, "finish_reason": finish}
        return {**self._head, **self._kind(), "choices": [choice], **extras}

    def _delta(self, chunk: Chunk) -> dict[str, Any]:
        return {"delta": chunk.delta} if self._chat else {"text": chunk.delta.get("text", "")}

    def _kind(self) -> dict[str, str]:
        return {"object": "chat.completion"} if self._chat else {}

    def _message(self, told: dict[str, list[Any]]) -> dict[str, Any]:
        texts = {k: "".join(v) for k, v in told.items() if k not in ("role", "tool_calls")}
        if not self._chat:
            return {"text": texts.get("text", "")}
        calls = [
            {key: value for key, value in call.items() if key != "index"}
            for deltas in told.get("tool_calls", ())
            for call in deltas
        ]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls else "", **texts}
        return {"message": {**message, "tool_calls": calls} if calls else message}


def comment(text: str) -> bytes:
    """Make a line that clients ignore and that keeps the connection alive."""
    return f": {text}\n\n".encode()


def error(body: dict[str, Any]) -> bytes:
    """Make an error in mid-stream: the headers are gone, so the envelope travels as an event."""
    return f"data: {dumps(body)}\n\n".encode()


def last_chunks(finish: Chunk, usage: Usage, *, include_usage: bool) -> list[Chunk]:
    """Add what belongs at the end of a stream: usage in a chunk of its own if asked, timings on the last."""
    timings = timings_object(usage)
    if not include_usage:
        return [replace(finish, timings=timings)]
    return [finish, Chunk(usage=usage_object(usage), timings=timings)]


def usage_object(usage: Usage) -> dict[str, Any]:
    """Build the `usage` of a reply."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_object(usage: Usage) -> dict[str, Any]:
    """Build the `timings` of a reply, under llama.cpp's names: chat pages show tokens a second from them.

    Two are ours: how long the request waited for its turn, and when its first token was there.
    """
    read = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": read,
        "prompt_ms": round(usage.prefill_seconds * 1000, 3),
        "prompt_per_second": _rate(read, usage.prefill_seconds),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(usage.decode_seconds * 1000, 3),
        "predicted_per_second": _rate(usage.completion_tokens, usage.decode_seconds),
        "queue_ms": round(usage.queue_seconds * 1000, 3),
        "first_token_ms": round((usage.queue_seconds + usage.prefill_seconds) * 1000, 3),
    }


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 2) if seconds > 0 else 0.0


def _extras(chunk: Chunk) -> dict[str, Any]:
    pairs = (("usage", chunk.usage), ("timings", chunk.timings))
    return {key: value for key, value in pairs if value is not None}


def dumps(value: Any) -> str:
    """Write JSON the short way."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
