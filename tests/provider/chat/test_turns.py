"""What of a history must stay, which turns may go, and where the cuts lie; over random histories too."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest

from dify_mlx_provider.chat.long_chats import ChatTurns, count_app_messages, estimate_message, step_for

type Message = dict[str, Any]

SYSTEM = {"role": "system", "content": "Answer briefly."}


def user(text: Any = "question") -> Message:
    return {"role": "user", "content": text}


def reply(text: str = "answer") -> Message:
    return {"role": "assistant", "content": text}


def tool_round(name: str = "clock", text: str = "10:00") -> list[Message]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": name, "content": text},
    ]


def random_turn(rng: random.Random) -> list[Message]:
    messages = [user("word " * rng.randrange(1, 60))]
    for _ in range(rng.choice((0, 0, 1, 3))):
        messages += tool_round(text="row " * rng.randrange(1, 80))
    if rng.random() < 0.9:  # a reply may have been stopped before its first word
        messages.append(reply("word " * rng.randrange(1, 200)))
    return messages


def random_history(
    rng: random.Random, turns: int
) -> tuple[list[Message], list[list[Message]], list[Message]]:
    """What must stay before the history, its turns, and the last one."""
    first = [SYSTEM] * rng.randrange(2) + [user("from the template")] * rng.randrange(2)
    last = [user("the last question"), *tool_round() * rng.randrange(3)]
    return first, [random_turn(rng) for _ in range(turns)], last


def flat(turns: list[list[Message]]) -> list[Message]:
    return [message for turn in turns for message in turn]


@pytest.mark.parametrize("seed", range(30))
def test_only_whole_turns_go_oldest_first_and_everything_else_stays(seed: int) -> None:
    rng = random.Random(seed)
    first, older, last = random_history(rng, rng.randrange(12))
    turns = ChatTurns([*first, *flat(older), *last], app_messages=sum(m["role"] == "user" for m in first))
    assert turns.count == len(older)
    assert list(turns.last_turn) == last
    for left_out in range(len(older) + 1):
        kept = turns.without_oldest(left_out)
        assert kept == [*first, *flat(older[left_out:]), *last]
        assert turns.size_without_oldest(left_out) == sum(map(estimate_message, kept))


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_lies_where_it_lay_before_the_history_grew(seed: int) -> None:
    rng = random.Random(seed)
    first, older, last = random_history(rng, 60)
    app_messages = sum(message["role"] == "user" for message in first)
    step = 2 ** rng.randrange(4, 10)
    before: list[int] = [0]
    for count in range(1, 60):
        cuts = ChatTurns([*first, *flat(older[:count]), *last], app_messages=app_messages).cuts(step)
        assert cuts == sorted(set(cuts))
        assert cuts[-1] == count
        assert before[:-1] == cuts[: len(before) - 1]  # the last one leaves everything out
        before = cuts


@pytest.mark.parametrize("seed", range(10))
def test_the_cuts_of_a_doubled_step_are_among_those_of_the_step(seed: int) -> None:
    rng = random.Random(seed)
    turns = ChatTurns([*flat(random_history(rng, 80)[1]), user()])
    for exponent in range(2, 12):
        assert set(turns.cuts(2 ** (exponent + 1))) <= set(turns.cuts(2**exponent))


def test_from_cut_to_cut_lies_at_most_a_step_and_a_turn() -> None:
    rng = random.Random(1)
    older = random_history(rng, 80)[1]
    turns = ChatTurns([*flat(older), user()])
    longest = max(sum(map(estimate_message, turn)) for turn in older)
    sizes = [turns.size_without_oldest(cut) for cut in turns.cuts(512)]
    assert all(0 < before - after <= 512 + longest for before, after in pairwise(sizes))


@pytest.mark.parametrize(
    ("room", "step"), [(4096, 1024), (3000, 1024), (2800, 512), (6, 2), (0, 1), (-500, 1)]
)
def test_a_step_is_about_a_quarter_of_the_room_and_a_power_of_two(room: int, step: int) -> None:
    assert step_for(room) == step


def test_system_messages_stay_wherever_they_stand() -> None:
    late = {"role": "system", "content": "Be polite."}
    turns = ChatTurns([SYSTEM, user("1"), reply(), late, user("2"), reply(), user("3")])
    assert turns.without_oldest(2) == [SYSTEM, late, user("3")]


def test_what_stands_before_the_first_question_is_a_turn_that_a_client_has_cut() -> None:
    turns = ChatTurns([SYSTEM, reply("the end of it"), user("2"), reply(), user("3")])
    assert turns.without_oldest(1) == [SYSTEM, user("2"), reply(), user("3")]
    assert turns.count == 2


@pytest.mark.parametrize(
    "messages", [[user()], [SYSTEM, user()], [SYSTEM], [reply()], [SYSTEM, user(), *tool_round()]]
)
def test_one_turn_alone_is_never_left_out(messages: list[Message]) -> None:
    turns = ChatTurns(messages)
    assert turns.count == 0
    assert turns.cuts(16) == [0]
    assert turns.without_oldest(0) == messages


@pytest.mark.parametrize("end", ["continue", "Which city?"])
def test_a_react_agents_round_belongs_to_its_question(end: str) -> None:
    rounds = reply('Thought: I need the time.\n\nAction: {"action": "clock"}\n\nObservation: 10:00\n\n')
    turns = ChatTurns([SYSTEM, user("Hi"), reply(), user("Which city?"), rounds, user(end)])
    assert turns.without_oldest(1) == [SYSTEM, user("Which city?"), rounds, user(end)]
    assert turns.count == 1


def test_a_person_who_writes_continue_or_asks_again_asks_a_new_question() -> None:
    for text in ("continue", "Tell me a story."):
        assert ChatTurns([user("Tell me a story."), reply("Once"), user(text)]).count == 1


@pytest.mark.parametrize(
    ("roles", "count"),
    [
        ("system user assistant user", 0),
        ("system user user assistant user", 1),
        ("user user user assistant user", 2),
        ("user system user assistant user", 1),
        ("system user user", 1),
        ("assistant user user", 0),
        ("user assistant user user", 0),
        ("user", 0),
        ("", 0),
    ],
)
def test_user_messages_before_the_history_are_the_apps_own_prompt(roles: str, count: int) -> None:
    assert count_app_messages(roles.split()) == count


def test_images_and_calls_count_too() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    with_image = estimate_message(user([{"type": "text", "text": "look"}, image]))
    assert estimate_message(user("look")) < with_image < 2000
    call, _ = tool_round(name="clock")
    call["tool_calls"][0]["function"]["arguments"] = "x" * 4000
    assert estimate_message(call) > 1000
