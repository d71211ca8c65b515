"""How a dialect's reasoning is closed, and kept from being opened again: what a reasoning budget asks it for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.constraints.mask import Mask


class ReasoningCloser(ABC):
    """Follows one reply. Every token of it goes through `advance`."""

    opening: Sequence[int] = ()
    """Tokens that begin an answer at the beginning of a turn."""
    cost: int
    """Tokens of the longest closing."""
    header = 0
    """Tokens with which reasoning is begun."""
    can_reopen = True
    """Whether there may be reasoning again behind the beginning of an answer."""

    @abstractmethod
    def closing(self) -> Sequence[int]:
        """Return the tokens that close the open reasoning."""

    @abstractmethod
    def advance(self, token: int | None, *, exhausted: bool) -> None:
        """Take a token (None: the reply begins); `exhausted`: no more reasoning may follow."""

    @abstractmethod
    def allowed_mask(self) -> Mask | None:
        """Return the mask of what may come instead of reasoning, where it might begin; None: anything."""
