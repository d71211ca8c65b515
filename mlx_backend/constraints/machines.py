"""Which state machine constrains which dialect.

A family of blocks needs no machine of its own: `block_machine` constrains its answers and its reasoning, and its
calls if `calls` knows their syntax. For any other, write its machine and add it here. A dialect that is not here
is never constrained: its models offer no structured output, and a reasoning budget does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mlx_backend.constraints import blocks, harmony
from mlx_backend.constraints.calls import can_enforce
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.harmony import HARMONY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from mlx_backend.constraints.compiler import Matchers, ReplyRules, Rule
    from mlx_backend.constraints.json_schema import Schema
    from mlx_backend.constraints.mask import ReasoningCloser
    from mlx_backend.constraints.states import State
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Channel
    from mlx_backend.conversation.parser import ChannelParser
    from mlx_backend.engine.base import Tokenizer


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


class CloserFactory(Protocol):
    """Makes the closer of one reply."""

    def __call__(
        self, tokenizer: Tokenizer, parser: ChannelParser, prompt_tail: str, *, has_tools: bool
    ) -> ReasoningCloser:
        """Make a closer."""
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
    closer: CloserFactory | None = None
    """Makes what closes reasoning; None where there is none."""


def block_machine(dialect: Dialect) -> StateMachine:
    """Return the machine of a family that writes blocks."""
    return StateMachine(
        grammar=partial(blocks.BlockGrammar, dialect=dialect),
        has_calls=can_enforce(dialect.calls),
        has_required_tokens=partial(blocks.has_required_tokens, known_ends=dialect.ends),
        closer=partial(blocks.BlockCloser, openers=dialect.blocks) if dialect.has_reasoning else None,
    )


def machine_of(dialect: Dialect) -> StateMachine | None:
    """Return the machine of a dialect, None if it cannot be constrained."""
    machine = STATE_MACHINES.get(dialect)
    return block_machine(dialect) if machine is None and dialect.is_from_response_template else machine


STATE_MACHINES: Mapping[Dialect, StateMachine] = {
    HARMONY: StateMachine(
        grammar=harmony.HarmonyGrammar,
        has_calls=True,
        has_required_tokens=harmony.has_required_tokens,
        closer=harmony.HarmonyCloser,
    ),
    **{dialect: block_machine(dialect) for dialect in DIALECTS.values() if dialect is not HARMONY},
}
