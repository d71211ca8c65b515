"""Results find their calls: by id, by name or by order, however many there are."""

from __future__ import annotations

from typing import Any

from mlx_backend.conversation.history import sanitise

MANY = 20_000
"""Where each result looked for its call among all messages, these took minutes."""


def call(identifier: str, name: str = "f") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": "{}"}}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def result(text: str, **named: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, **named}


def answers(*messages: dict[str, Any]) -> list[tuple[str, str]]:
    """Whose result each is, by the call's id."""
    history = sanitise([{"role": "user", "content": "go"}, *messages])
    return [(entry["tool_call_id"], entry["content"]) for entry in history if entry["role"] == "tool"]


def test_ten_thousands_of_calls_in_one_message_get_their_results_in_their_order() -> None:
    calls = [call(f"c{at}") for at in range(MANY)]
    results = [result(str(at), tool_call_id=f"c{at}") for at in reversed(range(MANY))]
    assert answers(calling(*calls), *results) == [(f"c{at}", str(at)) for at in range(MANY)]


def test_ten_thousands_of_results_that_come_late_go_back_to_their_messages() -> None:
    calls = [calling(call(f"c{at}")) for at in range(MANY)]
    results = [result(str(at), tool_call_id=f"c{at}") for at in range(MANY)]
    assert answers(*calls, *results) == [(f"c{at}", str(at)) for at in range(MANY)]


def test_an_id_that_is_used_again_and_again_is_the_latest_call() -> None:
    rounds = [(calling(call("same")), result(str(at), tool_call_id="same")) for at in range(MANY)]
    found = answers(*(message for each in rounds for message in each))
    assert [text for _, text in found] == [str(at) for at in range(MANY)]
    assert len({identifier for identifier, _ in found}) == MANY


def test_calls_of_one_message_with_the_same_id_are_answered_in_their_order() -> None:
    found = answers(
        calling(call("x"), call("x")), result("1", tool_call_id="x"), result("2", tool_call_id="x")
    )
    assert [text for _, text in found] == ["1", "2"]
    assert len({identifier for identifier, _ in found}) == 2


def test_results_without_ids_are_found_by_name_and_then_by_order() -> None:
    found = answers(
        calling(call("a", "look"), call("b", "find"), call("c", "look")),
        result("1", name="find"),
        result("2"),
        result("3", name="look"),
    )
    assert found == [("a", "2"), ("b", "1"), ("c", "3")]


def test_ten_thousands_of_system_texts_are_each_kept_once() -> None:
    texts = [f"rule {at}" for at in range(MANY)]
    messages = [{"role": "system", "content": text} for text in [*texts, *texts]]
    [system, _] = sanitise([*messages, {"role": "user", "content": "go"}])
    assert system["content"] == "\n\n".join(texts)
