"""What a reply is held to, before it is known in which dialect: the answer, the calls, and which of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.constraints.compiler import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`answer` is what an answer is held to (None: to nothing), if one may be given at all (`answers`).

    `calls` are the tools that may be called and what the arguments of each are held to. `several`: one call
    may follow another, in dialects that do that.
    """

    answers: bool = True
    answer: Rule | None = None
    calls: Mapping[str, Rule] = field(default_factory=dict)
    several: bool = True
