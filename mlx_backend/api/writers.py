"""What writers of replies share: a reply that is not streamed is what the stream would have added up to.

    ReplyWriter    `open`, `feed` for each event, `finish`; or `fold` for all of them at once
    StreamWriter   a whole reply is what it has gathered when it is closed
    BlockWriter    for APIs whose replies are blocks, one after the other: `begin`, `delta`, `end`

A block ends where one of another kind begins. A call that was cut never ends: it must not be run. Knows no API.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.api import json_text
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
from mlx_backend.engine.base import Progress, Queued

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mlx_backend.api.errors import ApiError
    from mlx_backend.chat.reply import ReplyEvent, TokenLogprobs, Usage
    from mlx_backend.chat.reply_group import GroupEvent


class ReplyWriter(ABC):
    """Writes one reply. What `open`, `feed` and `finish` return is sent as it is; b"" sends nothing."""

    def __init__(self, id_prefix: str) -> None:
        self.id = id_prefix + uuid.uuid4().hex
        """The reply's id, also for the log and the response header."""

    def open(self) -> bytes:
        """Return what is sent at once, before the first token: nothing."""
        return b""

    @abstractmethod
    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        """Write any event but the last. Where several replies were started, the events say whose they are."""

    @abstractmethod
    def finish(self, end: StreamEnd, usage: Usage) -> bytes:
        """Write the last event and whatever marks the end of a stream."""

    @abstractmethod
    def keepalive(self, reason: Progress | Queued | None = None) -> bytes:
        """Return what fills a silence; the `reason` for it, if that is the prefill or the queue."""

    def progress(self, _progress: Progress) -> bytes:
        """Write how far prefill is, each time that is known: nothing, unless the request asks for that."""
        return b""

    @abstractmethod
    def error(self, error: ApiError) -> bytes:
        """Write an error in mid-stream, which ends the stream."""

    @abstractmethod
    def fold(self, events: Iterable[ReplyEvent | GroupEvent], usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed. `usage` is final once the events are consumed."""


class StreamWriter(ReplyWriter):
    """The base of a writer: each event is written as it comes, and nothing is written a second time for the whole."""

    @abstractmethod
    def close(self, end: StreamEnd) -> bytes:
        """Write what is still open, without what the end itself is written as."""

    @abstractmethod
    def whole(self, end: StreamEnd, usage: Usage) -> Any:
        """Return the whole reply, once it is closed."""

    def fold(self, events: Iterable[ReplyEvent | GroupEvent], usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed."""
        end: StreamEnd | None = None
        for event in events:
            if isinstance(event, StreamEnd):
                end = event
            else:
                self.feed(event)
        assert end is not None  # or `events` raises
        self.close(end)
        return json_text.body(self.whole(end, usage))


@dataclass(frozen=True)
class Block:
    """A part of a reply that is being written. Of a call there are its index and its function's name."""

    kind: Literal["reasoning", "text", "call"]
    position: int
    channel: Channel = Channel.FINAL
    call: int = 0
    name: str = ""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it holds so far."""
        return "".join(self.texts)


class BlockWriter(StreamWriter):
    """The base of a writer of blocks. With `splits_channels` a text on another channel is a block of its own."""

    def __init__(self, id_prefix: str, *, splits_channels: bool) -> None:
        super().__init__(id_prefix)
        self._splits_channels = splits_channels
        self._block: Block | None = None
        self._num_blocks = 0
        self._tokens: Sequence[TokenLogprobs] = ()
        """Those of the text that comes next."""

    @abstractmethod
    def begin(self, block: Block) -> bytes:
        """Write that a block begins."""

    @abstractmethod
    def delta(self, block: Block, text: str) -> bytes:
        """Write more of a block."""

    @abstractmethod
    def end(self, block: Block, *, is_cut: bool) -> bytes:
        """Write that a block is complete, or cut."""

    def feed(self, event: ReplyEvent | GroupEvent) -> bytes:
        """Write an event but the last."""
        match event:
            case ReasoningDelta(text):
                return self._enter("reasoning", Channel.ANALYSIS) + self._more(text)
            case ContentLogprobs(tokens):
                self._tokens = [*self._tokens, *tokens]
            case ContentDelta(text, channel):
                return self._enter("text", channel) + self._more(text)
            case ToolCallStart(index, name):
                return self._leave() + self._begin(Block("call", self._num_blocks, call=index, name=name))
            case ToolCallDelta(_, arguments):
                return self._more(arguments)
            case ToolCallEnd(_, True):
                return self._end()
        return b""

    def close(self, end: StreamEnd) -> bytes:
        """End the block that is open."""
        return self._leave(is_cut=end.finish == "length")

    def _enter(self, kind: Literal["reasoning", "text"], channel: Channel) -> bytes:
        """Begin a block, unless the open one is of this kind."""
        block = self._block
        is_same = block is not None and block.kind == kind
        if is_same and not (self._splits_channels and block is not None and block.channel is not channel):
            return b""
        return self._leave() + self._begin(Block(kind, self._num_blocks, channel))

    def _begin(self, block: Block) -> bytes:
        self._block = block
        self._num_blocks += 1
        return self.begin(block)

    def _more(self, text: str) -> bytes:
        assert self._block is not None
        self._block.texts.append(text)
        return self.delta(self._block, text)

    def _leave(self, *, is_cut: bool = False) -> bytes:
        """End the open block, but for a call, which has been cut."""
        if self._block is not None and self._block.kind == "call":
            self._block = None
        return b"" if self._block is None else self._end(is_cut=is_cut)

    def _end(self, *, is_cut: bool = False) -> bytes:
        block, self._block = self._block, None
        assert block is not None
        return self.end(block, is_cut=is_cut)


def reason_fields(reason: Progress | Queued | None) -> dict[str, Any]:
    """Return why nothing has come for a while: how far prefill is (llama.cpp's names), or the place in the queue."""
    match reason:
        case Progress(processed, total, cached):
            return {"prompt_progress": {"total": total, "cache": cached, "processed": processed}}
        case Queued(position):
            return {"queue_position": position}
    return {}


def sse(kind: str, fields: Any) -> bytes:
    """Write a server-sent event of a type that its object repeats."""
    return f"event: {kind}\ndata: {json_text.dumps({'type': kind, **fields})}\n\n".encode()


def data_of_events(written: bytes) -> list[str]:
    """Return what whole server-sent events hold, each in one line."""
    mark = b"data: "
    return [line.removeprefix(mark).decode() for line in written.splitlines() if line.startswith(mark)]
