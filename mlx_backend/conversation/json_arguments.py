r"""The arguments of a call that a model writes as JSON: put out as they come, and repaired where they are no JSON.

Theory of operation
-------------------
JSON goes out as it was written, character by character. A fault whose meaning is plain is repaired where it stands, as
soon as it is seen; what was put out is never taken back, so a little text is held where the next character decides:

    in a string   a control character    `\n`, `\t`, `\u001b` …
                  `\d`, `\p`, `\u12`     the backslash is doubled; `\'` is an apostrophe
    else          `,` before `}` or `]`  dropped; held with the blanks after it
                  True, none, FALSE …    true, null, false; held to the word's end
                  {key:                  "key"; held to the colon
                  'text', `text`         "text"
                  {{ at the beginning    {
                  `\n`, spelt            a line break
    instead       nothing, null, ""      {}
                  "{\"key\": …}"         the object in the string
    around it     `}`, `]`, a fence      dropped

`_Json` is the machine. It knows what may come next, and nothing else of what it has read but the open brackets. Where
something else comes (two values in a row, a bracket of the other kind, a word without quotes), the meaning is not plain
any more: from there on the text goes out as it was written, and only strings and brackets are followed, for the end.
So do brackets and strings that are left open, since nobody knows what was to stand before their ends, and `C:\new`,
which is JSON, though a path was meant.

`JsonArguments` looks at the beginning (nothing, an object, an object in a string, or something that is no JSON at all)
and at what follows the end.
"""

from __future__ import annotations

import json
import re

_BLANKS = re.compile(r"[ \t\r\n]+")
_QUOTES = "\"'`"
_STOPS = {quote: re.compile(rf'[{quote}"\\\x00-\x1f]') for quote in _QUOTES}
_STRING_CHARACTERS = {quote: re.compile(rf"[{quote}\\]") for quote in _QUOTES}
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_COMMA = re.compile(r",[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z_$][\w$-]*")
_KEY = re.compile(r"([A-Za-z_$][\w$-]*)([ \t\r\n]*)")
_OTHER = re.compile(r"[^\s{}\[\],:\"\\]+|.", re.DOTALL)
_SPELT_BLANK = re.compile(r"\\[nrt]")
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_SHORT_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f", '"': '\\"'}
_PARTNERS = {"{": "}", "[": "]"}

_MAX_HELD = 64
"""Characters that are held: of a word, of the blanks after a comma, of what may be no arguments at all."""
_MAX_DEPTH = 1000
"""Open brackets whose kinds are known."""

_SPACE = r"(?:\s|\\[nrt])*"
_NULL = "(?:null|none)?"
_QUOTED_NOTHING = re.compile(rf"""\s*(["']){_SPACE}{_NULL}{_SPACE}\1""", re.IGNORECASE)
_NOTHING = re.compile(rf"\s*{_NULL}\s*|{_QUOTED_NOTHING.pattern}", re.IGNORECASE)
_BEGUN_NULL = "(?:n|nu|nul|null|no|non|none)?"
# What may still become nothing, an object in a string, or the beginning of a fence.
_UNDECIDED = re.compile(
    rf"""\s*(?:{_BEGUN_NULL}\s*|["']{_SPACE}(?:{_BEGUN_NULL}|\{{){_SPACE}\\?|`{{1,3}}|```j(?:so?)?|```json\s*)""",
    re.IGNORECASE,
)
_FENCE = re.compile(r"\s*```(?:json)?\s*(?=\{)")
_BRACKET = re.compile(r"\s*[{\[]")
_NO_VALUE = re.compile(r"\s*(?=[}\],])")
_QUOTED_OBJECT = re.compile(rf'\s*"{_SPACE}(?=\{{{_SPACE}")')
_OBJECT_IN_STRING = re.compile(rf"""\s*(["'])(?={_SPACE}\{{)""")
_STRING = re.compile(r"""\s*["']""")
_ANY_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
AFTER_OBJECT = " \t\r\n]}),`;\"'"
"""Characters that models write after arguments by mistake: brackets, and the end of a fence or of a quotation."""


class _Json:
    """Follows one JSON value, and repairs it."""

    __slots__ = (
        *("_depth", "_held", "_in_word", "_is_key", "_last", "_open", "as_written", "has_ended"),
        "quote",
    )

    def __init__(self, *, as_written: bool = False) -> None:
        self.quote = ""  # of the string that is open
        self.as_written = as_written  # its meaning is not plain, and nothing is repaired any more
        self.has_ended = False
        self._held = ""
        self._open: list[str] = []
        self._depth = 0
        self._last = ""  # a bracket, a comma, a colon, "key" or "value"
        self._is_key = False  # the open string is one
        self._in_word = False

    @property
    def is_escaped(self) -> bool:
        """Whether the next character is escaped."""
        return self._held[:1] == "\\"

    @property
    def is_plain(self) -> bool:
        """Whether text without special characters is put out as it is."""
        return self.quote == '"' and not self._held

    def read(self, text: str) -> tuple[str, int]:
        """Take a piece. Return what is to be put out, and how much of the piece stands after the value's end."""
        text, self._held = self._held + text, ""
        out: list[str] = []
        at, size = 0, len(text)
        while at < size and not self.has_ended:
            at = self._read_string(text, at, out) if self.quote else self._read_other(text, at, out)
        return "".join(out), size - at

    def finish(self) -> str:
        """Return what was held: it was the end."""
        held, self._held = self._held, ""
        return held

    # in a string

    def _read_string(self, text: str, at: int, out: list[str]) -> int:
        stops = _STRING_CHARACTERS if self.as_written else _STOPS
        found = stops[self.quote].search(text, at)
        if found is None:
            out.append(text[at:])
            return len(text)
        start, character = found.start(), found[0]
        out.append(text[at:start])
        if character == "\\":
            return self._read_escape(text, start, out)
        if character == self.quote:
            out.append(character if self.as_written else '"')
            self.quote = ""
            self._last = "key" if self._is_key else "value"
            self.has_ended = not self._depth
        else:
            out.append(_SHORT_ESCAPES.get(character) or f"\\u{ord(character):04x}")
        return start + 1

    def _read_escape(self, text: str, at: int, out: list[str]) -> int:
        if len(text) == at + 1 or (not self.as_written and _BEGUN_ESCAPE.fullmatch(text, at)):
            self._held = text[at:]
            return len(text)
        if self.as_written:
            out.append(text[at : at + 2])
            return at + 2
        if escape := _ESCAPE.match(text, at):
            out.append(escape[0])
            return escape.end()
        if text[at + 1] in "'`":
            out.append(text[at + 1])
            return at + 2
        out.append("\\\\")
        return at + 1

    # outside of strings

    @property
    def _expects_key(self) -> bool:
        return self._last == "{" or (self._last == "," and self._open[-1] == "{")

    @property
    def _expects_value(self) -> bool:
        return self._last in ("", "[", ":") or (self._last == "," and self._open[-1] == "[")

    def _read_other(self, text: str, at: int, out: list[str]) -> int:
        character = text[at]
        match character:
            case " " | "\n" | "\r" | "\t":
                blanks = _BLANKS.match(text, at)
                assert blanks is not None
                out.append(blanks[0])
                at = blanks.end()
            case '"' | "'" | "`" if character == '"' or self._may_begin:
                self._check(self._may_begin)
                self._is_key = not self.as_written and self._expects_key
                self.quote = character
                out.append('"')
                at += 1
            case ",":
                return self._read_comma(text, at, out)
            case ":":
                self._check(self._last == "key")
                self._last = character
                out.append(character)
                at += 1
            case "{" if self._last == "{" and self._depth == 1 and not self.as_written:
                at += 1  # doubled, as templates of Python have it; so is the last one, which is too many then
            case "{" | "[":
                self._check(self._expects_value and self._depth < _MAX_DEPTH)
                if not self.as_written:
                    self._open.append(character)
                self._depth += 1
                self._last = character
                out.append(character)
                at += 1
            case "}" | "]":
                is_fit = self._last in ("value", *_PARTNERS) and bool(self._open)
                self._check(is_fit and _PARTNERS[self._open[-1]] == character)
                if not self.as_written:
                    self._open.pop()
                self._depth -= 1
                self._last = "value"
                self.has_ended = self._depth <= 0
                out.append(character)
                at += 1
            case _:
                return self._read_word(text, at, out)
        self._in_word = False
        return at

    @property
    def _may_begin(self) -> bool:
        """Whether a string may begin here."""
        return not self.as_written and not self._in_word and (self._expects_value or self._expects_key)

    def _read_comma(self, text: str, at: int, out: list[str]) -> int:
        self._in_word = False
        comma = _COMMA.match(text, at)
        assert comma is not None
        self._check(self._last == "value")
        end = comma.end()
        may_go = not self.as_written and end - at < _MAX_HELD
        if may_go and end == len(text):
            self._held = comma[0]
        elif may_go and text[end] in "}]":
            out.append(comma[0][1:])
        else:
            out.append(comma[0])
            self._last = ","
        return end

    def _read_word(self, text: str, at: int, out: list[str]) -> int:
        """Read a number, a word, or a character that JSON does not have."""
        if not self.as_written:
            if text[at] == "\\":
                if at + 1 == len(text):
                    self._held = "\\"
                    return len(text)
                if blank := _SPELT_BLANK.match(text, at):
                    out.append("\n")
                    self._in_word = False
                    return blank.end()
            elif not self._in_word and (word := (_KEY if self._expects_key else _WORD).match(text, at)):
                end = word.end()
                if end == len(text) and end - at < _MAX_HELD:
                    self._held = word[0]
                elif self._expects_key and end - at < _MAX_HELD and text[end] == ":":
                    name, blanks = word.groups()
                    out.append(f'"{name}"{blanks}')
                    self._last = "key"
                else:
                    out.append(self._word(word[0]))
                return end
        other = _OTHER.match(text, at)
        assert other is not None
        if not self._in_word:
            self._check(self._expects_value and other[0][0] in "-0123456789")
            self._in_word = True
            self._last = "value"
        out.append(other[0])
        return other.end()

    def _word(self, word: str) -> str:
        """Return what JSON has for a word that is no key."""
        literal = _LITERALS.get(word.lower()) if self._expects_value and not self.as_written else None
        self._check(literal is not None)
        self._last = "value"
        return literal or word

    def _check(self, is_right: bool) -> None:
        """Stop repairing if this is not what may come next."""
        if not is_right:
            self.as_written = True


class JsonArguments:
    """Reads the arguments of one call: pieces of what the model writes come, and JSON goes out."""

    SPECIAL = '"\\' + "".join(map(chr, range(0x20)))
    """While `is_plain`, a piece without these characters is put out as it is, without `read`."""

    __slots__ = ("_after", "_beginning", "_inner", "_is_text", "_json", "_marked", "_marker", "_string")

    def __init__(self) -> None:
        self._beginning: str | None = ""  # what is held until it is known what begins; then None
        self._json = _Json()
        self._inner: JsonArguments | None = None  # reads what stands in a string
        self._is_text = False  # no JSON begins
        self._after: str | None = None  # what `feed` holds after the end
        self._marker, self._marked = "", [""]  # a held marker, and what followed it
        self._string = _StringEnd('"')

    @property
    def is_plain(self) -> bool:
        """Whether the next piece, if it has no special character, is put out as it is."""
        if self._beginning is not None or self._inner is not None or self._after is not None:
            return False
        return self._is_text or self._json.is_plain

    @property
    def in_string(self) -> bool:
        """Whether the text so far ends in a string."""
        return bool(self._json.quote)

    def read(self, text: str) -> tuple[str, str | None]:
        """Return what is to be put out, and what follows the end of the value: None if it goes on."""
        if self._beginning is not None:
            text = self._beginning + text
            if len(text) < _MAX_HELD and _UNDECIDED.fullmatch(text):
                self._beginning = text
                return "", None
            if nothing := _QUOTED_NOTHING.match(text, 0, _MAX_HELD):
                self._beginning = None
                return "{}", text[nothing.end() :]
            if nothing := _NO_VALUE.match(text):  # the object around them goes on, or ends
                self._beginning = None
                self._json.has_ended = True
                return "{}", text[nothing.end() :]
            text = self._begin(text)
        if self._is_text:
            return text, None
        written, left = self._json.read(text)
        rest = text[len(text) - left :] if self._json.has_ended else None
        if self._inner is not None:
            if rest is not None:
                written = written[:-1]  # the quotation mark
            written = self._inner.feed(_ANY_ESCAPE.sub(_unescaped, written))
            if rest is not None:
                written += self._inner.finish()
        return written, rest

    def _begin(self, text: str) -> str:
        """Find out what begins; return the text that is to be read."""
        beginning, self._beginning = text[:_MAX_HELD], None
        if found := _FENCE.match(beginning):
            return text[found.end() :]
        if _BRACKET.match(beginning):
            return text
        if found := _QUOTED_OBJECT.match(beginning):  # its own quotation marks are not escaped
            return text[found.end() :]
        if found := _OBJECT_IN_STRING.match(beginning):
            self._inner = JsonArguments()
            self._json.read(found[1])
            return text[found.end() :]
        self._is_text = not _STRING.match(beginning)
        return text

    def feed(self, text: str) -> str:
        """Return what is to be put out of arguments that end with their call.

        What models write after the value by mistake is dropped: blanks, brackets, and the end of a fence.
        """
        written = ""
        if self._after is None:
            written, rest = self.read(text)
            if rest is None:
                return written
            self._after, text = "", rest
        self._after += text
        if len(self._after) >= _MAX_HELD or self._after.strip(AFTER_OBJECT):
            written += self._after
            self._after, self._is_text = None, True
        return written

    def finish(self) -> str:
        """Return what is still to be put out: what was held, and `{}` where there are no arguments."""
        if self._beginning is not None:
            beginning, self._beginning = self._beginning, None
            return "{}" if _NOTHING.fullmatch(beginning) else beginning
        return self._json.finish() if self._inner is None else self._inner.finish()

    # markers

    def hold(self, marker: str) -> None:
        """Hold a marker that stands in a string."""
        self._marker, self._marked = marker, []
        self._string = _StringEnd(self._json.quote, is_escaped=self._json.is_escaped)

    def judge(self, text: str) -> tuple[bool | None, str]:
        """Take what follows a held marker. Return whether the marker is part of the string, and the rest of the text.

        None: it is not known yet.
        """
        end = self._string.find(text)
        if end < 0:
            self._marked.append(text)
            return None, ""
        self._marked.append(text[:end])
        return self._string.ends_well, text[end:]

    def release(self) -> tuple[str, str]:
        """Return the held marker and the text after it; nothing is held any more."""
        held, self._marked = "".join(self._marked), []
        return self._marker, held


class _StringEnd:
    """Finds the end of a string that was entered already, and whether JSON can go on after it."""

    __slots__ = ("_characters", "_is_closed", "_is_escaped", "_quote", "ends_well")

    def __init__(self, quote: str, *, is_escaped: bool = False) -> None:
        self._quote = quote
        self._characters = _STRING_CHARACTERS[quote]
        self._is_closed = False
        self._is_escaped = is_escaped
        self.ends_well = False

    def find(self, text: str) -> int:
        """Take a piece; return where in it the first visible character after the string stands, -1 if not in it."""
        at = 0
        if not self._is_closed:
            escaped_at = 0 if self._is_escaped else -1
            self._is_escaped = False
            for match in self._characters.finditer(text):
                at = match.end()
                if match.start() == escaped_at:
                    continue
                if match[0] == self._quote:
                    self._is_closed = True
                    break
                escaped_at = at
                self._is_escaped = at == len(text)
            if not self._is_closed:
                return -1
        after = len(text) - len(text[at:].lstrip())
        if after == len(text):
            return -1
        self.ends_well = text[after] in ",:}]"
        return after


def repair_arguments(text: str) -> str:
    """Return the arguments of a call whose text is known."""
    if is_json_object(text):  # as most are, and this is faster
        return text.rstrip()
    arguments = JsonArguments()
    return arguments.feed(text) + arguments.finish()


def is_json_object(text: str) -> bool:
    """Whether a text is a JSON object, for every parser: some do not know Python's NaN."""
    try:
        return isinstance(json.loads(text, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character that an escape means. Half of one stays an escape: JSON is in the string."""
    character: str = json.loads(f'"{escape[0]}"')
    return escape[0] if "\ud800" <= character <= "\udfff" else character
