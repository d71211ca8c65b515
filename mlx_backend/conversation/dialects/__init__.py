"""The dialects: one object per family of models, and how to tell which family a model belongs to.

To add a family, write a module with its `Dialect`, or a row of `families`, and put it in the registry below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects import recognition
from mlx_backend.conversation.dialects.base import Dialect
from mlx_backend.conversation.dialects.families import FAMILIES
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.dialects.plain import PLAIN
from mlx_backend.conversation.dialects.recognition import Recognition
from mlx_backend.conversation.dialects.think import THINK

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_PUNCTUATION = re.compile(r"[\s._-]+")

__all__ = ["DIALECTS", "Dialect", "Recognition", "detect", "recognise"]


class DialectRegistry(Mapping[str, Dialect]):
    """Dialects by name, in the order in which they are listed. An alias finds its dialect, and is not listed.

    Case, hyphens and the like do not count: `qwen3_coder` and `Qwen3-Coder` are one name.
    """

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        self._by_name = {dialect.name: dialect for dialect in dialects}
        self._by_folded_name = {
            _folded(name): dialect
            for dialect in self._by_name.values()
            for name in (dialect.name, *dialect.aliases)
        }

    def __getitem__(self, name: str) -> Dialect:
        """Find the dialect of a name or an alias. Raises KeyError."""
        return self._by_name.get(name) or self._by_folded_name[_folded(name)]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._by_name)

    def __len__(self) -> int:
        """Count the dialects."""
        return len(self._by_name)


def _folded(name: str) -> str:
    return _PUNCTUATION.sub("", name.casefold())


DIALECTS = DialectRegistry((HARMONY, *FAMILIES, THINK, PLAIN))
"""Every dialect. The last one is for models that show no sign of any."""


def recognise(chat_template: str | None, control_tokens: Iterable[str]) -> Recognition:
    """Return the dialect a model speaks, with what told it."""
    return recognition.recognise([*DIALECTS.values()], chat_template or "", control_tokens)


def detect(chat_template: str | None, control_tokens: Iterable[str]) -> Dialect:
    """Return the dialect a model speaks."""
    return recognise(chat_template, control_tokens).dialect
