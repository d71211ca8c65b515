"""The thinking block, as Dify's page and workflows read it, for all kinds of reasoning and however it is split."""

from __future__ import annotations

from itertools import combinations

import pytest
from dify_view import PAGE_BLOCK, split_reasoning, web_page

from dify_mlx_provider.chat.think_block import ThinkBlockWriter, remove_guards
from mlx_backend.conversation.events import ContentDelta, Event, ReasoningDelta, ToolCallStart


def dify_text(
    *events: Event, hide_reasoning: bool = False, verbatim: bool = False, follows: str = ""
) -> list[str]:
    thinking = ThinkBlockWriter(hide_reasoning=hide_reasoning, verbatim=verbatim, follows=follows)
    return [piece for event in events for piece in thinking.feed(event)] + thinking.close()


def block(*reasoning: str) -> str:
    """The text between the tags."""
    text = "".join(dify_text(*map(ReasoningDelta, reasoning)))
    assert text.startswith("<think>\n")
    assert text.endswith("\n</think>")
    return text[len("<think>\n") : -len("\n</think>")]


def test_a_blank_line_precedes_the_answer_so_that_the_page_formats_its_first_lines() -> None:
    assert dify_text(ReasoningDelta("why"), ContentDelta("- a")) == [
        "<think>\n",
        "why",
        "\n</think>",
        "\n\n- a",
    ]


def test_an_answer_with_leading_blank_lines_gets_no_more_of_them() -> None:
    assert dify_text(ReasoningDelta("why"), ContentDelta("\n\nHi"))[-1] == "\n\nHi"


def test_without_reasoning_the_answer_is_left_alone() -> None:
    assert dify_text(ContentDelta("\nHi"), ContentDelta(" there")) == ["\nHi", " there"]


def test_reasoning_after_the_start_of_the_answer_is_a_second_block() -> None:
    events = (ReasoningDelta("a"), ContentDelta("one."), ReasoningDelta("b"), ContentDelta("two"))
    assert dify_text(*events) == [
        *("<think>\n", "a", "\n</think>", "\n\none."),
        *("\n\n", "<think>\n", "b", "\n</think>", "\n\ntwo"),
    ]


def test_a_tool_call_closes_the_block_and_adds_nothing() -> None:
    assert dify_text(ReasoningDelta("a"), ToolCallStart(0, "clock")) == ["<think>\n", "a", "\n</think>"]


def test_two_blocks_around_a_tool_call_are_parted_by_a_blank_line() -> None:
    pieces = dify_text(ReasoningDelta("a"), ToolCallStart(0, "clock"), ReasoningDelta("b"))
    assert pieces == ["<think>\n", "a", "\n</think>", "\n\n", "<think>\n", "b", "\n</think>"]


ROUNDS = [
    ("<think>\na\n</think>", (ReasoningDelta("b"), ContentDelta("Hi")), "\n\n<think>\nb\n</think>\n\nHi"),
    ("Let me look.", (ReasoningDelta("b"), ContentDelta("Hi")), "\n\n<think>\nb\n</think>\n\nHi"),
    ("Let me look.\n", (ReasoningDelta("b"),), "\n<think>\nb\n</think>"),
    ("Let me look.\n\n", (ReasoningDelta("b"),), "<think>\nb\n</think>"),
    ("Let me look.", (ContentDelta("- Hi"),), "\n\n- Hi"),
    ("Let me look.", (ContentDelta("\n\n- Hi"),), "\n\n- Hi"),
    ("Let me look.", (ContentDelta(" \n"), ReasoningDelta("b")), "\n\n<think>\nb\n</think>"),
    ("", (ReasoningDelta("b"),), "<think>\nb\n</think>"),
    ("", (ContentDelta("Hi"),), "Hi"),
]


@pytest.mark.parametrize(("follows", "events", "shown"), ROUNDS)
def test_an_agents_next_round_begins_with_a_blank_line_however_it_is_split(
    follows: str, events: tuple[Event, ...], shown: str
) -> None:
    assert "".join(dify_text(*events, follows=follows)) == shown
    letters = [
        type(event)(letter)
        for event in events
        if isinstance(event, ContentDelta | ReasoningDelta)
        for letter in event.text
    ]
    pieces = dify_text(*letters, follows=follows)
    assert "".join(pieces) == shown
    assert [piece for piece in pieces if "think>" in piece] == (
        ["<think>\n", "\n</think>"] if "think>" in shown else []
    )


@pytest.mark.parametrize(("follows", "events", "shown"), ROUNDS)
def test_the_page_and_the_engine_part_the_rounds(follows: str, events: tuple[Event, ...], shown: str) -> None:
    text = follows + "".join(dify_text(*events, follows=follows))
    html = web_page(text)
    # To Markdown an element that begins inside a paragraph is a part of it, and so is one right after another.
    assert all(before.endswith("\n\n") for before in html.split("<details")[:-1] if before)
    assert html.count("<details") == html.count("</details>") == text.count("<think>")
    assert "think" not in split_reasoning(text)[0]


def test_an_agents_next_round_of_hidden_reasoning_is_parted_too_and_data_is_not() -> None:
    events = (ReasoningDelta("b"), ContentDelta("Hi"))
    assert dify_text(*events, follows="Let me look.", hide_reasoning=True) == ["\n\nHi"]
    assert dify_text(*events, follows="Let me look.", hide_reasoning=True, verbatim=True) == ["Hi"]


def test_hidden_reasoning_leaves_the_answer_alone() -> None:
    assert dify_text(ReasoningDelta("a"), ContentDelta("{}"), hide_reasoning=True) == ["{}"]


@pytest.mark.parametrize(
    "reasoning",
    [
        "a </think> b",
        "</DETAILS>",
        "use a <script> tag",
        "<!-- note",
        "List<int> and a < b",
        "ends with <",
        "<",
    ],
)
def test_html_in_the_reasoning_is_text(reasoning: str) -> None:
    guarded = block(reasoning)
    assert remove_guards(guarded) == reasoning
    for opener in ("<t", "<T", "</", "<!", "<s", "<i", "<d"):
        assert opener not in guarded
    assert split_reasoning(f"<think>\n{guarded}\n</think>Hi") == ("Hi", guarded)


def test_a_comparison_is_not_html() -> None:
    assert block("a < b and 1<2") == "a < b and 1<2"


@pytest.mark.parametrize(
    ("reasoning", "added"),
    [
        ("Try:\n\n```python\nx = 1", "\n```"),
        ("Try:\n\n```python\nx = 1\n```", ""),
        ("Try:\n\n~~~\n```\n~~~", ""),
        ("Try:\n\n````\n```\n", "\n````"),
        ("Try:\n\n```js\n~~~\n", "\n```"),
        ("Try:\n\n``` not `a fence", ""),
        ("Try:\n\n- item\n  ```\n  x", "\n  ```"),
        ("The first lines are HTML:\n```\nx\n\ny\n```\nDone.", "\n```"),
        ("The first lines are HTML:\n```\nx\n\ny", ""),
        ("No empty line at all:\n```\nx", "\n```"),
        ("Compute:\n\n$$\nx^2", "\n$$"),
        ("Compute:\n\n$$\nx^2\n$$", ""),
        ("It costs:\n\n$$5 and $$6", ""),
        ("Try:\n\n```\n$$\n```", ""),
        ("So:\n\n| a | b |\n|---|:-:|\n| 1 | 2 |", "\n\n\u200b"),
        ("So:\n\na | b\n- | -\n1 | 2\n", "\n\n\u200b"),
        ("So:\n\n| a |\n|---|\n| 1 |\n\nDone.", ""),
        ("A list:\n\n- a\n- b", ""),
    ],
)
def test_markdown_that_would_swallow_the_end_of_the_block_is_closed_first(reasoning: str, added: str) -> None:
    assert block(reasoning) == reasoning.rstrip() + added


def test_characters_added_for_the_page_are_removed_again() -> None:
    table = "So:\n\n| a |\n|---|\n| <b> |"
    assert remove_guards(block(table)) == table


def test_white_space_between_two_pieces_of_reasoning_does_not_split_the_block() -> None:
    events = (
        ReasoningDelta("a"),
        ContentDelta("\n"),
        ContentDelta(" "),
        ReasoningDelta(" b"),
        ContentDelta("Hi"),
    )
    assert "".join(dify_text(*events)) == "<think>\na b\n</think>\n\nHi"


def test_white_space_after_the_reasoning_is_no_answer() -> None:
    assert dify_text(ReasoningDelta("a"), ContentDelta("\n\n")) == ["<think>\n", "a", "\n</think>"]


ANSWERS = [
    "The tag <think> opens it and </think> closes it.",
    "<think>",
    "</think>\n",
    "Written <THINK> or <think x='y'> too",
    "ends with <thin",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_tag_in_the_answer_is_text_for_dify_however_it_is_split(answer: str) -> None:
    whole = "".join(dify_text(ReasoningDelta("why"), ContentDelta(answer)))
    assert split_reasoning(whole)[1] == "why"
    assert remove_guards(split_reasoning(whole)[0]) == answer.strip()
    assert PAGE_BLOCK.findall(whole) == ["why"]
    for at in range(len(answer) + 1):
        cut = dify_text(ReasoningDelta("why"), ContentDelta(answer[:at]), ContentDelta(answer[at:]))
        assert "".join(cut) == whole


@pytest.mark.parametrize("answer", ["<thinking> and <b>", "a </thinks", "1 < 2", "<"])
def test_other_html_in_the_answer_is_left_alone(answer: str) -> None:
    assert "".join(dify_text(*map(ContentDelta, answer))) == answer


def test_an_answer_that_is_data_is_not_changed() -> None:
    answer = '{"tag": "<think>"}'
    assert dify_text(ReasoningDelta("why"), ContentDelta(answer), hide_reasoning=True, verbatim=True) == [
        answer
    ]


@pytest.mark.parametrize("reasoning", ["", " ", "\n\n"])
def test_blank_reasoning_makes_no_block(reasoning: str) -> None:
    assert dify_text(ReasoningDelta(reasoning), ContentDelta("Hi")) == ["Hi"]


def test_white_space_around_the_reasoning_goes_and_inside_it_stays() -> None:
    assert block("\n a", "  ", "\n\n", "b \n") == "a  \n\nb"


def test_the_text_is_the_same_however_the_reasoning_is_split() -> None:
    reasoning = "So:\n\n```\n<b> </think\n\n~~~ <"
    whole = block(reasoning)
    assert PAGE_BLOCK.findall(f"<think>\n{whole}\n</think>") == [whole]
    for first, second in combinations(range(len(reasoning) + 1), 2):
        assert block(reasoning[:first], reasoning[first:second], reasoning[second:]) == whole
