"""Whether markup in a text is used or only talked about: in code, in quotation marks, in the middle of a sentence.

An answer about `<think>` or `<|end|>` must survive being parsed for them. Where token ids are known nothing has to be
guessed; these are the heuristics for text alone, for a whole text and for a stream. Knows markup only as something
that begins with `<` (or `◁`), and no dialect.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from copy import copy
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

type Span = tuple[int, int]

CLAUSE_ENDS = tuple(",.;:!?、。")
"""What may follow markup that is part of a sentence."""

_OPENING_QUOTES = ("`", '"', "'", "“", "「", "(")
# One that closes a quotation looks alike: before one that opens it there is no word.
_OPENED_QUOTATION = re.compile(r"(?:\A|[\s(\[{=:,])[\"'(]\Z|[“「『«]\Z")
_SENTENCE_ENDS = (*".!?…:。！？", ")", "`", '"', "'")
_BLANKS = " \u3000"
_CONTEXT = 40
"""Characters before markup that tell whether it stands in a sentence."""

_FENCE = 3
"""Backticks or tildes in a row that open a block of code."""
_RUNS = re.compile(r"`+|~+|\n")
# Each alternative begins with its character: what `^` begins is tried at every position, which takes ten times as long.
_CODE = re.compile(
    r"`(?:(?<=^`)``.*?(?:^```|\Z)|[^`\n]*`)|~(?<=^~)~~.*?(?:^~~~|\Z)", re.DOTALL | re.MULTILINE
)
# Markup in quotation marks: `<think>`, "<|end|>", 「<|channel|>analysis<|message|>」.
_QUOTATION = re.compile(
    r"`<[^`\n]{0,200}[>▷]`|\"<[^\"\n]{0,200}[>▷]\"|'<[^'\n]{0,200}[>▷]'|“<[^”\n]{0,200}[>▷]”|「<[^」\n]{0,200}[>▷]」"
)

HIDER = "\ufdd0"
"""Stands after the `<` of hidden markup: a noncharacter, which no text may hold."""


# -- a whole text ---------------------------------------------------------------------------------


def code_spans(text: str) -> list[Span]:
    """Return where code stands: fenced blocks (also one that is never closed) and code in backticks."""
    return [match.span() for match in _CODE.finditer(text)]


def is_within(spans: Sequence[Span], position: int) -> bool:
    """Whether a position lies in one of the spans, which are in order and do not overlap."""
    at = bisect_right(spans, position, key=itemgetter(0)) - 1
    return at >= 0 and position < spans[at][1]


def is_quoted(text: str, position: int) -> bool:
    """Whether the character before a position opens a quotation."""
    return text[max(0, position - 1) : position] in _OPENING_QUOTES


def is_mentioned(text: str, start: int, end: int) -> bool:
    """Whether markup stands in a sentence: after a blank, and the sentence goes on."""
    before = text[max(0, start - _CONTEXT) : start]
    if not before.endswith(tuple(_BLANKS)):
        return False
    return text.startswith((" ", *CLAUSE_ENDS), end) or not before.rstrip(_BLANKS).endswith(_SENTENCE_ENDS)


def hide_quotations(text: str, is_hidden: Callable[[str], bool] = lambda quotation: True) -> str:
    """Hide the markup that stands in quotation marks, where `is_hidden(quotation)`. `reveal` undoes it."""
    return _QUOTATION.sub(lambda match: hide(match[0]) if is_hidden(match[0]) else match[0], text)


def hide(text: str) -> str:
    """Break all markup in a text, so that no pattern finds it."""
    return text.replace("<", f"<{HIDER}").replace("◁", f"◁{HIDER}")


def reveal(text: str) -> str:
    """Undo `hide`."""
    return text.replace(HIDER, "")


def opens_quotation(tail: str) -> bool:
    """Whether a text with this end, of two characters if it has them, opens a quotation."""
    return _OPENED_QUOTATION.search(tail) is not None


# -- a stream -------------------------------------------------------------------------------------


class OpenCode:
    """Whether a text so far ends in code, in backticks or in a fenced block, known without keeping the text.

    A piece without `SPECIAL` characters need not be added, unless `is_pending`.
    """

    SPECIAL = "`~\n"

    __slots__ = ("_fence", "_inline", "_run", "is_pending")

    def __init__(self) -> None:
        self._fence = ("", 0)  # what opened the block
        self._inline = 0  # backticks that opened code in this line
        self._run = ("", 0)  # what the text ends with: a character, and how many of it
        self.is_pending = False  # more of it may make something else of the end of the text

    def add(self, text: str) -> None:
        """Take in the next piece of the text."""
        if not self.is_pending and "`" not in text and "~" not in text:
            if self._inline and "\n" in text:
                self._inline = 0
            return
        at = 0
        for match in _RUNS.finditer(text):
            if match.start() > at or match[0][0] != self._run[0]:
                self._end_run()
            at = match.end()
            if match[0] == "\n":
                self._inline = 0
            else:
                self._run = match[0][0], self._run[1] + len(match[0])
        if at < len(text):
            self._end_run()
        self.is_pending = self._run[1] > 0

    @property
    def is_open(self) -> bool:
        """Whether what follows, if it is no more of the same, stands in code."""
        later = copy(self)
        later._end_run()
        return bool(later._fence[1] or later._inline)

    def _end_run(self) -> None:
        character, length = self._run
        if not length:
            return
        self._run = ("", 0)
        fence, opened = self._fence
        if opened:
            if character == fence and length >= opened:
                self._fence = ("", 0)
        elif length >= _FENCE:
            self._fence, self._inline = (character, length), 0
        elif character == "`":
            self._inline = 0 if self._inline == length else self._inline or length


class PrecedingText:
    """What stands before markup in a stream, known without keeping the text."""

    def __init__(self) -> None:
        self._code = OpenCode()
        self._tail = ""

    def add(self, text: str) -> None:
        """Take in text that has been put out."""
        self._code.add(text)
        self._tail = (self._tail + text)[-_CONTEXT:]

    def followed_by(self, text: str) -> PrecedingText:
        """Return what would stand before the markup if this text came too."""
        later = PrecedingText()
        later._code, later._tail = copy(self._code), self._tail
        later.add(text)
        return later

    @property
    def tail(self) -> str:
        """The last characters, which may hold the beginning of a marker."""
        return self._tail

    @property
    def is_in_code(self) -> bool:
        """Whether a fence or a backtick is open."""
        return self._code.is_open

    @property
    def opens_quotation(self) -> bool:
        """Whether what follows stands in quotation marks."""
        return self._tail.endswith(_OPENING_QUOTES)

    @property
    def is_mid_sentence(self) -> bool:
        """Whether what follows stands in a sentence."""
        before = self._tail.rstrip(_BLANKS)
        return before != self._tail and bool(before) and not before.endswith(("\n", *_SENTENCE_ENDS))
