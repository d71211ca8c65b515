"""Ends the replies that a new request shows to be abandoned: its history continues what they have said so far.

Clients that close their connection when a user presses Stop do not need this. conversation/running_replies.py says what
counts as proof, and why nothing less does. Here the scope is the field `user`: one user's request ends no other user's
reply. Requests without it end nothing: of two people who began with the same question, one may go on from an old answer
while the other still reads the same words. Knows no HTTP.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.message_parts import REASONING_CONTENT
from mlx_backend.conversation.running_replies import History, RunningReplies

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.chat.request import ChatRequest
    from mlx_backend.conversation.running_replies import Quote, RunningReply

log = logging.getLogger(__name__)

CONTENT, REASONING = "content", "reasoning"
"""The texts of a reply, by name."""


class SupersededReplies:
    """The running replies of one model. Safe to use from several threads."""

    def __init__(self, model_id: str) -> None:
        self._model_id = model_id
        self._replies = RunningReplies(_quotes)

    def reply_to(self, request: ChatRequest) -> RunningReply | None:
        """End what the request supersedes, and return its own reply, not yet started; None where it has no `user`.

        The messages must be canonical, or have been found valid.
        """
        user = request.fields.get("user")
        if not isinstance(user, str) or not user:
            return None
        history = History.of(request.messages)
        for _ in self._replies.supersede(user, history):
            log.info(
                "Stopped a reply of %s that nobody is waiting for: a newer request goes on from a part of it.",
                self._model_id,
            )
        return self._replies.reply(user, history, is_streamed=request.fields.get("stream") is True)


def _quotes(message: Mapping[str, Any]) -> list[Quote]:
    """Return what an assistant's message quotes: its text, or, of a reply stopped in its reasoning, that."""
    *_, quoting = sanitise([{"role": "user", "content": "?"}, message])
    if quoting["role"] != "assistant":
        return []
    content, reasoning = quoting["content"], quoting.get(REASONING_CONTENT, "")
    return [(CONTENT, content)] if content.strip() else [(REASONING, reasoning)]
