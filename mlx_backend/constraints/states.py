"""The states of a constrained reply: what each allows next, and the state a token leads to.

Theory of operation
-------------------
A reply is in one state at a time. A state gives a mask, takes the token that was chosen, and returns the state
that follows, often itself:

    FixedTokens   one of several spellings, token by token: the header of a message, a marker of several tokens
    FreeText      any text, until a token (or a spelling) that leads on: reasoning, a preamble, a free answer
    MatchedText   text that a matcher allows, and what leads on once it is complete: JSON, arguments
    EndOfReply    nothing but the end

The dialects (`harmony.py`, `blocks.py`) say which state leads where. A `Transition` makes the next state, and is
called only when it is taken. In every state control tokens that lead nowhere are masked: the shape of a reply is
certain, and only its words are the model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.json_schema import describe_error
from mlx_backend.constraints.mask import excluding, including

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from llguidance import LLMatcher

    from mlx_backend.constraints.mask import Mask
    from mlx_backend.constraints.vocabulary import Vocabulary

    type Transition = Callable[[], State]
    type Branches = dict[int, Branches | Transition]


class State(Protocol):
    """What may come next in a reply."""

    def allowed_mask(self) -> Mask:
        """Return the mask of the next token; at least one is in it."""
        ...

    def advance(self, token: int) -> State:
        """Take the token that was chosen; return the next state."""
        ...


class GrammarConstraint:
    """A reply constrained by a grammar: the engine's `Constraint`."""

    never_raises = False  # a grammar may become too expensive

    def __init__(self, first: State) -> None:
        self._state = first

    def unconstrained_tokens(self) -> int:
        """Return 0: every token is masked."""
        return 0

    def allowed_mask(self) -> Sequence[int]:
        """Return the next token's mask."""
        return self._state.allowed_mask()

    def advance(self, token: int) -> None:
        """Take the token that was chosen."""
        self._state = self._state.advance(token)


class FixedTokens:
    """One of several spellings: a tree whose branches are tokens and whose leaves are transitions."""

    def __init__(self, vocabulary: Vocabulary, branches: Branches) -> None:
        self._vocabulary = vocabulary
        self._branches = branches

    @staticmethod
    def tree(spellings: Iterable[tuple[Sequence[int], Transition]]) -> Branches:
        """Make the tree of spellings. None of them may be the beginning of another."""
        root: Branches = {}
        for tokens, transition in spellings:
            branches = root
            for token in tokens[:-1]:
                inner = branches.setdefault(token, {})
                assert isinstance(inner, dict)
                branches = inner
            branches[tokens[-1]] = transition
        return root

    def allowed_mask(self) -> Mask:
        """Return the mask of every branch."""
        return self._vocabulary.mask_of(self._branches)

    def advance(self, token: int) -> State:
        """Go down a branch."""
        if token not in self._branches:
            raise _forbidden(self._vocabulary, token)
        branch = self._branches[token]
        return FixedTokens(self._vocabulary, branch) if isinstance(branch, dict) else branch()


class ClosingText:
    """A closing marker that is not a token of its own, and where it leads."""

    def __init__(self, vocabulary: Vocabulary, marker: str, transition: Transition) -> None:
        self.marker = marker.encode()
        self.transition = transition
        self._vocabulary = vocabulary
        self._overrunning: dict[int, list[int]] | None = None

    def overrunning(self, written: int) -> list[int]:
        """Return the tokens that would write past the marker's end, if `written` bytes of it are there."""
        if self._overrunning is None:
            size = len(self.marker)
            self._overrunning = {at: [] for at in range(size)}
            for token, text in enumerate(self._vocabulary.tokens):
                at = text.find(self.marker)
                if at >= 0 and at + size < len(text):
                    self._overrunning[0].append(token)
                for at in range(1, size):
                    if len(text) > size - at and text.startswith(self.marker[at:]):
                        self._overrunning[at].append(token)
        return self._overrunning[written]

    def written(self, tail: bytes) -> int:
        """Return how many bytes of the marker a text ends with."""
        return next(size for size in range(len(self.marker), -1, -1) if tail.endswith(self.marker[:size]))


class FreeText:
    """Any text, until one of the tokens with a transition, or the closing text."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        transitions: Mapping[int, Transition],
        closing: ClosingText | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._transitions = transitions
        self._closing = closing
        self._tail = b""

    def allowed_mask(self) -> Mask:
        """Return the mask of all text and of what leads on."""
        mask = self._vocabulary.text_and(self._transitions)
        if self._closing is None:
            return mask
        overrunning = self._closing.overrunning(self._closing.written(self._tail))
        return excluding(mask, overrunning) if overrunning else mask

    def advance(self, token: int) -> State:
        """Take text, or go on."""
        if (transition := self._transitions.get(token)) is not None:
            return transition()
        if token in self._vocabulary.special:
            raise _forbidden(self._vocabulary, token)
        if self._closing is not None:
            size = len(self._closing.marker)
            self._tail = (self._tail + self._vocabulary.tokens[token])[-size:]
            if self._closing.written(self._tail) == size:
                return self._closing.transition()
        return self


class MatchedText:
    """Text that a matcher allows. `transitions` lead on when it is complete, `alternatives` before it has begun."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: LLMatcher,
        transitions: Mapping[int, Transition],
        alternatives: Mapping[int, Transition] | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._transitions = transitions
        self._alternatives = alternatives or {}
        self._matcher_mask: bytes | None = None  # until a token is taken
        self._is_complete = False

    def allowed_mask(self) -> Mask:
        """Return the mask. Raises GrammarError if the grammar has become too expensive, or leads nowhere."""
        mask = excluding(self._mask(), [self._vocabulary.end_token])
        mask = including(mask, [*(self._transitions if self._is_complete else ()), *self._alternatives])
        if not any(mask):
            raise _stuck("no token of this model continues it from here")
        return mask

    def advance(self, token: int) -> State:
        """Take text, or go on."""
        mask = self._mask()
        if token in self._transitions and self._is_complete:
            return self._transitions[token]()
        is_text = _has(mask, token)
        if token in self._alternatives and not is_text:
            return self._alternatives[token]()
        if not is_text:
            raise _forbidden(self._vocabulary, token)
        if not self._matcher.consume_token(token):
            raise _stuck(describe_error(self._matcher.get_error()))
        self._matcher_mask = None
        self._alternatives = {}
        return self

    def continued(self, text: str) -> State:
        """Take text that is there already. Raises GrammarError if the grammar does not allow it."""
        tokens = self._vocabulary.encode_text(text)
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            raise GrammarError(
                f"The answer to be continued does not fit what the reply is constrained to: it begins {text[:60]!r}."
            )
        self._matcher_mask = None
        self._alternatives = {}
        return self

    def _mask(self) -> bytes:
        if self._matcher_mask is None:
            self._matcher_mask = self._matcher.compute_bitmask()
            if self._matcher.is_error():  # its mask allows the end then
                raise _stuck(describe_error(self._matcher.get_error()))
            self._is_complete = self._matcher.is_accepting()
        return self._matcher_mask


class EndOfReply:
    """The reply is over: only the tokens that end it are allowed."""

    def __init__(self, vocabulary: Vocabulary, end_tokens: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._end_tokens = tuple(end_tokens)

    def allowed_mask(self) -> Mask:
        """Return the mask of what ends a reply."""
        return self._vocabulary.mask_of(self._end_tokens)

    def advance(self, token: int) -> State:
        """Stay."""
        return self


def _has(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _stuck(reason: str) -> GrammarError:
    return GrammarError(f"The reply cannot follow its grammar any further: {reason}.")


def _forbidden(vocabulary: Vocabulary, token: int) -> GrammarError:
    text = vocabulary.special.get(token) or vocabulary.tokens[token].decode("utf-8", "replace")
    return GrammarError(f"The model wrote {text!r} where the grammar of its reply does not allow it.")
