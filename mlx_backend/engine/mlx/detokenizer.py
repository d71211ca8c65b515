"""Detokenizing a stream: the text of each token as it is generated, for one request at a time.

The rules: a character that is still incomplete is held back. A special token is exactly its own marker, and an
incomplete character before it is dropped. Nothing is sent twice. A leading space is kept: what precedes it is the
prompt, and only the parser knows whether a space belongs there.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4  # of UTF-8, and so the most tokens that a character can take


class Detokenizer(Protocol):
    """Turns the tokens of one request into text."""

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings: exact, with one dictionary look-up per token."""

    def __init__(self, special: Mapping[int, str], bytes_of: Callable[[int], bytes]) -> None:
        self._special = special
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        marker = self._special.get(token)
        if marker is not None:
            self._utf8.reset()
            return marker
        return self._utf8.decode(self._bytes_of(token))


class WindowDetokenizer:
    """For every other vocabulary: decodes the last tokens again and returns what is new."""

    def __init__(self, special: Mapping[int, str], decode: Callable[[Sequence[int]], str]) -> None:
        self._special = special
        self._decode = decode
        self._window: list[int] = []  # the tokens returned last, as context, and then those held back
        self._num_returned = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        marker = self._special.get(token)
        if marker is not None:
            self._window.clear()
            self._num_returned = 0
            return marker
        self._window.append(token)
        before = self._decode(self._window[: self._num_returned])
        text = self._decode(self._window)
        num_held_back = len(self._window) - self._num_returned
        if text.endswith(REPLACEMENT) and num_held_back < MAX_CHARACTER_BYTES:
            return ""
        self._window = self._window[self._num_returned :]
        self._num_returned = len(self._window)
        return text[len(before) :]


class TokenBytes:
    """Maps each token to its bytes, decoding its name once."""

    def __init__(self, backend: Any, decode_name: Callable[[str], bytes]) -> None:
        self._backend = backend
        self._decode_name = decode_name
        # Added tokens are named by their text, whatever the rest of the vocabulary does.
        self._known = {
            token: added.content.encode() for token, added in backend.get_added_tokens_decoder().items()
        }

    def __call__(self, token: int) -> bytes:
        """Return the token's bytes; b"" for an id that only pads the vocabulary."""
        known = self._known.get(token)
        if known is None:
            name = self._backend.id_to_token(token)
            known = self._known[token] = b"" if name is None else self._decode_name(name)
        return known


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's bytes by letter: printable bytes look like themselves, the rest start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(rest)
    }


_ALPHABET = _byte_alphabet()


def decode_byte_level(name: str) -> bytes:
    """Return the bytes that the name of a byte-level BPE token stands for."""
    try:
        return bytes(_ALPHABET[letter] for letter in name)
    except KeyError:  # a token that somebody added to the vocabulary as plain text
        return name.encode()


def decode_sentencepiece(name: str) -> bytes:
    """Return the bytes that the name of a SentencePiece token stands for."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()
