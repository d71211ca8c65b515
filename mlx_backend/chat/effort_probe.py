"""Finds a model's own effort scale by rendering its chat template with every word and switch it may know.

One short chat is rendered for each candidate value of each argument that may be about effort or thinking; equal prompts
are one level, and a value that raises is none. So nothing is assumed of a family: a template that ignores the words,
raises on some, or takes every other word for its highest is recognised as such, and is never sent a word it refuses.
Argument names come from the template itself, also those of an object's parts (`reasoning.effort`).

A template is tried with the usual words, and with those that it names itself and that mean an effort: `Low`, `低`,
`light`, `deep`; an argument whose name is about thinking with any others, which are levels in the order they stand in.
Any other argument counts only if what it changes in the prompt speaks of how hard to think (`evidence`). Numbers are
fractions of the most that a model reasons, in the unit that a template takes: fractions, steps from 1, or per cent.

    words     reasoning_effort, thinking_effort …    each distinct prompt is a level
    numbers   reasoning_effort from 0 to 1, to 100   fractions of the most, for a few levels
    switches  enable_thinking, thinking, …_mode      reasoning is on or off
    flags     low_effort, medium_effort              one level more, below the model's own
    budget    thinking_budget                        tokens: the levels are budgets, and the template is told
    nothing   or only a switch                       the same budgets, and the server alone holds the model to them

Where a template cannot switch reasoning off, the server closes the block at once: every model that reasons has `none`.
Some arguments matter only with a system message or tools: where one makes no difference, it is tried with these too.
Knows no tokens, no weights and no requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.conversation.effort import DIAL, EFFORT_OF, Effort, EffortScale, Level, fold
from mlx_backend.models.templates import TemplateContents, TemplateFault, TemplateProbe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence


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
    word: effort
    for effort, words in (
        (Effort.LOW, "fast quick rapid short brief concise shallow lite simple small 浅 快速"),
        (Effort.MEDIUM, "balanced standard regular"),
        (
            Effort.HIGH,
            "deep long heavy hard thorough extended detailed careful intense intensive slow large 深 深度",
        ),
        (Effort.MAX, "extreme exhaustive deepest unlimited"),
    )
    for word in words.split()
}
"""Words that mean an effort only where a template takes them for one."""
_THINKING: Final = r"(?:think|thought|reason|deliberat|ponder|cogit|cogni|reflect|contemplat|analysis)"
_CLOSED: Final = re.compile(
    # </think>, </seed:think>, [/THINK]
    rf"(?:(?:</|end_|\[/)(?:\w{{1,12}}:)?{_THINKING}\w{{0,12}}(?::\w{{1,20}})?[>\]|]{{1,2}}"
    # <|think|><|end|>, <|channel>thought <channel|>
    rf"|{_THINKING}\w{{0,12}}[>\]|]{{0,2}}\s*<(?:\|?(?:end|close)[^<>]{{0,20}}|\w{{1,20}}\|)>)"
    # and how an answer begins
    rf"(?:\s|<(?![^<>]*{_THINKING})[^<>\s]{{1,40}}>|assistant|model)*\Z",
    re.IGNORECASE,
)
_STATED: Final = re.compile(
    rf"(?:effort|{_THINKING})\w{{0,12}}(?:[ _-](?:effort|level|depth|intensity|strength|degree|amount|power|setting))?"
    r"(?: ?\([^()\n]{0,40}\))?"
    rf"(?:\s(?:is|to|at|of|level)\b|[\s:=>\"'*`(\[])*{OTHER}\b"
    rf"|\b{OTHER}[\s*`\"']+(?:(?:amount|level|degree|depth) of )?(?:effort|{_THINKING})\w{{0,12}}"
    r"\b(?! (?:model|assistant|agent|engine))",
    re.IGNORECASE,
)
"""A prompt that says how hard to think, with the word it was given: `Thinking level: …`, `Use … effort`."""
_MOST: Final = re.compile(
    rf"{OTHER}[ )]*(?:/|out of|of|from) *(\d{{1,3}})\b|{OTHER}[^\n]{{0,40}}\b[01] *(?:-|–|to) *(\d{{1,3}})\b"
    rf"|\b[01] *(?:-|–|to) *(\d{{1,3}})\b[^\n]{{0,40}}{OTHER}"
)
"""What a prompt says of the most that a number may be: `…/5`, `… out of 10`, `(0 to 10): …`."""
_SAYS_THINK: Final = re.compile(rf"\b(?:effort|{_THINKING})|step[- ]by[- ]step|思考|推理", re.IGNORECASE)
_SAYS_MORE: Final = re.compile(
    r"\b(?:long|hard|deep|thorough|careful|detail|extens|exhaust|much|all|most|max)", re.I
)
_SAYS_LESS: Final = re.compile(
    r"\b(?:brief|short|quick|fast|few|little|less|minimal|direct|without)", re.IGNORECASE
)
_NO_AMOUNT: Final = frozenset(
    [
        *("on", "true", "yes", "enabled", "enable", "no", "false", "disable", "auto", "default"),
        *("adaptive", "dynamic"),
    ]
)
_MAX_OWN_WORDS: Final = 24
_ORDER: Final = (Effort.HIGH, Effort.LOW, Effort.MEDIUM, Effort.MAX, Effort.MINIMAL, Effort.XHIGH)
"""The places that a scale of one, two, three, … unknown words takes."""

_FRACTIONS: Final = ((Effort.LOW, 0.2), (Effort.MEDIUM, 0.5), (Effort.HIGH, 0.8), (Effort.MAX, 1.0))


def own_words(named: Collection[str]) -> dict[str, Effort]:
    """Return which of a template's words mean an effort, without the usual ones."""
    usual = {word for words in WORDS.values() for word in words}
    found: dict[str, Effort] = {}
    for word in sorted(set(named) - usual):
        folded = fold(word) if len(word) <= 40 else ""
        effort = None if folded in _NO_AMOUNT else EFFORT_OF.get(folded) or _MORE.get(folded)
        if effort is not None and len(found) < _MAX_OWN_WORDS:
            found[word] = effort
    return found


def places_in_order(words: Sequence[str], known: Mapping[str, Effort]) -> dict[str, Effort]:
    """Return the places of those words that are not known: what is free between the known ones around them."""
    found: dict[str, Effort] = {}
    unknown: list[str] = []
    below = 0
    for word in (*words, None):
        if word is not None and word not in known:
            unknown.append(word)
            continue
        above = len(DIAL) if word is None else DIAL.index(known[word])
        free = [effort for effort in _ORDER if below < DIAL.index(effort) < above][: len(unknown)]
        found |= zip(unknown, sorted(free, key=DIAL.index), strict=False)
        below, unknown = above, []
    return found


def difference(prompt: str, other: str) -> str:
    """Return what two prompts do not have in common, with the beginning of its clause and without markers."""
    start = common_prefix_length(prompt, other)
    start = max(0, start - 60, *(prompt.rfind(end, 0, start) + 1 for end in ".!?\n>]"))
    end = common_prefix_length(prompt[start:][::-1], other[start:][::-1])
    return " ".join(re.sub(r"<[^<>\s]*>", " ", each[start : len(each) - end]) for each in (prompt, other))


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """The prompts of one argument's words, and that of an unknown word. None: refused."""

    prompts: Mapping[str, str | None]
    other: str | None
    places: Mapping[str, Effort]

    @property
    def is_printed(self) -> bool:
        """Whether the template prints any word that it is given."""
        return self.other is not None and OTHER in self.other.lower()

    @property
    def speaks_of_thinking(self) -> bool | None:
        """Whether what the words change in the prompt is about how hard to think; None if it is about nothing."""
        if self.is_printed:
            return _STATED.search(self.other or "") is not None
        prompts = list(dict.fromkeys(filter(None, (self.other, *self.prompts.values()))))
        changed = " ".join(difference(prompt, prompts[0]) for prompt in prompts[1:])
        if _SAYS_THINK.search(changed) or len({closes_reasoning(prompt) for prompt in prompts}) > 1:
            return True
        said = {word.lower() for word in re.findall(r"[^\W\d_]{3,}", changed)}
        return None if said <= {word.lower() for word in self.prompts} else False

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
    return _CLOSED.search(prompt[-200:]) is not None


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
    render: Callable[[float], str | None],
    by_itself: str | None,
    numbers: Collection[float],
    most: int | None = None,
) -> dict[Effort, tuple[float, str]]:
    """Return the levels of an argument that takes a number, with their prompts; nothing if it takes none.

    `by_itself` is the template's prompt without a number, `numbers` are those it names: one of them may be its default,
    which is then one of the levels. `most` is the highest, if the prompt says it.
    """
    own = next((each for each in sorted(numbers) if each > 0 and render(each) == by_itself), None)
    if own is not None and render(own / 2) == render(own * 2) == by_itself:
        return {}  # no number makes a difference

    def takes(number: float) -> bool:
        return render(number) is not None

    chosen: dict[Effort, float]
    if most is not None:
        chosen = _near({effort: max(1, round(most * fraction)) for effort, fraction in _FRACTIONS}, own, most)
    elif takes(0.5) and (own < 1 or (own == 1 and not takes(2)) if own is not None else not takes(2)):
        chosen = _near(dict(_FRACTIONS), own, 1)
    elif takes(1) and takes(2) and not takes(50):
        steps = next(step for step in range(10, 1, -1) if takes(step))
        names = [effort for effort, _ in _FRACTIONS]
        if steps < len(names):
            chosen = dict(zip([names[0], *names[3 - (steps - 1) : 3]], range(1, steps + 1), strict=True))
        else:
            chosen = {effort: max(1, int(steps * fraction + 0.5)) for effort, fraction in _FRACTIONS}
    elif takes(50) and (not takes(1000) or (own is not None and own <= 100)):
        chosen = _near({effort: round(100 * fraction) for effort, fraction in _FRACTIONS}, own, 100)
    else:
        return {}
    rendered = {effort: (number, render(number)) for effort, number in chosen.items()}
    levels = {effort: (number, prompt) for effort, (number, prompt) in rendered.items() if prompt is not None}
    return levels if len({prompt for _, prompt in levels.values()}) == len(levels) > 1 else {}


def named_numbers(
    render: Callable[[float], str | None], numbers: Collection[float]
) -> dict[Effort, tuple[float, str]]:
    """Return the levels of an argument that is compared with numbers: 0 is none, and the others rise."""
    found: dict[str, float] = {}
    for number in sorted(number for number in numbers if 0 <= number <= 100)[:_MAX_OWN_WORDS]:
        if (prompt := render(number)) is not None:
            found.setdefault(prompt, number)
    if len(found) < 2:
        return {}
    reasoning = [(number, prompt) for prompt, number in found.items() if number > 0]
    places = sorted(_ORDER[: len(reasoning)], key=DIAL.index)
    levels = dict(zip(places, reasoning[: len(places)], strict=True))
    off = [(number, prompt) for prompt, number in found.items() if number == 0]
    return {**levels, Effort.NONE: off[0]} if off else levels


def _near(levels: dict[Effort, float], own: float | None, unit: float) -> dict[Effort, float]:
    """Return the levels with a template's own default in the place of the one nearest to it."""
    if own is not None and own <= unit:
        levels[min(levels, key=lambda effort: abs(levels[effort] - own))] = own
    return levels


type Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Switch:
    """What switches reasoning on and off, and the prompts it gives."""

    on: Arguments
    off: Arguments
    on_prompt: str | None
    off_prompt: str

    def is_off_in(self, prompt: str | None) -> bool:
        """Whether a prompt is the one of reasoning switched off."""
        return prompt == self.off_prompt


def ordered_scale(
    base: str | None,
    levels: Mapping[Effort, Level],
    prompts: Mapping[Effort, str],
    off: Arguments | None,
    off_prompt: str | None,
    switch: Switch | None,
) -> EffortScale:
    """Order the levels, add `none`, and find which of them the template gives by itself, in the prompt `base`."""
    ordered = [levels[effort] for effort in DIAL if effort in levels]
    lowest = ordered[0]
    # Without a word for it, the lowest level is told and the server closes the reasoning.
    none = Level(effort=Effort.NONE, template_kwargs=lowest.template_kwargs if off is None else off, budget=0)

    def level_of(prompt: str | None) -> Effort | None:
        return next((effort for effort in DIAL if prompt is not None and prompts.get(effort) == prompt), None)

    named = level_of(base)
    if named is None and base is not None and base == off_prompt:
        named = Effort.NONE
    default = named or _middle(ordered)
    on = level_of(switch.on_prompt) if switch else None
    if on is None:
        on = default if default is not Effort.NONE else ordered[-1].effort
    tells_default = named is not None or base is None
    return EffortScale(levels=(none, *ordered), default=default, on=on, tells_default=tells_default)


def _middle(levels: Sequence[Level]) -> Effort:
    """Return the level in the middle: what a template that prints any word means by none."""
    return levels[len(levels) // 2].effort


def level_above(levels: Mapping[Effort, Any]) -> Effort:
    """Return the effort above some levels: high, if it is not among them."""
    highest = max(DIAL.index(effort) for effort in levels)
    return DIAL[min(max(highest + 1, DIAL.index(Effort.HIGH)), len(DIAL) - 1)]


def budget_scale(
    budgets: Mapping[Effort, int],
    switch: Switch | None = None,
    base: str | None = None,
    *,
    told_as: str | None = None,
    tells_none: bool = True,
    tells_any: bool = True,
) -> EffortScale:
    """Make the levels of a model without a scale: budgets of tokens, and the model's own way above them.

    `told_as` is the template's argument for a budget; `tells_none` says whether it takes 0, and `tells_any` whether it
    takes any other number.
    """
    on: Arguments = switch.on if switch and base != switch.on_prompt else {}
    off: Arguments = switch.off if switch else {told_as: 0} if told_as and tells_none else {}
    limited = [
        Level(
            effort=effort,
            template_kwargs={**on, told_as: budgets[effort]} if told_as else on,
            budget=budgets[effort],
        )
        for effort in DIAL[1:-1]
        if effort in budgets
    ]
    top = level_above({level.effort: level for level in limited} or {Effort.NONE: None})
    levels = (
        Level(effort=Effort.NONE, template_kwargs=off, budget=0),
        *limited,
        Level(effort=top, template_kwargs=on),
    )
    is_off = switch is not None and switch.is_off_in(base)
    return EffortScale(
        levels=levels,
        default=Effort.NONE if is_off else top,
        on=top,
        # A third way ("adaptive") is none of the levels: where nothing states an effort, nothing is told.
        tells_default=switch is None or is_off or base in (None, switch.on_prompt),
        budget_argument=told_as if tells_any else None,
    )


def nested(arguments: Arguments) -> dict[str, Any]:
    """Return arguments with `reasoning.effort` as the part of an object."""
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        owner, _, part = name.partition(".")
        if part:
            found[owner] = {**found.get(owner, {}), part: value}
        else:
            found[name] = value
    return found


def with_part(arguments: Arguments, name: str, value: Any) -> dict[str, Any]:
    """Return a template's arguments with another value for one, or for a part of one; None takes it away."""
    owner, _, part = name.partition(".")
    changed = dict(arguments)
    if part:
        holder = changed.get(owner)
        value = {**(holder if isinstance(holder, dict) else {}), part: value}
        value = {each: given for each, given in value.items() if given is not None} or None
    if value is None:
        changed.pop(owner, None)
    else:
        changed[owner] = value
    return changed


PROBE_SECONDS: Final = 2.0
"""Of processor time, for all renderings of one template together; those of published templates take 20 to 300 ms."""
MAX_TEMPLATES: Final = 1024
"""Whose scales are remembered: as many models may be listed, again and again."""
type Budgets = tuple[tuple[Effort, int], ...]

DEFAULT_BUDGETS: Final[Budgets] = ((Effort.LOW, 1024), (Effort.MEDIUM, 4096))
"""Tokens of reasoning, for models whose template has no scale. The level above them has no budget."""

_IS_ABOUT_EFFORT: Final = re.compile(rf"effort|{_THINKING}", re.IGNORECASE)
_IS_AMOUNT: Final = re.compile(
    r"effort|level|depth|intensity|strength|degree|amount|power|tier", re.IGNORECASE
)
_IS_ABOUT_HISTORY: Final = re.compile(r"preserve|clear|truncate|keep|drop|history|content|text")
_IS_BUDGET: Final = re.compile(r"budget|token|limit|length")
_FLAG: Final = re.compile(r"\A(minimal|low|medium|high)_effort\Z")
_SWITCHES_OFF: Final = re.compile(r"skip|disable|\Ano_?think|\Ano_|without")
_NOT_EFFORT: Final = re.compile(
    r"detail|verbos|quality|image|video|audio|vision|priority|risk|safe|lang|style|tone|format|resolution|citation"
    r"|date|name|role|id\Z|token|messages|tool|document|prompt|answer|response|output|size"
)
"""Names that an argument without a word for effort in its own must not have, to be tried with such words."""
_MAX_UNKNOWN: Final = 16
_MAX_LITERALS: Final = 48
_USER: Final = {"role": "user", "content": "Hi"}
_SYSTEM: Final = {"role": "system", "content": "Answer."}
_TOOLS: Final = [
    {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
    }
]
_CONTEXTS: Final = (([_USER], None), ([_SYSTEM, _USER], None), ([_SYSTEM, _USER], _TOOLS))


class _EffortProbe:
    """Renders one template with one set of arguments after another. Raises TemplateOverrun once its time is up."""

    def __init__(
        self,
        template: TemplateProbe,
        messages: Sequence[Mapping[str, str]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        self.contents = template.contents
        self._template = template
        self._messages = messages
        self._tools = tools
        self.own_words = own_words(template.contents.words)
        usual = [word for effort, words in WORDS.items() for word in words if effort is not Effort.NONE]
        self.named = [*(word for word in usual if word in template.contents.words), *self.own_words]
        """The template's words that mean an effort."""
        known = {
            *self.own_words,
            *(word for words in WORDS.values() for word in words),
            *_NO_AMOUNT,
            *ON_WORDS,
        }
        literals = (word for word in template.contents.words if re.fullmatch(r"[^\W_][\w-]{0,23}", word))
        self._literals = [word for word in literals if word not in known][:_MAX_LITERALS]
        self._rendered: dict[str, str | None] = {}
        self.base = self.render({})
        """The prompt of a request that states no effort; None if the template cannot do without."""

    def render(self, *arguments: Arguments) -> str | None:
        """Return the prompt, None where the template refuses."""
        joined = nested({name: value for given in arguments for name, value in given.items()})
        key = repr(joined)
        if key not in self._rendered:
            self._rendered[key] = self._template.render(self._messages, joined, self._tools)
        return self._rendered[key]

    def words(self, name: str, *fixed: Arguments) -> WordPrompts:
        """Render with every word for an argument; with any word of the template if its name is about thinking."""
        places = {word: effort for effort, words in WORDS.items() for word in words} | self.own_words
        prompts = {word: self.render(*fixed, {name: word}) for word in places}
        rendered = WordPrompts(prompts, self.render(*fixed, {name: OTHER}), places)
        if not _IS_ABOUT_EFFORT.search(name) or rendered.is_printed:
            return rendered
        named = {prompts[word] for word in self.named}
        order = {word: at for at, word in enumerate(self.contents.words)}
        more: dict[str, str] = {}
        for word in self._literals:
            prompt = self.render(*fixed, {name: word})
            if prompt is not None and prompt not in (rendered.other, *named, *more.values()):
                more[word] = prompt
        closing = {word for word, prompt in more.items() if closes_reasoning(prompt)}
        known = {word: places[word] for word in self.named}
        # They rise as they stand in the template, if neither they nor their texts say more.
        rank = {word: DIAL.index(effort) - DIAL.index(Effort.MEDIUM) for word, effort in known.items()}
        for word, prompt in more.items():
            said = difference(prompt, self.base or "")
            rank[word] = bool(_SAYS_MORE.search(said)) - bool(_SAYS_LESS.search(said))
        in_order = sorted(
            (word for word in rank if word not in closing), key=lambda word: (rank[word], order[word])
        )
        places |= dict.fromkeys(closing, Effort.NONE) | places_in_order(in_order, known)
        return WordPrompts(prompts | more, rendered.other, places)


@lru_cache(maxsize=MAX_TEMPLATES)
def probe_effort(
    source: str | None,
    *,
    reasons: bool,
    budgets: Budgets = DEFAULT_BUDGETS,
    seconds: float = PROBE_SECONDS,
) -> EffortScale:
    """Return the scale of the model with this chat template. Never raises.

    `reasons` says whether the model reasons, as far as its dialect and the template's text tell: it decides where no
    argument changes the prompt, or the template cannot be probed. `budgets` are for models without a scale.
    """
    found: EffortScale | None = None
    try:
        if source:
            found = _scale(TemplateProbe(source, seconds), dict(budgets), reasons=reasons)
    except TemplateFault:
        pass
    if found is None and reasons:
        found = budget_scale(dict(budgets))
    found = found or EffortScale()
    levels = [replace(level, template_kwargs=nested(level.template_kwargs)) for level in found.levels]
    return replace(found, levels=tuple(levels))


@dataclass(frozen=True, slots=True)
class _Names:
    """The arguments of a template that may be about effort, by what their names suggest."""

    words: Sequence[str]
    flags: Sequence[str]
    budgets: Sequence[str]
    others: Sequence[str]
    unknown: Sequence[str]
    """Those whose names say nothing of effort."""
    are_levels: bool
    """Whether the words that the template names may be the levels of such an argument, even if no text says so."""

    @classmethod
    def of(cls, template: TemplateContents, *, reasons: bool) -> _Names:
        names = sorted(
            (
                name
                for name in template.variables | template.parts
                if _IS_ABOUT_EFFORT.search(name) and not _IS_ABOUT_HISTORY.search(name)
            ),
            key=lambda name: (name != "enable_thinking", name != "thinking", name),
        )
        flags = [name for name in names if _FLAG.match(name)]
        words = [name for name in names if _IS_AMOUNT.search(name) and name not in flags]
        budgets = [name for name in names if _IS_BUDGET.search(name) and name not in words]
        others = [name for name in names if name not in (*flags, *words, *budgets)]
        unknown = [
            name
            for name in (*sorted(filter(_IS_AMOUNT.search, template.parts)), *sorted(template.variables))
            if name not in names and not _NOT_EFFORT.search(name) and not _IS_ABOUT_HISTORY.search(name)
        ]
        places = set(own_words(template.words).values())
        places |= {effort for effort, usual in WORDS.items() if set(usual) & set(template.words)}
        are_levels = reasons and len(places - {Effort.NONE}) > 1
        return cls(words, flags, budgets, others, unknown[:_MAX_UNKNOWN], are_levels)


def _scale(template: TemplateProbe, budgets: Mapping[Effort, int], *, reasons: bool) -> EffortScale | None:
    names = _Names.of(template.contents, reasons=reasons)
    if not any((names.words, names.flags, names.budgets, names.others, names.unknown)):
        return None
    switched: EffortScale | None = None
    for messages, tools in _CONTEXTS:
        probe = _EffortProbe(template, messages, tools)
        switch = next(filter(None, (_find_switch(probe, name) for name in names.others)), None)
        switch = switch or next(filter(None, (_closing_switch(probe, name) for name in names.unknown)), None)
        if scale := _own_scale(probe, names, switch, budgets):
            return scale
        for name in () if switch else names.words:
            switch = switch or _find_switch(probe, name)
        if switch is not None and switched is None:
            switched = budget_scale(budgets, switch, probe.base)
        if switched is not None and not (names.words or names.flags or names.budgets):
            break
        names = replace(names, unknown=())  # these would be tried for too long
    return switched


def _own_scale(
    probe: _EffortProbe, names: _Names, switch: Switch | None, budgets: Mapping[Effort, int]
) -> EffortScale | None:
    """Return the scale of a template that has more than a switch."""
    for name in names.words:
        if scale := _word_scale(probe, name, switch):
            return scale
    if names.flags and (scale := _flag_scale(probe, names.flags, switch)):
        return scale
    for name in names.budgets:
        on: Arguments = switch.on if switch and switch.is_off_in(probe.base) else {}
        told = {probe.render(on, {name: tokens}) for tokens in (*budgets.values(), 1_000_000)}
        if len(told - {None}) > 1:
            return budget_scale(
                budgets,
                switch,
                probe.base,
                told_as=name,
                tells_none=probe.render(on, {name: 0}) is not None,
                tells_any=probe.render(on, {name: 777}) is not None,
            )
    for name in (*names.others, *names.unknown):
        if all(probe.render({name: word}) == probe.base for word in (OTHER, *probe.named)):
            continue  # none of the template's words is for this argument
        if name in names.unknown:
            speaks = probe.words(name).speaks_of_thinking
            if speaks is False or (speaks is None and not names.are_levels):
                continue
        other = None if switch is None or name in switch.off else switch
        scale = _word_scale(probe, name, other)
        if scale and len(scale.levels) > 2:
            return scale
    return None


def _find_switch(probe: _EffortProbe, name: str) -> Switch | None:
    """Try an argument as a boolean, and with the words for on and off that the template names."""
    named = probe.contents.words
    pairs: list[tuple[Any, Any]] = [(True, False)]
    pairs += [(on, off) for off in WORDS[Effort.NONE] if off in named for on in ON_WORDS if on in named]
    pairs += [(None, off) for off in WORDS[Effort.NONE] if off in named]
    if not closes_reasoning(probe.base or ""):
        pairs += [(None, off) for off in probe.named if closes_reasoning(probe.render({name: off}) or "")]
    for on_value, off_value in pairs:
        on: Arguments = {} if on_value is None else {name: on_value}
        off: Arguments = {name: off_value}
        on_prompt, off_prompt = probe.render(on), probe.render(off)
        if on_prompt is None or off_prompt is None or on_prompt == off_prompt:
            continue
        if on_value is None and off_prompt == probe.render({name: OTHER}):
            continue  # any other word does the same
        if on_value is True and on_prompt.replace("True", "False") == off_prompt:
            continue  # it only prints them
        if on_value is True and "True" in on_prompt and OTHER in (probe.render({name: OTHER}) or ""):
            continue  # it prints whatever it is given
        if on_value is True and _is_reversed(name, on_prompt, off_prompt):
            on, off, on_prompt, off_prompt = off, on, off_prompt, on_prompt
        return Switch(on, off, on_prompt, off_prompt)
    return None


def _closing_switch(probe: _EffortProbe, name: str) -> Switch | None:
    """Return a switch, whatever its name, that has the prompt end with a closed block of reasoning."""
    switch = _find_switch(probe, name)
    closes = switch and closes_reasoning(switch.off_prompt) and not closes_reasoning(switch.on_prompt or "")
    return switch if closes else None


def _is_reversed(name: str, true_prompt: str, false_prompt: str) -> bool:
    """Whether a boolean switches reasoning off: by the prompt that closes it, else by the argument's name."""
    closed = closes_reasoning(true_prompt), closes_reasoning(false_prompt)
    return closed[0] if closed[0] != closed[1] else bool(_SWITCHES_OFF.search(name))


def _word_scale(probe: _EffortProbe, name: str, switch: Switch | None) -> EffortScale | None:
    """Make the levels of an argument that takes words or numbers; None if fewer than two kinds of prompt come."""
    template = probe.contents
    # Reasoning that is off by default has to be switched on as well, if the word does not do that.
    fixed: Arguments = {}
    words = probe.words(name)
    is_ignored = len({*words.prompts.values(), words.other} - {None}) < 2
    if switch is not None and (is_ignored or switch.is_off_in(probe.base)):
        fixed = switch.on
        words = probe.words(name, fixed)
    by_itself = probe.render(fixed)
    found: Mapping[Effort, tuple[Any, str]] = {}
    off: Arguments | None = None
    off_prompt: str | None = None
    if words.is_printed and not (_IS_AMOUNT.search(name) or by_itself in words.prompts.values()):
        is_switch = any(probe.render(fixed, {name: word}) == by_itself for word in ON_WORDS)
        if is_switch or not words.speaks_of_thinking:
            return None  # it prints a text of some other kind
    has_no_words = words.other is None and not any(words.prompts.values())
    if has_no_words or words.is_printed:
        most = _MOST.search(words.other or "")
        found = number_levels(
            lambda number: probe.render(fixed, {name: number}),
            by_itself,
            template.numbers,
            int(next(filter(None, most.groups()))) if most else None,
        )
        if words.is_printed and by_itself not in [prompt for _, prompt in found.values()]:
            found = {}
        if found and (off_prompt := probe.render(fixed, {name: 0})) is not None:
            off = {name: 0}
    if not found:
        found = words.printed(by_itself) if words.is_printed else words.recognised(template.words)
        found = _without_closing(found, words.other)
    if not found and _IS_ABOUT_EFFORT.search(name):
        found = named_numbers(lambda number: probe.render(fixed, {name: number}), template.numbers)
    by_prompt: dict[str, list[Effort]] = {}
    for effort, (_, prompt) in found.items():
        by_prompt.setdefault(prompt, []).append(effort)
    levels: dict[Effort, Level] = {}
    prompts: dict[Effort, str] = {}
    for prompt, efforts in by_prompt.items():
        reasoning = [effort for effort in efforts if effort is not Effort.NONE]
        if not reasoning:
            continue
        effort = most_fitting(prompt, reasoning, template.defaults)
        kwargs = {**fixed, name: found[effort][0]}
        levels[effort] = Level(effort=effort, template_kwargs=kwargs, accepts=frozenset(reasoning))
        prompts[effort] = prompt
    if not levels:
        return None
    other = words.other if _is_level_of_its_own(words, by_prompt, by_itself) else None
    if other is not None and (place := place_of_other(other, prompts)):
        levels[place] = Level(effort=place, template_kwargs={**fixed, name: place.value})
        prompts[place] = other
    off_word, worded_off = found.get(Effort.NONE, ("", None))
    if worded_off is not None and by_prompt[worded_off] == [Effort.NONE]:
        off, off_prompt = {name: off_word}, worded_off
    if switch is not None:
        off, off_prompt = dict(switch.off), switch.off_prompt
    if len(levels) < 2 and off is None:
        return None
    return ordered_scale(probe.base, levels, prompts, off, off_prompt if off else None, switch)


def _without_closing(
    found: Mapping[Effort, tuple[str, str]], other: str | None
) -> Mapping[Effort, tuple[str, str]]:
    """Return the words with those that close the reasoning at once (Solar Open's low) as one for none."""
    closing = {effort: each for effort, each in found.items() if closes_reasoning(each[1])}
    if not closing or (len(closing) == len(found) and closes_reasoning(other or "")):
        return found
    left = {effort: each for effort, each in found.items() if effort not in closing}
    return {Effort.NONE: closing.get(Effort.NONE) or next(iter(closing.values())), **left}


def _is_level_of_its_own(words: WordPrompts, known: Collection[str], by_itself: str | None) -> bool:
    """Whether what every other word comes to is a level, which the template does not name."""
    other = words.other
    if other is None or words.is_printed or other in known:
        return False
    return other == by_itself or not is_left_blank(other, known)


def _flag_scale(probe: _EffortProbe, flags: Sequence[str], switch: Switch | None) -> EffortScale | None:
    """Make the levels of flags such as low_effort: each is a level below the one without any."""
    fixed: Arguments = switch.on if switch and switch.is_off_in(probe.base) else {}
    unflagged = probe.render(fixed)
    levels: dict[Effort, Level] = {}
    prompts: dict[Effort, str] = {}
    for name in flags:
        match = _FLAG.match(name)
        prompt = probe.render(fixed, {name: True})
        if match is not None and prompt is not None and prompt != unflagged:
            effort = Effort(match[1])
            levels[effort] = Level(effort=effort, template_kwargs={**fixed, name: True})
            prompts[effort] = prompt
    if not levels or unflagged is None:
        return None
    top = level_above(levels)
    levels[top], prompts[top] = Level(effort=top, template_kwargs=fixed), unflagged
    off = dict(switch.off) if switch else None
    return ordered_scale(probe.base, levels, prompts, off, switch.off_prompt if switch else None, switch)
