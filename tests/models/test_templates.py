"""A chat template is a program by a stranger: it runs in a process of its own, which ends when it takes too much."""

from __future__ import annotations

import resource
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hostile_templates import HOSTILE

from mlx_backend.child_process import ChildProcesses
from mlx_backend.errors import EngineError
from mlx_backend.models import templates
from mlx_backend.models.templates import (
    MAX_SOURCE,
    TemplateFault,
    TemplateOverrun,
    TemplateProbe,
    check,
    examined,
)

HI = [{"role": "user", "content": "Hi <b>"}]


def rendered(source: str) -> str:
    return templates.render(source, HI, {})


def test_a_template_gets_what_transformers_gives_it() -> None:
    assert rendered("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b>"}'
    assert rendered("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}") == "Hi <b>"
    assert rendered("{% generation %}a{% endgeneration %}{{ tools is none }}") == "aTrue"
    assert rendered("{{ strftime_now('%Y-%m-%d') | length }}{{ add_generation_prompt }}") == "10True"
    assert rendered("{{ namespace(self=1).self }}{{ dict(a=1).a }}{{ documents }}") == "11None"


def test_half_a_surrogate_pair_and_a_value_that_is_no_json_are_rendered() -> None:
    messages = [{"role": "user", "content": "\ud83d", "name": None}]
    source = "{{ messages[0].content }}{{ messages[0].name is defined }}{{ day }}"
    assert templates.render(source, messages, {"day": time.gmtime}).startswith("\ud83dFalse<built-in")


def test_it_says_which_arguments_it_reads_and_which_words_it_names() -> None:
    found = examined(
        "{% set e = reasoning_effort | default('high') %}{% if e == 'low' %}{{ {'max': 1}[e] }}{% endif %}"
    )
    assert "reasoning_effort" in found.variables
    assert found.words == (
        "low",
        "max",
        "high",
    )  # a default is named where it stands among the others, or last
    assert "high" in found.defaults
    assert 1 in found.numbers


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Only user messages.') }}", "Only user messages"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "attribute"),
        ("{{ messages[0].content + 1 }}", "concatenate|operand"),
        ("{{ range(10 ** 9) }}", "[Rr]ange"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "writes more than"),
    ],
)
def test_what_goes_wrong_in_it_is_a_fault(source: str, words: str) -> None:
    with pytest.raises(TemplateFault, match=words):
        rendered(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000, "x" * (MAX_SOURCE + 1)])
def test_a_template_that_cannot_be_parsed_is_a_fault(source: str) -> None:
    with pytest.raises(TemplateFault):
        examined(source)


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_too_much_is_refused_and_this_process_takes_no_part_in_it(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "TRIAL_SECONDS", 0.2)
    before = resource.getrusage(resource.RUSAGE_SELF)
    with pytest.raises(TemplateOverrun, match=r"more than 0\.2 seconds of processor time|too much memory"):
        check(source)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 1
    assert after.ru_maxrss - before.ru_maxrss < 1 << 18  # KiB


def test_one_that_explodes_with_a_certain_word_ends_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    doubling = HOSTILE["a list doubled, then printed"]
    source = f"{{% if 'boom' in messages[0].content %}}{doubling}{{% endif %}}{{{{ messages[0].content }}}}"
    examined(source)
    monkeypatch.setattr(templates, "MAX_SECONDS", 0.5)
    with pytest.raises(TemplateOverrun, match=r"more than 0\.5 seconds of processor time|too much memory"):
        templates.render(source, [{"role": "user", "content": "boom"}], {})
    assert templates.render(source, HI, {}) == "Hi <b>"


def test_chance_has_no_part_in_a_prompt() -> None:
    assert rendered("{{ range(99999) | random }}") == "0"


def test_a_probe_has_so_much_time_for_all_its_renderings() -> None:
    slow = "{% for i in range(99999) %}{% endfor %}{{ strftime_now('%Y-%m-%d') }}"
    probe = TemplateProbe(slow, seconds=0.5)
    assert probe.render(HI, {}) == "2026-01-01"

    def go_on() -> None:
        while True:
            probe.render(HI, {})

    with pytest.raises(TemplateOverrun):
        go_on()


def test_what_takes_too_long_is_tried_once_and_refused_at_once_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "TRIAL_SECONDS", 0.2)
    source = HOSTILE["loops in loops"] + "again"
    with pytest.raises(TemplateOverrun):
        check(source)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    for _ in range(3):
        with pytest.raises(TemplateOverrun, match=r"more than 0\.2 seconds"):
            TemplateProbe(source, seconds=9)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime == before


def test_a_broken_installation_is_not_held_against_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ messages[0].content }}, installed"
    with monkeypatch.context() as patched:
        patched.setattr(templates, "_processes", ChildProcesses("no_such_module:answer", at_once=1))
        with pytest.raises(EngineError, match="ended unexpectedly"):
            check(source)
    check(source)
    assert rendered(source) == "Hi <b>, installed"


def test_a_steady_load_starts_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(1)
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(rendered, ["{% for i in range(999) %}{{ i }}{% endfor %}"] * 99))
    assert len(started) <= templates.MAX_PROCESSES_OF_TEMPLATE
