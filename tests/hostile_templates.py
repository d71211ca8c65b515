"""Chat templates that take all the time or memory there is, each in another way."""

from __future__ import annotations

_ROUNDS = "{{% set ns = namespace(x={0}) %}}{{% for i in range({1}) %}}{{% {2} %}}{{% endfor %}}{3}"


def _grown(start: str, step: str, then: str = "{{ ns.x }}", rounds: int = 40) -> str:
    return _ROUNDS.format(start, rounds, step, then)


_DOUBLED = "set ns.x = [ns.x, ns.x]"

HOSTILE = {
    "a list doubled, then printed": _grown("[1]", _DOUBLED, rounds=34),
    "a list doubled, then compared": _grown(
        "[1]",
        "set ns.x = [ns.x, ns.x]",
        "{% set a = ns.x %}" + _grown("[1]", _DOUBLED, "{{ a == ns.x }}", 34),
        34,
    ),
    "a list doubled, then written as JSON": _grown("[1]", _DOUBLED, "{{ ns.x | tojson }}", 34),
    "a list doubled, then joined": _grown("[1]", _DOUBLED, "{{ ns.x | join }}", 34),
    "a list doubled, then formatted": _grown("[1]", _DOUBLED, "{{ '%s' % ns.x }}", 34),
    "a dictionary doubled": _grown("{}", "set ns.x = {'a': ns.x, 'b': ns.x}", rounds=34),
    "a tuple doubled, then looked up": _grown("(1,)", "set ns.x = (ns.x, ns.x)", "{{ {ns.x: 1}[ns.x] }}", 34),
    "a text doubled": _grown("'ab'", "set ns.x = ns.x ~ ns.x"),
    "a text doubled by adding": _grown("'ab'", "set ns.x = ns.x + ns.x"),
    "a text replaced by itself": _grown("'aa'", "set ns.x = ns.x.replace('a', ns.x)"),
    "a text joined by itself": _grown("'ab'", "set ns.x = [ns.x, ns.x] | join(ns.x)"),
    "a text translated": _grown("'a'", "set ns.x = ns.x.translate({97: 'a' * 999})"),
    "an indent": "{{ messages | tojson(indent=99999999999) }}",
    "a width": "{{ 'a' | center(99999999999) }}{{ '%99999999999d' % 1 }}",
    "a text many times": "{{ 'a' * 10 ** 11 }}",
    "a list many times": "{{ [1] * 10 ** 11 }}",
    "a large number": "{{ 9 ** (9 ** 9) }}",
    "a number multiplied by itself": _grown("9", "set ns.x = ns.x * ns.x"),
    "paragraphs of nothing": "{{ lipsum(n=99999999) }}",
    "lists added up": "{{ ([[1] * 999] * 99999) | sum(start=[]) }}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that finds nothing": (
        "{% for a in range(99999) if range(99999) | select('gt', 99999) | list %}{% endfor %}"
    ),
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
}
