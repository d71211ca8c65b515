"""How long a reply may reason: when it is enough the reasoning is closed, in the dialect's own tokens.

Theory of operation
-------------------
A `Budget` is a `Constraint` that allows everything until the reasoning has had its tokens, or until what is left of
the reply is needed for the answer. It reads the reply with the dialect's own parser, so it counts as the usage does.
Then, wherever the reply is:

    reasoning            the closing tokens are forced, one by one, and the answer begins behind them
    a header, a block    no other reasoning is begun: the word `analysis` is not among those that may follow
    a call, an answer    nothing; what was begun is never cut

A Harmony turn without tools is led into its final message. With tools it is led behind `<|start|>assistant` and no
further, so that it may still call one. Where no reasoning has been begun yet, none is.

While the budget lasts nothing is masked: `unconstrained_tokens` says for how long, and the engine is as fast as
without one.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from mlx_backend.constraints.mask import all_but, bits_of, only
from mlx_backend.conversation.dialects.harmony import CHANNEL, HARMONY, MESSAGE
from mlx_backend.conversation.dialects.plain import PLAIN
from mlx_backend.conversation.dialects.think import OPENERS
from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.parser import ChannelParser
from mlx_backend.engine.base import UNBOUNDED_TOKENS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from mlx_backend.chat.prompt import Prompt
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.engine.base import Constraint, Tokenizer

    type Words = memoryview[int]
    type Branches = dict[int, Branches]

# Tokens that may be reasoned once an answer has begun: so long nothing has to be watched there.
SECOND_THOUGHT = 8
_TAIL = 64  # tokens of a prompt in which its last block was opened, if it was


class Budgets:
    """The budgets of one model. Safe to use from several threads; a `Budget` is for one reply."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect

    def begin(
        self,
        prompt: Prompt,
        *,
        room: int,
        tokens: int | None = None,
        reserve: int | None = None,
        tools: Collection[str] = (),
    ) -> Budget | None:
        """Begin a reply of at most `room` tokens; None if there is nothing to hold it to.

        At most `tokens` are reasoning, and the last `reserve` of the room are not.
        """
        if (tokens is None and reserve is None) or self._dialect.name == PLAIN.name:
            return None
        parser = ChannelParser(
            self._dialect.name,
            tools=tools,
            opens_in=prompt.opens_in,
            special_tokens=self._tokenizer.special_tokens,
        )
        shape = _Harmony if self._dialect.name == HARMONY.name else _Blocks
        tail = self._tokenizer.decode(prompt.tokens[-_TAIL:]) if parser.is_reasoning else ""
        return Budget(
            shape(self._tokenizer, parser, tail, calls=bool(tools)),
            self._tokenizer,
            parser,
            tokens=UNBOUNDED_TOKENS if tokens is None else tokens,
            reserve=reserve,
            room=room,
        )


class Budget:
    """Implements the engine's `Constraint` for one reply."""

    never_raises = True

    def __init__(
        self,
        shape: _Shape,
        tokenizer: Tokenizer,
        parser: ChannelParser,
        *,
        tokens: int,
        reserve: int | None,
        room: int,
    ) -> None:
        self._shape = shape
        self._tokenizer = tokenizer
        self._parser = parser
        self._text = codecs.getincrementaldecoder("utf-8")("replace")
        self._left = tokens  # of reasoning
        self._room = room  # tokens of the reply that are still to come
        self._reserve = reserve  # of them, for the answer; None once it has begun
        self._answers = False
        self._forced: Sequence[int] = ()
        self._look(None)

    def allowed_mask(self) -> Words | None:
        """Return the mask of what has to come, if something has."""
        if self._forced:
            return only(self._tokenizer.vocabulary_size, self._forced[:1])
        return self._shape.allowed_mask()

    def unconstrained_tokens(self) -> int:
        """Return how many tokens there are at least until something has to come."""
        if self._forced or self._shape.allowed_mask() is not None:
            return 0
        if self._answers and not self._shape.reopens:
            return UNBOUNDED_TOKENS
        # A turn that is reasoning may leave its message, and begin another: that would cost a header more.
        return max(1, self._spare(self._shape.header))

    def advance(self, token: int) -> None:
        """Read the token that was chosen."""
        before = self._parser.is_reasoning
        self._room -= 1
        self._parser.feed(self._text_of(token), token)
        if before and self._parser.is_reasoning:
            self._left -= 1
        self._forced = self._forced[1:] if self._forced[:1] == (token,) else ()
        self._look(token)

    def _look(self, token: int | None) -> None:
        """See where the reply is behind this token (None: at its beginning), and what may follow."""
        if self._parser.is_answering and not self._answers:
            self._answers = True
            self._reserve = None
            self._left += SECOND_THOUGHT
        spent = self._spare(0 if self._parser.is_reasoning else self._shape.header) <= 0
        self._shape.read(token, spent=spent)
        if spent and not self._forced:
            if self._parser.is_reasoning:
                self._forced = tuple(self._shape.closing())
            elif token is None and not self._answers:
                self._forced = tuple(self._shape.opening)

    def _spare(self, header: int) -> int:
        """Return how many tokens of reasoning there may still be, behind a header of so many."""
        if self._reserve is None:
            return self._left
        return min(self._left, self._room - self._reserve - self._shape.cost - header)

    def _text_of(self, token: int) -> str:
        marker = self._tokenizer.special_tokens.get(token)
        if marker is not None:
            self._text.reset()
            return marker
        return self._text.decode(self._tokenizer.bytes_of(token))


class _Shape:
    """What a dialect's turns are closed with, and how they are kept from reasoning again."""

    opening: Sequence[int] = ()  # begins an answer at the beginning of a turn
    cost: int  # tokens of the longest closing
    header = 0  # tokens with which reasoning is begun
    reopens = True  # behind the beginning of an answer there may be reasoning again

    def closing(self) -> list[int]:
        """Return the tokens that close the open reasoning."""
        raise NotImplementedError

    def read(self, token: int | None, *, spent: bool) -> None:
        """Read a token; `spent`: there is to be no more reasoning behind it."""
        raise NotImplementedError

    def allowed_mask(self) -> Words | None:
        """Return the mask of what may come instead of reasoning, where it might begin."""
        raise NotImplementedError


class _Harmony(_Shape):
    """A header says what its message is: behind `<|channel|>` the word `analysis` is not allowed."""

    def __init__(self, tokenizer: Tokenizer, parser: ChannelParser, _tail: str, *, calls: bool) -> None:
        self._size = tokenizer.vocabulary_size
        end, start, final = (_encoded(tokenizer, text) for text in parser.reasoning_closer(""))
        header = {channel: _encoded(tokenizer, f"{CHANNEL}{channel}{MESSAGE}") for channel in Channel}
        self._closing = [*end, *start, *(() if calls else final)]
        self.cost = len(end) + len(start) + len(final)
        self.header = len(header[Channel.ANALYSIS])
        self.opening = () if calls else final
        self._channel = final[0]
        words = [header[Channel.FINAL][1:-1], *([header[Channel.COMMENTARY][1:-1]] if calls else [])]
        self._words = _tree(words)
        self._open: Branches = {}  # where in the tree of words the header is

    def closing(self) -> list[int]:
        """End the message and begin another; without tools that is the answer."""
        return self._closing

    def read(self, token: int | None, *, spent: bool) -> None:
        """Follow a header's channel."""
        if spent and token == self._channel:
            self._open = self._words
        else:
            self._open = self._open.get(token, {}) if token is not None else {}

    def allowed_mask(self) -> Words | None:
        """Return the mask of the words that go on."""
        return only(self._size, self._open) if self._open else None


class _Blocks(_Shape):
    """A block is closed by its marker; another one is not opened behind it."""

    reopens = False

    def __init__(self, tokenizer: Tokenizer, parser: ChannelParser, tail: str, *, calls: bool) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._tail = tail
        openers = [token for token, text in tokenizer.special_tokens.items() if text in OPENERS]
        self._others = all_but(tokenizer.vocabulary_size, openers) if openers else None
        self.cost = len(self.closing())
        self._closed = self._between = False

    def closing(self) -> list[int]:
        """Close the block on a line of its own, and leave an empty line behind it."""
        self._closed = True
        # Each by itself, so that no token is both the marker and what stands beside it.
        return [
            token
            for text in self._parser.reasoning_closer(self._tail)
            for token in _encoded(self._tokenizer, text)
        ]

    def read(self, token: int | None, *, spent: bool) -> None:
        """See whether the reply is between a block that was closed and the answer."""
        self._between = (
            spent and self._closed and not (self._parser.is_reasoning or self._parser.is_answering)
        )

    def allowed_mask(self) -> Words | None:
        """Return the mask of everything but what opens a block."""
        return self._others if self._between else None


class Both:
    """A grammar and a budget over one reply. Where they cannot agree, the grammar was promised."""

    never_raises = False

    def __init__(self, grammar: Constraint, budget: Constraint) -> None:
        self._grammar = grammar
        self._budget = budget

    def unconstrained_tokens(self) -> int:
        """Return for how long both leave it alone."""
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
        """Let both read it."""
        self._grammar.advance(token)
        self._budget.advance(token)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, control_tokens=True)


def _tree(spellings: Iterable[Sequence[int]]) -> Branches:
    root: Branches = {}
    for tokens in spellings:
        branches = root
        for token in tokens:
            branches = branches.setdefault(token, {})
    return root
