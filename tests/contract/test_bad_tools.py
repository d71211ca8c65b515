"""Tools and calls that are not as they should be, over the real wire: each has an answer, and no text is lost."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from running_server import RunningServer, running
from scripted_engine import ScriptedEngine, ScriptedTokenizer

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
MIB = 1 << 20


@contextmanager
def writing(
    text: str, *, template: str = QWEN, markers: tuple[str, ...] = MARKERS
) -> Iterator[RunningServer]:
    """A server whose model writes this and nothing else."""
    engine = ScriptedEngine(
        lambda _: text + "<|im_end|>", markers=markers, chat_template=template, context_length=4 * MIB
    )
    with running(engine) as server:
        yield server


def both(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The message, which is the same if it is streamed."""
    message = server.chat(**fields)["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in server.chunks(**fields) if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    streamed: list[dict[str, str]] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        if "id" in part:
            streamed.append(part["function"])
        else:
            streamed[part["index"]]["arguments"] += part["function"]["arguments"]
    assert streamed == [call["function"] for call in message.get("tool_calls", ())]
    whole: dict[str, Any] = message
    return whole


def xml_call(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_a_call_to_a_tool_that_nobody_offered_is_the_clients_to_refuse() -> None:
    with writing("I try. " + xml_call("launch", at="dawn")) as server:
        message = both(server, tools=[LOOK])
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "launch", "arguments": '{"at": "dawn"}'}
        assert message["content"].strip() == "I try."
        # The client says so in a result, and the conversation goes on.
        said = {"role": "tool", "tool_call_id": call["id"], "content": "There is no tool launch."}
        assert both(server, tools=[LOOK], messages=[{"role": "user", "content": "Go."}, message, said])


def test_without_any_tool_what_looks_like_a_call_is_the_answer() -> None:
    text = xml_call("launch", at="dawn")
    with writing(text) as server:
        cases: list[dict[str, Any]] = [{}, {"tools": [LOOK], "tool_choice": "none"}, {"tools": []}]
        for fields in cases:
            message = both(server, **fields)
            assert "tool_calls" not in message
            assert message["content"] == text


def test_a_hundred_thousand_tokens_of_arguments_are_read_whole() -> None:
    value = "".join(f"{hour:05} The sea was calm, and then it was not.\n" for hour in range(8_000))
    with writing(xml_call("look", text=value)) as server:
        [call] = server.chat(tools=[LOOK])["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"text": value}


def test_a_megabyte_of_arguments_in_a_history_is_rendered() -> None:
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "look", "arguments": json.dumps({"text": "x" * MIB})}  # type: ignore[assignment]  # JSON
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Nothing."},
    ]
    with writing("Nothing there.") as server:
        reply = server.chat(messages, tools=[LOOK])
        assert reply["choices"][0]["message"]["content"] == "Nothing there."
        assert reply["usage"]["prompt_tokens"] > MIB // ScriptedTokenizer.PIECE


def test_other_families_markers_in_a_vocabulary_are_no_markup() -> None:
    markers = (*MARKERS, "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<arg_key>", "</arg_key>")
    foreign = "[TOOL_CALLS]look[ARGS]{} <arg_key>a</arg_key> <|channel|>analysis<|message|>Hm."
    with writing(f"<think>\nI see.\n</think>\n\n{foreign}", markers=markers) as server:
        message = both(server, tools=[LOOK])
        assert message["reasoning_content"] == "I see."
        assert "tool_calls" not in message
        for word in ("look", "{}", "a", "analysis", "Hm."):
            assert word in message["content"]
