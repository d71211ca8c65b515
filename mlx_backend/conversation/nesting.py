"""How deep JSON may nest before it is no request but an attack on whoever walks through it."""

from __future__ import annotations

from typing import Any

DEEPEST = 100
"""Levels. Tool schemas of real applications have under 20; Python's own recursion ends near 1,000."""


def too_deep(value: Any, deepest: int = DEEPEST) -> bool:
    """Whether lists and objects are nested in each other more than `deepest` levels. Does not recurse itself."""
    level = [value]
    for _ in range(deepest + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
