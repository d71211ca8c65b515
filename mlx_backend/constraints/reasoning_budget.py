"""How long a reply may reason: when the budget is spent the reasoning is closed, in the dialect's own tokens.

Theory of operation
-------------------
A `ReasoningBudget` is a `Constraint` that allows everything until the reasoning has had its tokens, or until what is
left of the reply is needed for the answer. It parses the reply as its client's events are parsed, and counts as the
usage does (reasoning_count.py). From then on, wherever the reply is:

    reasoning            the operator's message, if there is one, and the closing tokens are forced, one by one, and
                         the answer begins after them; the message is in addition to the budget
    a header, a block    no other reasoning is begun: the word `analysis` is not among those that may follow
    a call, an answer    nothing; what was begun is never cut

A Harmony turn without tools is led into its final message. With tools it is led after `<|start|>assistant` and no
further, so that it may still call one. Where no reasoning has been begun yet, none is.

While the budget lasts nothing is masked: `unconstrained_tokens` says for how long, and the engine is as fast as
without one.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from mlx_backend.constraints.machines import machine_of
from mlx_backend.constraints.mask import bits_of, only
from mlx_backend.constraints.reasoning_count import ReasoningCount
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.engine.base import UNBOUNDED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mlx_backend.constraints.mask import Mask, ReasoningCloser
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Channel
    from mlx_backend.conversation.tools import ToolDefinition
    from mlx_backend.engine.base import Constraint, Tokenizer

REOPENED_TOKENS = 8
"""Tokens that may be reasoned once an answer has begun, without any mask."""
_PROMPT_TAIL = 64
"""Tokens at the end of a prompt in which its last block is looked for."""


class ReasoningBudgets:
    """The budgets of one model. Safe to use from several threads; a `ReasoningBudget` is for one reply."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect

    def start(
        self,
        prompt: Sequence[int],
        opens_in: Channel | None = None,
        *,
        room: int,
        tokens: int | None = None,
        reserve: int | None = None,
        message: str = "",
        tools: Collection[ToolDefinition] = (),
    ) -> ReasoningBudget | None:
        """Start a reply of at most `room` tokens; None if nothing limits its reasoning.

        At most `tokens` are reasoning, and the last `reserve` of the room are not. Reasoning that is cut short ends
        with the `message`. `opens_in` is the channel that the prompt has opened.
        """
        closer = machine_of(self._dialect).closer
        if (tokens is None and reserve is None) or closer is None:
            return None
        parser = ChannelParser(
            self._dialect, tools=tools, opens_in=opens_in, special_tokens=self._tokenizer.special_tokens
        )
        tail = self._tokenizer.decode(prompt[-_PROMPT_TAIL:]) if parser.is_reasoning else ""
        said = message.strip() if tokens != 0 else ""
        return ReasoningBudget(
            closer(self._tokenizer, parser, tail, has_tools=bool(tools)),
            self._tokenizer,
            parser,
            tokens=UNBOUNDED_TOKENS if tokens is None else tokens,
            reserve=reserve,
            room=room,
            message=self._tokenizer.encode(f"\n\n{said}", control_tokens=False) if said else (),
        )


class ReasoningBudget:
    """Implements the engine's `Constraint` for one reply."""

    never_raises = True

    def __init__(
        self,
        closer: ReasoningCloser,
        tokenizer: Tokenizer,
        parser: ChannelParser,
        *,
        tokens: int,
        reserve: int | None,
        room: int,
        message: Sequence[int],
    ) -> None:
        self._closer = closer
        self._tokenizer = tokenizer
        self._parser = parser
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._allowed = tokens  # of reasoning, in the whole reply
        self._count = ReasoningCount(tokenizer.special_tokens)
        self._room = room  # tokens of the reply that are still to come
        self._reserve = reserve  # of them, for the answer; None once it has begun
        self._message = message  # until it has been said, or the answer has begun
        self._has_answered = False
        self._forced: Sequence[int] = ()
        self._update(None)

    def allowed_mask(self) -> Mask | None:
        """Return the mask of what has to come, if something has."""
        if self._forced:
            return only(self._tokenizer.vocabulary_size, self._forced[:1])
        return self._closer.allowed_mask()

    def unconstrained_tokens(self) -> int:
        """Return how many tokens there are at least until something has to come."""
        if self._forced or self._closer.allowed_mask() is not None:
            return 0
        # A turn that is reasoning may leave its message, and begin another: that would cost a header more.
        return max(1, self._reasoning_left(self._closer.header))

    def advance(self, token: int) -> None:
        was_reasoning = self._parser.is_reasoning
        self._room -= 1
        text = self._text_of(token)
        events = self._parser.feed(text, token)
        is_reasoning = self._parser.is_reasoning
        self._count.add(token, text, events, was_reasoning=was_reasoning, is_reasoning=is_reasoning)
        self._forced = self._forced[1:] if self._forced[:1] == (token,) else ()
        self._update(token)

    def _update(self, token: int | None) -> None:
        """Find where the reply is after this token (None: at its beginning), and what may follow."""
        if self._parser.is_answering and not self._has_answered:
            self._has_answered = True
            self._reserve = None
            self._message = ()
            self._allowed += REOPENED_TOKENS
        is_reasoning = self._parser.is_reasoning
        exhausted = self._reasoning_left(0 if is_reasoning else self._closer.header) <= 0
        self._closer.advance(token, exhausted=exhausted)
        if exhausted and not self._forced:
            if is_reasoning:
                message, self._message = self._message, ()
                has_room = self._room >= len(message) + self._closer.cost + (self._reserve or 1)
                self._forced = tuple(message if has_room and message else self._closer.closing())
            elif token is None and not self._has_answered:
                self._forced = tuple(self._closer.opening)

    def _reasoning_left(self, header: int) -> int:
        """Return how many tokens of reasoning there may still be, after a header of `header` tokens."""
        left = self._allowed - self._count.at_most
        if self._reserve is None:
            return left
        return min(left, self._room - self._reserve - self._closer.cost - len(self._message) - header)

    def _text_of(self, token: int) -> str:
        marker = self._tokenizer.special_tokens.get(token)
        if marker is not None:
            self._text.reset()
            return marker
        return self._text.decode(self._tokenizer.bytes_of(token))


class CombinedConstraint:
    """A grammar and a budget over one reply. Where they cannot both be met, the grammar is: it was promised."""

    never_raises = False

    def __init__(self, grammar: Constraint, budget: Constraint) -> None:
        self._grammar = grammar
        self._budget = budget

    def unconstrained_tokens(self) -> int:
        """Return for how many tokens neither masks anything."""
        return min(self._grammar.unconstrained_tokens(), self._budget.unconstrained_tokens())

    def allowed_mask(self) -> Sequence[int] | None:
        """Return the mask of what both allow."""
        promised, wanted = self._grammar.allowed_mask(), self._budget.allowed_mask()
        if promised is None or wanted is None:
            return promised if wanted is None else wanted
        both = bits_of(promised) & bits_of(wanted)
        if not both:
            return promised
        return memoryview(both.to_bytes(4 * max(len(promised), len(wanted)), "little")).cast("I")

    def advance(self, token: int) -> None:
        """Take the token that was chosen, in both."""
        self._grammar.advance(token)
        self._budget.advance(token)
