"""A grammar in Lark's language as one regular expression: what clients hold the input of a custom tool to.

Such an input is a text within something else, a JSON string or an element, where it is written with escapes. llguidance
has those for a pattern, not for a grammar in a grammar. A grammar that refers to itself is no regular expression and is
refused, and so is %ignore, with which a text may hold what the grammar does not say.

    start: "+" name*              ─▶ \\+(?:[a-z]+(?:\\n))*
    name: /[a-z]+/ LF
    %import common.LF
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.conversation.json_values import excerpt

MAX_CHARACTERS = 50_000
"""Of the expression: a rule is written out wherever it is named."""
_MAX_DEPTH = 100

_TOKEN = re.compile(
    r"""
      (?P<blank>[ \t\r]+|(?://|\#)[^\n]*)
    | (?P<newline>\n[ \t\r\n]*)
    | (?P<text>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?!/)(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[imslux]*)
    | (?P<directive>%[a-z]+)
    | (?P<name>[?!]*_?[A-Za-z][A-Za-z0-9_]*)
    | (?P<number>[0-9]+)
    | (?P<sign>\.\.|->|[:|()\[\]?*+~.,{}-])
    """,
    re.VERBOSE,
)

_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""What %import finds in `common`."""

type _Token = tuple[str, str]


def lark_to_regex(grammar: str) -> str:
    """Return the expression that matches the texts of a grammar's `start`. Raises GrammarError."""
    return _Writer(_definitions(_tokens(grammar))).write("start", ())


def _tokens(grammar: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None or found.lastgroup is None:
            line = grammar.count("\n", 0, at) + 1
            _refuse(f"line {line} cannot be read from {excerpt(grammar[at : at + 40])} on")
        if found.lastgroup != "blank":
            tokens.append((found.lastgroup, found.group()))
        at = found.end()
    return tokens


def _definitions(tokens: list[_Token]) -> dict[str, list[_Token] | str]:
    """Return what each name stands for: tokens, or an expression."""
    found: dict[str, list[_Token] | str] = {}
    for statement in _statements(tokens):
        match statement:
            case [("directive", "%import"), *rest]:
                found |= _imported(rest)
            case [("directive", directive), *_]:
                _refuse(f"{directive} is not supported")
            case [("name", name), *rest]:
                name = name.lstrip("?!")
                if len(rest) > 1 and rest[0] == ("sign", ".") and rest[1][0] == "number":  # a priority
                    rest = rest[2:]
                if not rest or rest[0] != ("sign", ":"):
                    _refuse(f"the rule {excerpt(name)} has no colon after its name")
                if name in found:
                    _refuse(f"there are two rules called {excerpt(name)}")
                found[name] = rest[1:]
            case _:
                _refuse(f"a rule cannot begin with {excerpt(statement[0][1])}")
    if "start" not in found:
        _refuse("it has no rule called start")
    return found


def _statements(tokens: list[_Token]) -> list[list[_Token]]:
    """Split a grammar at the ends of lines, but for those within brackets and those that `|` goes on after."""
    statements: list[list[_Token]] = [[]]
    depth = 0
    for at, token in enumerate(tokens):
        kind, text = token
        if kind == "newline":
            if depth == 0 and tokens[at + 1 : at + 2] != [("sign", "|")]:
                statements.append([])
            continue
        if kind == "sign":
            depth += (text in "([{") - (text in ")]}")
        statements[-1].append(token)
    return [statement for statement in statements if statement]


def _imported(rest: list[_Token]) -> dict[str, str]:
    match rest:
        case [("name", "common"), ("sign", "."), ("name", name)]:
            names = {name: name}
        case [("name", "common"), ("sign", "."), ("name", name), ("sign", "->"), ("name", alias)]:
            names = {alias: name}
        case [("name", "common"), ("sign", "("), *listed, ("sign", ")")]:
            names = {text: text for kind, text in listed if kind == "name"}
        case _:
            _refuse("%import is supported from common alone")
    for name in names.values():
        if name not in _COMMON:
            _refuse(f"common has no terminal {excerpt(name)}")
    return {alias: _COMMON[name] for alias, name in names.items()}


class _Writer:
    """Writes rules out as expressions."""

    def __init__(self, definitions: dict[str, list[_Token] | str]) -> None:
        self._definitions = definitions
        self._written: dict[str, str] = {}

    def write(self, name: str, within: tuple[str, ...]) -> str:
        """Return the expression of a rule that is named within others."""
        if name in within or len(within) > _MAX_DEPTH:
            _refuse(f"the rule {excerpt(name)} refers to itself, which a regular expression cannot do")
        if name not in self._written:
            definition = self._definitions.get(name)
            if definition is None:
                _refuse(f"there is no rule or terminal called {excerpt(name)}")
            if isinstance(definition, str):
                self._written[name] = definition
            else:
                body = _Body(self, definition, (*within, name))
                self._written[name] = self.checked(body.whole())
        return self._written[name]

    @staticmethod
    def checked(expression: str) -> str:
        """Return an expression. Raises the GrammarError for one that is too long."""
        if len(expression) > MAX_CHARACTERS:
            _refuse(f"written out it has more than {MAX_CHARACTERS} characters")
        return expression


class _Body:
    """What stands after the colon of one rule."""

    def __init__(self, writer: _Writer, tokens: list[_Token], within: tuple[str, ...]) -> None:
        self._writer = writer
        self._tokens = tokens
        self._within = within
        self._at = 0
        self._depth = 0

    def whole(self) -> str:
        expression = self._alternatives()
        if self._at < len(self._tokens):
            _refuse(f"{excerpt(self._tokens[self._at][1])} is not expected in {excerpt(self._within[-1])}")
        return expression

    def _next(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _take(self, sign: str) -> bool:
        is_there = self._next() == ("sign", sign)
        self._at += is_there
        return is_there

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return f"(?:{'|'.join(found)})" if len(found) > 1 else found[0]

    def _sequence(self) -> str:
        parts: list[str] = []
        while (part := self._repeated()) is not None:
            parts.append(part)
            self._writer.checked(part)
        if self._take("->"):
            self._at += 1  # an alias is a name in the tree
        return "".join(parts)

    def _repeated(self) -> str | None:
        atom = self._atom()
        if atom is None:
            return None
        for sign in "?*+":
            if self._take(sign):
                return f"(?:{atom}){sign}"
        if self._take("~"):
            least = most = self._number()
            if self._take(".."):
                most = self._number()
            return f"(?:{atom}){{{least},{most}}}"
        return atom

    def _number(self) -> int:
        kind, text = self._next()
        if kind != "number" or len(text) > 4:
            _refuse(f"a number is expected in {excerpt(self._within[-1])}")
        self._at += 1
        return int(text)

    def _atom(self) -> str | None:
        kind, text = self._next()
        match kind:
            case "text":
                self._at += 1
                return self._range(text) if self._take("..") else _literal(text)
            case "regex":
                self._at += 1
                return _regex(text)
            case "name":
                self._at += 1
                return f"(?:{self._writer.write(text.lstrip('?!'), self._within)})"
        for opening, closing, form in (("(", ")", "(?:{})"), ("[", "]", "(?:{})?")):
            if self._take(opening):
                self._depth += 1
                if self._depth > _MAX_DEPTH:
                    _refuse("it is nested too deeply")
                inner = self._alternatives()
                if not self._take(closing):
                    _refuse(f"a bracket is not closed in {excerpt(self._within[-1])}")
                self._depth -= 1
                return form.format(inner)
        return None

    def _range(self, first: str) -> str:
        kind, last = self._next()
        ends = [_spelt(text) for text in (first, last)] if kind == "text" else []
        if [len(end) for end in ends] != [1, 1] or ends[0] > ends[1]:
            _refuse(f"a range in {excerpt(self._within[-1])} needs a first and a last character")
        self._at += 1
        return f"[{re.escape(ends[0])}-{re.escape(ends[1])}]"


def _spelt(text: str) -> str:
    try:
        spelt: str = json.loads(text.removesuffix("i"))
    except ValueError:
        _refuse(f"the text {excerpt(text)} has an escape that is not known")
    return spelt


def _literal(text: str) -> str:
    escaped = "".join(map(_escaped, _spelt(text)))
    return f"(?i:{escaped})" if text.endswith("i") else escaped


def _escaped(character: str) -> str:
    short = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
    # re.escape also escapes blanks and some signs that mean nothing: not every reader takes that.
    return short.get(character) or (f"\\{character}" if character in r"\.+*?()|[]{}^$/" else character)


def _regex(text: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    flags = "".join(sorted({*flags} - {"u"}))
    if "x" in flags or "l" in flags or "m" in flags:
        _refuse(f"the flags of {excerpt(text)} are not supported, but for i and s")
    return f"(?{flags}:{pattern})" if flags else f"(?:{pattern})"


def _refuse(reason: str) -> NoReturn:
    raise GrammarError(f"The grammar cannot be used: {reason}.")
