"""The grammar of a family's calls, found by having its codec write some.

Theory of operation
-------------------
A codec writes a call of a name, and of arguments that are known: what it puts around them is the family's markup, and
is the same for any other arguments. So a new family needs no grammar of its own, only one of these bodies:

    JsonBody    the arguments are one JSON object: Hermes, Mistral, DeepSeek, Kimi K2, Llama, Cohere, Apertus …
    TaggedBody  a tag for every parameter; texts stand as they are, other values as JSON: Qwen, GLM, MiniMax, DSML …
    NotedBody   a notation of its own for every value (`call_values.Notation`): Gemma, Python
    ElementBody an element for every value, in each other: MiniMax M3

Control tokens stand in the grammar as tokens, and where a model has none for a marker, its spelling. Line breaks that a
family writes between the parts of a call may be left out, and parameters come in the order of their schema. Whatever
the grammar allows, the family's reader reads back (`tests/constraints/test_call_grammars.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.constraints.call_bodies import (
    CallBody,
    GemmaBody,
    JsonBody,
    PythonBody,
    TaggedBody,
    unknown_format,
)
from mlx_backend.constraints.call_values import Report
from mlx_backend.constraints.compiler import Rule, joined_rule
from mlx_backend.constraints.element_calls import ElementBody
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.lark import Lark, Marked
from mlx_backend.conversation.dialects.calls.any_syntax import AnySyntax
from mlx_backend.conversation.dialects.calls.base import SyntaxCodec
from mlx_backend.conversation.dialects.calls.elements import ElementCalls
from mlx_backend.conversation.dialects.calls.gemma import GemmaCalls
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.calls.named_json import NamedJson
from mlx_backend.conversation.dialects.calls.pairs import PairCalls
from mlx_backend.conversation.dialects.calls.pythonic import PythonicCalls, TaggedCalls
from mlx_backend.conversation.dialects.calls.xml import XmlCalls
from mlx_backend.conversation.dialects.calls.xtml import XtmlCalls
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.constraints.compiler import Rules
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects.base import CallCodec
    from mlx_backend.conversation.dialects.calls.base import CallSyntax


class CallGrammar:
    """The calls of one model.

    `opener` is the control token with which they begin, None if it is none; `spelling` is the marker, "" if they begin
    without one.
    """

    def __init__(self, codec: CallCodec, vocabulary: Vocabulary, rules: Rules) -> None:
        body = _body_of(codec)
        if body is None or not isinstance(codec, SyntaxCodec):
            raise unknown_format()
        make, self._syntax = body
        self._rules = rules
        self._body = make(codec, self._syntax, Marked(vocabulary))
        begins, _ = self._body.around
        self.opener = self._body.marked.token((begins or self._body.written({}))[0])
        first = next(iter(codec.encode("f", {})))
        self.spelling = first.text if first.marker else ""

    def rule(self, at: int, name: str, parameters: Mapping[str, Any], *, strict: bool, what: str) -> Rule:
        """Return the rule of the calls of one tool, the `at`-th. Raises GrammarError if it cannot be enforced."""
        self._check_name(name)
        lark, report = Lark(f"call_{at}"), Report(what, self._rules, strict=strict)
        written = self._body.write(lark, name, parameters, report)
        return Rule(lark.finish(written), tuple(report.notes))

    def join(self, calls: Mapping[str, Rule], *, parallel: bool) -> Rule:
        """Return the rule of all that a turn calls: one of these, or more."""
        call = f"({' | '.join(_root(rule) for rule in calls.values())})"
        if parallel and not isinstance(self._syntax, TaggedCalls):
            between = '"," " "?' if self._syntax.in_list else '"\\n"?'
            call = f"{call} ({between} {call})*"
        begins, ends = self._body.around
        lines = [f"start: {self._body.lark(begins)} {call} {self._body.lark(ends)}"]
        return joined_rule("\n".join([*lines, *(rule.lark for rule in calls.values())]))

    def _check_name(self, name: str) -> None:
        tools = ToolSet([name])
        said = self._body.said(name) if not isinstance(self._body, JsonBody) else name
        body = "".join(piece.text for piece in self._syntax.encode(said, {}))
        if [tools.offered_name(call.name) for call in self._syntax.decode(body, tools)] != [name]:
            raise GrammarError(f"This model's format of calls cannot write the name {name!r}.")


def can_enforce(codec: CallCodec | None) -> bool:
    """Whether there is a grammar of the calls that a codec writes."""
    return codec is not None and _body_of(codec) is not None


def _body_of(codec: CallCodec) -> tuple[type[CallBody], CallSyntax] | None:
    syntax = codec.syntax if isinstance(codec, SyntaxCodec) else None
    syntax = syntax.own if isinstance(syntax, AnySyntax) else syntax
    for kinds, body in _BODIES.items():
        if syntax is not None and isinstance(syntax, kinds):
            return body, syntax
    return None


_BODIES: Mapping[tuple[type[CallSyntax], ...], type[CallBody]] = {
    (JsonObjects, NamedJson, TaggedCalls): JsonBody,
    (XmlCalls, PairCalls, XtmlCalls): TaggedBody,
    (GemmaCalls,): GemmaBody,
    (PythonicCalls,): PythonBody,
    (ElementCalls,): ElementBody,
}
"""Which syntaxes are written by which body; calls in another syntax cannot be enforced."""


def _root(rule: Rule) -> str:
    return rule.lark.rstrip("\n").rpartition("\n")[2].partition(":")[0]
