"""POST /v1/chat/completions.

`role` comes once, before everything else. A tool call is sent whole, with its index, and only if it is complete:
one that the token limit cut must not be run. Reasoning goes to a field of its own, a block in the content, or nowhere.
"""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from mlx_backend.api.openai.stream import (
    ChatLogprobs,
    ChoiceWriter,
    Chunk,
    ChunkWriter,
    ReplyForm,
    reasoning_object,
)
from mlx_backend.api.tools import Tools
from mlx_backend.chat.reply import ContentLogprobs
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
    from collections.abc import Callable, Mapping

    from mlx_backend.api.openai.chat_body import ChatBody
    from mlx_backend.api.openai.stream import LogprobsFormat
    from mlx_backend.api.tools import Arguments
    from mlx_backend.chat.reply import Reply, ReplyEvent
    from mlx_backend.chat.reply_group import ReplyGroup
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient


type Delta = dict[str, Any]


def reasoning_deltas(fmt: ReasoningFormat, field: ReasoningField) -> ReasoningDeltas:
    """Return the writer for a format; `field` is the name of the field of its own."""
    match fmt:
        case ReasoningFormat.SEPARATE if field is ReasoningField.BOTH:
            return ReasoningDeltas(ReasoningField.REASONING_CONTENT, ReasoningField.REASONING)
        case ReasoningFormat.SEPARATE:
            return ReasoningDeltas(field)
        case ReasoningFormat.THINK:
            return _ThinkBlock()
        case ReasoningFormat.DETAILS:
            return _DetailsBlock()
        case ReasoningFormat.HIDDEN | ReasoningFormat.RAW:  # raw has no reasoning events: all is content
            return ReasoningDeltas()


class ReasoningDeltas:
    """Writes the reasoning of one reply to fields of its own; without any it is hidden."""

    def __init__(self, *fields: ReasoningField) -> None:
        self._fields = [str(field) for field in fields]

    def feed(self, text: str) -> list[Delta]:
        """Write more reasoning."""
        return [dict.fromkeys(self._fields, text)] if self._fields else []

    def close(self) -> list[Delta]:
        """Write what ends it, if it was begun: an answer, a call or the end follows."""
        return []


class _Block(ReasoningDeltas, ABC):
    """A block in the content. Each tag is a delta of its own; an open block is always closed."""

    opening: str
    closing: str

    def __init__(self) -> None:
        super().__init__()
        self._open = False

    def feed(self, text: str) -> list[Delta]:
        deltas = []
        if not self._open:
            self._open = True
            deltas.append({"content": self.opening})
        body = self.body(text)
        return [*deltas, {"content": body}] if body else deltas

    def close(self) -> list[Delta]:
        if not self._open:
            return []
        self._open = False
        return [{"content": rest} for rest in (self.rest(), self.closing) if rest]

    @abstractmethod
    def body(self, text: str) -> str:
        """Return the text as it stands in the block, but for what is held back."""

    def rest(self) -> str:
        """Return what was held back."""
        return ""


class _ThinkBlock(_Block):
    """`<think>`. A tag spelt inside the reasoning would end the block early, so its `<` becomes `‹`."""

    opening = "<think>\n"
    closing = "\n</think>\n\n"
    _TAGS = ("<think", "</think")

    def __init__(self) -> None:
        super().__init__()
        self._held = ""  # the end of the text, if it may become a tag

    def body(self, text: str) -> str:
        text = self._held + text
        for tag in self._TAGS:
            text = text.replace(tag, "‹" + tag[1:])
        at = text.rfind("<")
        undecided = at >= 0 and any(tag.startswith(text[at:]) for tag in self._TAGS)
        self._held = text[at:] if undecided else ""
        return text[: len(text) - len(self._held)]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


class _DetailsBlock(_Block):
    """What Open WebUI writes itself: escaped, and every line quoted."""

    opening = '<details type="reasoning" done="true">\n<summary>Thought</summary>\n> '
    closing = "\n</details>\n\n"

    def body(self, text: str) -> str:
        return html.escape(text).replace("\n", "\n> ")


def start(body: ChatBody, service: Service, client: QueueClient) -> tuple[Reply | ReplyGroup, ChunkWriter]:
    """Answer a conversation."""
    settings, tools = service.settings, body.tools or Tools()
    reasoning_format = body.reasoning_format_or(settings.reasoning_format)
    reply = service.chat_replies(body.request(reasoning_format), body.num_choices, client)
    choices = [
        ChatWriter(
            call_id=each.call_id,
            tools=tools,
            reasoning_format=reasoning_format,
            reasoning_field=settings.reasoning_field,
            logprobs=ChatLogprobs(service.engine.tokenizer.bytes_of) if body.logprobs else None,
        )
        for each in reply.replies
    ]
    options = body.stream_fields(reply)
    return reply, ChunkWriter(FORM, service.model_id, choices, reasoning=reasoning_object(reply), **options)


FORM = ReplyForm("chatcmpl-", "chat.completion.chunk", "chat.completion")


class ChatWriter(ChoiceWriter):
    """Writes one reply to a conversation. `call_id` gives the id of a call of `tools` by its index."""

    def __init__(
        self,
        *,
        call_id: Callable[[int], str],
        tools: Tools,
        reasoning_format: ReasoningFormat = ReasoningFormat.SEPARATE,
        reasoning_field: ReasoningField = ReasoningField.REASONING_CONTENT,
        logprobs: LogprobsFormat | None = None,
    ) -> None:
        super().__init__(logprobs=logprobs)
        self._call_id = call_id
        self._reasoning = reasoning_deltas(reasoning_format, reasoning_field)
        self._tools = tools
        self._calls: dict[int, tuple[str, Arguments]] = {}
        self._complete_calls: set[int] = set()

    def opening(self) -> list[Chunk]:
        """Return the chunk with the role."""
        return [Chunk({"role": "assistant"})]

    def chunks(self, event: ReplyEvent) -> list[Chunk]:
        """Return the chunks of an event."""
        match event:
            case ReasoningDelta(text):
                return [Chunk(delta) for delta in self._reasoning.feed(text)]
            case ContentLogprobs(tokens):
                self._tokens = tokens
            case ContentDelta(text):
                return [*self._reasoning_end(), Chunk({"content": text}, self.take_logprobs())]
            case ToolCallStart(index, name):
                tool = self._tools.named(name)
                self._calls[index] = tool.kind, tool.text()
                head = {"id": self._call_id(index), "type": tool.kind}
                return [*self._reasoning_end(), self._call_chunk(index, "", head, name=tool.name)]
            case ToolCallDelta(index, arguments):
                more = self._calls[index][1].feed(arguments)
                return [self._call_chunk(index, more)] if more else []
            case ToolCallEnd(index, complete):
                if complete:
                    self._complete_calls.add(index)
                    more, _ = self._calls[index][1].close()
                    return [self._call_chunk(index, more)] if more else []
            case StreamEnd(finish):
                return [*self._reasoning_end(), self.ending(finish)]
        return []

    def choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        """Return a choice's delta."""
        return {"delta": delta}

    def whole_choice(self, deltas: dict[str, list[Any]]) -> dict[str, Any]:
        """Return a choice's message: texts joined, calls in order. With calls alone the content is null.

        A call that was cut stays open in a stream. Here it is left out.
        """
        texts = {key: "".join(parts) for key, parts in deltas.items() if key not in ("role", "tool_calls")}
        whole = []
        for [delta] in deltas.get("tool_calls", ()):
            if "id" in delta and delta["index"] in self._complete_calls:
                kind, text = self._calls[delta["index"]]
                called = {**delta[kind], text.name: text.close()[1]}
                whole.append({"id": delta["id"], "type": kind, kind: called})
        message: dict[str, Any] = {"role": "assistant", "content": None if whole else "", **texts}
        return {"message": {**message, "tool_calls": whole} if whole else message}

    def _reasoning_end(self) -> list[Chunk]:
        return [Chunk(delta) for delta in self._reasoning.close()]

    def _call_chunk(self, index: int, more: str, head: Mapping[str, str] = {}, **name: str) -> Chunk:
        kind, text = self._calls[index]
        return Chunk({"tool_calls": [{"index": index, **head, kind: {**name, text.name: more}}]})
