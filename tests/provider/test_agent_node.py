"""What the strategies of Dify's Agent node send, round by round, and what the model behind the plugin is told of it.

Function calling sends the tools, and returns calls and results as messages. Of a picture in a result it keeps a
sentence; only what a tool gives as text reaches the model. ReAct describes the tools in the system prompt, looks for
actions in the text, and returns all rounds as one assistant message before the user's `continue`.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chat_templates import QWEN_XML_MARKERS, qwen_xml
from conftest import listening
from dify_view import assistant, calls_of, result, split_reasoning, text_of, user
from picture_files import png
from scripted_engine import HARMONY_MARKERS, HARMONY_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from daemon import PluginProcess

QUESTION = "Weather in Paris and Rome?"


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {each: {"type": "string", "description": each} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": f"The tool {name}.", "parameters": schema}


TOOLS = [tool("get_weather", "city"), tool("draw_chart", "title"), tool("take_picture")]
PICTURE = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
RESULTS = {
    "get_weather Paris": 'tool response: {"sky": "sunny"}.',
    "get_weather Rome": "tool invoke error: no such city",
    "draw_chart Weather": "image has been created and sent to user already, just tell the user to check it now.",
    "take_picture": PICTURE,
    "get_wether Rome": "there is not a tool named get_wether",
}


@contextmanager
def model(
    folder: Path, template: str, markers: Sequence[str], replies: Sequence[str]
) -> Iterator[tuple[str, Path]]:
    """A server with a model that gives these replies; its address, and the file of the prompts it was given."""
    specification, prompts = folder / "model.json", folder / "prompts.jsonl"
    specification.write_text(json.dumps({"template": template, "markers": markers, "replies": replies}))
    server = Path(__file__).parent / "family_server.py"
    with listening([sys.executable, str(server), str(specification), str(prompts)]) as address:
        yield f"{address}/v1", prompts


def answer_of(name: str, arguments: dict[str, Any]) -> str:
    return RESULTS[" ".join([name, *map(str, arguments.values())])]


# -- function calling -----------------------------------------------------------------------------


def xml(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CALLED = (
    [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})],
    [("draw_chart", {"title": "Weather"}), ("take_picture", {})],
    [("get_wether", {"city": "Rome"})],
    [("take_picture", {}), ("take_picture", {}), ("get_weather", {"city": "Paris"})],
)


def test_function_calling_goes_five_rounds_with_parallel_calls_errors_and_pictures(
    plugin: PluginProcess, tmp_path: Path
) -> None:
    replies = [
        f"Round {at}.\n</think>\n\nI look.\n{''.join(xml(name, **arguments) for name, arguments in calls)}<|im_end|>"
        for at, calls in enumerate(CALLED)
    ]
    replies.append("I have all.\n</think>\n\nParis is sunny.<|im_end|>")
    history = [{"role": "system", "content": ""}, user(QUESTION)]
    called, texts = [], []
    with model(tmp_path, qwen_xml(), QWEN_XML_MARKERS, replies) as (address, file):
        for _ in replies:
            chunks = list(plugin.invoke(history, credentials={"endpoint_url": address}, tools=TOOLS))
            calls = calls_of(chunks)
            texts.append(text_of(chunks))
            history.append(assistant(texts[-1], calls))
            called.append(
                [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
            )
            history += [result(call, answer_of(*each)) for call, each in zip(calls, called[-1], strict=True)]
        prompts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert called == [*CALLED, []]
    assert split_reasoning(texts[-1]) == ("Paris is sunny.", "I have all.")
    assert all(later.startswith(earlier.rstrip()) for earlier, later in pairwise(prompts))
    last = prompts[-1]
    assert [last.count(f"Round {at}.") for at in range(4)] == [1, 1, 1, 1], (
        "its reasoning stays with its calls"
    )
    assert last.count("<tool_response>") == sum(map(len, CALLED))
    assert last.count("not shown: this model does not see]") == 3
    assert PICTURE not in last
    assert RESULTS["get_wether Rome"] in last


# -- ReAct ----------------------------------------------------------------------------------------

INSTRUCTIONS = f"""You have these tools:

{json.dumps(TOOLS)}

Use a json blob to specify a tool by providing an action key (tool name) and an action_input key (tool input).
End with "FinalAnswer:".
"""
ACTION = re.compile(r"Action: (\{.*\})")
THINKING = "<|channel|>analysis<|message|>Action: or Observation?<|end|><|start|>assistant<|channel|>"
CALL = "commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"


def spelt(name: str, **arguments: str) -> str:
    return f"Action: {json.dumps({'action': name, 'action_input': arguments})}"


def test_react_goes_five_rounds_also_where_the_model_calls_in_its_own_way(
    plugin: PluginProcess, tmp_path: Path
) -> None:
    paris = spelt("get_weather", city="Paris")
    replies = [
        THINKING + f"final<|message|>Thought: Paris.\n{paris}\nObservation: I make it up.<|return|>",
        THINKING + CALL.format("get_weather", '{"city": "Rome"}'),
        THINKING
        + "commentary<|message|>A chart.<|end|><|start|>assistant<|channel|>"
        + CALL.format("draw_chart", '{"title": "Weather"}'),
        THINKING + CALL.format("take_picture", "{}"),
        THINKING + "final<|message|>FinalAnswer: Paris is sunny.<|return|>",
    ]
    actions, rounds, text = [], "", ""
    with model(tmp_path, HARMONY_TEMPLATE, HARMONY_MARKERS, replies) as (address, file):
        for _ in replies:
            messages = [{"role": "system", "content": INSTRUCTIONS}, user(QUESTION)]
            if rounds:
                messages += [assistant(rounds), user("continue")]
            chunks = list(
                plugin.invoke(messages, credentials={"endpoint_url": address}, stop=["Observation"])
            )
            assert calls_of(chunks) == []
            text, _ = split_reasoning(text_of(chunks))
            assert "Observation" not in text
            for found in ACTION.findall(text):
                action = json.loads(found)
                actions.append((action["action"], action["action_input"]))
                rounds += f"Thought: \n\nAction: {found}\n\nObservation: {answer_of(*actions[-1])}\n\n"
        prompts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert actions == [
        ("get_weather", {"city": "Paris"}),
        ("get_weather", {"city": "Rome"}),
        ("draw_chart", {"title": "Weather"}),
        ("take_picture", {}),
    ]
    assert text == "FinalAnswer: Paris is sunny."
    assert "I make it up" not in prompts[-1]
    assert RESULTS["get_weather Rome"] in prompts[-1]
