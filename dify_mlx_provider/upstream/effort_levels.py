"""Efforts as the words that stand in settings and requests, and their order.

What people write for them is read by the shared core (`mlx_backend.conversation.effort`); here every word is one of its
six. Which of them a model or a server knows is known elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.effort import Effort

if TYPE_CHECKING:
    from collections.abc import Collection

ORDER = tuple(effort.value for effort in Effort)
LEVELS = ("low", "medium", "high")
"""What gpt-oss and its like know."""

SWITCH = ("none", "medium")
"""What a model has whose reasoning can only be switched off."""


def in_order(efforts: Collection[str]) -> tuple[str, ...]:
    """Return the words that are efforts, from the least to the most."""
    return tuple(effort for effort in ORDER if effort in efforts)


def nearest(effort: str, known: Collection[str]) -> str:
    """The effort of the known ones that comes nearest; a wish to reason is not answered with none if possible."""
    place = ORDER.index(effort if effort in ORDER else Effort.MEDIUM)
    words = in_order(known)
    reasoning = [word for word in words if word != Effort.NONE or effort == Effort.NONE]
    return min(reasoning or words, key=lambda word: abs(ORDER.index(word) - place))


def lowest(efforts: Collection[str]) -> str:
    """The least of some efforts, or a low one."""
    return next(iter(in_order(efforts)), Effort.LOW.value)
