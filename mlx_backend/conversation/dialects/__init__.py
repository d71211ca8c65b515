"""The dialects: one object per family of models, and how to tell which family a model belongs to.

To add a family, write a module with its `Dialect` and put it in the registry below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Dialect
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.dialects.plain import PLAIN
from mlx_backend.conversation.dialects.think import THINK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["DIALECTS", "Dialect", "detect"]

DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (HARMONY, THINK, PLAIN)}
"""Every dialect by its name, in the order in which they are tried. The last one recognises any model."""


def detect(chat_template: str | None, control_tokens: Iterable[str]) -> Dialect:
    """Return the dialect a model speaks, from its template and its control tokens."""
    template, tokens = chat_template or "", frozenset(control_tokens)
    return next(dialect for dialect in DIALECTS.values() if dialect.recognises(template, tokens))
