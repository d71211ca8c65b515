"""Sends a chat whose history may be longer than the context: the oldest turns are left out until the rest fits.

What     A history has three parts. The instructions always stay: system messages, wherever they stand, and the user
         messages of the app's own prompt, which Dify puts before the history (retrieved knowledge stands in these, or
         in the last question). So does the last turn: the question that is to be answered, and the tool rounds since.
         The turns between them, each from a user's message to the message before the next one, may be left out: whole,
         and the oldest first.
When     Before sending, where the estimate says that the prompt may leave too little room for an answer and the server
         counts tokens (mlx-backend) or would cut the prompt by itself, without a word. Otherwise when the server
         refuses the prompt. So a short conversation costs no request more than before.
How much The smallest cut that fits, as counted by the server, or in proportion to the numbers in its refusal. What was
         counted for one cut predicts the others, so two or three counts decide it. Cuts lie about a quarter of the room
         apart, so that many turns follow with the same one, and where they lie depends on nothing but the texts before
         them: the next turn finds the same cut, and the server's prefix cache still holds.
Room     An answer gets what Max tokens asks for, but at most a quarter of the context: a prompt that leaves room for
         six tokens is of no use.

The log says once for each request how many turns were left out. A prompt that is too long without them is refused in
words that name the largest part of it, its tokens and those there is room for; where the server counts, both are exact.
Sizes are estimated tokens. Knows no Dify.
"""

from __future__ import annotations

import json
import logging
import math
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate
from itertools import count as count_from
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.requests import adapt_request, chat
from dify_mlx_provider.servers.token_count import TOKENS_PER_MESSAGE, count_tokens, estimate_tokens
from dify_mlx_provider.upstream.errors import PromptTooLong
from mlx_backend.conversation.history import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from dify_mlx_provider.upstream.credentials import Credentials

    type Message = Mapping[str, Any]
    type Body = Mapping[str, Any]
    type Documents = Sequence[tuple[str, str]]
    type ChunkStream = Generator[dict[str, Any], None, None]

logger = logging.getLogger(__name__)

MAX_ANSWER_ROOM = 8192
"""Tokens kept free for an answer of a request without Max tokens, where the context is large enough."""

MAX_ESTIMATE_ERROR = 2
"""How many times its estimated tokens a prompt may have; with few exceptions, which the server refuses."""

MAX_REFUSALS = 4
"""Refused prompts of one request, before everything goes that may be left out."""

MAX_GUESSES = 4
"""Counts that follow the prediction; the others halve what is left."""

TOKENS_PER_FILE = 1000
"""Tokens of an image, a recording or another file, roughly."""

_INSTRUCTION_ROLES = ("system", "developer")


# -- the parts of a history ----------------------------------------------------------------------------------


class ChatTurns:
    """A request's messages, in canonical form (`conversation.history`). `app_messages` as `count_app_messages` says."""

    def __init__(self, messages: Sequence[Message], *, app_messages: int = 0) -> None:
        self.messages = messages
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        last = _start_of_last_turn(messages, users)
        history = users[app_messages - 1] + 1 if app_messages else 0
        while history < last and messages[history]["role"] in _INSTRUCTION_ROLES:
            history += 1
        # What stands before the first question, such as the rest of a turn that the client cut, is a turn too.
        questions = [index for index in users[app_messages:] if index < last]
        self._starts = sorted({min(history, last), *questions, last})
        sizes = [estimate_message(message) for message in messages]
        may_go = [
            0 if index < self._starts[0] or message["role"] in _INSTRUCTION_ROLES else size
            for index, (message, size) in enumerate(zip(messages, sizes, strict=True))
        ]
        before = [0, *accumulate(may_go)]
        self._left_out = [before[start] for start in self._starts]
        self._size = sum(sizes)
        self.instructions_size = self._size - before[-1]
        """Estimated tokens of what is never left out, but for the last turn."""

    @property
    def count(self) -> int:
        """How many turns may be left out."""
        return len(self._starts) - 1

    @property
    def last_turn(self) -> Sequence[Message]:
        """The last question, and the tool rounds since."""
        return self.messages[self._starts[-1] :]

    def without_oldest(self, turns: int) -> list[Message]:
        """Return the messages without that many of the oldest turns."""
        first, start = self._starts[0], self._starts[turns]
        between = [message for message in self.messages[first:start] if message["role"] in _INSTRUCTION_ROLES]
        return [*self.messages[:first], *between, *self.messages[start:]]

    def size_without_oldest(self, turns: int) -> int:
        """Return the estimated tokens of `without_oldest(turns)`."""
        return self._size - self._left_out[turns]

    def cuts(self, step: int) -> list[int]:
        """Return the numbers of turns that may be left out, ascending: none, those of a grid, all.

        A cut lies where the turns before it first reach a multiple of `step` tokens. The cuts of a doubled step are
        among them.
        """
        passed = [tokens // step for tokens in self._left_out]
        grid = [turns for turns in range(1, self.count) if passed[turns] > passed[turns - 1]]
        return [0, *grid, self.count] if self.count else [0]


def _start_of_last_turn(messages: Sequence[Message], users: Sequence[int]) -> int:
    """The index of the last question.

    Dify's ReAct agents write their rounds into one assistant message after the question, and end with a user message
    that says `continue` or repeats the question.
    """
    if not users:
        return 0
    last = users[-1]
    if len(users) > 1 and messages[last - 1]["role"] == "assistant":
        goes_on = messages[last].get("content") in ("continue", messages[users[-2]].get("content"))
        if goes_on and str(messages[last - 1].get("content")).startswith("Thought:"):
            return users[-2]
    return last


def count_app_messages(roles: Iterable[str]) -> int:
    """Return how many user messages are the app's own prompt, from the roles as Dify sent them.

    Dify writes a prompt's own messages before the history. A question of the history is followed by its answer, if only
    an empty one; a user message that another follows at once is no question.
    """
    rest = [role for role in roles if role not in _INSTRUCTION_ROLES]
    count = 0
    while rest[count : count + 2] == ["user", "user"]:
        count += 1
    return count


def step_for(room: int) -> int:
    """Return the distance of cuts for a history that has `room` tokens: about a quarter, rounded to a power of two.

    Rounded, because a step that followed every change of the room would move the cuts each time.
    """
    return 1 << max(0, round(math.log2(max(room, 1) / 4)))


def smallest_cut(
    sizes: Sequence[int], limit: int, count: Callable[[int], int | None], ratio: float = 1.0
) -> int:
    """Return the index of the first cut that fits; the last one if none does.

    `sizes` are the estimated tokens of the prompt with each cut, the largest first; `ratio` is the tokens of each
    estimated one. `count` returns a prompt's tokens, or None if the server cannot say; then the prediction decides.
    """
    first, end = 0, len(sizes)
    for guess in count_from():
        predicted = next((cut for cut in range(first, end) if sizes[cut] * ratio <= limit), end)
        if first == end:
            break
        # A prediction that agrees with what is known already is checked at its border.
        cut = min(predicted, end - 1) if guess < MAX_GUESSES else (first + end) // 2
        tokens = count(cut)
        if tokens is None:
            end = predicted
            break
        ratio = tokens / max(1, sizes[cut])
        if tokens <= limit:
            end = cut
        else:
            first = cut + 1
    return min(end, len(sizes) - 1)


def estimate_message(message: Message) -> int:
    """Estimate a message's tokens."""
    size = TOKENS_PER_MESSAGE + estimate_tokens(str(message.get("reasoning_content") or ""))
    content = message.get("content") or ""
    for part in [content] if isinstance(content, str) else content:
        text = part if isinstance(part, str) else part.get("text")
        size += TOKENS_PER_FILE if text is None else estimate_tokens(text)
    return size + sum(
        estimate_tokens(call["function"]["name"]) + estimate_tokens(call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )


def estimate_prompt(body: Body) -> int:
    """Estimate the tokens of a request's prompt."""
    return sum(map(estimate_message, body["messages"])) + _estimate_tools(body)


def _estimate_tools(body: Body) -> int:
    return sum(estimate_tokens(json.dumps(tool, ensure_ascii=False)) for tool in body.get("tools") or ())


# -- sending -------------------------------------------------------------------------------------------------


class LongChat:
    """One request of `messages.chat_request`, sent as often as it takes; if it is too long, without its oldest turns.

    If not `shorten`, nothing is left out. `app_messages` is how many of the first user messages are the app's own
    prompt, `documents` gives the files whose texts stand in the messages, with their names, and `max_tokens` is the
    user's own limit of the answer: the request's may only be an end for what is never read.
    """

    def __init__(
        self,
        credentials: Credentials,
        body: Body,
        *,
        shorten: bool = True,
        app_messages: int = 0,
        documents: Callable[[], Documents] = tuple,
        max_tokens: int | None = None,
    ) -> None:
        self._credentials, self._body = credentials, body
        self._shorten, self._documents = shorten, documents
        self._turns = ChatTurns(body["messages"], app_messages=app_messages)
        self._tools_size = _estimate_tools(body)
        self._max_tokens = max_tokens if max_tokens is not None and max_tokens > 0 else None
        self._profile = discovery.find_profile(credentials)
        self._context = self._stated_context() if shorten and self._turns.count else None
        # How many turns are left out, and the largest number known to be too few.
        self._left_out, self._too_few = 0, -1
        # The prompt's tokens: for each estimated one, and as counted by the turns left out.
        self._ratio = 1.0
        self._counted: dict[int, int] = {}
        self._refusals = 0

    def answer(self) -> ChunkStream:
        """Send the request; return the answer's chunks. Raises what `requests.chat` raises.

        A refusal (PromptTooLong, which says what to do) is raised here, unless the server sends it as the first chunk.
        """
        if (context := self._context) is not None and self._may_be_too_long(context):
            self._choose(context, self._limit(context))
        return self._chunks(self._send())

    def estimated_tokens(self) -> int:
        """Estimate the tokens of the prompt that was sent."""
        return self._size(self._left_out)

    def _send(self) -> ChunkStream:
        while True:
            try:
                return chat(self._credentials, self._without_oldest(self._left_out))
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

    def _log(self) -> None:
        if not self._left_out:
            return
        logger.info(
            "A conversation with %s no longer fits the context%s with room for an answer: the oldest %d of its %d "
            "turns were left out, and about %d of about %d tokens were sent.",
            self._body["model"],
            "" if self._context is None else f" of {self._context} tokens",
            self._left_out,
            self._turns.count + 1,
            self._tokens(self._left_out),
            self._tokens(0),
        )

    # -- how much to leave out; turns are how many of the oldest ones -------------------------------------------

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

    def _size(self, turns: int) -> int:
        """The estimated tokens of the prompt without these turns."""
        return self._turns.size_without_oldest(turns) + self._tools_size

    def _tokens(self, turns: int) -> int:
        """The tokens of the prompt without these turns: as counted, or as predicted."""
        return self._counted.get(turns, round(self._size(turns) * self._ratio))

    def _without_oldest(self, turns: int) -> dict[str, Any]:
        return {**self._body, "messages": self._turns.without_oldest(turns)} if turns else dict(self._body)

    def _may_be_too_long(self, context: int) -> bool:
        if self._profile.counts_tokens:
            return self._size(0) * MAX_ESTIMATE_ERROR > self._limit(context)
        return not self._profile.refuses_long_prompts and self._size(0) > self._limit(context)

    def _choose(self, context: int, limit: int) -> None:
        """Choose the smallest cut with which the prompt has at most `limit` tokens."""
        room = self._limit(context) - self._turns.instructions_size - self._tools_size
        cuts = [turns for turns in self._turns.cuts(step_for(room)) if turns > self._too_few]
        sizes = [self._size(turns) for turns in cuts]

        def count(cut: int) -> int | None:
            tokens = self._count(self._without_oldest(cuts[cut]))
            if tokens is not None:
                self._counted[cuts[cut]] = tokens
                self._ratio = tokens / max(1, sizes[cut])
            return tokens

        self._left_out = cuts[smallest_cut(sizes, limit, count, self._ratio)]

    def _count(self, body: Body) -> int | None:
        """Count a prompt on the server; None if it cannot."""
        return count_tokens(self._credentials, adapt_request(body, self._profile))

    def _leave_out_more(self, error: PromptTooLong) -> None:
        """Choose a larger cut after a refusal. Raises the refusal, with what to do, if there is none."""
        size = self._size(self._left_out)
        self._context = error.overflow.context_length or self._context
        prompt, context = error.overflow.prompt_tokens, self._context
        counts_answer = prompt is not None and context is not None and prompt < context
        if not self._shorten or self._left_out == self._turns.count:
            raise error if counts_answer else self._explained(error)
        # Without its number, the context is a little smaller than what was refused.
        context = context or prompt or size
        self._ratio = (prompt or max(size, context + 1)) / max(1, size)
        self._too_few = self._left_out
        limit = self._limit(context)
        if counts_answer:
            limit = context - (self._max_tokens or self._reserve(context))
            if self._tokens(self._turns.count) > limit:
                raise error  # what is too long is the answer that was asked for
        self._refusals += 1
        if self._refusals < MAX_REFUSALS:
            self._choose(context, limit)
        else:
            self._left_out = self._turns.count

    def _explained(self, error: PromptTooLong) -> PromptTooLong:
        """The refusal, with what is too long or what to do."""
        if not self._shorten and self._turns.count:
            return PromptTooLong(
                f"{str(error).rstrip('.')}. Start a new conversation, or set Long conversations to shorten: then the "
                "oldest turns are left out.",
                error.overflow,
            )
        overflow = replace(error.overflow, context_length=self._context)
        body = self._without_oldest(self._left_out)
        parts = list(_parts(body, len(self._turns.last_turn), self._documents()))
        part = max(parts, key=lambda each: each.size)
        tokens, context = overflow.prompt_tokens, overflow.context_length
        if tokens is None or context is None:
            text = str(error) if str(error).endswith((".", "!", "?")) else f"{error}."
            return PromptTooLong(
                f"{text} {part.has} the largest share of its tokens. {part.advice}", overflow
            )
        rest, about = self._count(part.rest), ""
        if rest is None:
            about = "about "
            rest = round(tokens * (1 - part.size / max(1, sum(each.size for each in parts))))
        room = context - rest - self._reserve(context)
        room = room if room > 0 else context - rest - 1
        left_out = _counted(self._left_out, "earlier turn")
        return PromptTooLong(
            f"{f'Without the {left_out}, the' if self._left_out else 'The'} prompt has {tokens} tokens; the context "
            f"holds {context}, and the answer needs room too. {part.has} {about}{tokens - rest} tokens, and "
            + (f"there is room for {about}{room}. " if room > 0 else f"the rest has {about}{rest}. ")
            + part.advice,
            overflow,
        )


# -- which part of a prompt is too long ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a prompt: the beginning of a sentence on its size, the estimated size, and the request without it."""

    has: str
    advice: str
    size: int
    rest: Body


def _parts(body: Body, last_turn: int, documents: Documents) -> Iterator[_Part]:
    """Yield the parts that a person can do something about; `last_turn` is its number of messages."""
    messages: Sequence[Message] = body["messages"]
    start = len(messages) - last_turn
    stays = [index < start or each["role"] in _INSTRUCTION_ROLES for index, each in enumerate(messages)]
    if any(stays):
        rest = [each for each, is_instruction in zip(messages, stays, strict=True) if not is_instruction]
        size = sum(map(estimate_message, messages)) - sum(map(estimate_message, rest))
        has = "The app's instructions, retrieved knowledge included, have"
        yield _Part(has, "Shorten them, or retrieve fewer chunks (Top K).", size, {**body, "messages": rest})
    if tools := body.get("tools"):
        has = f"The descriptions of the {_counted(len(tools), 'tool')} have"
        toolless = {name: value for name, value in body.items() if name != "tools"}
        yield _Part(has, "Give the app fewer tools.", _estimate_tools(body), toolless)
    for index in range(start, len(messages)):
        message = messages[index]
        size, emptied = estimate_message(message), _with_content(body, index, "")
        match message["role"]:
            case "user":
                for name, text in documents:
                    if text not in text_of(message["content"]):
                        continue  # of an older question
                    size -= estimate_tokens(text)
                    rest_of_it = _with_content(body, index, _without(message["content"], text))
                    advice = "Send a shorter one, or put it into a knowledge base."
                    yield _Part(f"The file {name} has", advice, estimate_tokens(text), rest_of_it)
                advice = "Shorten it, or send it in parts."
                yield _Part("The last question has", advice, max(0, size), emptied)
            case "tool":
                has = f"The result of the tool {message.get('name') or '?'} has"
                yield _Part(has, "Have the tool return less.", size, emptied)
            case "assistant":
                has = "What the model wrote for its tools has"
                yield _Part(has, "Ask for less at once.", size, emptied)


def _with_content(body: Body, index: int, content: Any) -> Body:
    """The request with another content of one message, and without what its model thought and passed to its tools."""
    messages = list(body["messages"])
    message = {name: value for name, value in messages[index].items() if name != "reasoning_content"}
    if calls := message.get("tool_calls"):  # the calls stay, so that their results still have one
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": "{}"}} for call in calls
        ]
    messages[index] = {**message, "content": content}
    return {**body, "messages": messages}


def _without(content: Any, text: str) -> Any:
    """A content without one of its texts."""
    if isinstance(content, str):
        return content.replace(text, "", 1)
    return [
        {**part, "text": part["text"].replace(text, "", 1)} if "text" in part else part for part in content
    ]


def _counted(count: int, noun: str) -> str:
    """Return "tool" for one, else "2 tools"."""
    return noun if count == 1 else f"{count} {noun}s"
