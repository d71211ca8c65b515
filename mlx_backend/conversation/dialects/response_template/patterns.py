r"""The regular expressions of a response template, as far as they can be run in linear time.

    \s*<tool_call>\s*<function=(?P<name>[^>\n]+)>
    <parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>

A pattern is a sequence of texts (or a choice of texts), white space, and captures: a run of some characters, or
anything (`.*?`) up to the text behind it. Response templates are written with these, and nothing is tried twice.
`pattern_parser` refuses everything else: a file from a model's folder must not be able to stop a server.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.calls.base import beginnings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MAX_RUN = 1024  # characters of a run
_MAX_EXPRESSION = 4096
_TAIL = 2048  # characters in which what stands before a closer is looked for


class ResponseTemplateError(ValueError):
    """A response template that cannot be used; the text says what of it."""


@dataclass(frozen=True, slots=True)
class Text:
    """One of these texts; the first is how it is written."""

    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Blanks:
    """White space."""

    is_required: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """Characters of a class (`[^>]`), captured if it has a name."""

    characters: str
    is_required: bool
    name: str = ""


@dataclass(frozen=True, slots=True)
class Anything:
    """Any text up to what stands behind it, captured if it has a name."""

    name: str = ""


type Part = Text | Blanks | Run | Anything


@dataclass(frozen=True, slots=True)
class Found:
    """Where a pattern was found, and what it captured. `is_whole`: all of it was there."""

    start: int
    end: int
    captures: Mapping[str, str]
    is_whole: bool = True


@dataclass(frozen=True)
class Pattern:
    """A sequence of parts."""

    parts: tuple[Part, ...]

    @property
    def names(self) -> list[str]:
        """The names of what it captures."""
        return [part.name for part in self.parts if isinstance(part, Run | Anything) and part.name]

    def texts(self) -> tuple[str, ...] | None:
        """Return the texts it matches if it is one text, or a choice, with white space around; else None."""
        match [part for part in self.parts if not isinstance(part, Blanks)]:
            case [Text(choices)]:
                return choices
        return None

    def written(self, captures: Mapping[str, str]) -> str:
        """Write a text that it matches. White space that may be left out is."""
        words: list[str] = []
        for part in self.parts:
            match part:
                case Text(choices):
                    words.append(choices[0])
                case Blanks(is_required):
                    words.append(" " if is_required else "")
                case Run(name=name) | Anything(name=name):
                    words.append(captures.get(name, ""))
        return "".join(words)

    def every_beginning(self, then: str) -> str:
        """Return an expression of every beginning of a text that it matches with `then` behind it."""
        expression = then
        for part in reversed(self.parts):
            match part:
                case Text(choices) if len(expression) < _MAX_EXPRESSION:
                    expression = f"(?:{beginnings(choices, expression)})"
                case Blanks() if len(expression) < _MAX_EXPRESSION:
                    expression = rf"\s*(?:{expression})?"
                case Run(characters) if len(expression) < _MAX_EXPRESSION:
                    expression = f"{characters}{{0,{_MAX_RUN}}}(?:{expression})?"
                case _:
                    expression = ".*"
        return expression

    def match(self, text: str, at: int = 0) -> Found | None:
        """Match it at a place."""
        head, tails = self._compiled
        found = head.match(text, at)
        return self._completed(found, tails, text) if found else None

    def each(self, text: str) -> Iterator[Found]:
        """Find it again and again. What is cut at the end of the text is found as far as it goes."""
        head, tails = self._compiled
        at = 0
        while found := head.search(text, at):
            whole = self._completed(found, tails, text)
            yield whole
            at = max(whole.end, found.end())
            if not whole.is_whole or at >= len(text):
                return

    def without_end(self, text: str) -> str:
        """Return a text without this pattern at its end."""
        head, _ = self._compiled
        start = max(0, len(text) - _TAIL)
        last = None
        for found in head.finditer(text, start):
            last = found if not text[found.end() :].strip() else last
        return text[: last.start()] if last and last.end() > last.start() else text

    def _completed(
        self, head: re.Match[str], tails: Sequence[tuple[str, re.Pattern[str]]], text: str
    ) -> Found:
        captures = {name: value for name, value in head.groupdict().items() if value is not None}
        at = head.end()
        for name, tail in tails:
            found = tail.search(text, at)
            value = text[at : found.start() if found else len(text)]
            if name:
                captures[name] = value.strip() if self._trims(name) else value
            if found is None:
                return Found(head.start(), len(text), captures, is_whole=False)
            captures |= {key: each for key, each in found.groupdict().items() if each is not None}
            at = found.end()
        return Found(head.start(), at, captures)

    def _trims(self, name: str) -> bool:
        """Whether white space stands around what is captured."""
        at = next(
            at for at, part in enumerate(self.parts) if isinstance(part, Anything) and part.name == name
        )
        return any(isinstance(part, Blanks) for part in self.parts[max(0, at - 1) : at + 2])

    @cached_property
    def _compiled(self) -> tuple[re.Pattern[str], list[tuple[str, re.Pattern[str]]]]:
        """Return what stands before the first `Anything`, and each of these with what stands behind it."""
        groups: list[tuple[str, list[Part]]] = [("", [])]
        for part in self.parts:
            if isinstance(part, Anything):
                groups.append((part.name, []))
            else:
                groups[-1][1].append(part)
        compiled = [
            (name, re.compile("".join(map(_expression, parts[1:] if _begins_blank(at, parts) else parts))))
            for at, (name, parts) in enumerate(groups)
        ]
        return compiled[0][1], compiled[1:]


def _begins_blank(at: int, parts: list[Part]) -> bool:
    """White space behind `Anything` is found with what follows it: else its run would be tried at each character."""
    return at > 0 and isinstance(parts[0], Blanks)


def _expression(part: Part) -> str:
    """Write a part so that it never gives back what it has taken."""
    match part:
        case Text(choices):
            longest_first = sorted(choices, key=len, reverse=True)
            return f"(?>{'|'.join(map(re.escape, longest_first))})"
        case Blanks(is_required):
            return r"\s++" if is_required else r"\s*+"
        case Run(characters, is_required, name):
            run = f"{characters}{{{int(is_required)},{_MAX_RUN}}}+"
            return f"(?P<{name}>{run})" if name else run
    raise AssertionError(part)


def literal(texts: Sequence[str]) -> Pattern:
    """Return the pattern of one of these texts."""
    return Pattern((Text(tuple(texts)),))


def split(pattern: Pattern) -> tuple[tuple[str, ...], Pattern]:
    """Split a pattern that begins with a text: into the marker(s) it begins with, and the rest.

    Of `<|tool_call>call:` the marker is `<|tool_call>`: that is the control token.
    """
    parts = list(pattern.parts)
    while parts and isinstance(parts[0], Blanks):
        del parts[0]
    if not parts or not isinstance(parts[0], Text):
        raise ResponseTemplateError("it does not begin with a text")
    choices = tuple(filter(None, (choice.strip() for choice in parts[0].choices)))
    rest = parts[1:]
    if len(choices) == 1 and (tag := re.match(r"<[^<>\s]+>|\[[A-Z_]+\]", choices[0])):
        if behind := choices[0][tag.end() :]:
            rest.insert(0, Text((behind,)))
        choices = (tag[0],)
    return choices, Pattern(tuple(rest))


def split_end(pattern: Pattern) -> tuple[Pattern, tuple[str, ...]]:
    """Split a pattern that ends with a text: into what stands before it, and the text(s)."""
    parts = list(pattern.parts)
    while parts and isinstance(parts[-1], Blanks):
        del parts[-1]
    if not parts or not isinstance(parts[-1], Text):
        raise ResponseTemplateError("it does not end with a text")
    choices = tuple(filter(None, (choice.strip() for choice in parts[-1].choices)))
    if any(isinstance(part, Anything) for part in parts):
        raise ResponseTemplateError("it holds .*?")
    return Pattern(tuple(parts[:-1])), choices
