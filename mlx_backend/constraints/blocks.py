"""A constrained reply of answer and blocks: `<think>…</think>`, then the answer or `<tool_call>` blocks of JSON.

    <think>FREE</think> ⏎⏎ ANSWER <|im_end|>
    <think>FREE</think> ⏎⏎ <tool_call>⏎{"name": NAME, "arguments": ARGUMENTS}⏎</tool_call> ⏎ … <|im_end|>

A plain model's reply has no blocks: it is constrained from its first token. Where a marker is a control token,
the token is looked for; where it is not, its spelling is looked for in what the model writes. One thing is only
done with a token: a call that the model is free not to make is constrained only if `<tool_call>` is a token.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.constraints.closers import ReasoningCloser
from mlx_backend.constraints.compiler import joined_rule
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.mask import all_but
from mlx_backend.constraints.states import ClosingText, EndOfReply, FixedTokens, FreeText, MatchedText
from mlx_backend.constraints.vocabulary import MAX_LINE_BREAKS
from mlx_backend.conversation.dialects.plain import END_MARKERS
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence, Set

    from llguidance import LLMatcher

    from mlx_backend.constraints.compiler import Matchers, Rule
    from mlx_backend.constraints.mask import Mask
    from mlx_backend.constraints.plan import ReplyPlan
    from mlx_backend.constraints.states import State, Transition
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects.json_calls import JsonCalls
    from mlx_backend.conversation.parser import ChannelParser
    from mlx_backend.engine.base import Tokenizer


def has_required_tokens(control_tokens: Set[str]) -> bool:
    """Whether a model with these control tokens can be constrained: one of them has to end its turn."""
    return not control_tokens.isdisjoint(END_MARKERS)


class BlockGrammar:
    """The replies of one model that reasons in a block, or not at all.

    `openers` are what opens a block in its family, each with its closer. `calls` is how it writes calls; with None its
    answers can be constrained, and its calls cannot. `end_tokens` are the tokens that end a turn; None means those that
    dialects are known to use.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matchers: Matchers,
        *,
        openers: Mapping[str, str],
        calls: JsonCalls | None,
        end_tokens: Collection[int] | None,
    ) -> None:
        self.allows_calls = calls is not None
        self.call_markers = (calls.opener, calls.closer) if calls is not None else ("", "")
        self.vocabulary = vocabulary
        self.matchers = matchers
        known_ends = END_MARKERS & vocabulary.ids.keys()
        self.end_tokens = frozenset(end_tokens or (vocabulary.ids[text] for text in known_ends))
        if not self.end_tokens:
            raise GrammarError(
                "Replies of this model cannot be constrained to a grammar: it is not known which token ends its turn."
            )
        template = vocabulary.tokenizer.chat_template or ""
        known = {opener for opener in openers if opener in vocabulary.ids or opener in template}
        self.openers = {opener: openers[opener] for opener in sorted(known)}
        self.has_call_tokens = vocabulary.ids.keys() >= set(self.call_markers)

    def first_state(self, plan: ReplyPlan, opens_in: Channel | None, begun: str) -> State:
        """Return the state at the beginning of a reply, or in what the prompt has opened."""
        reply = _Reply(self, plan)
        match opens_in:
            case Channel.ANALYSIS:
                return reply.reasoning(tuple(self.openers.values()))
            case None:
                return reply.answer(begun, may_reason=not begun)
            case _:
                return reply.answer(begun)


class _Reply:
    """The states of one reply. What takes time is done at its beginning, not in the middle of decoding."""

    def __init__(self, grammar: BlockGrammar, plan: ReplyPlan) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._opener, self._closer = grammar.call_markers
        self._plan = plan
        self._answer = grammar.matchers.of(plan.answer) if plan.answer is not None else None
        self._calls: LLMatcher | None = None
        if plan.calls and (grammar.has_call_tokens or not plan.allows_answer):
            self._calls = grammar.matchers.of(
                _calls_rule(plan, grammar.call_markers, by_token=grammar.has_call_tokens)
            )
        self._ends: dict[int, Transition] = dict.fromkeys(grammar.end_tokens, self._end)

    def reasoning(self, closers: Collection[str]) -> State:
        """Reasoning, until one of these markers. Which of them it is, only its opener tells for certain."""
        vocabulary = self._vocabulary
        answer = partial(self.answer, line_breaks=MAX_LINE_BREAKS)
        # Where nothing is demanded it may also end here.
        ends = self._ends if self._plan.allows_answer and self._plan.answer is None else {}
        if tokens := {vocabulary.ids[closer]: answer for closer in closers if closer in vocabulary.ids}:
            return FreeText(vocabulary, {**tokens, **ends})
        return FreeText(vocabulary, ends, ClosingText(vocabulary, next(iter(closers), "</think>"), answer))

    def answer(self, begun: str = "", *, may_reason: bool = False, line_breaks: int = 0) -> State:
        """What is not reasoning: the answer or the first call, behind at most so many line breaks."""
        plan, vocabulary, grammar = self._plan, self._vocabulary, self._grammar
        alternatives: dict[int, Transition] = {}
        if self._calls is not None and grammar.has_call_tokens:
            alternatives[vocabulary.ids[self._opener]] = self._call
        if not plan.allows_answer and begun:
            # An answer was begun where a call is required: it goes on until the call.
            closing = None if alternatives else ClosingText(vocabulary, self._opener, self._call)
            return FreeText(vocabulary, alternatives, closing)
        if may_reason:
            alternatives |= self._reasoning_openers()
        if plan.allows_answer and plan.answer is None:
            return FreeText(vocabulary, {**self._ends, **alternatives})
        for token, size in vocabulary.line_breaks.items():
            if size <= line_breaks:
                alternatives[token] = partial(self.answer, line_breaks=line_breaks - size)
        if self._answer is not None:
            answer = MatchedText(vocabulary, self._answer.deep_copy(), self._ends, alternatives)
            return answer.continued(begun) if begun else answer
        if grammar.has_call_tokens:
            return FixedTokens(vocabulary, dict(alternatives))
        spelling = FixedTokens.tree([(vocabulary.encode(self._opener), self._call)])
        return FixedTokens(vocabulary, {**spelling, **alternatives})

    def _reasoning_openers(self) -> dict[int, Transition]:
        """The transitions into a block of reasoning, by the first token of its opener."""
        transitions: dict[int, Transition] = {}
        for opener, closer in self._grammar.openers.items():
            first, *rest = self._vocabulary.encode(opener)
            reasoning = partial(self.reasoning, (closer,))
            if not rest:
                transitions[first] = reasoning
            elif self._plan.answer is not None:  # in a free answer what is spelt is text
                transitions[first] = partial(
                    FixedTokens, self._vocabulary, FixedTokens.tree([(rest, reasoning)])
                )
        return transitions

    def _call(self) -> State:
        """What stands behind a call's opener."""
        assert self._calls is not None
        if not self._grammar.has_call_tokens:
            return MatchedText(self._vocabulary, self._calls.deep_copy(), self._ends)
        closes: dict[int, Transition] = {self._vocabulary.ids[self._closer]: self._after_call}
        return MatchedText(self._vocabulary, self._calls.deep_copy(), closes)

    def _after_call(self, line_breaks: int = MAX_LINE_BREAKS) -> State:
        transitions = dict(self._ends)
        if self._plan.parallel:
            transitions[self._vocabulary.ids[self._opener]] = self._call
            for token, size in self._vocabulary.line_breaks.items():
                if size <= line_breaks:
                    transitions[token] = partial(self._after_call, line_breaks - size)
        return FixedTokens(self._vocabulary, dict(transitions))

    def _end(self) -> State:
        return EndOfReply(self._vocabulary, self._grammar.end_tokens)


class BlockCloser(ReasoningCloser):
    """A block is closed by its marker; another one is not opened behind it."""

    can_reopen = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: ChannelParser,
        prompt_tail: str,
        *,
        has_tools: bool,
        openers: Collection[str],
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._prompt_tail = prompt_tail
        tokens = [token for token, text in tokenizer.special_tokens.items() if text in openers]
        self._no_openers = all_but(tokenizer.vocabulary_size, tokens) if tokens else None
        self._was_closed = self._is_between = False
        self.cost = len(self._encode_closing())

    def closing(self) -> Sequence[int]:
        """Close the block on a line of its own, and leave an empty line behind it."""
        self._was_closed = True
        return self._encode_closing()

    def advance(self, token: int | None, *, exhausted: bool) -> None:
        """See whether the reply is between a block that was closed and the answer."""
        is_elsewhere = self._parser.is_reasoning or self._parser.is_answering
        self._is_between = exhausted and self._was_closed and not is_elsewhere

    def allowed_mask(self) -> Mask | None:
        """Return the mask of everything but what opens a block."""
        return self._no_openers if self._is_between else None

    def _encode_closing(self) -> list[int]:
        # Each text by itself, so that no token is both the marker and what stands beside it.
        return [
            token
            for text in self._parser.reasoning_closer(self._prompt_tail)
            for token in self._tokenizer.encode(text, control_tokens=True)
        ]


def _calls_rule(plan: ReplyPlan, markers: tuple[str, str], *, by_token: bool) -> Rule:
    """Return the rule of what stands behind a call's opener: up to its closer if that is a token."""
    if by_token:
        return joined_rule(f"start: body\n{_body(plan.calls)}")
    opens, closes = map(json.dumps, markers)
    more = f' ("\\n" {opens} body {closes})*' if plan.parallel else ""
    return joined_rule(f"start: body {closes}{more}\n{_body(plan.calls)}")


def _body(calls: Mapping[str, Rule]) -> str:
    """Write the rules of what stands in a block: any of the calls, as JSON, on a line of its own or not."""
    lines = ['body: "\\n"? call "\\n"?']
    lines.append("call: " + " | ".join(f"call_{at}" for at in range(len(calls))))
    for at, (name, rule) in enumerate(calls.items()):
        spelling = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
        arguments = rule.lark.removeprefix("start: ")
        lines.append(
            f'call_{at}: "{{" B "\\"name\\":" B {spelling} "," B "\\"arguments\\":" B arguments_{at} B "}}"'
        )
        lines.append(f"arguments_{at}: {arguments}")
    return "\n".join([*lines, 'B: " "?', ""])
