"""Chatflows as Dify exports them, on Dify's workflow engine: what a user of an app reads and its designer sees.

`make test-dify` installs the engine (graphon) next to the project and runs these. The flows are in flows/.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from bridge import Bridge
from dify_engine import PYTHON, Dify, scripted
from running_server import running
from scripted_engine import ScriptedEngine, Transcript
from tour import PluginProcess, server, unpacked_package

from mlx_backend.errors import EngineBusy, EngineFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.jobs import Generation

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
STREAMED = "NodeRunStreamChunkEvent"
REASONED = "NodeRunReasoningChunkEvent"


@pytest.fixture(scope="session")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bridge]:
    """The packaged plugin, running, and its bridge to graphon."""
    assert PYTHON.exists(), (
        "Dify's workflow engine is not installed: `make test-dify` does it and runs these tests."
    )
    root = unpacked_package(tmp_path_factory.mktemp("package"))
    with PluginProcess(root) as plugin, Bridge(plugin) as bridge:
        yield bridge


@pytest.fixture(scope="session")
def dify(bridge: Bridge) -> Iterator[Dify]:
    """Dify with a server on the model that ships."""
    with server() as (_, address):
        yield Dify(bridge, {"endpoint_url": f"{address}/v1", "api_key": ""})


def test_tagged_shows_one_block_above_the_answer_streamed_and_whole(dify: Dify) -> None:
    run = dify.play("tagged", QUESTION)
    thinking, _, answer = run.answer.removeprefix("<think>\n").partition("\n</think>")
    assert "capital I learned" in thinking
    assert answer.strip() == ANSWER
    assert run.answer.count("<think>") == run.answer.count("</think>") == 1
    assert run.streamed(STREAMED, ["llm", "text"]) == run.answer
    assert run.of(REASONED) == []


def test_separated_makes_the_thinking_an_output_and_streams_both_separately(dify: Dify) -> None:
    run = dify.play("separated", QUESTION)
    outputs = run.outputs("llm")
    assert outputs["text"] == run.answer == ANSWER
    assert "capital I learned" in outputs["reasoning_content"]
    assert (
        run.streamed(REASONED, ["llm", "reasoning_content"]).strip() == outputs["reasoning_content"].strip()
    )
    assert run.streamed(STREAMED, ["llm", "text"]).strip() == ANSWER


def test_each_node_thinks_according_to_its_own_effort(dify: Dify) -> None:
    run = dify.play("efforts", QUESTION)
    quick, deep = (run.outputs(node)["reasoning_content"] for node in ("quick", "deep"))
    assert len(quick) * 3 < len(deep)
    assert deep.startswith(quick)
    assert [invocation["model_parameters"]["reasoning_effort"] for invocation in run.invocations] == [
        "low",
        "high",
    ]
    assert run.answer == f"{ANSWER} / {ANSWER}"


def test_usage_is_the_servers_count(dify: Dify) -> None:
    quick, deep = (dify.play("efforts", QUESTION).outputs(node)["usage"] for node in ("quick", "deep"))
    assert quick["prompt_tokens"] == deep["prompt_tokens"] > 0
    assert quick["completion_tokens"] < deep["completion_tokens"]


def test_a_second_turn_works_with_the_thinking_that_dify_sends_back(dify: Dify) -> None:
    first = dify.play("tagged", "My name is Ada.")
    second = dify.play("tagged", "What is my name?", history=[["My name is Ada.", first.answer]])
    (invocation,) = second.invocations
    assert "<think>" in invocation["prompt_messages"][2]["content"]
    assert second.answer.rpartition("</think>")[2].strip() == "Your name is Ada."


@pytest.mark.parametrize("flow", ["tagged", "own_prompt"])
def test_a_conversation_longer_than_the_context_goes_on(bridge: Bridge, flow: str) -> None:
    history = [[QUESTION, f"<think>\nI know it.\n</think>{ANSWER}"]] * 60
    with server("--context-length", "1024") as (_, address):
        run = Dify(bridge, {"endpoint_url": f"{address}/v1", "api_key": ""}).play(
            flow, QUESTION, history=history
        )
        assert run.answer.endswith(ANSWER)
        assert run.outputs("llm")["usage"]["prompt_tokens"] <= 768
    (invocation,) = run.invocations
    assert len(invocation["prompt_messages"]) > 120


def test_the_apps_own_user_messages_stay_while_the_history_after_them_is_shortened(bridge: Bridge) -> None:
    history = [[f"Question {turn}, please.", f"Answer {turn}."] for turn in range(200)]
    script = "<|channel|>final<|message|>Fine.<|return|>"
    with ScriptedEngine([script], context_length=4096) as engine, running(engine) as served:
        run = Dify(bridge, {"endpoint_url": served.url, "api_key": ""}).play(
            "own_prompt", "And now?", history=history
        )
        assert run.answer == "Fine."
        prompt = engine.requests[-1].prompt
    roles = [message["role"] for message in run.invocations[0]["prompt_messages"]]
    assert roles[:4] == ["system", "user", "user", "assistant"]
    assert "Question 0," in run.invocations[0]["prompt_messages"][2]["content"]
    assert "You are a helpful assistant." in prompt
    assert "My name is Ada." in prompt
    assert "Question 0," not in prompt
    assert "Question 199," in prompt
    assert "And now?" in prompt


def test_structured_output_is_the_answer_alone_and_fits_the_schema(dify: Dify) -> None:
    run = dify.play("structured", QUESTION, structured_output="supported")
    outputs = run.outputs("llm")
    assert set(outputs["structured_output"]) == {"capital", "certain"}
    assert json.loads(outputs["text"]) == outputs["structured_output"]
    assert run.answer == outputs["structured_output"]["capital"]


def test_structured_output_is_not_taken_from_json_in_the_thinking(bridge: Bridge) -> None:
    with scripted(
        bridge,
        '<|channel|>analysis<|message|>Maybe {"capital": "Lyon", "certain": false}? No.<|end|>'
        '<|start|>assistant<|channel|>final<|message|>{"capital": "Paris", "certain": true}<|return|>',
    ) as dify:
        # Without a constraint the model is invocation for JSON in the prompt, and its answer is taken as it is.
        run = dify.play("structured_in_words", QUESTION)
    assert json.loads(run.answer) == {"capital": "Paris", "certain": True}


def test_a_classifier_works_with_the_model_that_ships(dify: Dify) -> None:
    questions = {
        "What is the capital of France?": "geography",
        "What is 17 + 5?": "arithmetic",
    }
    assert {question: dify.play("classifier", question).answer for question in questions} == questions


@pytest.mark.parametrize(
    "form",
    ["```json\n{}\n```", "{}\n```\n", "{}", "\n```json\n{}", "It is this one:\n\n{}"],
    ids=[
        "a block",
        "a closing fence only",
        "bare JSON with a backtick",
        "an opening fence only",
        "after words",
    ],
)
def test_a_classifier_uses_the_answer_and_not_json_in_the_thinking(bridge: Bridge, form: str) -> None:
    answer = form.replace("{}", '{"keywords": ["`sum`"], "category_id": "2", "category_name": "Sums"}')
    with scripted(
        bridge,
        '<|channel|>analysis<|message|>Not {"category_id": "1", "category_name": "Questions about geography"}.<|end|>'
        f"<|start|>assistant<|channel|>final<|message|>{answer}<|return|>",
    ) as dify:
        run = dify.play("classifier", "What is 2 + 2?")
    assert run.outputs("classifier")["class_name"] == "Sums"
    assert run.answer == "arithmetic"


def test_parameters_are_taken_from_the_function_call_after_the_thinking(bridge: Bridge) -> None:
    with scripted(
        bridge,
        '<|channel|>analysis<|message|>Is it {"city": "Rome"}? They said Oslo.<|end|>'
        "<|start|>assistant<|channel|>commentary to=functions.extract_parameters <|constrain|>json<|message|>"
        '{"city": "Oslo", "days": 3}<|call|>',
    ) as dify:
        run = dify.play("extractor_call", "The weather in Oslo for three days, please.")
    outputs = run.outputs("extractor")
    assert (outputs["city"], outputs["days"]) == ("Oslo", 3)
    (invocation,) = run.invocations
    assert [tool["name"] for tool in invocation["tools"]] == ["extract_parameters"]


def test_a_node_that_hides_the_thinking_keeps_an_extractor_to_the_answer(
    bridge: Bridge,
) -> None:
    with scripted(
        bridge,
        '<|channel|>analysis<|message|>Is it {"city": "Rome", "days": 1}? They said Oslo.<|end|>'
        '<|start|>assistant<|channel|>final<|message|>{"city": "Oslo", "days": 3}<|return|>',
    ) as dify:
        run = dify.play("extractor_prompt", "The weather in Oslo for three days, please.")
    outputs = run.outputs("extractor")
    assert (outputs["city"], outputs["days"]) == ("Oslo", 3)


class BusyEngine(ScriptedEngine):
    """Its queue is full for the first requests, for longer than the plugin waits by itself."""

    def __init__(self, refusals: int, *, retry_after: int = 3600) -> None:
        super().__init__(lambda _: "<|channel|>final<|message|>Fine.<|return|>")
        self.refusals, self.retry_after = refusals, retry_after

    def generate(self, request: GenerationRequest) -> Generation:
        if self.refusals:
            self.refusals -= 1
            raise EngineBusy("The queue is full.", self.retry_after)
        return super().generate(request)


@pytest.mark.parametrize(
    ("refusals", "answer", "retries"),
    [(2, "Fine. / Fine.", 2), (3, "No model today. / Fine.", 2), (6, "No model today. / ", 4)],
    ids=["retries", "default value", "failure branch"],
)
def test_a_node_is_tried_again_when_the_server_is_full_and_then_falls_back(
    bridge: Bridge, refusals: int, answer: str, retries: int
) -> None:
    with BusyEngine(refusals) as engine, running(engine) as served:
        run = Dify(bridge, {"endpoint_url": served.url, "api_key": ""}).play("fallbacks", "Hello!")
    assert run.answer.startswith(answer)
    assert len(run.of("NodeRunRetryEvent")) == retries
    if refusals == 6:
        assert run.answer.endswith("[MLX] The queue is full; try again in 3600 s.")


def test_a_wait_that_the_server_asks_for_is_no_failure_of_the_node(bridge: Bridge) -> None:
    with BusyEngine(1, retry_after=1) as engine, running(engine) as served:
        run = Dify(bridge, {"endpoint_url": served.url, "api_key": ""}).play("fallbacks", "Hello!")
    assert run.answer == "Fine. / Fine."
    assert run.of("NodeRunRetryEvent") == []


def test_an_answer_that_broke_off_is_written_again(bridge: Bridge) -> None:
    half = Transcript(text="<|channel|>final<|message|>Fi", failure=EngineFailed("The engine broke.", 3600))
    whole = "<|channel|>final<|message|>Fine.<|return|>"
    with ScriptedEngine([half, whole, whole]) as engine, running(engine) as served:
        run = Dify(bridge, {"endpoint_url": served.url, "api_key": ""}).play("fallbacks", "Hello!")
    assert run.answer == "Fine. / Fine."
    assert len(run.of("NodeRunRetryEvent")) == 1


def test_a_server_that_is_down_is_an_error_with_advice(dify: Dify) -> None:
    run = dify.play("tagged", QUESTION, endpoint_url="http://127.0.0.1:9/v1")
    assert "[MLX] no server at http://127.0.0.1:9/v1: start it with" in run.error
    assert "Traceback" not in run.error
