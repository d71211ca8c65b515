"""Chunks to bytes, for both APIs whose stream is chunks with `choices`: chat.py and completions.py.

    events ─chunks─▶ Chunk ─┬─ sse ──▶ one server-sent event
                            └─ fold ─▶ the JSON object of a reply that is not streamed

The whole reply is the fold of the chunks that a stream sends: there is no second path. For clients' sake a delta holds
one thing, and no key is null where a client expects an object. With them go `usage`, `timings` (under llama.cpp's
names), `reasoning` and log probabilities. Knows nothing of HTTP, engines or requests.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_backend import __version__
from mlx_backend.api import json_text
from mlx_backend.api.json_text import dumps
from mlx_backend.api.openai.base import error_object
from mlx_backend.conversation.events import StreamEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.openai.objects import PromptTokens, ReasoningObject, TimingsObject, UsageObject
    from mlx_backend.chat.reply import Reply, ReplyEvent, TokenLogprobs, Usage
    from mlx_backend.engine.base import Progress


def usage_object(usage: Usage) -> UsageObject:
    """Build OpenAI's `usage`."""
    details: PromptTokens = {"cached_tokens": usage.cached_tokens}
    if usage.image_tokens:
        details["image_tokens"] = usage.image_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_object(usage: Usage) -> TimingsObject:
    """Build `timings` under llama.cpp's names, from which chat pages show tokens per second.

    Four are ours. Drafts are counted if there were any. A reply that was ended because it repeated itself says so, and
    how many tokens it repeated over and over.
    """
    prefilled = usage.prompt_tokens - usage.cached_tokens
    timings: TimingsObject = {
        "cache_n": usage.cached_tokens,
        "prompt_n": prefilled,
        "prompt_ms": round(usage.prefill_seconds * 1000, 3),
        "prompt_per_second": _rate(prefilled, usage.prefill_seconds),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(usage.decode_seconds * 1000, 3),
        "predicted_per_second": _rate(usage.completion_tokens, usage.decode_seconds),
        "queue_ms": round(usage.queue_seconds * 1000, 3),
        "first_token_ms": round((usage.queue_seconds + usage.prefill_seconds) * 1000, 3),
    }
    if usage.drafted_tokens:
        timings["draft_n"] = usage.drafted_tokens
        timings["draft_n_accepted"] = usage.accepted_tokens
    if usage.repeated_run is not None:
        timings["stopped_by"] = "repetition"
        timings["repeated_n"] = usage.repeated_run
    return timings


def reasoning_object(reply: Reply) -> ReasoningObject | None:
    """Build what was decided about a reply's reasoning; None for a completion of a bare text."""
    decided = reply.effort
    if decided is None:
        return None
    return {
        "effort": decided.effort,
        "level": decided.level.effort if decided.level else None,
        "source": decided.source,
        "budget": reply.thinking_budget,
    }


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 2) if seconds > 0 else 0.0


MIN_LOGPROB = -9999.0
"""What OpenAI sends for an impossible token: JSON has no infinity."""


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …], "refusal": null}`."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def chunk(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the tokens of one delta."""
        content = [
            {
                **self._entry(each.token, each.logprobs.chosen),
                "top_logprobs": [self._entry(token, value) for token, value in each.logprobs.top],
            }
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def fold(self, chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Fold the chunks of a reply."""
        return {"content": [entry for chunk in chunks for entry in chunk["content"]], "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        data = self._bytes_of(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(value, MIN_LOGPROB),
            "bytes": list(data),
        }


class TextLogprobs:
    """`{"tokens": […], "token_logprobs": […], "top_logprobs": [{…}, …], "text_offset": […]}`."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._offset = 0

    def chunk(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the tokens of one delta; offsets count characters from the beginning of the reply."""
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in tokens:
            text = self._text(each.token)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(max(each.logprobs.chosen, MIN_LOGPROB))
            top = {self._text(token): max(value, MIN_LOGPROB) for token, value in each.logprobs.top}
            columns["top_logprobs"].append(
                {text: max(each.logprobs.chosen, MIN_LOGPROB), **top} if top else None
            )
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns

    def fold(self, chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Fold the chunks of a reply."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns = list(chunks)
        return {name: [value for chunk in columns for value in chunk[name]] for name in names}

    def _text(self, token: int) -> str:
        data = self._bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # part of a character, as OpenAI writes it
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


type LogprobsFormat = ChatLogprobs | TextLogprobs

DONE = b"data: [DONE]\n\n"
_FINGERPRINT = f"mlx-backend-{__version__}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step of a reply: a delta, or the finish, or what comes after it."""

    delta: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[str, Any] | None = None
    finish: str | None = None
    usage: UsageObject | None = None
    timings: TimingsObject | None = None
    reasoning: ReasoningObject | None = None


class ChunkWriter(ABC):
    """Implements api/base.py's `ReplyWriter`; a subclass says what its chunks and its whole object look like."""

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(
        self,
        model: str,
        *,
        include_usage: bool = False,
        logprobs: LogprobsFormat | None = None,
        reasoning: ReasoningObject | None = None,
    ) -> None:
        self.id = self.id_prefix + uuid.uuid4().hex
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._reasoning_object = reasoning
        self._tokens: Sequence[TokenLogprobs] = ()
        """Those of the content delta that comes next."""
        self._head = {
            "id": self.id,
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }
        # Most chunks differ in their delta alone: the rest is written once.
        self._before = "data: " + dumps(self._head)[:-1] + ',"choices":[{"index":0,'
        self._after = ',"finish_reason":null}]}\n\n'

    @abstractmethod
    def opening(self) -> list[Chunk]:
        """Return the chunks before the first event."""

    @abstractmethod
    def chunks(self, event: ReplyEvent) -> list[Chunk]:
        """Return the chunks of an event. A StreamEnd's last chunk has the finish reason."""

    @abstractmethod
    def choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return how a choice carries a delta."""

    @abstractmethod
    def whole_choice(self, deltas: dict[str, list[Any]]) -> dict[str, Any]:
        """Return how a choice carries the whole reply, from the values that its deltas had for each key."""

    def open(self) -> bytes:
        """Return the opening chunks, or a comment: headers are sent with the first bytes."""
        return b"".join(map(self._sse, self.opening())) or _comment("accepted")

    def feed(self, event: ReplyEvent) -> bytes:
        """Write one event."""
        return b"".join(map(self._sse, self.chunks(event)))

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the last chunks and OpenAI's end marker."""
        return b"".join(map(self._sse, self._last(end, usage, include_usage=self._include_usage))) + DONE

    def keepalive(self, progress: Progress | None = None) -> bytes:
        """Return a comment, which clients ignore; during prefill it says how far that is."""
        return _comment(f"keepalive {progress.processed}/{progress.total}" if progress else "keepalive")

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream: the status line is gone, so the error object travels as an event."""
        return f"data: {dumps(error_object(error))}\n\n".encode()

    def fold(self, events: Iterable[ReplyEvent], usage: Usage) -> bytes:
        """Fold the chunks of all events into one object, always with usage and timings."""
        chunks = self.opening()
        for event in events:
            if isinstance(event, StreamEnd):
                chunks += self._last(event, usage, include_usage=True)
            else:
                chunks += self.chunks(event)
        return json_text.body(self._whole(chunks))

    def _last(self, end: StreamEnd, usage: Usage, *, include_usage: bool) -> list[Chunk]:
        """Return the chunks of the end: usage in a chunk of its own if asked for, the rest on the last one."""
        *chunks, finish = self.chunks(end)
        last = Chunk(usage=usage_object(usage)) if include_usage else finish
        last = replace(last, timings=timings_object(usage), reasoning=self._reasoning_object)
        return [*chunks, finish, last] if include_usage else [*chunks, last]

    def _sse(self, chunk: Chunk) -> bytes:
        if chunk.delta and not (chunk.finish or chunk.usage or chunk.timings or chunk.logprobs):
            return (self._before + dumps(self.choice(chunk.delta))[1:-1] + self._after).encode()
        if chunk.usage is not None and chunk.finish is None:
            choices = []
        else:
            logprobs = {"logprobs": chunk.logprobs} if chunk.logprobs is not None else {}
            choices = [{"index": 0, **self.choice(chunk.delta), **logprobs, "finish_reason": chunk.finish}]
        return f"data: {dumps({**self._head, 'choices': choices, **_extras(chunk)})}\n\n".encode()

    def _whole(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        deltas: dict[str, list[Any]] = {}
        logprob_chunks: list[dict[str, Any]] = []
        finish: str | None = None
        extras: dict[str, Any] = {}
        for chunk in chunks:
            for key, value in chunk.delta.items():
                deltas.setdefault(key, []).append(value)
            if chunk.logprobs is not None:
                logprob_chunks.append(chunk.logprobs)
            finish = chunk.finish or finish
            extras |= _extras(chunk)
        logprobs = {"logprobs": self._logprobs.fold(logprob_chunks)} if self._logprobs is not None else {}
        choice = {"index": 0, **self.whole_choice(deltas), **logprobs, "finish_reason": finish}
        return {**self._head, "object": self.whole_object, "choices": [choice], **extras}

    def take_logprobs(self) -> dict[str, Any] | None:
        """Return the log probabilities of the content delta that is being written; None if not asked for."""
        tokens, self._tokens = self._tokens, ()
        return self._logprobs.chunk(tokens) if self._logprobs is not None else None


def _comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


def _extras(chunk: Chunk) -> dict[str, Any]:
    pairs = (("usage", chunk.usage), ("timings", chunk.timings), ("reasoning", chunk.reasoning))
    return {key: value for key, value in pairs if value is not None}
