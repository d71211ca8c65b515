"""Which of several limits holds for a reply."""

from typing import Any

import pytest

from mlx_backend.chat.effort_probe import probe_effort
from mlx_backend.chat.limits import ReplyLimits
from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.request import UNLIMITED, ChatRequest, CompletionRequest
from mlx_backend.conversation.effort import Effort
from mlx_backend.conversation.effort_sources import Resolution, resolve
from mlx_backend.errors import RequestError

CHAT = ChatRequest(messages=[])


def limits_of(**server: Any) -> ReplyLimits:
    return ReplyLimits(context_length=100, settings=ModelSettings(**server))


@pytest.mark.parametrize(
    ("requested", "configured", "expected"),
    [(None, None, 90), (None, 50, 50), (7, 50, 7), (60, 50, 60), (10**9, 50, 90), (None, 10**9, 90)],
)
def test_max_tokens_is_the_requests_then_the_models_and_never_more_than_fits(
    requested: int | None, configured: int | None, expected: int
) -> None:
    limits = limits_of(max_tokens=configured)
    assert limits.max_tokens_of(ChatRequest(messages=[], max_tokens=requested), 10) == expected


@pytest.mark.parametrize(
    ("request_", "param"), [(CHAT, "messages"), (CompletionRequest(prompt="a"), "prompt")]
)
def test_a_prompt_that_fills_the_context_is_refused_by_its_field(
    request_: ChatRequest | CompletionRequest, param: str
) -> None:
    with pytest.raises(RequestError, match="has 100 tokens; the context holds 100") as raised:
        ReplyLimits(context_length=100).max_tokens_of(request_, 100)
    assert raised.value.param == param
    assert raised.value.numbers == {"prompt_tokens": 100, "max_model_len": 100}


@pytest.mark.parametrize(
    ("tools", "tokens", "sentence"),
    [
        (
            36,
            60,
            "60 of its tokens describe the 36 tools that were sent with it: turn off what is not needed.",
        ),
        (1, 60, "60 of its tokens describe the tool that was sent with it: turn off what is not needed."),
        (1, 0, "the reply needs room too."),  # a template that ignores tools
    ],
)
def test_the_error_says_how_much_of_a_prompt_is_tools(tools: int, tokens: int, sentence: str) -> None:
    error = ReplyLimits(context_length=100).too_long("messages", 110, tools=tools, tool_tokens=tokens)
    assert str(error).startswith("The prompt has 110 tokens; the context holds 100, and the reply needs room")
    assert f"{sentence} This model's maximum context length is 100 tokens. However, your " in str(error)
    assert error.numbers == {"prompt_tokens": 110, "max_model_len": 100} | (
        {"tool_tokens": tokens} if tokens else {}
    )


def at(effort: str) -> Resolution:
    """What an effort comes to on a model without a scale: low 50 tokens, medium 70, high as many as it likes."""
    scale = probe_effort(None, reasons=True, budgets=((Effort.LOW, 50), (Effort.MEDIUM, 70)))
    return resolve({"reasoning_effort": effort}, [{"role": "user", "content": "?"}], scale=scale)


def test_the_thinking_budget_is_the_requests_then_the_models_and_none_at_effort_none() -> None:
    limits = limits_of(thinking_budget=9)
    unlimited = ChatRequest(messages=[], thinking_budget=UNLIMITED)
    assert limits.thinking_budget_of(CHAT, at("high")) == 9
    assert limits.thinking_budget_of(unlimited, at("high")) is None
    assert limits.thinking_budget_of(unlimited, at("none")) == 0
    assert ReplyLimits(context_length=100).thinking_budget_of(CHAT, at("high")) is None


def test_an_effort_that_stands_for_a_budget_keeps_to_the_models_and_gives_way_to_the_requests() -> None:
    open_, tight = ReplyLimits(context_length=100), limits_of(thinking_budget=60)
    assert [open_.thinking_budget_of(CHAT, at(effort)) for effort in ("low", "medium")] == [50, 70]
    assert [tight.thinking_budget_of(CHAT, at(effort)) for effort in ("low", "medium")] == [50, 60]
    asked = ChatRequest(messages=[], thinking_budget=99)
    assert open_.thinking_budget_of(asked, at("low")) == 99


def test_a_configured_answer_reserve_is_at_most_half_the_reply_and_a_requested_one_is_not() -> None:
    limits = limits_of(answer_reserve=30)
    assert limits.answer_reserve_of(CHAT, 80) == 30
    assert limits.answer_reserve_of(CHAT, 40) == 20
    assert limits.answer_reserve_of(ChatRequest(messages=[], answer_reserve=35), 40) == 35
    assert ReplyLimits(context_length=100).answer_reserve_of(CHAT, 80) is None


def test_a_request_may_do_without_the_configured_answer_reserve() -> None:
    limits = limits_of(answer_reserve=30)
    assert limits.answer_reserve_of(ChatRequest(messages=[], answer_reserve=0), 80) is None
    assert limits_of(answer_reserve=0).answer_reserve_of(CHAT, 80) is None
