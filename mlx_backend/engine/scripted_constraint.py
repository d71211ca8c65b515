"""How a transcript keeps to a request's constraint: it goes on at its next token that is allowed. Knows no MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.engine.base import Constraint


def constrained(tokens: Sequence[int], constraint: Constraint | None) -> Iterator[int]:
    """Yield the tokens that are allowed; where none of the rest is, the lowest id that is."""
    if constraint is None:
        yield from tokens
        return
    at = 0
    while at < len(tokens):
        token, mask = tokens[at], _call(constraint.allowed_mask)
        if mask is not None:
            allowed = (position for position in range(at, len(tokens)) if _is_set(mask, tokens[position]))
            if (found := next(allowed, None)) is not None:
                at, token = found, tokens[found]
            else:
                at, token = at - 1, _lowest(mask)
        yield token
        at += 1
        _call(constraint.advance, token)


def _call[**P, R](method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a constraint's method; what it raises fails its own request alone."""
    try:
        return method(*args, **kwargs)
    except Exception as error:
        raise EngineError(f"Choosing the next token failed: {error}") from error


def _is_set(mask: Sequence[int], token: int) -> bool:
    return bool(mask[token // 32] >> token % 32 & 1)


def _lowest(mask: Sequence[int]) -> int:
    at, word = next((at, word) for at, word in enumerate(mask) if word)
    return 32 * at + (word & -word).bit_length() - 1
