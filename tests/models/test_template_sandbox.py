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


GROWS = "{{% set n = namespace(x={0}) %}}{{% for i in range(60) %}}{{% {1} %}}{{% endfor %}}{{{{ n.x }}}}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 2 ** 9999999999 }}",
        "{{ 'a' | center(9999999999) }}",
        "{{ 'a'.ljust(9999999999) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{0:{1}}'.format(1, 9999999999) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ messages | tojson(indent=9999999999) }}",
        "{{ (1).to_bytes(9999999999) }}",
        GROWS.format("'ab'", "set n.x = n.x ~ n.x"),
        GROWS.format("'ab'", "set n.x = n.x + n.x"),
        GROWS.format("[1, 2]", "set n.x = n.x + n.x"),
        GROWS.format("[1, 2]", "set x = n.x.extend(n.x)"),
        GROWS.format("9", "set n.x = n.x * n.x"),
        GROWS.format("'aa'", "set n.x = n.x.replace('a', n.x)"),
        GROWS.format("'aa'", "set n.x = n.x | replace('a', n.x)"),
        GROWS.format("'ab'", "set n.x = [n.x, n.x] | join(n.x)"),
        GROWS.format("'ab'", "set n.x = n.x.join([n.x, n.x])"),
        GROWS.format("'ab'", "set n.x %}{{ n.x }}{{ n.x }}{% endset"),
        "{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
    ],
)
def test_a_template_cannot_fill_the_memory(source: str) -> None:
    template = ChatTemplate(source, max_characters=1 << 20)
    with pytest.raises(TemplateFault, match=r"more than|too large|binary digits"):
        template.render(HI, {}, deadline=math.inf)


def test_what_is_bounded_gives_what_jinja_gives() -> None:
    assert (
        rendered("{{ 'x' ~ 1 ~ none ~ nothing }}{{ 3 * 'ab' }}{{ 2 ** 3 }}{{ 'a' + 'b' }}")
        == "x1Noneababab8ab"
    )
    assert (
        rendered("{{ '%s-%02d' % ('a', 3) }}{{ '{}:{x}'.format(1, x=2) }}{{ '%d' | format(7) }}")
        == "a-031:27"
    )
    assert rendered("{{ 'abc' | replace('b', 'd') }}{{ 'abc'.replace('b', 'd', 1) }}") == "adcadc"
    assert (
        rendered("{{ messages | map(attribute='role') | join('|') }}{{ ', '.join(['a', 'b']) }}")
        == "usera, b"
    )
    assert (
        rendered("{% macro f(context, function) %}{{ context }}{% endmacro %}{{ f(context=1, function=2) }}")
        == "1"
    )


def test_chance_has_no_part_in_a_prompt() -> None:
    assert rendered("{{ range(99999) | random }}") == "0"


def test_a_template_that_loops_is_stopped_and_tracing_is_as_before() -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    before = sys.gettrace()
    with pytest.raises(TemplateFault, match="ran for too long"):
        ChatTemplate(loops).render(HI, {}, deadline=time.thread_time() + 0.05)
    assert sys.gettrace() is before
