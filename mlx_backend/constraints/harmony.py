"""A constrained reply in Harmony: it may reason, and then it answers or calls as it must.

    <|channel|>analysis<|message|>FREE<|end|><|start|>assistant      at most once
    <|channel|>commentary<|message|>FREE<|end|><|start|>assistant    a preamble, at most once, before a call
    <|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>

Headers are spelt as gpt-oss spells them, and the model chooses among those that are allowed. A preamble is
shown as content, so it is only allowed where a call follows or the answer is free; one call ends the turn.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.mask import ReasoningCloser, only
from mlx_backend.constraints.states import EndOfReply, FixedTokens, FreeText, MatchedText
from mlx_backend.conversation.dialects.harmony import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    HARMONY_CALLS,
    MESSAGE,
    RETURN,
    START,
)
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from llguidance import LLMatcher

    from mlx_backend.constraints.compiler import Matchers, ReplyRules, Rule
    from mlx_backend.constraints.json_schema import Schema
    from mlx_backend.constraints.mask import Mask
    from mlx_backend.constraints.states import State, Transition
    from mlx_backend.constraints.vocabulary import Vocabulary
    from mlx_backend.conversation.parser import ChannelParser
    from mlx_backend.engine.base import Tokenizer

REQUIRED_MARKERS = (CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START)
"""The control tokens a turn is made of."""


def has_required_tokens(control_tokens: Set[str], _end_tokens: Set[str]) -> bool:
    """Whether a model with these control tokens can be constrained: each has one meaning, the end tokens' too."""
    return control_tokens >= set(REQUIRED_MARKERS)


class HarmonyGrammar:
    """The replies of one model that speaks Harmony."""

    can_forbid_calls = True  # their headers differ

    def __init__(self, vocabulary: Vocabulary, matchers: Matchers) -> None:
        if missing := [marker for marker in REQUIRED_MARKERS if marker not in vocabulary.ids]:
            raise GrammarError(
                "Replies of this model cannot be constrained to a grammar: its tokenizer has no "
                f"{', '.join(missing)} among its control tokens."
            )
        self._vocabulary = vocabulary
        self._matchers = matchers

    def call_rule(self, at: int, name: str, parameters: Schema, *, strict: bool, what: str) -> Rule:
        """Return the rule of a call's arguments: its header is not part of it."""
        return self._matchers.rules.schema(parameters, strict=strict, what=what)

    def first_state(self, plan: ReplyRules, opens_in: Channel | None, begun: str) -> State:
        """Return the state after `<|start|>assistant`, or in the body of a message that the prompt has opened."""
        reply = _HarmonyReply(self._vocabulary, self._matchers, plan)
        match opens_in:
            case None:
                return reply.header(is_first=True)
            case Channel.FINAL:
                return reply.answer(begun)
            case _:
                return reply.free_message(is_preamble=opens_in is Channel.COMMENTARY)


class _HarmonyReply:
    """The states of one reply. What takes time is done at its beginning, not in the middle of decoding."""

    def __init__(self, vocabulary: Vocabulary, matchers: Matchers, plan: ReplyRules) -> None:
        self._vocabulary = vocabulary
        self._plan = plan
        self._message_start = vocabulary.encode(f"{START}assistant")
        self._headers = {channel: vocabulary.encode(f"{CHANNEL}{channel}{MESSAGE}") for channel in Channel}
        self._answer = matchers.of(plan.answer) if plan.answer is not None else None
        self._calls = [
            (
                vocabulary.encode_pieces(HARMONY_CALLS.opening(name)),
                partial(self._arguments, matchers.of(rule)),
            )
            for name, rule in plan.calls.items()
        ]

    def header(
        self, *, is_first: bool = False, has_reasoned: bool = False, has_preamble: bool = False
    ) -> State:
        """A header; which messages may follow depends on those that were there already."""
        plan, headers = self._plan, self._headers
        bodies: list[tuple[Sequence[int], Transition]] = [*self._calls]
        if not has_reasoned:
            bodies.append((headers[Channel.ANALYSIS], self.free_message))
        if plan.calls and not has_preamble:
            bodies.append((headers[Channel.COMMENTARY], partial(self.free_message, is_preamble=True)))
        must_call = has_preamble and plan.calls and plan.answer is not None
        if plan.allows_answer and not must_call:
            bodies.append((headers[Channel.FINAL], self.answer))
        start = [] if is_first else self._message_start
        spellings = (([*start, *header], transition) for header, transition in bodies)
        return FixedTokens(self._vocabulary, FixedTokens.tree(spellings))

    def free_message(self, *, is_preamble: bool = False) -> State:
        """The body of a message whose text is free, and that another message follows."""
        plan, end = self._plan, self._vocabulary.ids[END]
        transitions: dict[int, Transition] = {
            end: partial(self.header, has_reasoned=True, has_preamble=is_preamble)
        }
        if plan.allows_answer and plan.answer is None:  # nothing is demanded: it may also end here
            transitions |= self._end_with(RETURN)
        return FreeText(self._vocabulary, transitions)

    def answer(self, begun: str = "") -> State:
        """The body of the final message. One that was begun where a call is required is closed for the call."""
        plan = self._plan
        if not plan.allows_answer:
            return self.free_message(is_preamble=True)
        transitions = self._end_with(RETURN)
        if self._answer is None:
            return FreeText(self._vocabulary, transitions)
        answer = MatchedText(self._vocabulary, self._answer.deep_copy(), transitions)
        return answer.continued(begun) if begun else answer

    def _arguments(self, matcher: LLMatcher) -> State:
        return MatchedText(self._vocabulary, matcher.deep_copy(), self._end_with(CALL))

    def _end_with(self, marker: str) -> dict[int, Transition]:
        token = self._vocabulary.ids[marker]
        return {token: partial(EndOfReply, self._vocabulary, (token,))}


class HarmonyCloser(ReasoningCloser):
    """A header says what its message is: after `<|channel|>` the word `analysis` is not allowed."""

    def __init__(
        self, tokenizer: Tokenizer, parser: ChannelParser, prompt_tail: str, *, has_tools: bool
    ) -> None:
        self._size = tokenizer.vocabulary_size
        end, start, final = (
            tokenizer.encode(text, control_tokens=True) for text in parser.reasoning_closer("")
        )
        headers = {
            channel: tokenizer.encode(f"{CHANNEL}{channel}{MESSAGE}", control_tokens=True)
            for channel in Channel
        }
        # With tools the model is led to the header and no further, so that it may still call one.
        self._closing = [*end, *start, *(() if has_tools else final)]
        self.cost = len(end) + len(start) + len(final)
        self.header = len(headers[Channel.ANALYSIS])
        self.opening = () if has_tools else final
        self._channel_token = final[0]
        channels = (Channel.FINAL, Channel.COMMENTARY) if has_tools else (Channel.FINAL,)
        self._words = [headers[channel][1:-1] for channel in channels]
        self._left: Sequence[Sequence[int]] = ()  # how the channel's word may go on

    def closing(self) -> Sequence[int]:
        """End the message and begin another; without tools that is the answer."""
        return self._closing

    def advance(self, token: int | None, *, exhausted: bool) -> None:
        """Follow the channel's word in a header."""
        if exhausted and token == self._channel_token:
            self._left = self._words
        else:
            self._left = [word[1:] for word in self._left if word[0] == token and word[1:]]

    def allowed_mask(self) -> Mask | None:
        """Return the mask of the tokens with which an allowed word goes on."""
        return only(self._size, {word[0] for word in self._left}) if self._left else None
