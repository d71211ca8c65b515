"""What a reply is constrained to, whatever the dialect: the answer, the calls, and which of them may come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.constraints.compiler import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """Which parts a reply may have, and the rule of each."""

    allows_answer: bool = True
    """Whether it may be an answer at all; False where a call is required."""
    answer: Rule | None = None
    """The rule of the answer; None leaves it free."""
    calls: Mapping[str, Rule] = field(default_factory=dict)
    """The tools that may be called, by name, and the rule of each one's calls (`ReplyGrammar.call_rule`)."""
    parallel: bool = True
    """Whether one call may follow another, in dialects that do that."""
