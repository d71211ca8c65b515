"""What holds for every history, drawn at random from the corpus and then damaged. Every draw is seeded."""

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from history_corpus import Prompt, demo, history_cases

from mlx_backend.conversation.history import HistoryError, sanitise
from mlx_backend.conversation.template import TemplateTraits, accepted, for_template

SEEDS = range(300)
BITS = (
    *(
        "<think>",
        "</think>",
        "\n",
        " ",
        "`",
        '"',
        "text",
        "```\n",
        "<details>",
        "</details>",
        "<|",
        "|>",
        "\\",
    ),
    *(
        "<|start|>",
        "<|end|>",
        "<|channel|>",
        "<|message|>",
        "<|call|>",
        "<|return|>",
        "<|constrain|>",
        "to=f",
    ),
    *(
        "assistant",
        "analysis",
        "final",
        "commentary",
        "<summary>Thought",
        "</summary>",
        "&gt; x",
        "\ud800",
        "\0",
    ),
    '<details type="reasoning" done="true">',
    '<details type="tool_calls" name="f" arguments="{" result="1">',
)
ODD: tuple[Any, ...] = (
    None,
    "",
    0,
    7,
    -1.5,
    True,
    [],
    {},
    [[]],
    [None],
    {"text": None},
    {"type": 5},
    "x",
    ["a", 1],
)
KEYS = (
    *("content", "role", "tool_calls", "tool_call_id", "name", "reasoning", "thinking", "reasoning_content"),
    *("reasoning_details", "function_call", "refusal"),
)
CASES = history_cases()


def damaged(seed: int) -> list[Any]:
    """Return some case's messages, shuffled, cut, and with odd values and odd texts put in."""
    draw = random.Random(seed)
    messages: list[Any] = copy.deepcopy(draw.choice(CASES).request["messages"])
    messages += copy.deepcopy(draw.choice(CASES).request["messages"])
    if draw.random() < 0.4:
        draw.shuffle(messages)
    for _ in range(draw.randrange(1, 5)):
        message = draw.choice(messages)
        if draw.random() < 0.4:
            message["content"] = "".join(draw.choices(BITS, k=draw.randrange(1, 9)))
        elif draw.random() < 0.7:
            key = draw.choice(KEYS)
            if key != "role":
                message[key] = copy.deepcopy(draw.choice(ODD))
        elif (calls := message.get("tool_calls")) and isinstance(calls, list):
            calls[draw.randrange(len(calls))] = copy.deepcopy(draw.choice(ODD))
    return messages


def texts(seed: int) -> list[Any]:
    """Return a conversation whose assistant texts are put together from bits of every grammar."""
    draw = random.Random(seed)
    messages = []
    for turn in range(3):
        messages.append({"role": "user", "content": f"Question {turn}"})
        messages.append(
            {"role": "assistant", "content": "".join(draw.choices(BITS, k=draw.randrange(1, 14)))}
        )
    return [*messages, {"role": "user", "content": "Last question"}]


@cache
def template() -> Prompt:
    return demo()


@pytest.fixture(params=["damaged", "texts"])
def histories(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    make = damaged if request.param == "damaged" else texts
    return (make(seed) for seed in SEEDS)


def test_nothing_raises_and_nothing_is_changed_in_place(histories: Iterator[list[Any]]) -> None:
    for history in histories:
        before = copy.deepcopy(history)
        sanitise(history)
        assert history == before


def test_a_second_time_changes_nothing(histories: Iterator[list[Any]]) -> None:
    for history in histories:
        once = sanitise(history)
        assert sanitise(once) == once, history


def test_the_canonical_form_is_always_the_same_shape(histories: Iterator[list[Any]]) -> None:
    for history in histories:
        canonical = sanitise(history)
        waiting: set[str] = set()
        for index, message in enumerate(canonical):
            match message:
                case {"role": "system", "content": str(), **rest}:
                    assert index != 1 or canonical[0]["role"] != "system", "the first ones are one"
                    assert not rest
                case {"role": "user", "content": str() | list(), **rest}:
                    assert not rest
                case {"role": "assistant", "content": str(), **rest}:
                    assert set(rest) <= {"reasoning_content", "tool_calls"}
                    calls = rest.get("tool_calls", [{"id": ""}])
                    assert calls
                    waiting |= {call["id"] for call in calls}
                case {"role": "tool", "content": str(), "tool_call_id": str(id_), "name": str(), **rest}:
                    assert id_ in waiting
                    assert not rest
                case _:
                    raise AssertionError(message)


def test_a_template_renders_it_and_every_user_text_is_there(histories: Iterator[list[Any]]) -> None:
    for history in histories:
        canonical = sanitise(history)
        if not canonical:
            continue
        ready = accepted(for_template(canonical, template().traits), template().traits)
        before = copy.deepcopy(canonical)
        rendered = template().render(ready)
        assert canonical == before
        for message in history:
            if message["role"] == "user" and isinstance(message["content"], str):
                assert message["content"] in rendered


@pytest.mark.parametrize(
    "traits",
    [
        TemplateTraits(),
        TemplateTraits(has_system_role=False, must_alternate=True),
        TemplateTraits(iterates_arguments=True),
    ],
)
def test_every_kind_of_template_gets_messages_without_nulls(traits: TemplateTraits) -> None:
    for seed in SEEDS:
        for message in for_template(sanitise(damaged(seed)), traits):
            assert isinstance(message["content"], str)
            assert None not in message.values()
            for call in message.get("tool_calls", ()):
                assert not traits.iterates_arguments or isinstance(call["function"]["arguments"], dict)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        (b"x", "messages"),
        (5, "messages"),
        (None, "messages"),
        ({"role": "user"}, "messages"),
        ([7], "messages[0]"),
        ([{"role": "user", "content": "q"}, None], "messages[1]"),
        ([{"content": "q"}], "messages[0].role"),
        ([{"role": "User", "content": "q"}], "messages[0].role"),
        ([{"role": ["user"], "content": "q"}], "messages[0].role"),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(messages: Any, param: str) -> None:
    with pytest.raises(HistoryError) as refused:
        sanitise(messages)
    assert refused.value.param == param
    assert str(refused.value).startswith(f"{param}: ") or str(refused.value).startswith(param)


def test_only_json_comes_out() -> None:
    for case in CASES:
        json.dumps(sanitise(case.request["messages"], tools=case.request.get("tools")))
