"""Chunks to bytes, for both APIs whose stream is chunks with `choices`: chat.py and completions.py.

    events ─chunks─▶ Chunk ─┬─ sse ──▶ one server-sent event
                            └─ fold ─▶ the JSON object of a reply that is not streamed

The whole reply is the fold of the chunks that a stream sends: there is no second path. For clients' sake a delta holds
one thing, and no key is null where a client expects an object. With them go `usage`, `timings` (under llama.cpp's
names), `reasoning` and log probabilities. Knows nothing of HTTP, engines or requests.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mlx_backend import __version__
from mlx_backend.api import json_text
from mlx_backend.api.json_text import dumps
from mlx_backend.api.openai.base import error_object
from mlx_backend.api.writers import ReplyWriter
from mlx_backend.chat.reply_group import GroupEvent
from mlx_backend.conversation.events import StreamEnd
from mlx_backend.engine.base import Progress, Queued

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.api.errors import ApiError
    from mlx_backend.api.openai.objects import (
        ProgressObject,
        PromptTokens,
        ReasoningObject,
        TimingsObject,
        UsageObject,
    )
    from mlx_backend.chat.reply import EchoedPrompt, Reply, ReplyEvent, TokenLogprobs, Usage
    from mlx_backend.chat.reply_group import ReplyGroup
    from mlx_backend.engine.base import Logprobs, PromptLogprobs


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

    Some are ours. Drafts are counted if there were any. A reply that was ended because it repeated itself says so, and
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
    if usage.match is not None:
        timings["cache_matched_n"] = usage.match.tokens
        if usage.broken_by:
            timings["cache_broken_by"] = usage.broken_by
    if usage.drafted_tokens:
        timings["draft_n"] = usage.drafted_tokens
        timings["draft_n_accepted"] = usage.accepted_tokens
    if usage.repeated_run is not None:
        timings["stopped_by"] = "repetition"
        timings["repeated_n"] = usage.repeated_run
    return timings


def reasoning_object(reply: Reply | ReplyGroup) -> ReasoningObject | None:
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
    """`{"tokens": […], "token_logprobs": […], "top_logprobs": [{…}, …], "text_offset": […]}`.

    Offsets count characters from the beginning of the choice's text. A token that shows nothing, such as the one that
    ends the reply, has its place all the same.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._begun = 0  # characters, in all tokens so far
        self._shift = 0
        self._prompt: Sequence[int] = ()

    def chunk(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the tokens of one delta."""
        return self._columns((each.token, each.logprobs) for each in tokens)

    def echo(self, prompt: EchoedPrompt) -> dict[str, Any]:
        """Write the first token of a prompt that the text begins with. Nothing is before it: it has no probability."""
        self._prompt = prompt.tokens
        # The tokens may spell a little more: one for the beginning of a text, or a blank before its first word.
        self._shift = len(prompt.text) - sum(_begun_in(self._bytes_of(token)) for token in self._prompt)
        return self._columns([(self._prompt[0], None)])

    def prompt(self, scored: PromptLogprobs) -> dict[str, Any]:
        """Write more tokens of that prompt."""
        tokens = self._prompt[scored.start : scored.start + len(scored.logprobs)]
        return self._columns(zip(tokens, scored.logprobs, strict=True))

    def fold(self, chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Fold the chunks of a reply."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns = list(chunks)
        return {name: [value for chunk in columns for value in chunk[name]] for name in names}

    def _columns(self, tokens: Iterable[tuple[int, Logprobs | None]]) -> dict[str, Any]:
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprobs in tokens:
            data = self._bytes_of(token)
            text = _shown(data)
            chosen: float | None = None
            top: dict[str, float] | None = None
            if logprobs is not None:
                chosen = max(logprobs.chosen, MIN_LOGPROB)
                top = {text: chosen}
                for other, value in logprobs.top:  # some tokens spell the same: the likeliest counts
                    top.setdefault(_shown(self._bytes_of(other)), max(value, MIN_LOGPROB))
            columns["tokens"].append(text)
            columns["token_logprobs"].append(chosen)
            columns["top_logprobs"].append(top)
            # A token may go on with a character that the one before it has begun.
            is_inside = 0x80 <= int.from_bytes(data[:1]) < 0xC0
            columns["text_offset"].append(max(0, self._begun - is_inside + self._shift))
            self._begun += _begun_in(data)
        return columns


def _shown(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:  # part of a character, as OpenAI writes it
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _begun_in(data: bytes) -> int:
    """Return how many characters begin in a piece of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


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
    progress: ProgressObject | None = None


class ChoiceWriter(ABC):
    """Writes the chunks of one choice. `logprobs` writes its log probabilities, if they are asked for."""

    def __init__(self, *, logprobs: LogprobsFormat | None = None) -> None:
        self._logprobs = logprobs
        self._tokens: Sequence[TokenLogprobs] = ()
        """Those of the content delta, or of the end, that comes next."""

    @abstractmethod
    def opening(self) -> list[Chunk]:
        """Return the chunks before the first event."""

    @abstractmethod
    def chunks(self, event: ReplyEvent) -> list[Chunk]:
        """Return the chunks of an event. A StreamEnd's last chunk has the finish reason."""

    @abstractmethod
    def choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return how the choice carries a delta."""

    @abstractmethod
    def whole_choice(self, deltas: dict[str, list[Any]]) -> dict[str, Any]:
        """Return how the choice carries the whole reply, from the values that its deltas had for each key."""

    def fold(self, chunks: Iterable[Chunk]) -> dict[str, Any]:
        """Return the whole choice."""
        deltas: dict[str, list[Any]] = {}
        logprob_chunks: list[dict[str, Any]] = []
        finish: str | None = None
        for chunk in chunks:
            for key, value in chunk.delta.items():
                deltas.setdefault(key, []).append(value)
            if chunk.logprobs is not None:
                logprob_chunks.append(chunk.logprobs)
            finish = chunk.finish or finish
        logprobs = {"logprobs": self._logprobs.fold(logprob_chunks)} if self._logprobs is not None else {}
        return {**self.whole_choice(deltas), **logprobs, "finish_reason": finish}

    def take_logprobs(self) -> dict[str, Any] | None:
        """Return the log probabilities of the content delta that is being written; None if not asked for."""
        tokens, self._tokens = self._tokens, ()
        return self._logprobs.chunk(tokens) if self._logprobs is not None else None

    def ending(self, finish: str) -> Chunk:
        """Return the chunk with the finish reason, and with the log probabilities of what ended the reply."""
        return Chunk(finish=finish, logprobs=self.take_logprobs() if self._tokens else None)


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What an API's replies are called: their ids, their chunks, and the object of a reply that is not streamed."""

    id_prefix: str
    chunk_object: str
    whole_object: str


class ChunkWriter(ReplyWriter):
    """Writes one choice or several.

    Events are those of a `Reply` or a `ReplyGroup`. With `include_usage` a stream ends with the usage; `running_usage`
    gives what each chunk is sent with. With `return_progress` a stream says how far prefill is.
    """

    def __init__(
        self,
        form: ReplyForm,
        model: str,
        choices: Sequence[ChoiceWriter],
        *,
        include_usage: bool = False,
        running_usage: Callable[[], Usage] | None = None,
        return_progress: bool = False,
        reasoning: ReasoningObject | None = None,
    ) -> None:
        super().__init__(form.id_prefix)
        self._form = form
        self._choices = choices
        self._include_usage = include_usage
        self._running_usage = running_usage
        self._return_progress = return_progress
        self._reasoning_object = reasoning
        self._started = time.monotonic()
        self._num_ended = 0
        self._last: tuple[int, Chunk] | None = None
        """The chunk with the finish reason of the choice that ends last: more may go with it."""
        self._head = {
            "id": self.id,
            "object": form.chunk_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": _FINGERPRINT,
        }
        # Most chunks differ in their delta alone: the rest is written once.
        self._before = "data: " + dumps(self._head)[:-1] + ',"choices":[{"index":'
        self._after = ',"finish_reason":null}]}\n\n'

    def open(self) -> bytes:
        """Return the opening chunks, or a comment: headers are sent with the first bytes."""
        opening = [
            self._sse(index, chunk) for index, each in enumerate(self._choices) for chunk in each.opening()
        ]
        return b"".join(opening) or _comment("accepted")

    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        """Write one event."""
        index, event = _of_choice(event)
        chunks = self._choices[index].chunks(event)
        if isinstance(event, StreamEnd):
            self._num_ended += 1
            if self._num_ended == len(self._choices):
                self._last = index, chunks.pop()
        return b"".join([self._sse(index, chunk) for chunk in chunks])

    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the last chunks and OpenAI's end marker: usage in a chunk of its own if asked for."""
        data = self.feed(end) if self._last is None else b""
        assert self._last is not None
        index, finish = self._last
        timings, reasoning = timings_object(usage), self._reasoning_object
        if self._include_usage:
            data += self._sse(index, finish)
            finish = Chunk(usage=usage_object(usage))
        return data + self._sse(index, replace(finish, timings=timings, reasoning=reasoning)) + DONE

    def keepalive(self, reason: Progress | Queued | None = None) -> bytes:
        """Return a comment, which clients ignore: how far prefill is, or where in the queue the request waits."""
        match reason:
            case Progress(processed, total):
                return _comment(f"keepalive {processed}/{total}")
            case Queued(position):
                return _comment(f"keepalive queued {position}")
        return _comment("keepalive")

    def progress(self, progress: Progress) -> bytes:
        """Write how far prefill is as a chunk, under llama.cpp's names, if the request asks for it."""
        if not self._return_progress:
            return b""
        values: ProgressObject = {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.processed,
            "time_ms": round((time.monotonic() - self._started) * 1000),
        }
        return self._sse(0, Chunk(progress=values))

    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream: the status line is gone, so the error object travels as an event."""
        return f"data: {dumps(error_object(error))}\n\n".encode()

    def fold(self, events: Iterable[ReplyEvent | GroupEvent], usage: Usage) -> bytes:
        """Fold the chunks of all events into one object, always with usage and timings."""
        chunks = [each.opening() for each in self._choices]
        for event in events:
            if isinstance(event, GroupEvent) or len(chunks) == 1:  # else the end of all
                index, event = _of_choice(event)
                chunks[index] += self._choices[index].chunks(event)
        last = Chunk(
            usage=usage_object(usage), timings=timings_object(usage), reasoning=self._reasoning_object
        )
        choices = [{"index": index, **each.fold(chunks[index])} for index, each in enumerate(self._choices)]
        whole = {**self._head, "object": self._form.whole_object, "choices": choices, **_extras(last)}
        return json_text.body(whole)

    def _sse(self, index: int, chunk: Chunk) -> bytes:
        choice, running_usage = self._choices[index].choice, self._running_usage
        if chunk.delta and running_usage is None and not (chunk.finish or chunk.logprobs):
            return f"{self._before}{index},{dumps(choice(chunk.delta))[1:-1]}{self._after}".encode()
        if chunk.usage is not None:
            choices = []
        else:
            logprobs = {"logprobs": chunk.logprobs} if chunk.logprobs is not None else {}
            choices = [{"index": index, **choice(chunk.delta), **logprobs, "finish_reason": chunk.finish}]
            if running_usage is not None:
                chunk = replace(chunk, usage=usage_object(running_usage()))
        return f"data: {dumps({**self._head, 'choices': choices, **_extras(chunk)})}\n\n".encode()


def _of_choice(event: ReplyEvent | GroupEvent) -> tuple[int, ReplyEvent]:
    return (event.index, event.event) if isinstance(event, GroupEvent) else (0, event)


def _comment(text: str) -> bytes:
    return f": {text}\n\n".encode()


def _extras(chunk: Chunk) -> dict[str, Any]:
    pairs = (
        ("usage", chunk.usage),
        ("timings", chunk.timings),
        ("reasoning", chunk.reasoning),
        ("prompt_progress", chunk.progress),
    )
    return {key: value for key, value in pairs if value is not None}
