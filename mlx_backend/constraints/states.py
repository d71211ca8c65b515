"""The places a reply can be in while it is held: what each allows next, and which place a token leads to.

Theory of operation
-------------------
A reply is in one place at a time. A place answers with a mask, reads the token that was chosen, and returns
the place that comes then, often itself:

    Path   one of several spellings, token by token: the header of a message, a marker that is several tokens
    Free   any text, until a token (or a spelling) that leads on: reasoning, a preamble, an answer of any kind
    Held   text that a matcher allows, and what leads on once it is complete: JSON, arguments
    Over   nothing but the end

The dialects (`harmony.py`, `blocks.py`) say which place leads where; a `Way` is such a step, taken only when
it is gone. In every place control tokens that lead nowhere are masked, so the shape of a turn is certain and
only its words are the model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.json_schema import told

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from llguidance import LLMatcher

    from mlx_backend.constraints.vocabulary import Vocabulary, Words

    type Way = Callable[[], Place]
    type Branches = dict[int, Branches | Way]


class Place(Protocol):
    """Where a reply is."""

    def allowed_mask(self) -> Words:
        """Return the mask of the next token; at least one is in it."""
        ...

    def advance(self, token: int) -> Place:
        """Read the token that was chosen."""
        ...


class Turn:
    """A reply that is being held: the engine's `Constraint`."""

    never_raises = False  # a grammar may become too much work

    def __init__(self, first: Place) -> None:
        self._place = first

    def unconstrained_tokens(self) -> int:
        """Every token is masked."""
        return 0

    def allowed_mask(self) -> Sequence[int]:
        """Return the next token's mask."""
        return self._place.allowed_mask()

    def advance(self, token: int) -> None:
        """Read the token that was chosen."""
        self._place = self._place.advance(token)


class Path:
    """One of several spellings: a tree whose branches are tokens and whose leaves lead on."""

    def __init__(self, vocabulary: Vocabulary, branches: Branches) -> None:
        self._vocabulary = vocabulary
        self._branches = branches

    @staticmethod
    def tree(spellings: Iterable[tuple[Sequence[int], Way]]) -> Branches:
        """Make the tree of spellings. None of them may be the beginning of another."""
        root: Branches = {}
        for tokens, way in spellings:
            branches = root
            for token in tokens[:-1]:
                inner = branches.setdefault(token, {})
                assert isinstance(inner, dict)
                branches = inner
            branches[tokens[-1]] = way
        return root

    def allowed_mask(self) -> Words:
        """Return the mask of every branch."""
        return self._vocabulary.only(self._branches)

    def advance(self, token: int) -> Place:
        """Go down a branch."""
        if token not in self._branches:
            raise _unlawful(self._vocabulary, token)
        branch = self._branches[token]
        return Path(self._vocabulary, branch) if isinstance(branch, dict) else branch()


class Closing:
    """A closing marker that is no token of its own, and where it leads."""

    def __init__(self, vocabulary: Vocabulary, marker: str, way: Way) -> None:
        self.marker = marker.encode()
        self.way = way
        self._vocabulary = vocabulary
        self._beyond: dict[int, list[int]] | None = None

    def beyond(self, begun: int) -> list[int]:
        """Return the tokens that would write past the marker's end, so many bytes of it being written."""
        if self._beyond is None:
            size = len(self.marker)
            self._beyond = {at: [] for at in range(size)}
            for token, text in enumerate(self._vocabulary.tokens):
                at = text.find(self.marker)
                if at >= 0 and at + size < len(text):
                    self._beyond[0].append(token)
                for at in range(1, size):
                    if len(text) > size - at and text.startswith(self.marker[at:]):
                        self._beyond[at].append(token)
        return self._beyond[begun]

    def begun(self, tail: bytes) -> int:
        """Return how many bytes of the marker the text ends with."""
        return next(size for size in range(len(self.marker), -1, -1) if tail.endswith(self.marker[:size]))


class Free:
    """Any text, until one of these tokens or the closing marker leads on."""

    def __init__(
        self, vocabulary: Vocabulary, ways: Mapping[int, Way], closing: Closing | None = None
    ) -> None:
        self._vocabulary = vocabulary
        self._ways = ways
        self._closing = closing
        self._tail = b""

    def allowed_mask(self) -> Words:
        """Return the mask of all text and of what leads on."""
        mask = self._vocabulary.text_and(self._ways)
        if self._closing is None:
            return mask
        beyond = self._closing.beyond(self._closing.begun(self._tail))
        return self._vocabulary.without(mask, beyond) if beyond else mask

    def advance(self, token: int) -> Place:
        """Read text, or go on."""
        if (way := self._ways.get(token)) is not None:
            return way()
        if token in self._vocabulary.special:
            raise _unlawful(self._vocabulary, token)
        if self._closing is not None:
            size = len(self._closing.marker)
            self._tail = (self._tail + self._vocabulary.tokens[token])[-size:]
            if self._closing.begun(self._tail) == size:
                return self._closing.way()
        return self


class Held:
    """Text that a matcher allows. `ways` lead on when it is complete, `instead` before it has begun."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: LLMatcher,
        ways: Mapping[int, Way],
        instead: Mapping[int, Way] | None = None,
        *,
        text_only: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._ways = ways
        self._instead = instead or {}
        self._text_only = text_only
        self._own: bytes | None = None  # the matcher's mask, until a token is read
        self._complete = False

    def allowed_mask(self) -> Words:
        """Return the mask. Raises GrammarError if the grammar has become too much work, or leads nowhere."""
        own = self._mask()
        vocabulary = self._vocabulary
        bits = bytearray(vocabulary.text_of(own) if self._text_only else own)
        bits[vocabulary.end >> 3] &= ~(1 << (vocabulary.end & 7))
        for token in [*(self._ways if self._complete else ()), *self._instead]:
            bits[token >> 3] |= 1 << (token & 7)
        if not any(bits):
            raise _lost("no token of this model goes on from here")
        return memoryview(bits).cast("I")

    def advance(self, token: int) -> Place:
        """Read text, or go on."""
        own = self._mask()
        if token in self._ways and self._complete:
            return self._ways[token]()
        if token in self._instead and not _has(own, token):
            return self._instead[token]()
        if not _has(own, token):
            raise _unlawful(self._vocabulary, token)
        if not self._matcher.consume_token(token):
            raise _lost(told(self._matcher.get_error()))
        self._own = None
        self._instead = {}
        return self

    def begin(self, text: str) -> Place:
        """Read text that stands already where this begins. Raises GrammarError if it is none of the grammar."""
        tokens = self._vocabulary.spell(text)
        if self._matcher.try_consume_tokens(tokens) < len(tokens):
            raise GrammarError(
                f"The answer that is to be continued is not what the reply is to be held to: it begins {text[:60]!r}."
            )
        self._own = None
        self._instead = {}
        return self

    def _mask(self) -> bytes:
        if self._own is None:
            self._own = self._matcher.compute_bitmask()
            if self._matcher.is_error():  # its mask allows the end then
                raise _lost(told(self._matcher.get_error()))
            self._complete = self._matcher.is_accepting()
        return self._own


class Over:
    """The reply is over: nothing but the end may be said."""

    def __init__(self, vocabulary: Vocabulary, ends: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._ends = tuple(ends)

    def allowed_mask(self) -> Words:
        """Return the mask of what ends a reply."""
        return self._vocabulary.only(self._ends)

    def advance(self, token: int) -> Place:
        """Stay."""
        return self


def _has(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


def _lost(reason: str) -> GrammarError:
    return GrammarError(f"The reply cannot be held to its grammar any further: {reason}.")


def _unlawful(vocabulary: Vocabulary, token: int) -> GrammarError:
    text = vocabulary.special.get(token) or vocabulary.tokens[token].decode("utf-8", "replace")
    return GrammarError(f"The model said {text!r} where the grammar of its reply has no place for it.")
