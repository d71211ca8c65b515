"""A constrained reply of answer and blocks: `<think>…</think>`, then the answer or calls.

    <think>FREE</think> ⏎⏎ ANSWER <|im_end|>
    <think>FREE</think> ⏎⏎ CALLS <|im_end|>
    <|START_THINKING|>FREE<|END_THINKING|><|START_RESPONSE|>ANSWER<|END_RESPONSE|><|END_OF_TURN_TOKEN|>

Markers around an answer may be left out, as its reader takes both. A plain model's reply has no blocks: it is
constrained from its first token. How calls are written is `calls`'s. Where a marker is a control token, it is
looked for; where it is not, its spelling is looked for in what the model writes. Two things are only done with a token:
markers around answers are known, and a call that the model is free not to make is constrained.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.constraints.calls import CallGrammar, can_enforce
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.mask import ReasoningCloser, all_but
from mlx_backend.constraints.states import ClosingText, EndOfReply, FixedTokens, FreeText, MatchedText
from mlx_backend.constraints.vocabulary import MAX_LINE_BREAKS, without_suffix
from mlx_backend.conversation.dialects.base import END_MARKERS
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence, Set

    from llguidance import LLMatcher

    from mlx_backend.constraints.compiler import Matchers, ReplyRules, Rule
    from mlx_backend.constraints.json_schema import Schema
    from mlx_backend.constraints.mask import Mask
    from mlx_backend.constraints.states import State, Transition
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.parser import ChannelParser
    from mlx_backend.engine.base import Tokenizer


def has_required_tokens(control_tokens: Set[str], end_tokens: Set[str], *, known_ends: Set[str]) -> bool:
    """Whether a model with these control tokens can be constrained: one of them has to end its turn.

    `end_tokens` are those that do so by its files, `known_ends` those of its family.
    """
    return not control_tokens.isdisjoint(END_MARKERS | known_ends | end_tokens)


class BlockGrammar:
    """The replies of one model that reasons in a block, or not at all.

    Where the dialect has no calls its answers can be constrained. Raises GrammarError if no token ends a turn.
    """

    def __init__(self, vocabulary: Vocabulary, matchers: Matchers, dialect: Dialect) -> None:
        calls = dialect.calls
        # What another opener begins with is read, and never demanded.
        openers = {
            opener: closer
            for opener, closer in dialect.blocks.items()
            if not any(other != opener and other.startswith(opener) for other in dialect.blocks)
        }
        self._has_calls = calls is not None
        self.calls = (
            CallGrammar(calls, vocabulary, matchers.rules)
            if calls is not None and can_enforce(calls)
            else None
        )
        self.can_forbid_calls = self.calls is not None and self.calls.opener is not None
        self.vocabulary = vocabulary
        self.matchers = matchers
        self.end_tokens = frozenset(vocabulary.ids[text] for text in vocabulary.ends)
        if not self.end_tokens:
            raise GrammarError(
                "Replies of this model cannot be constrained to a grammar: it is not known which token ends its turn."
            )
        template = vocabulary.tokenizer.chat_template or ""
        known = {
            opener
            for opener in openers
            if opener in template
            or ((tokens := vocabulary.encode(opener))[0] in vocabulary.special and tokens)
        }
        self.closer = next(iter(openers.values()), "</think>")
        self.openers = {opener: openers[opener] for opener in sorted(known)}
        # Markers of an answer that are spelt are left to the answer: there they are text.
        self.answers = [
            (vocabulary.encode(opener), vocabulary.encode(closer))
            for opener, closer in dialect.answers.items()
            if {vocabulary.encode(opener)[0], vocabulary.encode(closer)[0]} <= vocabulary.special.keys()
        ]

    def call_rule(self, at: int, name: str, parameters: Schema, *, strict: bool, what: str) -> Rule:
        """Return the rule of the calls of one tool. Raises GrammarError if they cannot be enforced."""
        if self.calls is not None:
            return self.calls.rule(at, name, parameters, strict=strict, what=what)
        reason = (
            "its format of calls cannot be enforced yet"
            if self._has_calls
            else "its output has no form for them"
        )
        raise GrammarError(f"Calls cannot be forced with this model: {reason}.")

    def first_state(self, plan: ReplyRules, opens_in: Channel | None, begun: str) -> State:
        """Return the state at the beginning of a reply, or in what the prompt has opened."""
        reply = _BlockReply(self, plan)
        match opens_in:
            case Channel.ANALYSIS:
                return reply.reasoning(tuple(self.openers.values()))
            case None:
                return reply.answer(begun, may_reason=not begun)
            case _:
                return reply.answer(begun)


class _BlockReply:
    """The states of one reply. What takes time is done at its beginning, not in the middle of decoding."""

    def __init__(self, grammar: BlockGrammar, plan: ReplyRules) -> None:
        self._grammar = grammar
        self._vocabulary = grammar.vocabulary
        self._plan = plan
        self._answer = grammar.matchers.of(plan.answer) if plan.answer is not None else None
        self._calls: LLMatcher | None = None
        self._opener = grammar.calls.opener if grammar.calls is not None else None
        self._spelling = grammar.calls.spelling if grammar.calls is not None else ""
        if plan.calls and grammar.calls is not None and not (self._opener is None and plan.allows_answer):
            self._calls = grammar.matchers.of(grammar.calls.join(plan.calls, parallel=plan.parallel))
        self._ends: dict[int, Transition] = dict.fromkeys(grammar.end_tokens, self._end)
        # What closes an answer may also follow one that the prompt has opened.
        after = self.answer if plan.answer is None else self._end
        closers = self._spelt((closer, after) for _, closer in grammar.answers) if plan.allows_answer else {}
        self._answer_ends = {**closers, **self._ends}

    def reasoning(self, closers: Collection[str]) -> State:
        """Reasoning, until one of these markers. Which of them it is, only its opener tells for certain."""
        vocabulary = self._vocabulary
        answer = partial(self.answer, line_breaks=MAX_LINE_BREAKS)
        # Where nothing is demanded it may also end here.
        ends = self._ends if self._plan.allows_answer and self._plan.answer is None else {}
        by_token = {closer: tokens for closer in closers if (tokens := self._control_tokens(closer))}
        if by_token:
            return FreeText(
                vocabulary, {**self._spelt((tokens, answer) for tokens in by_token.values()), **ends}
            )
        return FreeText(
            vocabulary, ends, ClosingText(vocabulary, next(iter(closers), self._grammar.closer), answer)
        )

    def answer(self, begun: str = "", *, may_reason: bool = False, line_breaks: int = 0) -> State:
        """What is not reasoning: the answer or the first call, after at most `line_breaks` line breaks."""
        plan, vocabulary = self._plan, self._vocabulary
        if plan.calls and self._calls is not None and not plan.allows_answer and begun:
            return self._until_call()
        spellings = self._reasoning_openers() if may_reason else []
        if plan.allows_answer and not begun:
            spellings += [(opener, self._wrapped_answer) for opener, _ in self._grammar.answers]
        is_shared = any(tokens[0] == self._opener for tokens, _ in spellings)
        if self._calls is not None and self._opener is not None and (plan.allows_answer or is_shared):
            # What begins with the same token as reasoning is spelt up to where they differ.
            opener = vocabulary.encode(self._spelling) if is_shared else [self._opener]
            spellings.append((opener, partial(self._call, opener)))
        alternatives = self._spelt(spellings)
        if plan.allows_answer and plan.answer is None:
            return FreeText(vocabulary, {**self._answer_ends, **alternatives})
        for token, size in vocabulary.line_breaks.items():
            if size <= line_breaks:
                alternatives[token] = partial(self.answer, line_breaks=line_breaks - size)
        if self._answer is not None:
            answer = MatchedText(vocabulary, self._answer.deep_copy(), self._answer_ends, alternatives)
            return answer.continued(begun) if begun else answer
        assert self._calls is not None
        if is_shared:
            return FixedTokens(vocabulary, dict(alternatives))
        return MatchedText(vocabulary, self._calls.deep_copy(), self._ends, alternatives)

    def _wrapped_answer(self) -> State:
        """The answer after what opens it."""
        if self._answer is None:
            return FreeText(self._vocabulary, self._answer_ends)
        return MatchedText(self._vocabulary, self._answer.deep_copy(), self._answer_ends)

    def _until_call(self) -> State:
        """An answer was begun where a call is required: it goes on until the call."""
        vocabulary = self._vocabulary
        if self._opener is not None:
            return FreeText(vocabulary, {self._opener: partial(self._call, [self._opener])})
        if not self._spelling:
            raise GrammarError("This model's format of calls has none after the beginning of an answer.")
        call = partial(self._call, vocabulary.encode(self._spelling))
        return FreeText(vocabulary, {}, ClosingText(vocabulary, self._spelling, call))

    def _reasoning_openers(self) -> list[tuple[Sequence[int], Transition]]:
        """Return how blocks of reasoning are opened, and where that leads."""
        spellings: list[tuple[Sequence[int], Transition]] = []
        for opener, closer in self._grammar.openers.items():
            tokens = self._vocabulary.encode(opener)
            # In a free answer what is spelt is text.
            if (
                tokens[0] in self._vocabulary.special
                or self._plan.answer is not None
                or not self._plan.allows_answer
            ):
                spellings.append((tokens, partial(self.reasoning, (closer,))))
        return spellings

    def _control_tokens(self, marker: str) -> list[int]:
        """Return the tokens of a marker if the first of them is a control token, else none."""
        tokens = self._vocabulary.encode(marker)
        return tokens if tokens[0] in self._vocabulary.special else []

    def _spelt(self, spellings: Iterable[tuple[Sequence[int], Transition]]) -> dict[int, Transition]:
        """Return the transitions by the first tokens of spellings."""
        return {
            token: partial(FixedTokens, self._vocabulary, branch) if isinstance(branch, dict) else branch
            for token, branch in FixedTokens.tree(spellings).items()
        }

    def _call(self, begun: Sequence[int]) -> State:
        """What stands after the beginning of a call."""
        assert self._calls is not None
        calls = self._calls.deep_copy()
        if calls.try_consume_tokens(list(begun)) < len(begun):
            raise GrammarError(
                "The reply cannot follow its grammar any further: its call begins differently."
            )
        return MatchedText(self._vocabulary, calls, self._ends)

    def _end(self) -> State:
        return EndOfReply(self._vocabulary, self._grammar.end_tokens)


class BlockCloser(ReasoningCloser):
    """A block is closed by its marker; another one is not opened right after it."""

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
        tokens = [
            token
            for token, text in tokenizer.special_tokens.items()
            if text in openers or without_suffix(text) in openers
        ]
        self._no_openers = all_but(tokenizer.vocabulary_size, tokens) if tokens else None
        self._was_closed = self._is_between = False
        self.cost = len(self._encode_closing())

    def closing(self) -> Sequence[int]:
        """Close the block on a line of its own, and leave an empty line after it."""
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
        # Each text by itself, so that no token is both the marker and what stands next to it.
        return [
            token
            for text in self._parser.reasoning_closer(self._prompt_tail)
            for token in self._tokenizer.encode(text, control_tokens=True)
        ]
