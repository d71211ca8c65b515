"""From a schema, a pattern or a grammar to something that masks tokens.

A `Rule` is what a text has to be, written in llguidance's dialect of Lark and read by it once. Compiled for a
vocabulary it is a matcher, which is copied for every reply.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.json_schema import (
    Schema,
    closed,
    constraints_meet,
    place_of,
    read_schema,
    spelt,
    told,
)
from mlx_backend.constraints.sandbox import Verdict, check, limits, try_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

    from mlx_backend.constraints.vocabulary import Vocabulary

# The model chooses how a text is cut into tokens: it knows that better than a tokenizer called in mid-mask.
# It stands at the end, so that the lines an error speaks of are those of the text.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'

MAX_CHOICES = 10_000
LONGEST = 200_000  # characters of a pattern or a grammar


@dataclass(frozen=True, slots=True)
class Rule:
    """What a text has to be. `foreign`: people wrote it, and it may name control tokens, which it must not."""

    lark: str
    ignored: tuple[str, ...] = field(default=(), compare=False)
    foreign: bool = False


def schema_rule(schema: object, *, strict: bool, what: str = "The schema") -> Rule:
    """Return the rule of a JSON Schema. Strict: every keyword counts, and objects are closed."""
    read = read_schema(schema)
    if strict:
        read = closed(read)
    lark = f"start: %json {spelt(read, strict=strict)}\n"
    verdict = _verdict(lark, hard=constraints_meet(read))
    if verdict.error:
        place = place_of(read, told(verdict.error), lambda part: _error_of(part, strict=strict))
        words = f"{what} at {place}" if place else what
        raise GrammarError(f"{words} cannot be held to: {told(verdict.error)}.", place)
    return Rule(lark, verdict.ignored)


def regex_rule(pattern: str) -> Rule:
    """Return the rule of a regular expression, which has to match all of the text."""
    from llguidance import regex_to_lark

    _bear("pattern", pattern)
    return _rule(f"start: /{regex_to_lark(pattern)}/\n", "The pattern")


def choice_rule(choices: Sequence[str]) -> Rule:
    """Return the rule of a text that is one of these."""
    if not choices or len(choices) > MAX_CHOICES:
        raise GrammarError(f"A reply can be chosen from 1 to {MAX_CHOICES} texts, not {len(choices)}.")
    for choice in choices:
        _bear("choice", choice)
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _rule(f"start: {texts}\n", "The choice")


def lark_rule(grammar: str) -> Rule:
    """Return the rule of a grammar in llguidance's dialect of Lark. It may not speak of control tokens."""
    _bear("grammar", grammar)
    rule = _rule(grammar, "The grammar", hard=True)
    return Rule(rule.lark, rule.ignored, foreign=True)


def joined_rule(lark: str) -> Rule:
    """Return the rule of a grammar that we have put together from rules that are sound."""
    return Rule(lark)


def _rule(lark: str, what: str, *, hard: bool = False) -> Rule:
    verdict = _verdict(lark, hard=hard)
    if verdict.error:
        raise GrammarError(f"{what} cannot be held to: {told(verdict.error)}.")
    return Rule(lark, verdict.ignored)


@lru_cache(maxsize=128)
def _verdict(lark: str, *, hard: bool) -> Verdict:
    grammar = _grammar(lark)
    return try_out(grammar) if hard else check(grammar)


def _error_of(schema: Schema, *, strict: bool) -> str:
    return told(check(_grammar(f"start: %json {spelt(schema, strict=strict)}\n")).error)


def _grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark + _OPTIONS}]})


def _bear(what: str, text: str) -> None:
    if len(text) > LONGEST:
        raise GrammarError(f"The {what} has {len(text)} characters; {LONGEST} are the most.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"The {what} holds half a surrogate pair, which is no character.") from None


class Matchers:
    """The matchers of one vocabulary. A rule is compiled once; every reply gets copies."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = Lock()
        self._compiled = lru_cache(maxsize=256)(self._compile)  # 0.1 MB each

    def of(self, rule: Rule) -> LLMatcher:
        """Return a rule's matcher, to be copied. Raises GrammarError if no token can begin such a text."""
        with self._lock:
            return self._compiled(rule)

    def _compile(self, rule: Rule) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer = self._vocabulary.grammar_tokenizer
        matcher = LLMatcher(tokenizer, _grammar(rule.lark), log_level=0, limits=limits())
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"The grammar cannot be held to: {told(matcher.get_error())}.")
        return matcher
