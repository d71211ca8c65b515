"""Which state machine constrains which dialect.

To constrain the replies of a new family, write its machine and add it here. A family of blocks whose calls are not JSON
needs none of its own: `block_grammar` without `calls` constrains its answers and its reasoning. A dialect that is not
here is never constrained: its models offer no structured output, and a reasoning budget does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from mlx_backend.constraints import blocks, harmony
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.dialects.json_calls import JSON_CALLS
from mlx_backend.conversation.dialects.plain import PLAIN
from mlx_backend.conversation.dialects.think import THINK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Set

    from mlx_backend.constraints.closers import ReasoningCloser
    from mlx_backend.constraints.compiler import Matchers
    from mlx_backend.constraints.plan import ReplyPlan
    from mlx_backend.constraints.states import State
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.dialects.json_calls import JsonCalls
    from mlx_backend.conversation.events import Channel
    from mlx_backend.conversation.parser import ChannelParser
    from mlx_backend.engine.base import Tokenizer


class ReplyGrammar(Protocol):
    """The shape of one model's replies."""

    @property
    def allows_calls(self) -> bool:
        """Whether its output has a form for calls to tools."""
        ...

    def first_state(self, plan: ReplyPlan, opens_in: Channel | None, begun: str) -> State:
        """Begin a reply, behind what the prompt has opened and what of the answer stands there already."""
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

    grammar: Callable[[Vocabulary, Matchers, Collection[int] | None], ReplyGrammar]
    """Makes the grammar of one model's replies; the last argument is the tokens that end a turn."""
    has_required_tokens: Callable[[Set[str]], bool]
    """Whether a model with these control tokens can be constrained."""
    closer: CloserFactory | None = None
    """Makes what closes reasoning; None where there is none."""


def _harmony(
    vocabulary: Vocabulary, matchers: Matchers, end_tokens: Collection[int] | None
) -> harmony.HarmonyGrammar:
    return harmony.HarmonyGrammar(vocabulary, matchers)


def block_grammar(
    vocabulary: Vocabulary,
    matchers: Matchers,
    end_tokens: Collection[int] | None,
    *,
    has_blocks: bool,
    calls: JsonCalls | None = None,
) -> blocks.BlockGrammar:
    """Make the grammar of a family that reasons in a block; `calls` is its codec, if its calls are JSON."""
    return blocks.BlockGrammar(
        vocabulary, matchers, has_blocks=has_blocks, calls=calls, end_tokens=end_tokens
    )


STATE_MACHINES: Mapping[Dialect, StateMachine] = {
    HARMONY: StateMachine(
        grammar=_harmony,
        has_required_tokens=harmony.has_required_tokens,
        closer=harmony.HarmonyCloser,
    ),
    THINK: StateMachine(
        grammar=partial(block_grammar, has_blocks=True, calls=JSON_CALLS),
        has_required_tokens=blocks.has_required_tokens,
        closer=blocks.BlockCloser,
    ),
    PLAIN: StateMachine(
        grammar=partial(block_grammar, has_blocks=False),
        has_required_tokens=blocks.has_required_tokens,
    ),
}
