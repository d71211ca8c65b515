"""Who may state an effort, who wins, and what becomes of a line in the system prompt."""

import copy
from typing import Any

import pytest

from mlx_backend.conversation.background_requests import BackgroundPrompt
from mlx_backend.conversation.effort import Effort, EffortError, EffortScale, Level
from mlx_backend.conversation.effort_sources import resolve, take_lines

QUESTION = {"role": "user", "content": "q"}


def system(text: Any, role: str = "system") -> list[dict[str, Any]]:
    return [{"role": role, "content": text}, QUESTION]


# every source, strongest first, each with a word of its own
SOURCES: list[tuple[str, dict[str, Any]]] = [
    ("reasoning_effort", {"reasoning_effort": "none"}),
    ("reasoning.effort", {"reasoning": {"effort": "minimal"}}),
    ("chat_template_kwargs.reasoning_effort", {"chat_template_kwargs": {"reasoning_effort": "low"}}),
    ("think", {"think": "high"}),
    ("enable_thinking", {"enable_thinking": False}),
    ("thinking.type", {"thinking": {"type": "disabled"}}),
]


@pytest.mark.parametrize("strongest", range(len(SOURCES)))
def test_the_strongest_source_that_speaks_wins(strongest: int) -> None:
    request: dict[str, Any] = {}
    for _, fields in SOURCES[strongest:]:
        request |= fields
    found = resolve(request, [QUESTION], model_default=Effort.LOW, server_default=Effort.HIGH)
    assert found.source == SOURCES[strongest][0]
    names = [name for name, _ in found.sources]
    assert names == [name for name, _ in SOURCES[strongest:]] + ["model default", "server default", "default"]


def test_a_line_in_the_system_prompt_is_stronger_than_any_field() -> None:
    found = resolve({"reasoning_effort": "low"}, system("Be short.\nReasoning: high"))
    assert (found.effort, found.source) == (Effort.HIGH, "system prompt")
    assert found.sources == (
        ("system prompt", Effort.HIGH),
        ("reasoning_effort", Effort.LOW),
        ("default", Effort.MEDIUM),
    )
    assert found.messages == system("Be short.")


@pytest.mark.parametrize(
    ("defaults", "effort", "source"),
    [
        ({}, Effort.MEDIUM, "default"),
        ({"server_default": Effort.LOW}, Effort.LOW, "server default"),
        ({"model_default": Effort.HIGH, "server_default": Effort.LOW}, Effort.HIGH, "model default"),
    ],
)
def test_where_nobody_speaks_the_defaults_do(defaults: dict[str, Any], effort: Effort, source: str) -> None:
    found = resolve({}, [QUESTION], **defaults)
    assert (found.effort, found.source) == (effort, source)


def test_a_background_request_comes_before_the_defaults_and_behind_what_the_request_states() -> None:
    def decided(fields: dict[str, Any], messages: list[dict[str, Any]]) -> str:
        return resolve(
            fields,
            messages,
            background=BackgroundPrompt(client="A page", purpose="title", words=("title",)),
            model_default=Effort.HIGH,
            server_default=Effort.MEDIUM,
        ).source

    assert decided({}, [QUESTION]) == "background request: A page, title"
    assert decided({"think": False}, [QUESTION]) == "think"
    assert decided({"think": True}, [QUESTION]) == "model default"  # it is to reason, as much as usual
    assert decided({}, system("Reasoning: high")) == "system prompt"


@pytest.mark.parametrize(
    ("request_fields", "effort", "source"),
    [
        ({"reasoning": "high"}, Effort.HIGH, "reasoning"),
        ({"reasoning": False}, Effort.NONE, "reasoning"),
        ({"reasoning": {"max_tokens": 1024}}, Effort.LOW, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 10}}, Effort.MINIMAL, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": "3"}}, Effort.MINIMAL, "reasoning.max_tokens"),
        ({"reasoning": {"max_tokens": 0}}, Effort.NONE, "reasoning.max_tokens"),
        ({"reasoning": {"effort": "high", "max_tokens": 1024}}, Effort.HIGH, "reasoning.effort"),
        ({"reasoning": {"enabled": False}}, Effort.NONE, "reasoning.enabled"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            Effort.NONE,
            "chat_template_kwargs.enable_thinking",
        ),
        ({"chat_template_kwargs": {"thinking": False}}, Effort.NONE, "chat_template_kwargs.thinking"),
        ({"think": False}, Effort.NONE, "think"),
        ({"think": "low"}, Effort.LOW, "think"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Effort.LOW, "thinking.budget_tokens"),
        ({"reasoning_effort": "高"}, Effort.HIGH, "reasoning_effort"),
        ({"reasoning_effort": 0}, Effort.NONE, "reasoning_effort"),
    ],
)
def test_every_field_that_clients_use_is_heard(
    request_fields: dict[str, Any], effort: Effort, source: str
) -> None:
    found = resolve(request_fields, [QUESTION], server_default=Effort.MINIMAL)
    assert (found.effort, found.source) == (effort, source)


@pytest.mark.parametrize("field", ["think", "enable_thinking", "thinking", "reasoning"])
def test_a_mere_on_leaves_it_to_the_defaults_how_much(field: str) -> None:
    assert resolve({field: True}, [QUESTION], model_default=Effort.HIGH).effort is Effort.HIGH
    assert resolve({field: True}, [QUESTION]).effort is Effort.MEDIUM
    assert resolve({field: True}, [QUESTION], model_default=Effort.NONE).effort is Effort.MEDIUM


def test_a_mere_on_counts_where_the_server_is_off_by_default() -> None:
    found = resolve({"think": True}, [QUESTION], server_default=Effort.NONE)
    assert (found.effort, found.source) == (Effort.MEDIUM, "think")


def test_null_and_empty_fields_are_absent() -> None:
    request: dict[str, Any] = {
        "reasoning_effort": None,
        "reasoning": None,
        "chat_template_kwargs": None,
        "think": None,
        "enable_thinking": None,
        "thinking": None,
    }
    assert resolve(request, [QUESTION]).source == "default"
    request = {
        "reasoning_effort": "",
        "reasoning": {"effort": None},
        "chat_template_kwargs": {"reasoning_effort": ""},
    }
    assert resolve(request, [QUESTION]).source == "default"
    assert (
        resolve({"reasoning": {}, "chat_template_kwargs": {}, "thinking": {}}, [QUESTION]).source == "default"
    )


@pytest.mark.parametrize(
    ("request_fields", "param"),
    [
        ({"reasoning_effort": "banana"}, "reasoning_effort"),
        ({"reasoning_effort": ["high"]}, "reasoning_effort"),
        ({"reasoning": {"effort": "banana"}}, "reasoning.effort"),
        ({"reasoning": []}, "reasoning"),
        ({"chat_template_kwargs": {"reasoning_effort": "banana"}}, "chat_template_kwargs.reasoning_effort"),
        ({"think": "banana"}, "think"),
        ({"think": {"a": 1}}, "think"),
        ({"thinking": {"budget_tokens": "lots"}}, "thinking.budget_tokens"),
    ],
)
def test_an_unknown_word_in_a_field_is_refused_with_the_fields_name(
    request_fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(EffortError) as refused:
        resolve(request_fields, [QUESTION])
    assert refused.value.param == param
    assert str(refused.value).startswith(param)


def test_a_bad_field_is_refused_even_where_a_stronger_source_speaks() -> None:
    with pytest.raises(EffortError):
        resolve({"reasoning_effort": "banana"}, system("Reasoning: high"))


@pytest.mark.parametrize(
    "text",
    [
        *("Reasoning: banana", "Reasoning:", "Reasoning: ", "Reasoning: high or low", "My Reasoning: high"),
        *(
            "Reasoning high",
            "Reasoning: think in steps.\nAnswer.",
            "`Reasoning: high`",
            "The line Reasoning: high is",
        ),
    ],
)
def test_what_is_no_effort_line_stays_as_text(text: str) -> None:
    found = resolve({}, system(text))
    assert (found.source, found.messages) == ("default", system(text))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Reasoning: high", ""),
        ("reasoning:HIGH", ""),
        ("  Reasoning : high.  ", ""),
        ("Reasoning_effort: high", ""),
        ("Reasoning effort: high", ""),
        ("Reasoning：高", ""),
        ("Be short.\nReasoning: high", "Be short."),
        ("Reasoning: high\nBe short.", "Be short."),
        ("Be short.\nReasoning: high\nBe kind.", "Be short.\nBe kind."),
        ("Be short.\n\nReasoning: high\n\nBe kind.", "Be short.\n\nBe kind."),
        ("Be short.\n\nReasoning: high\nBe kind.", "Be short.\n\nBe kind."),
        ("Be short.\r\nReasoning: high\r\nBe kind.", "Be short.\r\nBe kind."),
        ("  indented\nReasoning: high\n  too", "  indented\n  too"),
    ],
)
def test_the_line_is_taken_out_tidily(text: str, left: str) -> None:
    for role in ("system", "developer"):
        found = take_lines(system(text, role))
        assert (found.messages, found.efforts) == (system(left, role), [Effort.HIGH])


def test_the_last_line_wins_and_all_are_taken_out() -> None:
    messages = [
        *system("Reasoning: low\nBe short.\nReasoning: max"),
        {"role": "developer", "content": "Reasoning: high"},
    ]
    found = resolve({}, messages)
    assert (found.effort, found.source) == (Effort.HIGH, "system prompt")
    assert [effort for name, effort in found.sources if name == "system prompt"] == [
        *(Effort.HIGH, Effort.MAX, Effort.LOW)
    ]
    assert "Reasoning" not in str(found.messages)


def test_a_line_in_a_part_is_taken_out_too() -> None:
    parts = [{"type": "text", "text": "Be short.\nReasoning: high"}, {"type": "other"}, "x"]
    lines = take_lines(system(parts))
    messages, found = lines.messages, lines.efforts
    assert found == [Effort.HIGH]
    assert messages[0]["content"] == [{"type": "text", "text": "Be short."}, {"type": "other"}, "x"]


@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_nobody_else_can_state_an_effort_in_a_text(role: str) -> None:
    messages = [{"role": role, "content": "Reasoning: high"}]
    found = resolve({}, messages)
    assert (found.source, found.messages) == ("default", messages)


def test_nothing_is_changed_in_place_and_nothing_is_kept() -> None:
    messages, request = system("Reasoning: high\nBe short."), {"reasoning": {"effort": "low"}}
    before = copy.deepcopy((messages, request))
    assert resolve(request, messages) == resolve(request, messages)
    assert (messages, request) == before
    assert resolve({}, [QUESTION]).effort is Effort.MEDIUM


def test_a_line_with_a_word_that_is_no_effort_stays_and_is_named() -> None:
    found = resolve({}, system("Be brief.\nReasoning: extreme\nReasoning: explain each step"))
    assert found.messages[0]["content"] == "Be brief.\nReasoning: extreme\nReasoning: explain each step"
    assert (found.source, found.unknown_words) == ("default", ("extreme",))


def test_half_a_million_lines_are_read_in_one_pass() -> None:
    text = "Reasoning: high\n" * 480_000 + "Reasoning:" + " " * 500_000 + "x" * 500_000
    lines = take_lines(system(text))
    assert len(lines.efforts) == 480_000
    assert lines.messages[0]["content"].startswith("Reasoning:  ")


FLAGS = EffortScale(
    levels=(
        Level(effort=Effort.NONE, template_kwargs={"depth": "low"}, budget=0),
        Level(effort=Effort.LOW, template_kwargs={"depth": "low"}),
        Level(effort=Effort.HIGH, template_kwargs={}),
    ),
    default=Effort.HIGH,
    on=Effort.HIGH,
)


def test_an_argument_of_the_templates_own_states_the_level_that_it_tells() -> None:
    found = resolve({"chat_template_kwargs": {"depth": "low"}}, [QUESTION], scale=FLAGS)
    assert (found.effort, found.source) == (Effort.LOW, "chat_template_kwargs.depth")
    other = resolve({"chat_template_kwargs": {"depth": "sideways"}}, [QUESTION], scale=FLAGS)
    assert other.source == "default"


@pytest.mark.parametrize("kind", ["enabled", "adaptive"])
def test_thinking_without_a_budget_is_switched_on(kind: str) -> None:
    found = resolve({"thinking": {"type": kind}}, [QUESTION], scale=FLAGS)
    assert (found.effort, found.source) == (Effort.HIGH, "thinking.type")


@pytest.mark.parametrize("value", [True, "on", "enabled"])
def test_on_says_nothing_of_how_much_in_any_field(value: object) -> None:
    fields = {"reasoning_effort": value}
    found = resolve(fields, [QUESTION], scale=FLAGS)
    assert (found.effort, found.source) == (Effort.HIGH, "reasoning_effort")
    operators = resolve(fields, [QUESTION], scale=FLAGS, model_default=Effort.LOW)
    assert (operators.effort, operators.source) == (Effort.LOW, "model default")
