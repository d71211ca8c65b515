"""What the words and numbers of chat templates mean on the dial of reasoning effort.

A template is tried with the usual words, and with those that it names itself and that mean an effort: `Low`, `低`,
`light`, `deep`. Numbers are shares of the most that a model reasons, in the unit that a template takes: fractions,
steps from 1, or per cent. Pure functions: effort_probe.py renders.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.conversation.effort import EFFORT_OF, Effort, fold

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

WORDS: Final[Mapping[Effort, tuple[str, ...]]] = {
    Effort.NONE: ("none", "no_think", "off", "disabled", "chat"),
    Effort.MINIMAL: ("minimal",),
    Effort.LOW: ("low",),
    Effort.MEDIUM: ("medium",),
    Effort.HIGH: ("high",),
    Effort.XHIGH: ("xhigh",),
    Effort.MAX: ("max", "maximum"),
}
"""The words that templates use for each place on the dial."""
ON_WORDS: Final = ("enabled", "on", "thinking", "think")
OTHER: Final = "qzx"
"""A word that no template knows: it shows what any other word comes to."""

_USUAL: Final = (Effort.LOW, Effort.MEDIUM, Effort.HIGH)
_MORE: Final = {
    **dict.fromkeys(("fast", "quick", "short", "brief", "concise", "shallow", "lite", "simple"), Effort.LOW),
    **dict.fromkeys(("balanced", "standard", "regular"), Effort.MEDIUM),
    **dict.fromkeys(("deep", "long", "heavy", "hard", "thorough", "extended", "detailed"), Effort.HIGH),
    **dict.fromkeys(("extreme", "exhaustive", "deepest", "unlimited"), Effort.MAX),
}
"""Words that mean an effort only where a template takes them for one."""
_CLOSED: Final = re.compile(
    r"(?:(?:</|end_|\[/)(?:\w{1,12}:)?think\w*(?::\w{1,20})?[>\]|]{1,2}"  # </think>, </seed:think>, [/THINK]
    r"|think\w*[>\]|]{1,2}\s*<\|?(?:end|close)[^<>]{0,20}>)\s*\Z",  # <|think|><|end|>
    re.IGNORECASE,
)
_NO_AMOUNT: Final = frozenset(
    {"on", "true", "yes", "enabled", "enable", "no", "false", "disable", "auto", "default"}
)
_MAX_OWN_WORDS: Final = 24

_SHARES: Final = ((Effort.LOW, 0.2), (Effort.MEDIUM, 0.5), (Effort.HIGH, 0.8), (Effort.MAX, 1.0))


def own_words(named: Collection[str]) -> dict[str, Effort]:
    """Return which of a template's words mean an effort, beside the usual ones."""
    usual = {word for words in WORDS.values() for word in words}
    found: dict[str, Effort] = {}
    for word in sorted(set(named) - usual):
        folded = fold(word) if len(word) <= 40 else ""
        effort = None if folded in _NO_AMOUNT else EFFORT_OF.get(folded) or _MORE.get(folded)
        if effort is not None and len(found) < _MAX_OWN_WORDS:
            found[word] = effort
    return found


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """The prompts of one argument's words, and that of a word nobody knows. None: refused."""

    prompts: Mapping[str, str | None]
    other: str | None
    places: Mapping[str, Effort]

    @property
    def is_printed(self) -> bool:
        """Whether the template prints any word that it is given."""
        return self.other is not None and OTHER in self.other.lower()

    def recognised(self, named: Collection[str]) -> dict[Effort, tuple[str, str]]:
        """Return the words that mean something to the template, with their prompts, by their place on the dial.

        A word that gives the same prompt as any other does means something only if the template names it.
        """
        found: dict[Effort, tuple[str, str]] = {}
        for word, effort in self.places.items():
            prompt = self.prompts[word]
            if prompt is not None and (prompt != self.other or word in named):
                found.setdefault(effort, (word, prompt))
        return found

    def printed(self, by_itself: str | None) -> dict[Effort, tuple[str, str]]:
        """Return the words for a template that prints any: low, medium and high, its default, and what it singles out.

        `by_itself` is its prompt without a word.
        """
        found: dict[Effort, tuple[str, str]] = {}
        for effort, words in WORDS.items():
            for word in words:
                prompt = self.prompts[word]
                is_usual = effort.value == word and effort in _USUAL
                if prompt is not None and (is_usual or prompt == by_itself or self._is_singled_out(word)):
                    found.setdefault(effort, (word, prompt))
        return found

    def _is_singled_out(self, word: str) -> bool:
        """Whether the template does more with a word than to print it."""
        written = (self.other or "").replace(OTHER, word).replace(OTHER.upper(), word.upper())
        return self.prompts[word] != written.replace(OTHER.capitalize(), word.capitalize())


def closes_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with a block of reasoning that is closed already."""
    return _CLOSED.search(prompt[-100:]) is not None


def most_fitting(prompt: str, efforts: Collection[Effort], defaults: Collection[str]) -> Effort:
    """Return which of several words for one level is the level's name.

    One that the prompt says, else one that the template takes by default, else the usual one: high before xhigh.
    """
    said = [effort for effort in efforts if re.search(rf"\b{effort.value}\b", prompt, re.IGNORECASE)]
    taken = [effort for effort in efforts if effort.value in defaults]
    usual = [effort for effort in efforts if effort in _USUAL]
    return (said or taken or usual or list(efforts))[-1]


def place_of_other(prompt: str, known: Mapping[Effort, str]) -> Effort | None:
    """Return the place of a level that has no word: by what only its prompt says, or where there is room.

    None if low, medium and high are taken and the prompt says nothing: then it states no effort.
    """
    seen = {word for other in known.values() for word in re.findall(r"[a-z]+", other.lower())}
    said = [word for word in re.findall(r"[a-z]+", prompt.lower()) if word not in seen]
    for effort in reversed([effort for effort in Effort if effort is not Effort.NONE]):
        if effort not in known and any(word in said for word in WORDS[effort]):
            return effort
    room = [Effort.HIGH, Effort.MEDIUM, Effort.LOW]
    if known.keys() == {Effort.HIGH, Effort.MAX}:  # DeepSeek V4's low adds nothing to the prompt
        room = [Effort.LOW]
    return next((effort for effort in room if effort not in known), None)


def is_left_blank(prompt: str, known: Collection[str]) -> bool:
    """Whether a prompt is another one without some of its text: that of a word which a table did not hold."""
    return any(
        common_prefix_length(prompt, other) + common_prefix_length(prompt[::-1], other[::-1]) >= len(prompt)
        for other in known
    )


def number_levels(
    render: Callable[[float], str | None], by_itself: str | None, numbers: Collection[float]
) -> dict[Effort, tuple[float, str]]:
    """Return the levels of an argument that takes a number, with their prompts; nothing if it takes none.

    `by_itself` is the template's prompt without a number, `numbers` are those it names: one of them may be its default,
    which is then one of the levels.
    """
    own = next((each for each in sorted(numbers) if each > 0 and render(each) == by_itself), None)
    if own is not None and render(own / 2) == render(own * 2) == by_itself:
        return {}  # no number makes a difference

    def takes(number: float) -> bool:
        return render(number) is not None

    chosen: dict[Effort, float]
    if takes(0.5) and (own < 1 or (own == 1 and not takes(2)) if own is not None else not takes(2)):
        chosen = _near(dict(_SHARES), own, 1)
    elif takes(1) and takes(2) and not takes(50):
        steps = next(step for step in range(10, 1, -1) if takes(step))
        names = [effort for effort, _ in _SHARES]
        if steps < len(names):
            chosen = dict(zip([names[0], *names[3 - (steps - 1) : 3]], range(1, steps + 1), strict=True))
        else:
            chosen = {effort: max(1, int(steps * share + 0.5)) for effort, share in _SHARES}
    elif takes(50) and (not takes(1000) or (own is not None and own <= 100)):
        chosen = _near({effort: round(100 * share) for effort, share in _SHARES}, own, 100)
    else:
        return {}
    rendered = {effort: (number, render(number)) for effort, number in chosen.items()}
    levels = {effort: (number, prompt) for effort, (number, prompt) in rendered.items() if prompt is not None}
    return levels if len({prompt for _, prompt in levels.values()}) == len(levels) > 1 else {}


def _near(levels: dict[Effort, float], own: float | None, unit: float) -> dict[Effort, float]:
    """Return the levels with a template's own default in the place of the one nearest to it."""
    if own is not None and own <= unit:
        levels[min(levels, key=lambda effort: abs(levels[effort] - own))] = own
    return levels
