"""What is read off a chat template, and what a history becomes for it."""

import copy
from typing import Any

import pytest
from harmony_data import GPT_OSS_TEMPLATE, needs_gpt_oss_template
from history_corpus import DEMO_TEMPLATE
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.template import (
    GPT_OSS_TRAITS,
    INVISIBLE,
    TemplateTraits,
    accepted,
    for_template,
)

QWEN_LIKE = """
{%- for message in messages %}
{%- if message.role == 'tool' %}[tool]{{ message.content }}
{%- else %}[{{ message.role }}]
{%- if message.reasoning_content is defined %}(thought {{ message.reasoning_content }}){% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}{%- endif %}
{%- endfor %}[assistant]
{%- if enable_thinking is defined and not enable_thinking %}(no thought){% endif %}
"""
GEMMA_LIKE = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{{- '[' + message['role'] + ']' + message['content'] | trim }}
{%- endfor %}"""
MISTRAL_LIKE = """
{%- if messages[0]['role'] == 'system' %}{{ '[system]' + messages[0]['content'] }}{% set turns = messages[1:] %}
{%- else %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate') }}{% endif %}
{{- '[' + message['role'] + ']' + message['content'] }}
{%- endfor %}"""
CODER_LIKE = """
{%- for message in messages %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls or [] %}<{{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}{{ name }}={{ value }};{% endfor %}
{%- endfor %}{%- endfor %}"""


class Refused(Exception):
    pass


def render(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    def refuse(message: str) -> None:
        raise Refused(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    ready = for_template(sanitise(messages), TemplateTraits.of(source))
    return environment.from_string(source).render(messages=ready, **kwargs)


def call(id_: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


LOOP: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "How far?"},
    {
        "role": "assistant",
        "content": "One moment.",
        "reasoning": "I look.",
        "tool_calls": [call("a", "far", '{"of": "Mars"}'), call("b", "near", "{}")],
    },
    {"role": "tool", "tool_call_id": "b", "content": "40"},
    {"role": "tool", "tool_call_id": "a", "content": '{"km": 225}'},
]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello"},
    {"role": "user", "content": "How far?"},
    {"role": "assistant", "content": "225"},
    {"role": "assistant", "content": "million km"},
    {"role": "user", "content": "Thanks"},
]


@needs_gpt_oss_template
def test_the_real_template_has_the_traits_that_are_assumed_where_there_is_none_to_read() -> None:
    assert TemplateTraits.of(GPT_OSS_TEMPLATE.read_text(encoding="utf-8")) == GPT_OSS_TRAITS


def test_the_demonstration_template_is_read_like_the_real_one() -> None:
    traits = TemplateTraits.of(DEMO_TEMPLATE.read_text(encoding="utf-8"))
    assert (traits.reasoning_key, traits.takes_effort, traits.one_call_per_message) == (
        "thinking",
        True,
        True,
    )
    assert traits.refused == GPT_OSS_TRAITS.refused


@pytest.mark.parametrize("source", [None, "", "{{ messages }}"])
def test_a_template_that_says_nothing_has_no_traits(source: str | None) -> None:
    assert TemplateTraits.of(source) == TemplateTraits()


@pytest.mark.parametrize(
    ("source", "traits"),
    [
        (QWEN_LIKE, TemplateTraits(reasoning_key="reasoning_content", takes_effort=True)),
        (GEMMA_LIKE, TemplateTraits(has_system_role=False, must_alternate=True)),
        (MISTRAL_LIKE, TemplateTraits(must_alternate=True)),
        (CODER_LIKE, TemplateTraits(iterates_arguments=True)),
        ("{% if part['type'] == 'image' %}", TemplateTraits(takes_parts=True)),
        ("{{ message['reasoning_content'] }}", TemplateTraits(reasoning_key="reasoning_content")),
        ('{{ message.get("thinking") }}', TemplateTraits(reasoning_key="thinking")),
    ],
)
def test_traits_are_read_off_the_source(source: str, traits: TemplateTraits) -> None:
    assert TemplateTraits.of(source) == traits


def test_gpt_oss_gets_one_call_a_message_and_each_result_behind_its_call() -> None:
    canonical = sanitise(LOOP)
    before = copy.deepcopy(canonical)
    assert for_template(canonical, GPT_OSS_TRAITS)[2:] == [
        {
            "role": "assistant",
            "content": "",
            "thinking": "I look.\n\nOne moment.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "far", "arguments": {"of": "Mars"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "name": "far", "content": {"km": 225}},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "b", "type": "function", "function": {"name": "near", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "b", "name": "near", "content": "40"},
    ]
    assert canonical == before


def test_a_template_for_several_calls_keeps_them_together() -> None:
    assert render(QWEN_LIKE, LOOP) == (
        "[system]Be short.[user]How far?[assistant](thought I look.)One moment."
        '<call>far {"of": "Mars"}</call><call>near {}</call>[tool]{"km": 225}[tool]40[assistant]'
    ), "results in the order of the calls"


def test_a_template_without_a_system_role_gets_its_text_before_the_first_question() -> None:
    assert render(GEMMA_LIKE, TALK) == (
        "[user]Be short.\n\nHello\n\nHow far?[assistant]225\n\nmillion km[user]Thanks"
    )


def test_a_lone_system_text_becomes_a_question() -> None:
    assert render(GEMMA_LIKE, [{"role": "system", "content": "Be short."}]) == "[user]Be short."


def test_a_template_that_insists_on_turns_gets_them() -> None:
    assert render(MISTRAL_LIKE, TALK) == (
        "[system]Be short.[user]Hello\n\nHow far?[assistant]225\n\nmillion km[user]Thanks"
    )


def test_a_template_that_walks_through_arguments_always_gets_an_object() -> None:
    broken: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call("a", "far", '{"of":')]},
    ]
    assert render(CODER_LIKE, broken) == '[user]q[assistant]<far>arguments={"of":;'


def test_a_reasoning_that_a_template_cannot_show_is_left_out() -> None:
    for message in for_template(sanitise(LOOP), TemplateTraits()):
        assert not {"thinking", "reasoning", "reasoning_content"} & set(message)


def test_parts_go_to_a_template_that_takes_them_and_are_named_to_one_that_does_not() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    canonical = sanitise([{"role": "user", "content": parts}])
    assert for_template(canonical, TemplateTraits(takes_parts=True))[0]["content"] == parts
    assert for_template(canonical, GPT_OSS_TRAITS)[0]["content"] == "What is this?\n[image_url]"


@pytest.mark.parametrize("text", GPT_OSS_TRAITS.refused)
def test_a_refused_quotation_is_broken_and_can_be_mended(text: str) -> None:
    answer = f"Write `{text}` twice: `{text}`."
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer, "thinking": text}]
    before = copy.deepcopy(messages)
    user, assistant = accepted(messages, GPT_OSS_TRAITS)
    assert user["content"] == text  # nobody refuses it there
    for key in ("content", "thinking"):
        assert not any(refused in assistant[key] for refused in GPT_OSS_TRAITS.refused)
        assert assistant[key].replace(INVISIBLE, "") == messages[1][key]
    assert messages == before
    assert accepted(messages, TemplateTraits()) == messages
