"""Writing grammars in llguidance's dialect of Lark: names, literals, and what a family writes between values.

Control tokens stand in a grammar by their ids. While a family's writing is taken apart each of them is one character of
the private use area (`Marked`), so that text and tokens are one string. Knows no calls and no schemas.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects.base import Piece

ANY_TEXT = "/(?s:.*)/"
_FIRST_MARK = 0xE000
_MARK = r"[\ue000-\uf8ff]"


class Lark:
    """A grammar that is being written. `prefix` makes its names differ from those it is joined with."""

    def __init__(self, prefix: str) -> None:
        self.root = prefix
        self._prefix = prefix
        self._names: dict[tuple[str, bool], str] = {}
        self._lines: list[str] = []

    def reserve(self) -> str:
        """Return the name of a rule that is defined later."""
        self._names["", False] = name = f"{self._prefix}_{len(self._names)}"
        self._names[name, False] = name
        return name

    def define(self, name: str, body: str) -> None:
        """Write a rule."""
        self._lines.append(f"{name}: {body}")

    def rule(self, body: str) -> str:
        """Write a rule, once, and return its name."""
        return self._named(body, is_terminal=False)

    def terminal(self, body: str) -> str:
        """Write a terminal, once, and return its name."""
        return self._named(body, is_terminal=True)

    def schema(self, lark: str) -> str:
        """Write the rule of a schema (`Rules.schema`)."""
        return self.rule(lark.removeprefix("start: ").rstrip("\n"))

    def finish(self, body: str) -> str:
        """Write the root and return the grammar."""
        self.define(self.root, body)
        return "\n".join([*self._lines, ""])

    def sequence(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Write items, in their order, of which some are required. Return the rule of at least one of them."""
        more = '""'
        first = ""
        for item, is_required in reversed(items):
            begun = f"{item} {more}"
            first = self.rule(begun if is_required or not first else f"{begun} | {first}")
            more = self.rule(f"{separator} {begun}" + ("" if is_required else f" | {more}"))
        return first

    def _named(self, body: str, *, is_terminal: bool) -> str:
        name = self._names.get((body, is_terminal))
        if name is None:
            name = f"{self._prefix}_{len(self._names)}"
            name = name.upper() if is_terminal else name
            self._names[body, is_terminal] = name
            self.define(name, body)
        return name


def literal(text: str) -> str:
    """Write a text."""
    return json.dumps(text, ensure_ascii=False)


def without(*regexes: str) -> str:
    """Write, within a terminal, any text in which none of these regular expressions is found.

    One complement of all: one of each would be multiplied with each other.
    """
    return f"{ANY_TEXT} & ~{pattern(f'(?s:.*)(?:{"|".join(regexes)})(?s:.*)')}" if regexes else ANY_TEXT


def pattern(regex: str) -> str:
    """Write a regular expression of Rust's."""
    return "/" + regex.replace("/", r"\/") + "/"


class Marked:
    """Text in which control tokens are single characters."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.ids = vocabulary.ids
        self._tokens = re.compile("|".join(map(re.escape, sorted(vocabulary.ids, key=len, reverse=True))))
        self._marks: dict[str, str] = {}

    def of(self, pieces: Iterable[Piece]) -> str:
        """Put pieces together."""
        return self.text("".join(piece.text for piece in pieces))

    def text(self, text: str) -> str:
        """Put marks for the control tokens that are spelt in a text."""
        return self._tokens.sub(lambda match: self._mark(match[0]), text)

    def token(self, mark: str) -> int | None:
        """Return the control token that a mark stands for."""
        return next((self.ids[text] for text, each in self._marks.items() if each == mark), None)

    def lark(self, text: str, *, layout: str = "\n", counters: Mapping[str, str] | None = None) -> str:
        """Write a marked text. `layout`: characters that may be left out; `counters` as in `CallSyntax`."""
        counters = counters or {}
        splitter = "|".join([_MARK, *map(re.escape, counters), *map(re.escape, layout)])
        parts = []
        for part in re.split(f"({splitter})", text):
            if (token := self.token(part)) is not None:
                parts.append(f"<[{token}]>")
            elif part in counters:
                parts.append(pattern(counters[part]))
            elif part:
                parts.append(literal(part) + ("?" if part in layout else ""))
        return " ".join(parts)

    def _mark(self, token: str) -> str:
        if token not in self._marks:
            self._marks[token] = chr(_FIRST_MARK + len(self._marks))
        return self._marks[token]


def is_mark(character: str) -> bool:
    """Whether a character stands for a control token."""
    return re.fullmatch(_MARK, character) is not None
