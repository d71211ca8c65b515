"""Tokens to text as they come, for one request at a time.

The rules: a character that is still incomplete is held back; a special token is exactly its own marker, and
what was incomplete before it is dropped (half a character is nobody's text); nothing is sent twice. A leading
space is kept: what comes before it is the prompt, and only the reader knows whether it wants one there.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4  # bytes, and so at most as many tokens


class Detokenizer(Protocol):
    """The text of one request."""

    def push(self, token: int) -> str:
        """The text that this token completes."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings: exact, and a dictionary look-up per token."""

    def __init__(self, special: Mapping[int, str], bytes_of: Callable[[int], bytes]) -> None:
        self._special = special
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this token completes."""
        marker = self._special.get(token)
        if marker is not None:
            self._utf8.reset()
            return marker
        return self._utf8.decode(self._bytes_of(token))


class WindowDetokenizer:
    """For every other vocabulary: decode the last tokens again and show what is new."""

    def __init__(self, special: Mapping[int, str], decode: Callable[[Sequence[int]], str]) -> None:
        self._special = special
        self._decode = decode
        self._window: list[int] = []  # the tokens last shown, as context, and then those held back
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes."""
        marker = self._special.get(token)
        if marker is not None:
            self._window.clear()
            self._shown = 0
            return marker
        self._window.append(token)
        before = self._decode(self._window[: self._shown])
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._shown < MAX_CHARACTER_BYTES:
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]


class TokenBytes:
    """token -> its bytes, looked up once per token."""

    def __init__(self, backend: Any, spell: Callable[[str], bytes]) -> None:
        self._backend = backend
        self._spell = spell
        # Added tokens are spelt as they are, whatever the rest of the vocabulary does.
        self._known = {
            token: added.content.encode() for token, added in backend.get_added_tokens_decoder().items()
        }

    def __call__(self, token: int) -> bytes:
        """Give the token's bytes; b"" for an id that only pads the vocabulary."""
        known = self._known.get(token)
        if known is None:
            name = self._backend.id_to_token(token)
            known = self._known[token] = b"" if name is None else self._spell(name)
        return known


def _byte_alphabet() -> dict[str, int]:
    """In byte-level BPE, printable bytes are the letters they look like and the rest begin at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def spell_byte_level(name: str) -> bytes:
    """Read the name of a byte-level BPE token as bytes."""
    try:
        return bytes(_ALPHABET[letter] for letter in name)
    except KeyError:  # not of the alphabet: a token somebody put into the vocabulary as plain text
        return name.encode()


def spell_sentencepiece(name: str) -> bytes:
    """Read the name of a SentencePiece token as bytes."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()
