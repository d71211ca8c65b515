"""Ends answers that are no longer read, so that the server does not generate them to their end.

Dify does not tell its plugins when a user presses Stop. But it keeps the part of the answer that was shown, and the
user's next message brings it back: a history that continues an answer which still runs shows that no one waits for
it. mlx_backend/conversation/running_replies.py says what counts as proof, and why nothing less does; the server does
the same for its own clients. Here the scope is the app and its user, as far as Dify names them: plain chat apps name no
user, and 1.14 and older no app. The history tells the rest, as all users of one app may ask the same thing, but each
goes on from the answer that was shown to them. The instructions, which Dify fills anew for each question (knowledge,
the time of day), do not count, unless Dify names no app.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dify_plugin import get_current_session
from dify_plugin.entities.model.message import AssistantPromptMessage

from dify_mlx_provider.chat.think_block import CLOSE, OPEN
from dify_mlx_provider.upstream.errors import Unavailable
from mlx_backend.conversation.running_replies import History, RunningReplies

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from dify_plugin.entities.model.message import PromptMessage

    from mlx_backend.conversation.running_replies import Quote, RunningReply

    type ChunkStream = Generator[dict[str, Any], None, None]

logger = logging.getLogger(__name__)

# The texts of an answer, by name: all that Dify shows, and that without the thinking, as `separated` nodes keep it.
_SHOWN, _ANSWER = "shown", "answer"


def _quotes(message: Mapping[str, Any]) -> list[Quote]:
    text = message["content"]
    return [(_SHOWN, text), (_ANSWER, text)] if isinstance(text, str) else []


_replies = RunningReplies(_quotes)


def answer_to(messages: Sequence[PromptMessage], user: str | None, *, stream: bool) -> RunningReply:
    """End the answers that these messages show to be abandoned; return the one to them, not yet started."""
    session = get_current_session()
    app = session.app_id if session is not None else None
    scope = (app, user)
    ignored_roles = ("system",) if app else ()
    history = History.of([_plain(message) for message in messages], ignored_roles=ignored_roles)
    for _ in _replies.supersede(scope, history):
        logger.info(
            "Stopped an answer that nobody is waiting for: its conversation has gone on from a part of it."
        )
    return _replies.reply(scope, history, is_streamed=stream)


def until_abandoned(chunks: ChunkStream, running: RunningReply) -> ChunkStream:
    """Yield a server's chunks as long as somebody waits for them; closing the rest closes the connection.

    Raises Unavailable afterwards. A server that generates sends chunks, so it is noticed within one.
    """
    try:
        for chunk in chunks:
            if running.is_superseded:
                raise Unavailable("this answer was ended, because its conversation has gone on without it.")
            yield chunk
    finally:
        chunks.close()


class ShownText:
    """Tells a running reply what Dify is shown, piece by piece."""

    def __init__(self, running: RunningReply) -> None:
        self._running = running
        self._is_thinking = False

    def add(self, piece: str) -> None:
        """Note a piece; the tags of a thinking block are pieces of their own."""
        self._running.add(_SHOWN, piece)
        self._is_thinking = piece == OPEN or (self._is_thinking and piece != CLOSE)
        if not self._is_thinking and piece != CLOSE:
            self._running.add(_ANSWER, piece)


def _plain(message: PromptMessage) -> dict[str, Any]:
    """A message as it is compared: its text, and of files their kind, because Dify signs their addresses anew."""
    content: Any = message.content or ""
    if isinstance(content, list):
        content = [
            getattr(part, "data", "") if part.type.value == "text" else part.type.value for part in content
        ]
    plain = {"role": message.role.value, "content": content}
    if isinstance(message, AssistantPromptMessage) and message.tool_calls:
        plain["tool_calls"] = [
            {"function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in message.tool_calls
        ]
    return plain
