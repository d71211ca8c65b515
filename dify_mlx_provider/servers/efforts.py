"""Efforts as the words that stand in settings and requests, and their order.

What people write for them is parsed by `mlx_backend.conversation.effort`; here every word is one of its values. Which
of them a model or a server knows is decided elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.effort import Effort

if TYPE_CHECKING:
    from collections.abc import Collection

EFFORTS = tuple(effort.value for effort in Effort)
"""Every effort, from the least to the most."""

LEVELS = ("low", "medium", "high")
"""The efforts of gpt-oss and its like."""

SWITCH = ("none", "medium")
"""The efforts of a model whose reasoning can only be switched on and off, where its server says no more than that.

mlx-backend does: between them it holds such a model to budgets, and lists low, medium and high.
"""


def in_order(words: Collection[str]) -> tuple[str, ...]:
    """Return the words that are efforts, from the least to the most."""
    return tuple(effort for effort in EFFORTS if effort in words)


def nearest(effort: str, known: Collection[str]) -> str:
    """Return the known effort closest to one; `none` stands for a wish to reason only if nothing else is known."""
    index = EFFORTS.index(effort if effort in EFFORTS else Effort.MEDIUM)
    words = in_order(known)
    reasoning = [word for word in words if word != Effort.NONE or effort == Effort.NONE]
    return min(reasoning or words, key=lambda word: abs(EFFORTS.index(word) - index))
