"""Requests recorded from a real Dify (dify_cases/), through the packaged plugin to the real server.

A case is a JSON file: `what` it is, the `request` as Dify's daemon hands it to the plugin, and what to `expect`:

    answer       the text after the thinking block          thinking   words in the block
    no_block     the whole text is the answer               some_answer   there is one
    json_keys    the answer is a JSON object of these keys  calls      [name, arguments] of each tool call
    pieces       the number of chunks                       finish     Dify's finish_reason
    completion_tokens_at_most                               error      its kind, and words in its message
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError, PluginProcess
from dify_view import calls_of, split_reasoning, text_of, user

if TYPE_CHECKING:
    from collections.abc import Mapping

CASES = sorted((Path(__file__).parent / "dify_cases").glob("*.json"))


def asked(plugin: PluginProcess, credentials: Mapping[str, str], request: Mapping[str, Any]) -> Any:
    return plugin.request("invoke_llm", provider="mlx", model_type="llm", credentials=credentials, **request)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_dify_sends_is_answered_as_dify_needs_it(
    plugin: PluginProcess, credentials: dict[str, str], path: Path
) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    expected: dict[str, Any] = case["expect"]
    if "error" in expected:
        with pytest.raises(PluginError) as caught:
            list(asked(plugin, credentials, case["request"]))
        assert caught.value.kind == expected["error"]["kind"], caught.value
        assert expected["error"]["says"] in caught.value.message
        return
    chunks = list(asked(plugin, credentials, case["request"]))
    text, last = text_of(chunks), chunks[-1]["delta"]
    answer, thinking = split_reasoning(text)
    assert text.count("<think>") == text.count("</think>") <= 1
    observed = {
        "answer": answer,
        "some_answer": bool(answer),
        "no_block": "<think>" not in text,
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls_of(chunks)],
        "pieces": len(chunks),
        "finish": last["finish_reason"],
    }
    assert {key: observed[key] for key in expected if key in observed} == {
        key: value for key, value in expected.items() if key in observed
    }
    assert expected.get("thinking", "") in thinking
    if "json_keys" in expected:
        assert list(json.loads(text)) == expected["json_keys"]
    if "completion_tokens_at_most" in expected:
        assert 0 < last["usage"]["completion_tokens"] <= expected["completion_tokens_at_most"]


def test_every_expectation_of_a_case_is_checked() -> None:
    known = {"answer", "some_answer", "no_block", "calls", "pieces", "finish", "thinking", "json_keys"}
    known |= {"completion_tokens_at_most", "error"}
    for path in CASES:
        assert set(json.loads(path.read_text(encoding="utf-8"))["expect"]) <= known, path.name


def test_an_abandoned_run_does_not_block_the_next(plugin: PluginProcess, credentials: dict[str, str]) -> None:
    """Dify does not tell its plugins about Stop: it stops reading, and the user asks something else."""
    stopped = plugin.invoke([user("Count to 30.")], credentials=credentials)
    assert next(stopped)["delta"]["message"]["content"] == "<think>\n"
    again = plugin.invoke([user("What is the capital of France?")], credentials=credentials)
    assert split_reasoning(text_of(list(again)))[0] == "The capital of France is Paris."
