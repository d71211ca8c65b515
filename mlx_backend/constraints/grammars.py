"""What a request may constrain its reply to, and the constraint of one reply.

A `Spec` is made from what a client asked for, and refused there, in words; which part of the reply it applies to is
known when the reply begins. What is made for a model (its tokens as llguidance wants them) is made with its first
constrained reply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from mlx_backend.constraints.compiler import Matchers, ReplyRules, Rule
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.machines import machine_of
from mlx_backend.constraints.states import GrammarConstraint
from mlx_backend.constraints.vocabulary import MAX_TOKENS, Vocabulary
from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.constraints.machines import ReplyGrammar
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Channel
    from mlx_backend.engine.base import Constraint, Tokenizer

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Spec:
    """What a reply is constrained to. `ignored` is what of it has no effect, in words for a log.

    `answer | calls` constrains the answer to one and the calls to the other; where a call is required there is
    no answer to constrain.
    """

    _grammars: Grammars
    plan: ReplyRules
    ignored: tuple[str, ...] = ()

    def __or__(self, other: Spec) -> Spec:
        calls, answer = (other, self) if other.plan.calls else (self, other)
        if answer.plan.calls:
            raise ValueError("Only one of two specs can be about calls.")
        plan = replace(calls.plan, answer=answer.plan.answer if calls.plan.allows_answer else None)
        return Spec(self._grammars, plan, answer.ignored + calls.ignored)

    def start(self, opens_in: Channel | None = None, *, begun: str = "") -> Constraint:
        """Start constraining a reply. Raises GrammarError if this model's replies cannot be constrained.

        `opens_in` is the channel the prompt has opened; `begun` is the part of the answer that is there already,
        in a reply that is continued.
        """
        return self._grammars.start(self.plan, opens_in, begun)


class Grammars:
    """The grammars of one model. Safe to use from several threads; the constraint of a reply is for one."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect, caches: CacheBudget | None = None) -> None:
        self._vocabulary = Vocabulary(tokenizer, ends=dialect.ends, has_suffixes=bool(dialect.suffixes))
        self._matchers = Matchers(self._vocabulary, caches)
        self._rules = self._matchers.rules
        self._dialect = dialect

    def prepare(self) -> None:
        """Make what every constrained reply needs, if it is not there yet. Takes about 2 s for 200,000 tokens."""
        self._vocabulary.build()

    def json_object(self) -> Spec:
        """Constrain the answer to any JSON object."""
        return self._answer(self._rules.schema(_ANY_OBJECT, strict=False))

    def json_schema(self, schema: Mapping[str, Any], *, strict: bool) -> Spec:
        """Constrain the answer to a JSON Schema.

        Strict: a keyword that cannot be enforced is an error, and objects have no properties but those that are
        named, where the schema does not say. Otherwise such keywords are ignored.
        """
        return self._answer(self._rules.schema(_with_type(schema), strict=strict))

    def regex(self, pattern: str) -> Spec:
        """Constrain the answer to a regular expression, from its first character to its last."""
        return self._answer(self._rules.regex(pattern))

    def choice(self, choices: Sequence[str]) -> Spec:
        """Constrain the answer to one of these texts."""
        return self._answer(self._rules.choice(choices))

    def tool_calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        required: bool,
        name: str | None = None,
        parallel: bool = True,
    ) -> Spec:
        """Constrain calls to the tools' parameters, and force one if it is required (or named, which requires it).

        `tools` are in OpenAI's form. The parameters of a tool that is not `strict` never refuse a request:
        what of them cannot be enforced is ignored, if need be all of it.
        """
        functions = {tool["function"]["name"]: (at, tool["function"]) for at, tool in enumerate(tools)}
        if name is not None:
            if name not in functions:
                known = ", ".join(functions) or "none"
                raise GrammarError(f"There is no tool {excerpt(name)} to call; the request's tools: {known}.")
            functions = {name: functions[name]}
        if not functions:
            raise GrammarError("A call cannot be required: the request has no tools.")
        calls: dict[str, Rule] = {}
        ignored: list[str] = []
        for function_name, (at, function) in functions.items():
            rule, notes = self._call_rule(at, f"tools[{at}] ({function_name})", function)
            calls[function_name] = rule
            ignored += notes
        must_call = required or name is not None
        plan = ReplyRules(allows_answer=not must_call, calls=calls, parallel=parallel)
        return Spec(self, plan, tuple(ignored))

    def no_calls(self) -> Spec:
        """Have the reply be an answer, whatever tools the model was told of.

        Raises GrammarError where a call begins with no token of its own: it would be written as text.
        """
        if not self._grammar.can_forbid_calls:
            raise GrammarError("Calls cannot be forbidden with this model: they begin as a text may.")
        return Spec(self, ReplyRules())

    def start(self, plan: ReplyRules, opens_in: Channel | None, begun: str) -> Constraint:
        """Start constraining a reply (see `Spec.start`)."""
        self._vocabulary.build()
        return GrammarConstraint(self._grammar.first_state(plan, opens_in, begun))

    def _answer(self, rule: Rule) -> Spec:
        return Spec(self, ReplyRules(answer=rule), tuple(f"The schema: {note}" for note in rule.ignored))

    def _call_rule(self, at: int, what: str, function: Mapping[str, Any]) -> tuple[Rule, list[str]]:
        """Return the rule of a tool's calls, and what of its parameters is ignored."""
        name, parameters = function["name"], function.get("parameters") or _ANY_OBJECT
        strict = bool(function.get("strict"))
        if (
            isinstance(parameters, dict)
            and "type" not in parameters
            and parameters.keys().isdisjoint(("$ref", "allOf", "anyOf", "oneOf"))
        ):
            parameters = {"type": "object", **parameters}
        rule_of = partial(self._grammar.call_rule, at, name, what=f"{what}: its parameters")
        try:
            rule = rule_of(parameters, strict=strict)
        except GrammarError as error:
            if strict:
                error.tool = at
                raise
            return rule_of(_ANY_OBJECT, strict=False), [f"{what}: any object is accepted. {error}"]
        return rule, [f"{what}: {note}" for note in rule.ignored]

    @cached_property
    def _grammar(self) -> ReplyGrammar:
        return machine_of(self._dialect).grammar(self._vocabulary, self._matchers)


def can_constrain(
    dialect: Dialect,
    control_tokens: Collection[str],
    end_tokens: Collection[str],
    vocabulary_size: int | None,
) -> bool:
    """Whether the replies of a model can be constrained, as far as that is known without its vocabulary.

    `end_tokens` are those of its control tokens that end a reply by its files.
    """
    if vocabulary_size is not None and vocabulary_size > MAX_TOKENS:
        return False
    return machine_of(dialect).has_required_tokens(frozenset(control_tokens), frozenset(end_tokens))


def can_require_calls(dialect: Dialect) -> bool:
    """Whether calls of a family's models can be required, and held to their schemas."""
    return machine_of(dialect).has_calls


_OBJECT_KEYWORDS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_OTHER_TYPES = frozenset({"type", "$ref", "allOf", "anyOf", "oneOf", "enum", "const"})


def _with_type(schema: Any) -> Any:
    """Return an answer's schema, as an object's if it has properties and names no type.

    By JSON Schema a number would do, since properties say nothing of numbers; no author means that.
    """
    if isinstance(schema, dict) and schema.keys() & _OBJECT_KEYWORDS and not schema.keys() & _OTHER_TYPES:
        return {"type": "object", **schema}
    return schema
