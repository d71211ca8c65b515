"""A chat's history as the parts that must stay and the turns that may be left out, oldest first.

    instructions   system messages, wherever they stand; and the user messages of the app's own prompt, which Dify puts
                   before the history: retrieved knowledge stands in these, or in the last question
    older turns    each from a user's message to the message before the next one, tool rounds included
    last turn      the question that is to be answered, and the tool rounds since

Only whole turns are left out. Where the cuts lie depends on nothing but the texts before them, so the next turn finds
the same cut and the server's prefix cache still holds. Sizes are estimates; knows no server and no Dify.
"""

from __future__ import annotations

import json
import math
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.servers.token_count import TOKENS_PER_MESSAGE, estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    type Message = Mapping[str, Any]

TOKENS_PER_FILE = 1000
"""Tokens of an image, a recording or another file, roughly."""

INSTRUCTION_ROLES = ("system", "developer")
_REACT_ROUND = "Thought:"
_REACT_GO_ON = "continue"


class Turns:
    """A request's messages, in canonical form (`conversation.history`). `app_messages` as `count_app_messages` says."""

    def __init__(self, messages: Sequence[Message], *, app_messages: int = 0) -> None:
        self.messages = messages
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        last = _start_of_last_turn(messages, users)
        questions = [index for index in users[app_messages:] if index < last]
        history = users[app_messages - 1] + 1 if app_messages else 0
        while history < last and messages[history]["role"] in INSTRUCTION_ROLES:
            history += 1
        # What stands before the first question, such as the rest of a turn that the client cut, is a turn too.
        self._starts = sorted({min(history, last), *questions, last})
        sizes = [estimate_message(message) for message in messages]
        stays = [
            index < self._starts[0] or message["role"] in INSTRUCTION_ROLES
            for index, message in enumerate(messages)
        ]
        before = [0, *accumulate(0 if stay else size for stay, size in zip(stays, sizes, strict=True))]
        self._left_out = [before[start] for start in self._starts]
        self.size = sum(sizes)
        """Estimated tokens of all messages."""
        self.instructions_size = self.size - before[-1]
        """Estimated tokens of what stands before the history and is never left out."""

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
        instructions = [
            message for message in self.messages[first:start] if message["role"] in INSTRUCTION_ROLES
        ]
        return [*self.messages[:first], *instructions, *self.messages[start:]]

    def size_without_oldest(self, turns: int) -> int:
        """Return the estimated tokens of `without_oldest(turns)`."""
        return self.size - self._left_out[turns]

    def cuts(self, step: int) -> list[int]:
        """Return the numbers of turns that may be left out, ascending: none, those of a grid, all.

        A cut lies where the turns before it first reach a multiple of `step` tokens. The cuts of a doubled step are
        among them.
        """
        grid = [
            turns
            for turns in range(1, self.count)
            if self._left_out[turns] // step > self._left_out[turns - 1] // step
        ]
        return [0, *grid, self.count] if self.count else [0]


def step_for(room: int) -> int:
    """Return the distance of cuts for a history that has `room` tokens: about a quarter, rounded to a power of two.

    Rounded, because a step that followed every change of the room would move the cuts each time.
    """
    return 1 << max(0, round(math.log2(max(room, 1) / 4)))


def count_app_messages(roles: Iterable[str]) -> int:
    """Return how many user messages are the app's own prompt, from the roles as Dify sent them.

    Dify writes a prompt's own messages before the history. A question of the history is followed by its answer, if only
    an empty one; a user message that another follows at once is no question.
    """
    rest = [role for role in roles if role not in INSTRUCTION_ROLES]
    count = 0
    while rest[count : count + 2] == ["user", "user"]:
        count += 1
    return count


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


def estimate_tools(tools: Sequence[Mapping[str, Any]]) -> int:
    """Estimate the tokens of the tools' descriptions."""
    return sum(estimate_tokens(json.dumps(tool, ensure_ascii=False)) for tool in tools)


def _start_of_last_turn(messages: Sequence[Message], users: Sequence[int]) -> int:
    """The index of the last question.

    Dify's ReAct agents write their rounds into one assistant message behind the question, and end with a user message
    that says `continue` or repeats the question.
    """
    if not users:
        return 0
    last = users[-1]
    if len(users) > 1 and messages[last - 1]["role"] == "assistant":
        text = messages[last].get("content")
        goes_on = text in (_REACT_GO_ON, messages[users[-2]].get("content"))
        if goes_on and str(messages[last - 1].get("content")).startswith(_REACT_ROUND):
            return users[-2]
    return last
