"""A chat template is a program from a stranger: it is parsed, run in a sandbox, and stopped when it takes too long."""

import math
import sys
import time

import pytest

from mlx_backend.models.template_sandbox import MAX_SOURCE, ChatTemplate, TemplateFault

HI = [{"role": "user", "content": "Hi <b>"}]


def rendered(source: str) -> str:
    return ChatTemplate(source).render(HI, {}, deadline=math.inf)


def test_a_template_gets_what_transformers_gives_it() -> None:
    assert rendered("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi <b>"}'
    assert rendered("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}") == "Hi <b>"
    assert rendered("{% generation %}a{% endgeneration %}{{ tools is none }}") == "aTrue"
    assert rendered("{{ strftime_now('%Y-%m-%d') | length }}{{ add_generation_prompt }}") == "10True"


def test_it_says_which_arguments_it_reads_and_which_words_it_names() -> None:
    template = ChatTemplate(
        "{% set e = reasoning_effort | default('high') %}{% if e == 'low' %}{{ {'max': 1}[e] }}{% endif %}"
    )
    assert "reasoning_effort" in template.variables
    assert {"high", "low", "max"} <= template.words


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Only user messages.') }}", "Only user messages"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages[0].content + 1 }}", "concatenate|operand"),
        ("{{ range(10 ** 9) }}", "[Rr]ange"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_goes_wrong_in_it_is_a_fault(source: str, words: str) -> None:
    with pytest.raises(TemplateFault, match=words):
        rendered(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ " + "(" * 5000, "x" * (MAX_SOURCE + 1)])
def test_a_template_that_cannot_be_parsed_is_a_fault(source: str) -> None:
    with pytest.raises(TemplateFault):
        ChatTemplate(source)


def test_a_template_that_loops_is_stopped_and_tracing_is_as_before() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    before = sys.gettrace()
    with pytest.raises(TemplateFault, match="ran for too long"):
        ChatTemplate(loops).render(HI, {}, deadline=time.monotonic() + 0.05)
    assert sys.gettrace() is before
