"""A turn of Harmony that is held: it may think, and then it answers or calls as it must.

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
from mlx_backend.constraints.states import Free, Held, Over, Path
from mlx_backend.conversation.dialects.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLMatcher

    from mlx_backend.constraints.compiler import Matchers
    from mlx_backend.constraints.plan import Plan
    from mlx_backend.constraints.states import Place, Way
    from mlx_backend.constraints.vocabulary import Vocabulary

NEEDED = (CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START)
"""The control tokens a turn is made of."""


class HarmonyTurns:
    """The turns of one model that speaks Harmony."""

    def __init__(self, vocabulary: Vocabulary, matchers: Matchers) -> None:
        if missing := [marker for marker in NEEDED if marker not in vocabulary.ids]:
            raise GrammarError(
                "Replies cannot be held to a grammar with this model: its tokenizer has no "
                f"{', '.join(missing)} among its control tokens."
            )
        self.takes_calls = True
        self._vocabulary = vocabulary
        self._matchers = matchers

    def begin(self, plan: Plan, opens_in: Channel | None, begun: str) -> Place:
        """Begin a turn, behind `<|start|>assistant` or in the body of a message that the prompt has opened."""
        turn = _Turn(self._vocabulary, self._matchers, plan)
        match opens_in:
            case None:
                return turn.header(first=True)
            case Channel.FINAL:
                return turn.answer(begun)
            case _:
                return turn.thought(preamble=opens_in is Channel.COMMENTARY)


class _Turn:
    """One turn. What takes time is done at its beginning, not in the middle of decoding."""

    def __init__(self, vocabulary: Vocabulary, matchers: Matchers, plan: Plan) -> None:
        self._vocabulary = vocabulary
        self._plan = plan
        self._opened = vocabulary.encode(f"{START}assistant")
        self._headers = {channel: vocabulary.encode(f"{CHANNEL}{channel}{MESSAGE}") for channel in Channel}
        self._answer = matchers.of(plan.answer) if plan.answer is not None else None
        self._calls = [
            (
                [
                    vocabulary.ids[CHANNEL],
                    *vocabulary.spell(f"{Channel.COMMENTARY} to=functions.{name} "),
                    *vocabulary.encode(f"{CONSTRAIN}json{MESSAGE}"),
                ],
                partial(self._call, matchers.of(rule)),
            )
            for name, rule in plan.calls.items()
        ]

    def header(self, *, first: bool = False, thought: bool = False, announced: bool = False) -> Place:
        """A header; which messages may follow depends on those that were there already."""
        plan, headers = self._plan, self._headers
        bodies: list[tuple[Sequence[int], Way]] = [*self._calls]
        if not thought:
            bodies.append((headers[Channel.ANALYSIS], self.thought))
        if plan.calls and not announced:
            bodies.append((headers[Channel.COMMENTARY], partial(self.thought, preamble=True)))
        promised = announced and plan.calls and plan.answer is not None
        if plan.answers and not promised:
            bodies.append((headers[Channel.FINAL], self.answer))
        opened = [] if first else self._opened
        return Path(self._vocabulary, Path.tree(([*opened, *header], way) for header, way in bodies))

    def thought(self, *, preamble: bool = False) -> Place:
        """The body of a message that is free, and that another one follows."""
        plan, end = self._plan, self._vocabulary.ids[END]
        ways: dict[int, Way] = {end: partial(self.header, thought=True, announced=preamble)}
        if plan.answers and plan.answer is None:  # nothing is demanded: it may also end here
            ways |= self._to_the_end(RETURN)
        return Free(self._vocabulary, ways)

    def answer(self, begun: str = "") -> Place:
        """The body of the final message. One that was begun where a call is wanted is closed for the call."""
        plan = self._plan
        if not plan.answers:
            return self.thought(preamble=True)
        ways = self._to_the_end(RETURN)
        if plan.answer is None or self._answer is None:
            return Free(self._vocabulary, ways)
        held = Held(self._vocabulary, self._answer.deep_copy(), ways, text_only=plan.answer.foreign)
        return held.begin(begun) if begun else held

    def _call(self, arguments: LLMatcher) -> Place:
        return Held(self._vocabulary, arguments.deep_copy(), self._to_the_end(CALL))

    def _to_the_end(self, marker: str) -> dict[int, Way]:
        token = self._vocabulary.ids[marker]
        return {token: partial(Over, self._vocabulary, (token,))}
