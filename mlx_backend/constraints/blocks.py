"""A turn that is answer and blocks: `<think>…</think>`, then the answer or `<tool_call>` blocks of JSON.

    <think>FREE</think> ⏎⏎ ANSWER <|im_end|>
    <think>FREE</think> ⏎⏎ <tool_call>⏎{"name": NAME, "arguments": ARGUMENTS}⏎</tool_call> ⏎ … <|im_end|>

A plain model's turn is one without blocks: it is held from its first token. A marker is a control token where
the model has it as one; where it has not, it is spelt, and looked for in what the model writes. One thing is
only done with a token: a call that the model is free not to make is held only if `<tool_call>` is a token.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.constraints.compiler import joined_rule
from mlx_backend.constraints.errors import GrammarError
from mlx_backend.constraints.states import Closing, Free, Held, Over, Path
from mlx_backend.constraints.vocabulary import MAX_BREAKS
from mlx_backend.conversation.dialects.json_calls import JSON_CALLS
from mlx_backend.conversation.dialects.plain import END_MARKERS
from mlx_backend.conversation.dialects.think import OPENERS
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from llguidance import LLMatcher

    from mlx_backend.constraints.compiler import Matchers, Rule
    from mlx_backend.constraints.plan import Plan
    from mlx_backend.constraints.states import Place, Way
    from mlx_backend.constraints.vocabulary import Vocabulary

TOOL_CALL, TOOL_CALL_END = JSON_CALLS.opener, JSON_CALLS.closer


class BlockTurns:
    """The turns of one model that thinks in a block, or not at all. `ends` are the tokens that end a turn."""

    def __init__(
        self, vocabulary: Vocabulary, matchers: Matchers, *, thinks: bool, ends: Collection[int] | None
    ) -> None:
        self.takes_calls = thinks
        self.vocabulary = vocabulary
        self.matchers = matchers
        self.ends = frozenset(ends or (vocabulary.ids[text] for text in END_MARKERS & vocabulary.ids.keys()))
        if not self.ends:
            raise GrammarError(
                "Replies cannot be held to a grammar with this model: it is not known with which token it ends a turn."
            )
        template = vocabulary.tokenizer.chat_template or ""
        known = {opener for opener in OPENERS if opener in vocabulary.ids or opener in template}
        self.openers = {opener: OPENERS[opener] for opener in sorted(known)} if thinks else {}
        self.calls_by_token = TOOL_CALL in vocabulary.ids and TOOL_CALL_END in vocabulary.ids

    def begin(self, plan: Plan, opens_in: Channel | None, begun: str) -> Place:
        """Begin a turn, or go on with what the prompt has opened."""
        turn = _Turn(self, plan)
        match opens_in:
            case Channel.ANALYSIS:
                return turn.thought(tuple(self.openers.values()))
            case None:
                return turn.answer(begun, thinks=not begun)
            case _:
                return turn.answer(begun)


class _Turn:
    """One turn. What takes time is done at its beginning, not in the middle of decoding."""

    def __init__(self, turns: BlockTurns, plan: Plan) -> None:
        self._turns = turns
        self._vocabulary = turns.vocabulary
        self._plan = plan
        self._answer = turns.matchers.of(plan.answer) if plan.answer is not None else None
        self._calls: LLMatcher | None = None
        if plan.calls and (turns.calls_by_token or not plan.answers):
            self._calls = turns.matchers.of(_calls_rule(plan, by_token=turns.calls_by_token))
        self._ends: dict[int, Way] = dict.fromkeys(turns.ends, self._over)

    def thought(self, closers: Collection[str]) -> Place:
        """Reasoning, until one of these markers. Which of them it is, only its opener tells for certain."""
        vocabulary = self._vocabulary
        behind = partial(self.answer, breaks=MAX_BREAKS)
        # Where nothing is demanded it may also end here.
        ends = self._ends if self._plan.answers and self._plan.answer is None else {}
        if tokens := {vocabulary.ids[closer]: behind for closer in closers if closer in vocabulary.ids}:
            return Free(vocabulary, {**tokens, **ends})
        return Free(vocabulary, ends, Closing(vocabulary, next(iter(closers), "</think>"), behind))

    def answer(self, begun: str = "", *, thinks: bool = False, breaks: int = 0) -> Place:
        """What is not reasoning: the answer or the first call, behind at most so many line breaks."""
        plan, vocabulary = self._plan, self._vocabulary
        instead: dict[int, Way] = {}
        if self._calls is not None and self._turns.calls_by_token:
            instead[vocabulary.ids[TOOL_CALL]] = self._call
        if (
            not plan.answers and begun
        ):  # an answer was begun where a call is wanted: it goes on until the call
            return Free(vocabulary, instead, None if instead else Closing(vocabulary, TOOL_CALL, self._call))
        if thinks:
            instead |= self._ways_to_think()
        if plan.answers and plan.answer is None:
            return Free(vocabulary, {**self._ends, **instead})
        for token, size in vocabulary.breaks.items():
            if size <= breaks:
                instead[token] = partial(self.answer, breaks=breaks - size)
        if plan.answer is not None and self._answer is not None:
            matcher = self._answer.deep_copy()
            held = Held(vocabulary, matcher, self._ends, instead, text_only=plan.answer.foreign)
            return held.begin(begun) if begun else held
        if self._turns.calls_by_token:
            return Path(vocabulary, dict(instead))
        spelling = Path.tree([(vocabulary.encode(TOOL_CALL), self._call)])
        return Path(vocabulary, {**spelling, **instead})

    def _ways_to_think(self) -> dict[int, Way]:
        """The ways into a block of reasoning, by the first token of its opener."""
        ways: dict[int, Way] = {}
        for opener, closer in self._turns.openers.items():
            first, *rest = self._vocabulary.encode(opener)
            thought = partial(self.thought, (closer,))
            if not rest:
                ways[first] = thought
            elif self._plan.answer is not None:  # in a free answer what is spelt is text
                ways[first] = partial(Path, self._vocabulary, Path.tree([(rest, thought)]))
        return ways

    def _call(self) -> Place:
        """What stands behind `<tool_call>`."""
        assert self._calls is not None
        if not self._turns.calls_by_token:
            return Held(self._vocabulary, self._calls.deep_copy(), self._ends)
        closes: dict[int, Way] = {self._vocabulary.ids[TOOL_CALL_END]: self._behind_call}
        return Held(self._vocabulary, self._calls.deep_copy(), closes)

    def _behind_call(self, breaks: int = MAX_BREAKS) -> Place:
        ways = dict(self._ends)
        if self._plan.several:
            ways[self._vocabulary.ids[TOOL_CALL]] = self._call
            for token, size in self._vocabulary.breaks.items():
                if size <= breaks:
                    ways[token] = partial(self._behind_call, breaks - size)
        return Path(self._vocabulary, dict(ways))

    def _over(self) -> Place:
        return Over(self._vocabulary, self._turns.ends)


def _calls_rule(plan: Plan, *, by_token: bool) -> Rule:
    """Return the rule of what stands behind `<tool_call>`: up to `</tool_call>` if that is a token."""
    if by_token:
        return joined_rule(f"start: body\n{_body(plan.calls)}")
    opens, closes = json.dumps(TOOL_CALL), json.dumps(TOOL_CALL_END)
    more = f' ("\\n" {opens} body {closes})*' if plan.several else ""
    return joined_rule(f"start: body {closes}{more}\n{_body(plan.calls)}")


def _body(calls: Mapping[str, Rule]) -> str:
    """Write the rules of what stands in a block: any of the calls, as JSON, on a line of its own or not."""
    lines = ['body: "\\n"? call "\\n"?']
    lines.append("call: " + " | ".join(f"call_{at}" for at in range(len(calls))))
    for at, (name, rule) in enumerate(calls.items()):
        spelt = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
        arguments = rule.lark.removeprefix("start: ")
        lines.append(
            f'call_{at}: "{{" B "\\"name\\":" B {spelt} "," B "\\"arguments\\":" B arguments_{at} B "}}"'
        )
        lines.append(f"arguments_{at}: {arguments}")
    return "\n".join([*lines, 'B: " "?', ""])
