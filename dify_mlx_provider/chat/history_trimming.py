"""Sends a chat whose history may be longer than the context: the oldest turns are left out until the rest fits.

When     Before sending, where the estimate says that the prompt may leave too little room for an answer and the server
         counts tokens (mlx-backend) or would cut the prompt by itself, without a word. Otherwise when the server
         refuses the prompt. So a short conversation costs no request more than before.
How much The smallest cut of `turns` that fits (`cut_search`), as counted by the server, or in proportion to the
         numbers in its refusal. A cut frees about a quarter of the room, so that many turns follow with the same one.
Room     An answer gets what Max tokens asks for, but at most a quarter of the context: a prompt that leaves room for
         six tokens is of no use.

The log says once for each request how many turns were left out. A prompt that is too long without them is refused in
words that name the part which is too long (`oversized_prompt`).
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.chat.cut_search import CutSearch
from dify_mlx_provider.chat.oversized_prompt import explain
from dify_mlx_provider.chat.turns import Turns, estimate_tools, step_for
from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.requests import adapt_request, chat
from dify_mlx_provider.servers.token_count import count_tokens
from dify_mlx_provider.upstream.credentials import ServerKind
from dify_mlx_provider.upstream.errors import PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from dify_mlx_provider.upstream.credentials import Credentials

    type ChunkStream = Generator[dict[str, Any], None, None]
    type Documents = Callable[[], Sequence[tuple[str, str]]]

logger = logging.getLogger(__name__)

MAX_ANSWER_ROOM = 8192
"""Tokens kept free for an answer of a request without Max tokens, where the context is large enough."""

MAX_ESTIMATE_ERROR = 2
"""A prompt has at most so many times the tokens that are estimated; with few exceptions, which the server refuses."""

MAX_REFUSALS = 4
"""Refused prompts of one request, before everything goes that may be left out."""


@dataclass(frozen=True, slots=True)
class SentChat:
    """A request that was sent: the answer's chunks, and an estimate of the prompt's tokens, for who asks at its end."""

    chunks: ChunkStream
    estimated_tokens: Callable[[], int]


def chat_within_context(
    credentials: Credentials,
    body: Mapping[str, Any],
    *,
    shorten: bool = True,
    app_messages: int = 0,
    documents: Documents = tuple,
    max_tokens: int | None = None,
) -> SentChat:
    """Send a request of `messages.chat_request`; if it is too long, without its oldest turns.

    If not `shorten`, nothing is left out. `app_messages` is how many of the first user messages are the app's own
    prompt, `documents` gives the files whose texts stand in the messages, with their names, and `max_tokens` is the
    user's own limit of the answer: the request's may only be an end for what nobody reads. Raises what `requests.chat`
    raises; PromptTooLong says what to do.
    """
    request = _LongChat(credentials, body, shorten, app_messages, documents, max_tokens)
    return SentChat(request.answer(), request.estimated_tokens)


class _LongChat:
    """One request, sent as often as it takes."""

    def __init__(
        self,
        credentials: Credentials,
        body: Mapping[str, Any],
        shorten: bool,
        app_messages: int,
        documents: Documents,
        max_tokens: int | None,
    ) -> None:
        self._credentials, self._body = credentials, body
        self._shorten, self._documents = shorten, documents
        self._turns = Turns(body["messages"], app_messages=app_messages)
        self._tools_size = estimate_tools(body.get("tools") or ())
        self._max_tokens = max_tokens if max_tokens is not None and max_tokens > 0 else None
        self._kind = discovery.find_server(credentials).kind
        self._context = self._stated_context() if self._shorten and self._turns.count else None
        self._left_out = 0
        self._refusals = 0
        self._plan(self._context or 0)

    def answer(self) -> ChunkStream:
        """Send the request. A refusal is raised here, unless the server sends it as an answer's first chunk."""
        if self._context is not None and self._may_be_too_long(self._context):
            self._choose(self._limit(self._context))
        return self._chunks(self._send())

    def estimated_tokens(self) -> int:
        """Estimate the tokens of the prompt that was sent."""
        return self._size(self._left_out)

    def _send(self) -> ChunkStream:
        while True:
            try:
                return chat(self._credentials, self._shortened(self._left_out))
            except PromptTooLong as error:
                self._leave_out_more(error)

    def _chunks(self, chunks: ChunkStream) -> ChunkStream:
        """Yield the answer's chunks, from the first prompt that is not refused."""
        while True:
            try:
                first = next(chunks, None)
                break
            except PromptTooLong as error:
                self._leave_out_more(error)
                chunks = self._send()
        self._log()
        with closing(chunks):
            if first is not None:
                yield first
            yield from chunks

    # -- how much to leave out -----------------------------------------------------------------------

    def _stated_context(self) -> int | None:
        """The context's size by the form or by the server; the smaller one, if both say it."""
        model = discovery.find_model(str(self._body["model"]), self._credentials)
        sizes = (self._credentials.context_size, model.context_size if model is not None else None)
        return min((size for size in sizes if size is not None), default=None)

    def _reserve(self, context: int) -> int:
        """The tokens of the context that are kept for the answer."""
        return min(self._max_tokens or MAX_ANSWER_ROOM, context // 4)

    def _limit(self, context: int) -> int:
        """The most tokens the prompt should have."""
        return context - self._reserve(context)

    def _plan(self, context: int) -> None:
        """Lay out the cuts for a context of this size."""
        room = self._limit(context) - self._turns.instructions_size - self._tools_size
        self._cuts = self._turns.cuts(step_for(room))
        self._search = CutSearch([self._size(turns) for turns in self._cuts])
        self._planned_context = context

    def _size(self, turns: int) -> int:
        """The estimated tokens of the prompt without so many turns."""
        return self._turns.size_without_oldest(turns) + self._tools_size

    def _may_be_too_long(self, context: int) -> bool:
        if self._kind is ServerKind.MLX_BACKEND:
            return self._size(0) * MAX_ESTIMATE_ERROR > self._limit(context)
        return not discovery.PROFILES[self._kind].refuses_long_prompts and self._size(0) > self._limit(
            context
        )

    def _choose(self, limit: int) -> None:
        """Choose the smallest cut that fits."""
        if self._kind is ServerKind.MLX_BACKEND:
            cut = self._search.find(limit, lambda each: self._count(self._shortened(self._cuts[each])))
        else:
            cut = self._search.predict(limit)
        self._left_out = self._cuts[cut]

    def _leave_out_more(self, error: PromptTooLong) -> None:
        """Choose a larger cut after a refusal. Raises the refusal, with what to do, if there is none."""
        sent, size = self._left_out, self._size(self._left_out)
        self._context = error.overflow.context_length or self._context
        prompt, context = error.overflow.prompt_tokens, self._context
        counts_answer = prompt is not None and context is not None and prompt < context
        if not self._shorten or sent == self._turns.count:
            raise error if counts_answer else self._explained(error)
        # Without any number, the context is a little smaller than what was refused.
        context = context or size
        if context != self._planned_context:
            self._plan(context)
        self._search.calibrate(size, prompt or max(size, context + 1))
        for cut, turns in enumerate(self._cuts):
            if turns <= sent:
                self._search.rule_out(cut)
        limit = self._limit(context)
        if counts_answer:
            limit = context - (self._max_tokens or self._reserve(context))
            if self._search.tokens(len(self._cuts) - 1) > limit:
                raise error  # what is too long is the answer that was asked for
        self._refusals += 1
        if self._refusals < MAX_REFUSALS:
            self._choose(limit)
        else:
            self._left_out = self._turns.count

    # -- what is sent, counted and said --------------------------------------------------------------

    def _shortened(self, turns: int) -> dict[str, Any]:
        """The request without so many of its oldest turns."""
        return {**self._body, "messages": self._turns.without_oldest(turns)} if turns else dict(self._body)

    def _count(self, body: Mapping[str, Any]) -> int | None:
        """Count a prompt on the server; None if it cannot."""
        return count_tokens(self._credentials, adapt_request(body, self._kind))

    def _log(self) -> None:
        if not self._left_out:
            return
        before, after = (self._search.tokens(self._cuts.index(turns)) for turns in (0, self._left_out))
        context = "" if self._context is None else f" of {self._context} tokens"
        logger.info(
            "A conversation with %s no longer fits the context%s with room for an answer: the oldest %d of its %d "
            "turns were left out, and about %d of about %d tokens were sent.",
            *(self._body["model"], context, self._left_out, self._turns.count + 1, after, before),
        )

    def _explained(self, error: PromptTooLong) -> PromptTooLong:
        """The refusal, with what is too long or what to do."""
        if not self._shorten and self._turns.count:
            return PromptTooLong(
                f"{str(error).rstrip('.')}. Start a new conversation, or set Long conversations to shorten: then the "
                "oldest turns are left out.",
                error.overflow,
            )
        overflow = replace(error.overflow, context_length=self._context)
        return explain(
            PromptTooLong(str(error), overflow),
            self._shortened(self._left_out),
            last_turn=len(self._turns.last_turn),
            documents=self._documents(),
            reserve=self._reserve(self._context or 0),
            earlier_turns=self._left_out,
            count=self._count,
        )
