"""What a chat template wants of a history is found by rendering it: own layouts, and the real ones where they lie."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mlx_backend.chat.history_probe import probe_history
from mlx_backend.chat.request import ChatRequest
from mlx_backend.commands.render import PromptedModel, TemplateTokenizer
from mlx_backend.conversation.message_layout import CallIds
from mlx_backend.conversation.template import TemplateTraits
from mlx_backend.errors import EngineRefused
from mlx_backend.models import templates

REAL = Path(__file__).resolve().parents[3] / "shared" / "data" / "templates"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, reasoning: str = "", *calls: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": list(calls)} if calls else message


def call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(identifier: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identifier, "content": text}


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "Looks.", "parameters": parameters},
    }


TOOLS = [tool("weather"), tool("clock")]
PLAIN = [{"role": "system", "content": "SYS"}, user("Q1")]
TURNS = [
    *PLAIN,
    said("A1", "R1"),
    user("Q2"),
    said("A2", "R2"),
    {"role": "system", "content": "MID"},
    user("Q3"),
]
ROUND = [
    user("Q1"),
    said("", "R1", call("c1", "weather", '{"city": "Parıs"}'), call("c2", "clock", "{}")),
    result("c2", "T2"),
    result("c1", "T1"),
    said("A1", "R2"),
    user("Q2"),
]
OPEN = [
    user("Q1"),
    said("", "R1", call("c1", "weather", '{"city": "Berlin"}')),
    result("c1", "T1"),
    said("", "R2", call("c3", "clock", '{"city": "3"}')),
    result("c3", "T3"),
]

CALLS = """\
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
"""
TAIL = """\
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>\n{%- endif -%}
"""


def layout(reasoning: str, calls: str = CALLS, key: str = "reasoning_content") -> str:
    """A template in the usual layout; `reasoning` is when it shows that of a message."""
    return (
        "{%- set last = namespace(user=-1) -%}"
        "{%- for message in messages -%}{%- if message.role == 'user' -%}"
        "{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}"
        "{%- for message in messages -%}<|im_start|>{{ message.role }}|"
        f"{{%- if message.{key} and ({reasoning}) -%}}<think>{{{{ message.{key} }}}}</think>{{%- endif -%}}"
        "{{ message.content }}" + calls + "<|im_end|>" + TAIL
    )


IN_LOOP = "loop.index0 > last.user"
LAYOUTS = {
    "since the last question": layout(IN_LOOP),
    "always": layout("true"),
    "with tools": layout(f"tools or {IN_LOOP}"),
    "by switch": layout(f"(preserve_thinking is defined and preserve_thinking) or {IN_LOOP}"),
    "by switch, the other way": layout(f"(clear_thinking is defined and not clear_thinking) or {IN_LOOP}"),
    "in the key thinking": layout("true", key="thinking"),
}


def prompt(source: str, messages: list[dict[str, Any]], *, tools: bool = False, **kwargs: Any) -> str:
    """What the server would render."""
    model = PromptedModel.of(TemplateTokenizer(source), 1 << 30)
    fields = {"reasoning_effort": "high"} if model.form.scale.levels else {}
    request = ChatRequest(
        messages=messages, tools=TOOLS if tools else (), template_kwargs=kwargs, fields=fields
    )
    built = model.prompts.prompt(request, model.prompts.conversation(request))
    return model.tokenizer.decode(built.tokens)


def shown(text: str) -> list[str]:
    """The short words of a prompt behind the first question, and before it the system message."""
    found = re.findall(r"\b(?:SYS|MID|[QRABT]\d)\b|Par(?:ı|\\u0131)s|Berlin", text)
    return [word for at, word in enumerate(found) if word != "SYS" or at == 0]


@pytest.mark.parametrize(
    ("name", "plain", "agents"),
    [
        ("since the last question", False, False),
        ("always", True, True),
        ("with tools", False, True),
        ("by switch", False, True),
        ("in the key thinking", True, True),
    ],
)
def test_reasoning_of_answered_turns_is_what_the_template_keeps(name: str, plain: bool, agents: bool) -> None:
    source = LAYOUTS[name]
    assert ("R1" in prompt(source, TURNS)) is plain
    assert ("R1" in prompt(source, ROUND, tools=True)) is agents
    assert re.findall(r"R\d", prompt(source, OPEN, tools=True)) == ["R1", "R2"], "an open loop's always is"


def test_a_switch_is_found_and_users_may_set_it() -> None:
    preserve, clear = LAYOUTS["by switch"], LAYOUTS["by switch, the other way"]
    assert probe_history(preserve).keep_switches == (("preserve_thinking", True),)
    assert probe_history(clear).keep_switches == (("clear_thinking", False),)
    assert probe_history(LAYOUTS["always"]).keep_switches == ()
    assert "R1" in prompt(preserve, TURNS, preserve_thinking=True)
    assert "R1" in prompt(clear, TURNS, clear_thinking=False)


def test_a_family_that_keeps_it_as_an_agent_has_its_switch_set_with_tools_alone() -> None:
    glm = LAYOUTS["by switch, the other way"] + "{#<arg_key><arg_value>#}"
    assert "R1" not in prompt(glm, ROUND)
    assert "R1" in prompt(glm, ROUND, tools=True)
    assert "R1" not in prompt(glm, ROUND, tools=True, clear_thinking=True), "users' own setting wins"


def test_a_system_message_in_the_middle_stays_or_joins_the_next_question() -> None:
    anywhere = layout("true")
    first_only = (
        "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
        "{{ raise_exception('System message must be at the beginning.') }}{%- endif -%}{%- endfor -%}"
        + anywhere
    )
    hoisted = anywhere.replace(
        "<|im_start|>{{ message.role }}|", "{%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}|"
    )
    assert probe_history(anywhere).takes_system_anywhere
    assert "<|im_start|>system|MID<|im_end|>" in prompt(anywhere, TURNS)
    assert not probe_history(first_only).takes_system_anywhere
    assert "<|im_start|>user|MID\n\nQ3<|im_end|>" in prompt(first_only, TURNS)
    assert not probe_history(hoisted).takes_system_anywhere


def test_a_late_system_message_changes_nothing_before_it() -> None:
    refusing = "{%- if messages[-2].role == 'system' -%}{{ raise_exception('no') }}{%- endif -%}" + layout(
        "true"
    )
    for source in (layout("true"), refusing):
        before = prompt(source, [*TURNS[:5], user("Q3")])
        after = prompt(source, TURNS)
        assert after.startswith(before[: before.index("Q3")].removesuffix("<|im_start|>user|"))


@pytest.mark.parametrize(
    ("calls", "expected", "traits"),
    [
        (
            "{{ message.tool_calls[0].function.arguments + '' }}",
            '{"city": "Berlin"}',
            {"arguments_as_text": True},
        ),
        (
            "{% for k, v in message.tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
            "city=Berlin;",
            {"arguments_as_text": False},
        ),
        (
            "{% if message.tool_calls[0].id | length != 9 %}{{ raise_exception('ids have 9') }}{% endif %}"
            "{{ message.tool_calls[0].function.arguments | tojson }}",
            '{"city": "Berlin"}',
            {"call_ids": CallIds.NINE_LETTERS},
        ),
        (
            "{{ message.tool_calls[0].id }}{{ message.tool_calls[0].function.arguments | tojson }}",
            'functions.weather:0{"city": "Berlin"}',
            {"call_ids": CallIds.WITH_NAME},
        ),
    ],
    ids=["as a text", "as an object", "nine letters", "the name in the id"],
)
def test_calls_are_written_as_the_template_wants_them(
    calls: str, expected: str, traits: dict[str, object]
) -> None:
    source = layout("true", "{% if message.tool_calls %}" + calls + "{% endif %}")
    found = probe_history(source)
    assert {name: getattr(found, name) for name in traits} == traits
    assert expected in prompt(source, OPEN, tools=True)


def test_several_calls_are_parted_where_the_template_takes_one() -> None:
    one = (
        "{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        "{{ message.tool_calls[0].function | tojson }}{% endif %}"
    )
    rendered = prompt(layout("true", one), ROUND, tools=True)
    assert shown(rendered)[:6] == ["Q1", "R1", shown(rendered)[2], "T1", "T2", "R2"]


def test_calls_become_text_where_the_template_takes_none() -> None:
    gemma = (
        "{%- for message in messages -%}{%- if message.role not in ['user', 'assistant'] -%}"
        "{{ raise_exception('Conversation roles must be user and assistant') }}{%- endif -%}"
        "<start_of_turn>{{ message.role }}|{{ message.content }}<end_of_turn>{%- endfor -%}<start_of_turn>model"
    )
    rendered = prompt(gemma, OPEN)
    assert "weather(city='Berlin')" in rendered
    assert "```tool_output\nT1\n```" in rendered


def test_a_template_that_cannot_be_tried_is_guessed() -> None:
    for source in ("{% if %}", "{{ raise_exception('never') }}", ""):
        assert probe_history(source) == TemplateTraits.of(source)
    assert probe_history(None) == TemplateTraits()
    assert probe_history(LAYOUTS["always"], seconds=-1) == TemplateTraits.of(LAYOUTS["always"])


def real_templates() -> list[Any]:
    files = sorted(REAL.glob("*.jinja"))
    if not files:
        return [pytest.param(None, marks=pytest.mark.skip(reason=f"there are no templates in {REAL.name}"))]
    return [pytest.param(file, id=file.stem) for file in files]


@pytest.mark.parametrize("tools", [False, True], ids=["without tools", "with tools"])
@pytest.mark.parametrize("file", real_templates())
def test_a_real_template_renders_every_history_with_all_its_texts_in_order(file: Path, tools: bool) -> None:
    source = file.read_text(encoding="utf-8")
    traits = probe_history(source)
    assert shown(prompt(source, PLAIN)) == ["SYS", "Q1"]
    texts = {
        "turns": (TURNS, ["SYS", "Q1", "A1", "Q2", "A2", "MID", "Q3"]),
        "round": (ROUND, ["Q1", "Par", "T1", "T2", "A1", "Q2"]),
        "open": (OPEN, ["Q1", "Berlin", "T1", "T3"]),
    }
    for messages, expected in texts.values():
        rendered = prompt(source, messages, tools=tools)
        words = [word[:3] if word.startswith("Par") else word for word in shown(rendered)]
        assert [word for word in words if not word.startswith("R")] == expected
        if traits.reasoning_key and messages is OPEN:
            assert [word for word in words if word.startswith("R")] == ["R1", "R2"]
        if traits.keeps_answered_reasoning and messages is TURNS:
            assert [word for word in words if word.startswith("R")] == ["R1", "R2"]


def test_of_a_template_that_never_ends_only_the_text_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "TRIAL_SECONDS", 0.2)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert probe_history(loops) == TemplateTraits.of(loops)
    with pytest.raises(EngineRefused, match=r"it takes more than 0\.2 seconds of processor time"):
        prompt(loops, TURNS)
