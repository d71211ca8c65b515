"""What a request may hold its reply to, and the constraint of one reply.

A `Spec` is made from what a client asked for, and refused there, in words; where in the reply it applies is
found when the reply begins. What is made for a model (its tokens as llguidance wants them) is made with the
first reply that is held.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from mlx_backend.constraints.blocks import BlockTurns
from mlx_backend.constraints.compiler import Matchers, Rule, choice_rule, lark_rule, regex_rule, schema_rule
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.harmony import NEEDED, HarmonyTurns
from mlx_backend.constraints.plan import Plan
from mlx_backend.constraints.states import Turn
from mlx_backend.constraints.vocabulary import MAX_TOKENS, Vocabulary
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.dialects.plain import END_MARKERS
from mlx_backend.conversation.dialects.think import THINK
from mlx_backend.conversation.json_values import shown

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mlx_backend.constraints.states import Place
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Channel
    from mlx_backend.engine.base import Constraint, Tokenizer

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Spec:
    """What a reply is held to. `ignored` is what of it is not, in words for a log.

    `answer | calls` holds the answer to one and the calls to the other; where a call is required there is no
    answer to be held.
    """

    _grammars: Grammars
    plan: Plan
    ignored: tuple[str, ...] = ()

    def __or__(self, other: Spec) -> Spec:
        calls, answer = (other, self) if other.plan.calls else (self, other)
        if answer.plan.calls:
            raise ValueError("Only one of two specs can be about calls.")
        plan = replace(calls.plan, answer=answer.plan.answer if calls.plan.answers else None)
        return Spec(self._grammars, plan, answer.ignored + calls.ignored)

    def start(self, opens_in: Channel | None = None, *, begun: str = "") -> Constraint:
        """Begin to hold a reply. Raises GrammarError if this model's replies cannot be held.

        `opens_in` is the channel the prompt has opened; `begun` is what stands there of the answer already,
        in a reply that is continued.
        """
        return self._grammars.begin(self.plan, opens_in, begun)


class Grammars:
    """The grammars of one model. Safe to use from several threads; the constraint of a reply is for one.

    `ends` are the tokens with which the engine ends a reply; by default those that dialects are known to use.
    """

    def __init__(
        self, tokenizer: Tokenizer, dialect: Dialect, *, ends: Collection[int] | None = None
    ) -> None:
        self._vocabulary = Vocabulary(tokenizer)
        self._matchers = Matchers(self._vocabulary)
        self._dialect = dialect
        self._ends = ends

    def prepare(self) -> None:
        """Make what every held reply needs, if it is not there yet. Takes about 2 s for 200,000 tokens."""
        self._vocabulary.build()

    @property
    def prepared(self) -> bool:
        """Whether that is there."""
        return self._vocabulary.built

    def json_object(self) -> Spec:
        """Hold the answer to any JSON object."""
        return self._answer(schema_rule(_ANY_OBJECT, strict=False))

    def json_schema(self, schema: Mapping[str, Any], *, strict: bool) -> Spec:
        """Hold the answer to a JSON Schema.

        Strict: a keyword that nothing can be held to is an error, and objects have no properties but those
        that are named, where the schema does not say. Otherwise such keywords are ignored.
        """
        return self._answer(schema_rule(schema, strict=strict))

    def regex(self, pattern: str) -> Spec:
        """Hold the answer to a regular expression, from its first character to its last."""
        return self._answer(regex_rule(pattern))

    def choice(self, choices: Sequence[str]) -> Spec:
        """Hold the answer to one of these texts."""
        return self._answer(choice_rule(choices))

    def lark(self, grammar: str) -> Spec:
        """Hold the answer to a context-free grammar, in llguidance's dialect of Lark."""
        return self._answer(lark_rule(grammar))

    def tool_calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool,
        name: str | None = None,
        parallel: bool = True,
    ) -> Spec:
        """Hold calls to the tools' parameters, and force one if it is required (or named, which requires it).

        `tools` are in OpenAI's form. The parameters of a tool that is not `strict` never refuse a request:
        what of them nothing can be held to is ignored, and in the end any object will do.
        """
        if not self._turns.takes_calls:
            raise GrammarError("Calls cannot be forced with this model: its output has no form for them.")
        functions = {tool["function"]["name"]: (at, tool["function"]) for at, tool in enumerate(tools)}
        if name is not None:
            if name not in functions:
                there = ", ".join(functions) or "none"
                raise GrammarError(
                    f"There is no tool {shown(name)} to be called; the request's tools: {there}."
                )
            functions = {name: functions[name]}
        if not functions:
            raise GrammarError("A call cannot be held to tools that are not there: the request has none.")
        calls: dict[str, Rule] = {}
        ignored: list[str] = []
        for function_name, (at, function) in functions.items():
            rule, notes = _arguments(f"tools[{at}] ({function_name})", function)
            calls[function_name] = rule
            ignored += notes
        must = required or name is not None
        return Spec(self, Plan(answers=not must, calls=calls, several=parallel), tuple(ignored))

    def begin(self, plan: Plan, opens_in: Channel | None, begun: str) -> Constraint:
        """Begin a turn (what `Spec.start` does)."""
        self._vocabulary.build()
        return Turn(self._turns.begin(plan, opens_in, begun))

    def _answer(self, rule: Rule) -> Spec:
        return Spec(self, Plan(answer=rule), tuple(f"The schema: {note}" for note in rule.ignored))

    @cached_property
    def _turns(self) -> _Turns:
        if self._dialect.name == HARMONY.name:
            return HarmonyTurns(self._vocabulary, self._matchers)
        thinks = self._dialect.name == THINK.name
        return BlockTurns(self._vocabulary, self._matchers, thinks=thinks, ends=self._ends)


def can_hold(dialect: Dialect, control_tokens: Collection[str], vocabulary_size: int | None) -> bool:
    """Whether the replies of a model with these tokens can be held, as far as that is known without its vocabulary."""
    if vocabulary_size is not None and vocabulary_size > MAX_TOKENS:
        return False
    there = set(control_tokens)
    return there.issuperset(NEEDED) if dialect.name == HARMONY.name else not there.isdisjoint(END_MARKERS)


class _Turns(Protocol):
    """The turns of one model (HarmonyTurns, or BlockTurns)."""

    @property
    def takes_calls(self) -> bool: ...

    def begin(self, plan: Plan, opens_in: Channel | None, begun: str) -> Place: ...


def _arguments(what: str, function: Mapping[str, Any]) -> tuple[Rule, list[str]]:
    """Return the rule of a tool's arguments, and what of its parameters is ignored."""
    parameters = function.get("parameters") or _ANY_OBJECT
    strict = bool(function.get("strict"))
    if (
        isinstance(parameters, dict)
        and "type" not in parameters
        and parameters.keys().isdisjoint(("$ref", "allOf", "anyOf", "oneOf"))
    ):
        parameters = {"type": "object", **parameters}
    try:
        rule = schema_rule(parameters, strict=strict, what=f"{what}: its parameters")
    except GrammarError as error:
        if strict:
            raise
        return schema_rule(_ANY_OBJECT, strict=False), [f"{what}: any object is taken. {error}"]
    return rule, [f"{what}: {note}" for note in rule.ignored]
