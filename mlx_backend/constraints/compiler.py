"""From a schema, a pattern or a choice to something that masks tokens.

A `Rule` is what a text has to be, written in llguidance's dialect of Lark and validated once. Compiled for a
vocabulary it is a matcher, which is copied for every reply.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from sys import getsizeof
from typing import TYPE_CHECKING

from mlx_backend.byte_cache import ByteCache
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.json_schema import (
    Schema,
    check_schema,
    close_objects,
    describe_error,
    has_intersections,
    locate_error,
    serialise,
)
from mlx_backend.constraints.sandbox import Verdict, limits, validate, validate_isolated
from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llguidance import LLMatcher

    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.constraints.vocabulary import Vocabulary

# The model chooses how a text is cut into tokens: it knows that better than a tokenizer called in mid-mask.
# The option stands at the end, so that line numbers in errors are those of the text.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

MAX_CHOICES = 10_000
MAX_LENGTH = 200_000
"""Characters of a pattern, or of all choices together."""
_BYTES_OF_MATCHER = 100_000
"""Bytes of the smallest matcher; measured, as is the growth with the text of its grammar."""
_BYTES_PER_CHARACTER = 120
_VERDICT_BYTES = 1000
"""Bytes of a verdict, without the text of its grammar."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a text has to be. `ignored` is what of the schema it was made from has no effect, in words for a log."""

    lark: str
    ignored: tuple[str, ...] = field(default=(), compare=False)


class Rules:
    """Makes rules of what a client sends. Each is validated once, and again when it has left the cache."""

    def __init__(self, caches: CacheBudget | None = None) -> None:
        self._verdicts: ByteCache[tuple[str, bool], Verdict] = ByteCache(caches)

    def schema(self, schema: object, *, strict: bool, what: str = "The schema") -> Rule:
        """Return the rule of a JSON Schema. Strict: every keyword counts, and objects are closed."""
        checked = check_schema(schema)
        if strict:
            checked = close_objects(checked)
        lark = f"start: %json {serialise(checked, strict=strict)}\n"
        current().check()
        verdict = self._verdict(lark, is_hard=has_intersections(checked))
        if verdict.error:
            error = describe_error(verdict.error)
            pointer = locate_error(checked, error, lambda part: _error_of(part, strict=strict))
            where = f"{what} at {pointer}" if pointer else what
            raise GrammarError(f"{where} cannot be used: {error}.", pointer)
        return Rule(lark, tuple(map(describe_error, verdict.ignored)))

    def regex(self, pattern: str) -> Rule:
        """Return the rule of a regular expression, which has to match all of the text."""
        from llguidance import regex_to_lark

        _check_text("pattern", pattern)
        return self._rule(f"start: /{regex_to_lark(pattern)}/\n", "The pattern")

    def choice(self, choices: Sequence[str]) -> Rule:
        """Return the rule of a text that is one of these."""
        if not choices or len(choices) > MAX_CHOICES:
            raise GrammarError(f"A choice has 1 to {MAX_CHOICES} texts, not {len(choices)}.")
        _check_text("choice", "".join(choices))
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return self._rule(f"start: {texts}\n", "The choice")

    def _rule(self, lark: str, what: str) -> Rule:
        verdict = self._verdict(lark, is_hard=False)
        if verdict.error:
            raise GrammarError(f"{what} cannot be used: {describe_error(verdict.error)}.")
        return Rule(lark, tuple(map(describe_error, verdict.ignored)))

    def _verdict(self, lark: str, *, is_hard: bool) -> Verdict:
        key, nbytes, grammar = (lark, is_hard), getsizeof(lark) + _VERDICT_BYTES, _grammar(lark)
        if not is_hard:
            return self._verdicts.get(key, nbytes, lambda: validate(grammar))
        if (verdict := self._verdicts.find(key)) is not None:
            return verdict
        with current().waiting():  # for another process, or for a thread that waits for it already
            return self._verdicts.get(key, nbytes, lambda: validate_isolated(grammar))


def _error_of(schema: Schema, *, strict: bool) -> str:
    return describe_error(validate(_grammar(f"start: %json {serialise(schema, strict=strict)}\n")).error)


def _grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark + _OPTIONS}]})


def _check_text(what: str, text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise GrammarError(f"The {what} has {len(text)} characters; at most {MAX_LENGTH} are allowed.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"The {what} holds half of a surrogate pair, which is not a character.") from None


class Matchers:
    """The matchers of one vocabulary. A rule is compiled once; every reply gets copies.

    `rules` makes the rules that they are compiled from.
    """

    def __init__(self, vocabulary: Vocabulary, caches: CacheBudget | None = None) -> None:
        self.rules = Rules(caches)
        self._vocabulary = vocabulary
        self._compiled: ByteCache[Rule, LLMatcher] = ByteCache(caches)

    def of(self, rule: Rule) -> LLMatcher:
        """Return a rule's matcher, to be copied for a reply. Raises GrammarError if no token can begin its text."""
        nbytes = _BYTES_OF_MATCHER + _BYTES_PER_CHARACTER * len(rule.lark)
        return self._compiled.get(rule, nbytes, lambda: self._compile(rule))

    def _compile(self, rule: Rule) -> LLMatcher:
        from llguidance import LLMatcher

        current().check()
        tokenizer = self._vocabulary.grammar_tokenizer
        matcher = LLMatcher(tokenizer, _grammar(rule.lark), log_level=0, limits=limits())
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"The grammar cannot be used: {describe_error(matcher.get_error())}.")
        return matcher


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRules:
    """Which parts a reply may have, and the rule of each."""

    allows_answer: bool = True
    """Whether it may be an answer at all; False where a call is required."""
    answer: Rule | None = None
    """The rule of the answer; None leaves it free."""
    calls: Mapping[str, Rule] = field(default_factory=dict)
    """The tools that may be called, by name, and the rule of each one's calls (`ReplyGrammar.call_rule`)."""
    parallel: bool = True
    """Whether one call may follow another, in dialects that do that."""
