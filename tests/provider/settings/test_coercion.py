"""Settings from a workflow that was written for another model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from daemon import PluginError
from fake_servers import mlx_backend

from dify_mlx_provider.servers.efforts import LEVELS, SWITCH
from dify_mlx_provider.settings.coercion import coerce

if TYPE_CHECKING:
    from daemon import PluginProcess


def a_rule(name: str, **parts: Any) -> Any:
    """A parameter rule as far as it matters here; the SDK's own class would patch this process's threads."""
    return SimpleNamespace(**{"name": name, "options": (), "max": None, "precision": None, **parts})


@pytest.mark.parametrize(
    ("given", "options", "taken"),
    [
        ("high", LEVELS, "high"),
        ("HIGH", LEVELS, "high"),
        ("高", LEVELS, "high"),
        ("middle", LEVELS, "medium"),
        ("xhigh", LEVELS, "high"),
        ("minimal", LEVELS, "low"),
        ("none", LEVELS, "low"),
        ("high", SWITCH, "medium"),
        ("minimal", SWITCH, "medium"),  # a little reasoning is not none
        ("off", SWITCH, "none"),
        (True, SWITCH, "medium"),
        (False, SWITCH, "none"),
        ("banana", LEVELS, "banana"),
    ],
)
def test_an_effort_becomes_the_nearest_option(given: Any, options: tuple[str, ...], taken: str) -> None:
    rules = [a_rule("reasoning_effort", options=options)]
    assert coerce({"reasoning_effort": given}, rules) == {"reasoning_effort": taken}


@pytest.mark.parametrize(
    ("rule", "given", "taken"),
    [
        (a_rule("max_tokens", max=4096), 32_768, 4096),
        (a_rule("max_tokens", max=4096), 100, 100),
        (a_rule("thinking_budget", max=4096), 32_768, 4096),
        (a_rule("temperature", max=2.0, precision=2), 0.33333, 0.33),
        (a_rule("temperature", max=2.0, precision=2), 3.0, 3.0),  # too hot is the SDK's to refuse
        (a_rule("top_k", max=200), 20.0, 20),
        (a_rule("top_k", max=200), True, True),
        (a_rule("response_format", options=("text", "json_object")), "JSON_Object", "json_object"),
        (a_rule("response_format", options=("text", "json_object")), "JSON", "json_object"),
        (a_rule("response_format", options=("text", "json_object")), "yaml", "yaml"),
    ],
)
def test_values_that_nearly_fit_are_made_to_fit(rule: Any, given: Any, taken: Any) -> None:
    result = coerce({rule.name: given, "unknown": 1, "empty": None}, [rule, a_rule("empty")])
    assert result == {rule.name: taken, "unknown": 1, "empty": None}
    assert type(result[rule.name]) is type(taken)


def test_an_empty_option_counts_as_not_chosen() -> None:
    rules = [a_rule("reasoning_effort", options=("low", "medium")), a_rule("stop")]
    assert coerce({"reasoning_effort": " ", "stop": ""}, rules) == {"stop": ""}


def test_a_workflow_written_for_gpt_oss_runs_with_a_model_that_has_a_switch(plugin: PluginProcess) -> None:
    qwen = {
        "id": "qwen",
        "context_length": 4096,
        "capabilities": ["completion", "thinking"],
        "reasoning": {"efforts": ["none", "medium"], "default": "medium"},
    }
    settings = {"reasoning_effort": "high", "max_tokens": 32_768, "temperature": 0.12345}
    with mlx_backend(qwen) as server:
        form = {"endpoint_url": server.address}
        question = {"role": "user", "content": "hi"}
        list(plugin.invoke([question], credentials=form, model="qwen", parameters=settings))
        (body,) = server.bodies
        assert (body["reasoning_effort"], body["max_tokens"], body["temperature"]) == ("medium", 4096, 0.12)
        with pytest.raises(PluginError, match=r"should be one of \['none', 'medium'\]"):
            list(
                plugin.invoke(
                    [question], credentials=form, model="qwen", parameters={"reasoning_effort": "banana"}
                )
            )
