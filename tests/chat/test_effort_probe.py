"""What a chat template knows of effort, found by rendering it: one template of each kind, and the real ones.

The templates are written for these tests after what the families' own do; only the lines that matter are there.
"""

import logging
from typing import Any

import pytest
from harmony_data import GPT_OSS_TEMPLATE, HARMONY_DATA, needs_gpt_oss_template
from scripted_engine import ScriptedEngine

from mlx_backend.chat.effort_probe import probe_effort
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.conversation.effort import DIAL, GPT_OSS_SCALE, Effort, EffortScale
from mlx_backend.conversation.template import TemplateTraits
from mlx_backend.models import templates
from mlx_backend.models.templates import TemplateFault

CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)

TEMPLATES = {
    "prints any word": "Reasoning: {{ reasoning_effort | default('medium') }}" + CHAT,
    "prints a word only if told": "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}"
    + CHAT
    + "<think>",
    "raises on others": "{% set e = reasoning_effort if reasoning_effort is defined else 'xhigh' %}"
    "{% if e not in ['low', 'medium', 'xhigh'] %}{{ raise_exception('Unexpected ' ~ e) }}{% endif %}"
    "{% if e == 'low' %}Think briefly.{% elif e == 'xhigh' %}Think hard.{% endif %}" + CHAT + SWITCH,
    "folds one into another": "{% set e = reasoning_effort if reasoning_effort is defined else 'xhigh' %}"
    "{% if e == 'high' %}{% set e = 'xhigh' %}{% endif %}"
    "{% if e not in ['low', 'medium', 'xhigh'] %}{{ raise_exception('Unexpected ' ~ e) }}{% endif %}"
    "{% if e == 'low' %}Think briefly.{% elif e == 'xhigh' %}Think hard.{% endif %}" + CHAT + SWITCH,
    "others are its highest": "{% set e = reasoning_effort | default('') %}"
    "Reasoning Effort: {% if e == 'low' %}Low{% elif e == 'high' %}High{% else %}Max{% endif %}"
    + CHAT
    + "<think>",
    "another name": "{% if thinking_effort is defined and thinking_effort not in ['low', 'high', 'max'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}{% set on = true if thinking is undefined else thinking %}"
    + CHAT
    + "{% if on %}effort={{ thinking_effort | default('max') }}<think>{% else %}<think></think>{% endif %}",
    "a word for off": "{% set e = reasoning_effort | default('no_think') %}"
    "{% if e not in ['no_think', 'low', 'high'] %}{{ raise_exception('?') }}{% endif %}"
    + CHAT
    + "{% if e == 'no_think' %}<think></think>{% else %}{{ e }}<think>{% endif %}",
    "none or high": "{% set e = reasoning_effort | default('none') %}"
    "{% if e not in ['none', 'high'] %}{{ raise_exception('?') }}{% endif %}[SETTINGS]{{ e }}" + CHAT,
    "only none means something": "{% set on = not (reasoning_effort is defined and reasoning_effort == 'none') %}"
    + CHAT
    + "{% if on %}<think>{% else %}<think></think>{% endif %}",
    "off, with words": "{% set on = thinking | default(false) %}{% set e = reasoning_effort | default('high') %}"
    + CHAT
    + "{% if on %}{% if e == 'max' %}MAX{% elif e == 'low' %}{% else %}STD{% endif %}<think>{% else %}</think>"
    "{% endif %}",
    "words told even when off": "{% set e = reasoning_effort | default('high') %}"
    "{% if e not in ['low', 'high'] %}{{ raise_exception('?') }}{% endif %}Effort {{ e }}."
    + CHAT
    + "{% if thinking | default(false) %}<think>{% else %}</think>{% endif %}",
    "a flag for low": CHAT + "{% if low_effort %}{reasoning effort: low}{% endif %}" + SWITCH,
    "a flag for medium": CHAT + "{% if medium_effort %}{reasoning effort: medium}{% endif %}" + SWITCH,
    "a mode and words": "{% set mode = thinking_mode | default('enabled') %}"
    + CHAT
    + "({{ reasoning_effort }})"
    "{% if mode == 'enabled' %}<think>{% elif mode == 'disabled' %}</think>{% elif mode == 'adaptive' %}{% endif %}",
    "a budget": "{% if thinking_budget is defined and thinking_budget != -1 %}Budget {{ thinking_budget }}.{% endif %}"
    + CHAT
    + "<seed:think>",
    "a switch": CHAT + SWITCH,
    "a switch that is off": CHAT + "{% if enable_thinking %}<|think|>{% endif %}",
    "it is skipped": CHAT + "{% if not skip_thinking %}<think>{% endif %}",
    "nothing": CHAT + "<think>",
    "must be told": "{% if reasoning_effort not in ['low', 'high'] %}{{ raise_exception('no effort') }}{% endif %}"
    "{{ reasoning_effort }}" + CHAT,
    "wants a system message": "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + CHAT
    + SWITCH,
    "words for on and off": "{% set t = thinking | default('enabled') %}"
    "{% if t not in ['enabled', 'disabled'] %}{{ raise_exception('?') }}{% endif %}"
    + CHAT
    + "{% if t == 'disabled' %}<think></think>{% else %}<think>{% endif %}",
    "prints on or off": "thinking {{ reasoning | default('on') }}{% if reasoning == 'off' %}!{% endif %}"
    + CHAT
    + "<think>",
    "a third mode by default": CHAT
    + "{% if thinking_mode == 'enabled' %}<think>{% elif thinking_mode == 'disabled' %}</think>{% endif %}",
    "reversed": CHAT + "{% if nothinking %}<think></think>{% else %}<think>{% endif %}",
    "words of its own": "{% set s = reasoning_strength | default('standard') %}"
    "{% if s not in ['light', 'standard', 'Heavy'] %}{{ raise_exception('?') }}{% endif %}{{ s }}" + CHAT,
    "words in Chinese": "{% set e = reasoning_effort | default('中') %}"
    "{% if e not in ['低', '中', '高'] %}{{ raise_exception('?') }}{% endif %}{{ e }}" + CHAT,
    "a name nobody has seen": "{% set d = deliberation | default('high') %}"
    "{% if d not in ['low', 'high'] %}{{ raise_exception('?') }}{% endif %}{{ d }}" + CHAT + "<think>",
    "another argument with such words": "{% if image_detail not in ['low', 'high'] %}{% endif %}{{ image_detail }}"
    "{{ persona }}" + CHAT + "<think>",
    "a part of an object": "{% set r = reasoning | default({}) %}{{ r.effort | default('medium') }}" + CHAT,
    "got from an object": "{% set e = options.get('effort') if options else 'low' %}"
    "{% if e not in ['low', 'high'] %}{{ raise_exception('?') }}{% endif %}{{ e }}" + CHAT,
    "parts for switch and budget": "{% set t = thinking | default({}) %}"
    "{% if t.budget_tokens %}Up to {{ t.budget_tokens }}.{% endif %}"
    + CHAT
    + "{% if t.type == 'disabled' %}<think></think>{% else %}<think>{% endif %}",
    "a fraction": "{% set e = reasoning_effort | default(0.5) %}"
    "{% if e is not number or e > 1 %}{{ raise_exception('?') }}{% endif %}{{ e }}" + CHAT,
    "per cent": "Effort {{ reasoning_effort | default(75) }}." + CHAT,
    "steps": "{% set e = reasoning_effort | default(2) %}"
    "{% if e not in [1, 2, 3] %}{{ raise_exception('?') }}{% endif %}{{ e }}" + CHAT,
    "a budget by another name": "{% if max_thinking_tokens is defined %}{{ max_thinking_tokens }}{% endif %}"
    + CHAT,
    "a budget and a switch": "{% if thinking_budget %}{{ thinking_budget }}{% endif %}" + CHAT + SWITCH,
    "a table of words": "{% set t = {'low': 'brief', 'medium': 'fair', 'high': 'long'} %}"
    "{{ t[reasoning_effort | default('medium')] }}." + CHAT,
    "three words and silence": "{% if reasoning_effort in ['low', 'medium', 'high'] %}{{ reasoning_effort }}{% endif %}"
    + CHAT,
    "prints, and none closes": "{{ reasoning_effort | default('max') }}"
    + CHAT
    + "{% if reasoning_effort == 'none' %}<think></think>{% else %}<think>{% endif %}",
    "low closes": "{% set e = reasoning_effort | default('high') %}"
    + CHAT
    + "{% if e in ['low', 'minimal'] %}<|think|><|end|>{% endif %}",
    "two words for most levels": "{% set e = reasoning_effort | default('medium') %}"
    + CHAT
    + "{% if e in ['minimal', 'low'] %}A{% elif e == 'medium' %}B{% elif e in ['high', 'max'] %}C"
    "{% else %}{{ raise_exception('?') }}{% endif %}",
    "two words for its default": "{% set n = {'low': 50, 'high': 75, 'xhigh': 75, 'max': 100} %}"
    "{{ n[reasoning_effort | default('high')] }}" + CHAT,
    "silence for low": CHAT
    + "{% if thinking and reasoning_effort == 'high' %}H{% elif thinking and reasoning_effort == 'max' %}M{% endif %}"
    "{% if thinking %}<think>{% else %}</think>{% endif %}",
    "only beside a system message": "{% if messages[0].role == 'system' %}"
    "{{ reasoning_effort | default('low') }}{% endif %}" + CHAT + "<think>",
    "only beside tools": CHAT + "{% if tools and enable_thinking is false %}Off.{% endif %}<think>",
    "low closes, and the answer begins after it": "{% set e = reasoning_effort | default('high') %}"
    + CHAT
    + "{% if e in ['minimal', 'low'] %}<|turn|>assistant<|think|><|end|>{% endif %}<|turn|>assistant",
    "low is an empty block of another kind": CHAT
    + "{% if exertion == 'low' %}<|channel>thought\n<channel|>{% else %}<think>{% endif %}",
    "one word that only the text explains": "{% if gear == 'deep' %}Think deeply before you answer.{% endif %}"
    + CHAT
    + "<think>",
    "printed beside a word for thinking": "{% if gear %}Reasoning depth: {{ gear }}.{% endif %}"
    + CHAT
    + "<think>",
    "printed before a word for effort": "Use {{ gear | default('high') }} effort." + CHAT + "<think>",
    "printed in a tag": "<effort>{{ gear | default('low') }}</effort>" + CHAT + "<think>",
    "a level by its name": "{% if think_level %}[{{ think_level }}]{% endif %}" + CHAT + "<think>",
    "its default is the only word": "{% set s = strength if strength else 'high' %}Reasoning strength: {{ s }}."
    + CHAT,
    "words nobody has seen": "{% set p = ponder_level | default('walk') %}"
    "{% if p == 'sprint' %}Be quick.{% elif p == 'marathon' %}Take all the time there is.{% elif p != 'walk' %}"
    "{{ raise_exception('?') }}{% endif %}" + CHAT + "<think>",
    "words around one that is known": "{% set p = thinking_style | default('ponder') %}"
    "{{ {'glance': 'A', 'ponder': 'B', 'maximum': 'C'}[p] }}" + CHAT + "<think>",
    "compared with numbers": "{% set l = deliberation_level | default(2) %}"
    "{% if l == 1 %}Briefly.{% elif l == 3 %}Fully.{% endif %}"
    + CHAT
    + "{% if l == 0 %}<think></think>{% else %}<think>{% endif %}",
    "a switch by any name": CHAT + "{% if hurry %}<think></think>{% else %}<think>{% endif %}",
    "through a macro": "{% macro head(x) %}{% if x == 'light' %}Think a little.{% elif x == 'heavy' %}Think a lot."
    "{% endif %}{% endmacro %}{{ head(workload) }}" + CHAT + "<think>",
    "a part of an object by an unknown name": "{% set o = options | default({}) %}"
    "{% set d = o.depth | default('medium') %}{% if d not in ['low', 'medium', 'high'] %}{{ raise_exception('?') }}"
    "{% endif %}Thinking depth: {{ d }}." + CHAT + "<think>",
    "a number out of five": "Thinking level: {{ think_level | default(3) }}/5" + CHAT + "<think>",
    "a number on a scale": "Reasoning depth (1-10): {{ gear | default(7) }}" + CHAT + "<think>",
    "numbers as words": "{% if ponder_level == '1' %}A{% elif ponder_level == '2' %}B{% elif ponder_level == '3' %}C"
    "{% endif %}" + CHAT + "<think>",
    "in capitals": "{% if THINK_LEVEL is defined %}[{{ THINK_LEVEL }}]{% endif %}" + CHAT + "<think>",
    "a level of detail": "Level of detail: {{ level | default('high') }}" + CHAT + "<think>",
    "prints a language": "Think in {{ language | default('English') }}."
    "{% if reasoning_language %}Reasoning language: {{ reasoning_language }}{% endif %}" + CHAT + "<think>",
    "prints a persona": "You are {{ persona | default('Ada') }}, a reasoning model." + CHAT + "<think>",
    "personas that think": "{% if persona == 'poet' %}Think like a poet.{% elif persona == 'judge' %}"
    "Think like a judge.{% endif %}" + CHAT + "<think>",
    "levels of something else": "{% if chattiness == 'low' %}Answer in a sentence.{% elif chattiness == 'high' %}"
    "Answer in full.{% endif %}Danger: {{ danger | default('low') }}" + CHAT + "<think>",
    "a level of a model that does not reason": "Reading level: {{ reading_level | default('high') }}"
    "{% if skill == 'low' %}Speak simply.{% endif %}" + CHAT,
    "left to chance": "{{ [1, 2, 3, 4, 5, 6, 7, 8] | random }}" + CHAT + SWITCH,
    "raises always": "{{ raise_exception('no') }}{{ reasoning_effort }}",
    "does not reason": CHAT,
}
RAISES_ON = {"raises on others": "high", "another name": "medium", "none or high": "low"}


def scale_of(kind: str) -> EffortScale:
    source = TEMPLATES[kind]
    return probe_effort(source, reasons=TemplateTraits.of(source).is_reasoning_model)


@pytest.mark.parametrize(
    ("kind", "levels", "default"),
    [
        ("prints any word", "none low medium high", "medium"),
        ("prints a word only if told", "none low medium high", "medium"),
        ("raises on others", "none low medium xhigh", "xhigh"),
        ("folds one into another", "none low medium xhigh", "xhigh"),
        ("others are its highest", "none low high max", "max"),
        ("another name", "none low high max", "max"),
        ("a word for off", "none low high", "none"),
        ("none or high", "none high", "none"),
        ("only none means something", "none low medium high", "high"),
        ("off, with words", "none low high max", "none"),
        ("words told even when off", "none low high", "none"),
        ("a flag for low", "none low high", "high"),
        ("a flag for medium", "none medium high", "high"),
        ("a mode and words", "none low medium high", "medium"),
        ("a budget", "none low medium high", "high"),
        ("a switch", "none low medium high", "high"),
        ("a switch that is off", "none low medium high", "none"),
        ("it is skipped", "none low medium high", "high"),
        ("nothing", "none low medium high", "high"),
        ("must be told", "none low high", "high"),
        ("wants a system message", "none low medium high", "high"),
        ("words for on and off", "none low medium high", "high"),
        ("prints on or off", "none low medium high", "high"),
        ("a third mode by default", "none low medium high", "high"),
        ("reversed", "none low medium high", "high"),
        ("words of its own", "none low medium high", "medium"),
        ("words in Chinese", "none low medium high", "medium"),
        ("a name nobody has seen", "none low high", "high"),
        ("another argument with such words", "none low medium high", "high"),
        ("a part of an object", "none low medium high", "medium"),
        ("got from an object", "none low high", "low"),
        ("parts for switch and budget", "none low medium high", "high"),
        ("a fraction", "none low medium high max", "medium"),
        ("per cent", "none low medium high max", "high"),
        ("steps", "none low medium high", "medium"),
        ("a budget by another name", "none low medium high", "high"),
        ("a budget and a switch", "none low medium high", "high"),
        ("a table of words", "none low medium high", "medium"),
        ("three words and silence", "none low medium high", "medium"),
        ("prints, and none closes", "none low medium high max", "max"),
        ("low closes", "none high", "high"),
        ("two words for most levels", "none low medium high", "medium"),
        ("two words for its default", "none low high max", "high"),
        ("silence for low", "none low high max", "none"),
        ("only beside a system message", "none low medium high", "low"),
        ("only beside tools", "none low medium high", "high"),
        ("low closes, and the answer begins after it", "none high", "high"),
        ("low is an empty block of another kind", "none low medium high", "high"),
        ("one word that only the text explains", "none medium high", "medium"),
        ("printed beside a word for thinking", "none low medium high", "medium"),
        ("printed before a word for effort", "none low medium high", "high"),
        ("printed in a tag", "none low medium high", "low"),
        ("a level by its name", "none low medium high", "medium"),
        ("its default is the only word", "none low medium high", "high"),
        ("words nobody has seen", "none low medium high", "medium"),
        ("words around one that is known", "none low high max", "high"),
        ("compared with numbers", "none low medium high", "medium"),
        ("a switch by any name", "none low medium high", "high"),
        ("through a macro", "none low medium high", "medium"),
        ("a part of an object by an unknown name", "none low medium high", "medium"),
        ("a number out of five", "none low medium high max", "medium"),
        ("a number on a scale", "none low medium high max", "high"),
        ("numbers as words", "none low medium high", "medium"),
        ("in capitals", "none low medium high", "medium"),
        ("a level of detail", "none low medium high", "high"),
        ("prints a language", "none low medium high", "high"),
        ("prints a persona", "none low medium high", "high"),
        ("personas that think", "none low medium high", "high"),
        ("levels of something else", "none low medium high", "high"),
        ("a level of a model that does not reason", "", None),
        ("left to chance", "none low medium high", "high"),
        ("raises always", "none low medium high", "high"),
        ("does not reason", "", None),
    ],
)
def test_a_template_shows_its_own_scale(kind: str, levels: str, default: str | None) -> None:
    scale = scale_of(kind)
    assert scale.efforts == tuple(levels.split())
    assert scale.default == default


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("raises on others", {"none": {"enable_thinking": False}, "xhigh": {"reasoning_effort": "xhigh"}}),
        ("another name", {"none": {"thinking": False}, "max": {"thinking_effort": "max"}}),
        ("a word for off", {"none": {"reasoning_effort": "no_think"}, "low": {"reasoning_effort": "low"}}),
        ("only none means something", {"none": {"reasoning_effort": "none"}, "low": {}, "high": {}}),
        (
            "off, with words",
            {"none": {"thinking": False}, "max": {"thinking": True, "reasoning_effort": "max"}},
        ),
        ("words told even when off", {"low": {"thinking": True, "reasoning_effort": "low"}}),
        ("a flag for low", {"none": {"enable_thinking": False}, "low": {"low_effort": True}, "high": {}}),
        ("a mode and words", {"none": {"thinking_mode": "disabled"}}),
        ("a budget", {"none": {"thinking_budget": 0}, "low": {"thinking_budget": 1024}, "high": {}}),
        ("a switch that is off", {"none": {"enable_thinking": False}, "low": {"enable_thinking": True}}),
        ("it is skipped", {"none": {"skip_thinking": True}, "high": {}}),
        ("prints any word", {"none": {"reasoning_effort": "low"}, "high": {"reasoning_effort": "high"}}),
        ("words for on and off", {"none": {"thinking": "disabled"}, "low": {}, "high": {}}),
        ("prints on or off", {"none": {"reasoning": "off"}, "high": {}}),
        (
            "a third mode by default",
            {"low": {"thinking_mode": "enabled"}, "high": {"thinking_mode": "enabled"}},
        ),
        ("reversed", {"none": {"nothinking": True}, "high": {}}),
        (
            "words of its own",
            {"low": {"reasoning_strength": "light"}, "high": {"reasoning_strength": "Heavy"}},
        ),
        ("words in Chinese", {"low": {"reasoning_effort": "低"}, "high": {"reasoning_effort": "高"}}),
        ("a name nobody has seen", {"none": {"deliberation": "low"}, "high": {"deliberation": "high"}}),
        ("another argument with such words", {"low": {}, "medium": {}, "high": {}}),
        ("a part of an object", {"low": {"reasoning": {"effort": "low"}}}),
        ("got from an object", {"high": {"options": {"effort": "high"}}}),
        (
            "parts for switch and budget",
            {
                "none": {"thinking": {"type": "disabled"}},
                "low": {"thinking": {"budget_tokens": 1024}},
                "high": {},
            },
        ),
        ("a fraction", {"none": {"reasoning_effort": 0}, "low": {"reasoning_effort": 0.2}}),
        ("per cent", {"low": {"reasoning_effort": 20}, "high": {"reasoning_effort": 75}}),
        ("steps", {"low": {"reasoning_effort": 1}, "medium": {"reasoning_effort": 2}}),
        (
            "a budget by another name",
            {"none": {"max_thinking_tokens": 0}, "low": {"max_thinking_tokens": 1024}},
        ),
        ("a budget and a switch", {"none": {"enable_thinking": False}, "low": {"thinking_budget": 1024}}),
        (
            "prints, and none closes",
            {"none": {"reasoning_effort": "none"}, "max": {"reasoning_effort": "max"}},
        ),
        ("low closes", {"none": {"reasoning_effort": "minimal"}, "high": {"reasoning_effort": "high"}}),
        (
            "silence for low",
            {"none": {"thinking": False}, "low": {"thinking": True, "reasoning_effort": "low"}},
        ),
        ("only beside tools", {"none": {"enable_thinking": False}, "low": {}}),
        ("low closes, and the answer begins after it", {"none": {"reasoning_effort": "minimal"}}),
        ("low is an empty block of another kind", {"none": {"exertion": "low"}, "medium": {}, "high": {}}),
        ("printed in a tag", {"low": {"gear": "low"}, "high": {"gear": "high"}}),
        ("its default is the only word", {"low": {"strength": "low"}, "high": {"strength": "high"}}),
        ("words nobody has seen", {"low": {"ponder_level": "sprint"}, "high": {"ponder_level": "marathon"}}),
        ("words around one that is known", {"low": {"thinking_style": "glance"}}),
        ("compared with numbers", {"none": {"deliberation_level": 0}, "high": {"deliberation_level": 3}}),
        ("a switch by any name", {"none": {"hurry": True}, "low": {}}),
        ("a number out of five", {"low": {"think_level": 1}, "max": {"think_level": 5}}),
        ("a number on a scale", {"medium": {"gear": 5}, "high": {"gear": 7}}),
        ("numbers as words", {"low": {"ponder_level": "1"}, "high": {"ponder_level": "3"}}),
        ("a part of an object by an unknown name", {"high": {"options": {"depth": "high"}}}),
        *(
            (kind, {"none": {}, "low": {}, "high": {}})
            for kind in (
                "a level of detail",
                "prints a language",
                "prints a persona",
                "personas that think",
                "levels of something else",
            )
        ),
    ],
)
def test_each_level_is_told_in_the_templates_own_words(kind: str, told: dict[str, Any]) -> None:
    levels = {level.effort.value: dict(level.template_kwargs) for level in scale_of(kind).levels}
    assert {name: levels[name] for name in told} == told


@pytest.mark.parametrize(
    "kind", ["a switch", "a switch that is off", "nothing", "a budget", "only none means something"]
)
def test_without_a_scale_low_and_medium_are_budgets_and_the_highest_has_none(kind: str) -> None:
    budgets = {level.effort.value: level.budget for level in scale_of(kind).levels}
    assert budgets == {"none": 0, "low": 1024, "medium": 4096, "high": None}


@pytest.mark.parametrize("kind", ["prints any word", "raises on others", "a flag for low", "none or high"])
def test_a_level_of_the_templates_own_has_no_budget_and_none_has_no_tokens(kind: str) -> None:
    for level in scale_of(kind).levels:
        assert level.budget == (0 if level.effort is Effort.NONE else None)


@pytest.mark.parametrize(
    "kind", [kind for kind in TEMPLATES if kind not in ("raises always", "must be told")]
)
def test_no_effort_makes_a_template_raise_and_equal_prompts_are_one_level(kind: str) -> None:
    source = TEMPLATES[kind]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    scale = scale_of(kind)
    for effort in DIAL:
        level = scale.level_of(effort)
        templates.render(source, messages, level.template_kwargs if level else {})
    if kind in RAISES_ON:
        name = "thinking_effort" if kind == "another name" else "reasoning_effort"
        with pytest.raises(TemplateFault):
            templates.render(source, messages, {name: RAISES_ON[kind]})


def test_the_default_level_gives_the_prompt_of_a_request_that_states_none() -> None:
    for kind, source in TEMPLATES.items():
        scale = scale_of(kind)
        if scale.default is None or not scale.tells_default or kind in ("raises always", "must be told"):
            continue
        messages = [{"role": "system", "content": "s"}]
        level = scale.level_of(scale.default)
        assert level is not None
        said, by_itself = (
            templates.render(source, messages, kwargs) for kwargs in (level.template_kwargs, {})
        )
        assert said == by_itself, kind


def test_budgets_may_be_set_and_the_level_above_them_is_free() -> None:
    scale = probe_effort(TEMPLATES["nothing"], reasons=True, budgets=((Effort.LOW, 9), (Effort.HIGH, 99)))
    assert [(level.effort.value, level.budget) for level in scale.levels] == [
        *(("none", 0), ("low", 9), ("high", 99), ("xhigh", None)),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ reasoning_effort }}{% endfor %}{% endfor %}",
        "{% if %}",
        "{{ reasoning_effort.nothing.at_all }}",
    ],
)
def test_a_template_that_cannot_be_probed_is_told_nothing(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "TRIAL_SECONDS", 0.2)
    scale = probe_effort(source, reasons=True)
    assert scale.efforts == ("none", "low", "medium", "high")
    assert all(not level.template_kwargs for level in scale.levels)


def test_where_a_third_mode_is_the_default_nothing_is_told() -> None:
    scale = scale_of("a third mode by default")
    assert not scale.tells_default


@needs_gpt_oss_template
def test_gpt_oss_has_the_scale_that_is_assumed_where_there_is_no_template() -> None:
    scale = probe_effort(GPT_OSS_TEMPLATE.read_text(encoding="utf-8"), reasons=True)
    assert [(level.effort, level.template_kwargs, level.budget) for level in scale.levels] == [
        (level.effort, level.template_kwargs, level.budget) for level in GPT_OSS_SCALE.levels
    ]
    assert (scale.default, scale.on) == (GPT_OSS_SCALE.default, GPT_OSS_SCALE.on)


@pytest.mark.skipif(
    not (HARMONY_DATA / "templates").is_dir(),
    reason="the real chat templates are not here; set HARMONY_DATA to their folder",
)
@pytest.mark.parametrize(
    ("file", "default", "off", "budgeted"),
    [
        ("ByteDance-Seed-OSS", "high", {"thinking_budget": 0}, True),
        ("Cohere2MoE", "high", {"reasoning": False}, True),
        ("GLM-4.6", "high", {"enable_thinking": False}, True),
        ("GLM-4.7-Flash", "high", {"enable_thinking": False}, True),
        ("HuggingFaceTB-SmolLM3-3B", "high", {"enable_thinking": False}, True),
        ("MiniMax-M2", "high", {}, True),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "high", {"enable_thinking": False}, True),
        ("Qwen-Qwen3-0.6B", "high", {"enable_thinking": False}, True),
        ("Qwen3.5-4B", "high", {"enable_thinking": False}, True),
        ("deepseek-ai-DeepSeek-V3.1", "none", {"enable_thinking": False}, True),
        ("deepseek-ai-DeepSeek-V3.2", "none", {"enable_thinking": False}, True),
        ("google-gemma-4-31B-it", "none", {"enable_thinking": False}, True),
        ("Kimi-K2-Instruct", None, None, False),
        ("Qwen3-Coder", None, None, False),
        ("ibm-granite-granite-4.0", None, None, False),
        ("meta-llama-Llama-3.3-70B-Instruct", None, None, False),
    ],
)
def test_real_templates_show_their_scales(
    file: str, default: str | None, off: dict[str, Any] | None, budgeted: bool
) -> None:
    source = (HARMONY_DATA / "templates" / f"{file}.jinja").read_text(encoding="utf-8")
    scale = probe_effort(source, reasons=TemplateTraits.of(source).is_reasoning_model)
    assert scale.default == default
    none = scale.level_of(Effort.NONE)
    assert (dict(none.template_kwargs) if none else None) == off
    assert any(level.budget for level in scale.levels) == budgeted


def test_an_unknown_word_in_a_system_prompt_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    messages = [{"role": "system", "content": "Reasoning: extreme"}, {"role": "user", "content": "?"}]
    with ScriptedEngine(lambda _: "") as engine:
        service = Service(engine)
        for _ in range(2):
            prompt = service.prompt(ChatRequest(messages=messages))
            assert "Reasoning: extreme" in engine.tokenizer.decode(prompt.tokens)
    assert [record.message for record in caplog.records if "extreme" in record.message] == [
        "A system prompt says Reasoning: extreme, which is no effort: it stays text."
    ]
