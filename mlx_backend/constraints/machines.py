"""Which state machine constrains which dialect.

A family of blocks needs no machine of its own: `block_machine` constrains its answers and its reasoning, and its
calls if `calls` knows their syntax. For any other, write its machine and add it to `machine_of`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mlx_backend.constraints import blocks, harmony
from mlx_backend.constraints.calls import can_enforce
from mlx_backend.conversation.dialects.harmony import HARMONY

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from mlx_backend.constraints.compiler import Matchers, ReplyRules, Rule
    from mlx_backend.constraints.json_schema import Schema
    from mlx_backend.constraints.mask import ReasoningCloser
    from mlx_backend.constraints.states import State
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Channel


class ReplyGrammar(Protocol):
    """The shape of one model's replies.

    `can_forbid_calls` is whether no call can be written where the rules know of none.
    """

    can_forbid_calls: bool

    def call_rule(self, at: int, name: str, parameters: Schema, *, strict: bool, what: str) -> Rule:
        """Return the rule of the calls of one tool, the `at`-th of a request; `what` names it in errors.

        Strict: what of the schema cannot be enforced is an error. Raises GrammarError, also if calls cannot be.
        """
        ...

    def first_state(self, plan: ReplyRules, opens_in: Channel | None, begun: str) -> State:
        """Begin a reply, after what the prompt has opened and what of the answer stands there already."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMachine:
    """How a dialect's replies are constrained."""

    grammar: Callable[[Vocabulary, Matchers], ReplyGrammar]
    """Makes the grammar of one model's replies."""
    has_required_tokens: Callable[[Set[str], Set[str]], bool]
    """Whether a model can be constrained that has these control tokens, and of them these end tokens by its files."""
    has_calls: bool
    """Whether calls can be required, and held to their schemas."""
    closer: Callable[..., ReasoningCloser] | None
    """Makes what closes a reply's reasoning, of tokenizer, parser, prompt_tail and has_tools; None: there is none."""


def machine_of(dialect: Dialect) -> StateMachine:
    """Return the machine of a dialect."""
    if dialect is HARMONY:
        return _HARMONY
    return StateMachine(
        grammar=partial(blocks.BlockGrammar, dialect=dialect),
        has_calls=can_enforce(dialect.calls),
        has_required_tokens=partial(blocks.has_required_tokens, known_ends=dialect.ends),
        closer=partial(blocks.BlockCloser, openers=dialect.blocks) if dialect.has_reasoning else None,
    )


_HARMONY = StateMachine(
    grammar=harmony.HarmonyGrammar,
    has_calls=True,
    has_required_tokens=harmony.has_required_tokens,
    closer=harmony.HarmonyCloser,
)
