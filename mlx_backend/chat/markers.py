"""The markers of a model's control tokens as texts: where data spells them, and a character that data does not hold.

Knows no templates and no tokens but their texts.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mlx_backend.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Markers:
    """The texts of a model's control tokens, and where they are spelt."""

    def __init__(self, special_tokens: Mapping[int, str]) -> None:
        self.texts = dict(special_tokens)
        self.ids = {text: token for token, text in special_tokens.items() if text}
        longest_first = sorted(self.ids, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._splitter = re.compile(f"({self.pattern.pattern})")
        # A text may also end in the first half of a marker, and the template add the second half.
        self._halves = tuple({text[:size] for text in self.ids for size in range(1, len(text))})

    def split(self, text: str) -> list[str]:
        """Return a text's markers and what is between them."""
        return self._splitter.split(text)

    def spelt_in(self, data: Any) -> bool:
        """Whether a marker is spelt anywhere in the data, or a text ends in a part of one."""
        match data:
            case str():
                return bool(self.pattern.search(data)) or data.endswith(self._halves)
            case dict():
                return any(self.spelt_in(key) or self.spelt_in(value) for key, value in data.items())
            case list() | tuple():
                return any(map(self.spelt_in, data))
            case _:
                return False

    def broken(self, data: Any, sentinel: str) -> Any:
        """Copy `data` with the sentinel inside every spelt marker and after every half of one."""
        match data:
            case str():
                text = self.pattern.sub(lambda match: match[0][0] + sentinel + match[0][1:], data)
                return text + sentinel if data.endswith(self._halves) else text
            case dict():
                return {self.broken(k, sentinel): self.broken(v, sentinel) for k, v in data.items()}
            case list() | tuple():
                return [self.broken(item, sentinel) for item in data]
            case _:
                return data


def unused_character(data: Any) -> str:
    """Return a private-use character that occurs nowhere in the data, spelt out or escaped.

    Raises RequestError where there is none: it keeps control tokens that are spelt in the messages text.
    """
    # repr escapes private-use characters as \ue000, so one search finds both spellings.
    used = set(re.findall(r"\\u(e[0-9a-f]{3}|f[0-8][0-9a-f]{2})", repr(data), re.IGNORECASE))
    used = {code.lower() for code in used}
    for code in range(0xE000, 0xF900):
        if f"{code:04x}" not in used:
            return chr(code)
    raise RequestError(
        "The messages spell a control token and use every private-use character (U+E000 to U+F8FF), of which one is "
        "needed here: leave one out.",
        "messages",
    )
