"""Parses the regular expressions of a response template into `Pattern`s, and refuses all others.

Nested repetitions, lookarounds, references back, a greedy `.*`: whatever could take more than linear time, or cannot be
written back. No expression is handed to `re` as it stands in the template.
"""

from __future__ import annotations

import re
from typing import NoReturn

from mlx_backend.conversation.dialects.response_template.patterns import (
    Anything,
    Blanks,
    Part,
    Pattern,
    ResponseTemplateError,
    Run,
    Text,
)

MAX_PATTERN = 1000  # characters
MAX_CHOICES = 64
_CLASSES = {"w": r"\w", "d": r"\d", "S": r"\S", "W": r"\W", "D": r"\D"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}
_EVERYTHING = ({r"\s", r"\S"}, {r"\w", r"\W"}, {r"\d", r"\D"})


def parse_pattern(source: str) -> Pattern:
    """Parse a regular expression. Raises ResponseTemplateError for one that is not such a sequence."""
    if len(source) > MAX_PATTERN:
        raise ResponseTemplateError(f"{len(source)} characters; {MAX_PATTERN} are allowed")
    parts = _Parser(source).parts()
    for part, behind in zip(parts, [*parts[1:], None], strict=True):
        match part, behind:
            case Anything(), (Anything() | Run() | None):
                raise ResponseTemplateError(f"nothing tells where .*? ends in {source!r}")
            case Anything(), Blanks() if not _has_text_behind(part, parts):
                raise ResponseTemplateError(f"nothing tells where .*? ends in {source!r}")
            case Run(characters), (Text() | Run() | Blanks()) if _overlaps(characters, behind):
                raise ResponseTemplateError(
                    f"{characters} may also match what stands behind it in {source!r}"
                )
    return Pattern(tuple(parts))


def _has_text_behind(part: Part, parts: list[Part]) -> bool:
    behind = parts[next(at for at, each in enumerate(parts) if each is part) + 1 :]
    return next((isinstance(each, Text) for each in behind if not isinstance(each, Blanks)), False)


def _overlaps(characters: str, behind: Part) -> bool:
    """Whether a run would take what stands behind it, too."""
    one = re.compile(characters)
    match behind:
        case Text(choices):
            return any(one.match(choice) for choice in choices if choice)
        case Blanks(is_required):
            return is_required and one.match(" ") is not None
    return True


class _Parser:
    """Parses one expression."""

    def __init__(self, source: str) -> None:
        self._source, self._at = source, 0

    def parts(self) -> list[Part]:
        """Return its parts."""
        parts: list[Part] = []
        while self._at < len(self._source):
            if self._peek() in (")", "|"):
                self._refuse("a choice of more than texts")
            part = self._part()
            match part:
                case None:
                    continue
                case Text((text,)) if parts and isinstance(parts[-1], Text) and len(parts[-1].choices) == 1:
                    parts[-1] = Text((parts[-1].choices[0] + text,))
                case Text((text,)) if parts and isinstance(parts[-1], Blanks) and text[:1].isspace():
                    if text.strip():
                        parts.append(Text((text.lstrip(),)))
                case Blanks() if parts and isinstance(parts[-1], Blanks):
                    parts[-1] = Blanks(part.is_required or parts[-1].is_required)
                case _:
                    parts.append(part)
        return parts

    def _part(self) -> Part | None:
        character = self._peek()
        if character == "(":
            return self._group()
        if character in "^$":
            self._at += 1
            return None
        if character == "\\" and self._source[self._at + 1 : self._at + 2] in ("b", "A", "Z", "z"):
            self._at += 2
            return None
        atom, is_class = self._atom()
        quantifier, is_lazy = self._quantifier()
        if not is_class:
            if not quantifier:
                return Text((atom,))
            if atom.isspace():
                return Blanks(quantifier == "+")
            if quantifier == "?":
                return Text((atom, ""))
            self._refuse(f"{atom}{quantifier}")
        return self._repeated(atom, quantifier, is_lazy=is_lazy)

    def _repeated(self, characters: str, quantifier: str, *, is_lazy: bool, name: str = "") -> Part:
        if characters == r"\s" and not name:
            return Blanks(quantifier in ("", "+"))
        if quantifier not in ("*", "+"):
            self._refuse(f"{characters}{quantifier}")
        if characters == ".":
            if not is_lazy:
                self._refuse(f".{quantifier} that takes all it can")
            return Anything(name)
        return Run(characters, quantifier == "+", name)

    def _group(self) -> Part:
        rest = self._source[self._at :]
        named = re.match(r"\(\?P?<([A-Za-z_]\w{0,63})>", rest)
        opener = named[0] if named else "(?:" if rest.startswith("(?:") else "("
        if opener == "(" and rest[1:2] == "?":
            self._refuse(rest[:4])
        self._at += len(opener)
        if named:
            atom, is_class = self._atom()
            quantifier, is_lazy = self._quantifier()
            if self._peek() == ")" and is_class:
                self._at += 1
                return self._repeated(atom, quantifier, is_lazy=is_lazy, name=named[1])
            self._refuse(f"the group {named[1]!r}")
        choices = [self._text()]
        while self._peek() == "|":
            self._at += 1
            choices.append(self._text())
        if self._peek() != ")" or len(choices) > MAX_CHOICES:
            self._refuse("a group of more than texts")
        self._at += 1
        quantifier, _ = self._quantifier()
        if quantifier == "?":
            choices.append("")
        elif quantifier:
            self._refuse("a group that is repeated")
        return Text(tuple(choices))

    def _text(self) -> str:
        text = ""
        while self._peek() not in ("", "|", ")"):
            atom, is_class = self._atom()
            if is_class or self._quantifier()[0]:
                self._refuse("a group of more than texts")
            text += atom
        return text

    def _atom(self) -> tuple[str, bool]:
        """Take a character, or a class of characters. Return it and which of the two it is."""
        character = self._peek()
        self._at += 1
        match character:
            case ".":
                return ".", True
            case "[":
                return self._class()
            case "\\":
                escaped = self._peek()
                self._at += 1
                if escaped == "s":
                    return r"\s", True
                if escaped in _CLASSES:
                    return _CLASSES[escaped], True
                if escaped in _CONTROLS:
                    return _CONTROLS[escaped], False
                if escaped and not escaped.isalnum():
                    return escaped, False
                self._refuse(f"\\{escaped}")
            case "" | "*" | "+" | "?" | "(" | "|" | ")":
                self._refuse(repr(character) if character else "its end")
        return character, False

    def _class(self) -> tuple[str, bool]:
        begin = self._at
        self._at += self._peek() == "^"
        items: list[str] = []
        while (character := self._peek()) != "]" or not items:
            self._at += 1
            if not character or character == "[":
                self._refuse("a class")
            if character == "\\":
                character += self._peek()
                self._at += 1
                if not re.fullmatch(r"\\(?:[wWdDsSntr]|[^\w\s])", character):
                    self._refuse(character)
            items.append(character)
        self._at += 1
        source = f"[{self._source[begin : self._at]}"
        if any(pair <= set(items) for pair in _EVERYTHING):
            return ".", True
        if any(operator in source for operator in ("--", "&&", "||", "~~")):
            self._refuse(source)
        try:
            re.compile(source)
        except re.error:
            self._refuse(source)
        return (r"\s", True) if source == r"[\s]" else (source, True)

    def _quantifier(self) -> tuple[str, bool]:
        """Take what may stand behind an atom. Return it, and whether it takes as little as it can."""
        quantifier = self._peek()
        if quantifier == "{" and re.match(r"\{\d*,?\d*\}", self._source[self._at :]):
            self._refuse("a number of repetitions")
        if not quantifier or quantifier not in "*+?":
            return "", False
        self._at += 1
        manner = self._peek()
        if manner and manner in "?+":
            self._at += 1
        return quantifier, manner == "?"

    def _peek(self) -> str:
        return self._source[self._at : self._at + 1]

    def _refuse(self, what: str) -> NoReturn:
        raise ResponseTemplateError(f"{what} in the pattern {self._source!r}")
