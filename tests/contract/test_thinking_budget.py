"""Reasoning that has its limits, on the model that ships behind the real server: the answer comes all the same."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from running_server import RunningServer, running

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.request import UNLIMITED, ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.conversation.events import ReasoningDelta
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.threaded import Engine
from mlx_backend.models.spec import ModelDefaults
from mlx_backend.settings import Settings

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
OSLO = [{"role": "user", "content": "What is the weather in Oslo?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY},
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
ANSWER = "The capital of France is Paris."
HEADERS = 3 + 6 + 1  # the analysis message's header, from its end into the final message, and the end


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load_engine(MODEL_PATH) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[RunningServer]:
    with running(engine) as server:
        yield server


def answer(
    server: RunningServer, messages: Any = FRANCE, **fields: Any
) -> tuple[dict[str, Any], str, int, int]:
    """Return the message, why it ended, and how many tokens it had, of all and of reasoning."""
    reply = server.chat(messages, **({"reasoning_effort": "high"} | fields))
    [choice], usage = reply["choices"], reply["usage"]
    reasoned = usage["completion_tokens_details"]["reasoning_tokens"]
    return choice["message"], choice["finish_reason"], usage["completion_tokens"], reasoned


def test_reasoning_is_cut_where_its_budget_ends_and_the_usage_says_so(server: RunningServer) -> None:
    free, _, whole, reasoned = answer(server)
    tail = whole - reasoned - HEADERS
    for tokens in (1, 7, reasoned - 1):
        message, finish, used, spent = answer(server, thinking_budget=tokens)
        assert (finish, spent, used) == ("stop", tokens, tokens + HEADERS + tail)
        assert free["reasoning_content"].startswith(message["reasoning_content"])
        assert message["content"] == ANSWER


@pytest.mark.parametrize("fields", [{"thinking_budget": 0}, {"reasoning_effort": "none"}])
def test_no_reasoning_is_none_at_all(server: RunningServer, fields: dict[str, Any]) -> None:
    message, finish, _, reasoned = answer(server, **fields)
    assert (message["content"], finish, reasoned) == (ANSWER, "stop", 0)
    assert not message.get("reasoning_content")


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_budget_that_is_not_reached_changes_nothing(server: RunningServer, temperature: float) -> None:
    fields: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_tokens": 5000}
    same = {"thinking_budget": 4000, "answer_reserve": 20}
    assert answer(server, **fields, **same) == answer(server, **fields)


@pytest.mark.parametrize("room", [1, 3, 4, 16, 25, 60])
def test_max_tokens_leave_room_for_the_answer(server: RunningServer, room: int) -> None:
    message, finish, used, _ = answer(server, max_tokens=room, answer_reserve=16)
    said = message["content"] or ""
    assert used <= room
    assert ANSWER.startswith(said)
    if room >= 3 + 16:  # the header of a final message, fifteen tokens of answer and its end
        assert (said, finish) == (ANSWER, "stop")
    else:
        assert finish == "length"


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_budget": 9},
        {"answer_reserve": 20, "max_tokens": 60},
        {"thinking_budget": 3, "temperature": 1},
    ],
    ids=str,
)
def test_streamed_it_is_the_same(server: RunningServer, fields: dict[str, Any]) -> None:
    fields = {"reasoning_effort": "high", "seed": 5, **fields}
    [whole] = server.chat(FRANCE, **fields)["choices"]
    chunks = server.chunks(FRANCE, **fields)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    for field in ("reasoning_content", "content"):
        assert "".join(delta.get(field) or "" for delta in deltas) == (whole["message"].get(field) or "")
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_in_company_each_is_what_it_is_alone(server: RunningServer) -> None:
    cases: list[dict[str, Any]] = [
        {"thinking_budget": 5},
        {"max_tokens": 60},
        {"thinking_budget": 30, "temperature": 1, "seed": 3},
        {"temperature": 1, "seed": 3, "max_tokens": 60},
        {"answer_reserve": 12, "max_tokens": 40},
        {"reasoning_effort": "none"},
        {"thinking_budget": 8, "response_format": SCHEMA},
    ]
    alone = [answer(server, **case) for case in cases]
    with ThreadPoolExecutor(len(cases)) as clients:
        assert list(clients.map(lambda case: answer(server, **case), cases)) == alone


@pytest.mark.parametrize("tokens", [0, 1, 10])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_call_is_made_all_the_same(server: RunningServer, choice: str, tokens: int) -> None:
    message, finish, _, reasoned = answer(
        server, OSLO, tools=[TOOL], tool_choice=choice, thinking_budget=tokens
    )
    [call] = message["tool_calls"]
    assert (finish, reasoned) == ("tool_calls", tokens)
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["alone", "tools"])
@pytest.mark.parametrize("tokens", [0, 3, 4000])
def test_an_answer_is_held_to_its_schema_behind_reasoning_that_was_cut(
    server: RunningServer, tokens: int, tools: list[Any]
) -> None:
    held = {"response_format": SCHEMA, "tools": tools, "thinking_budget": tokens}
    message, finish, _, reasoned = answer(server, **held, temperature=1, seed=0, max_tokens=400)
    assert finish in ("stop", "tool_calls")
    assert reasoned <= tokens
    if finish == "stop":
        assert json.loads(message["content"]).keys() == {"city"}


def test_drafts_say_the_same_under_a_budget(server: RunningServer) -> None:
    cases: list[dict[str, Any]] = [
        *({"thinking_budget": tokens} for tokens in (0, 1, 23)),
        {"answer_reserve": 12, "max_tokens": 50},
        {"thinking_budget": 17, "temperature": 1, "seed": 2},
    ]
    with load_engine(MODEL_PATH, draft_from_text=True, draft_tokens=6) as fast, running(fast) as drafting:
        for case in cases:
            assert answer(drafting, **case) == answer(server, **case)


def service_of(engine: Engine, own: ModelDefaults | None = None, **server: Any) -> Service:
    """A service with a model's own settings, and these of the server."""
    return Service(engine, ModelSettings.of(own, Settings(**server)))


def test_the_models_own_budget_holds_where_a_request_has_none(engine: Engine) -> None:
    def reasoned(service: Service, **fields: Any) -> int:
        effort = {"reasoning_effort": "high"}
        reply = service.chat(ChatRequest(messages=FRANCE, fields=effort, **fields))
        list(reply.events())
        return reply.usage.reasoning_tokens

    of_the_model = service_of(engine, ModelDefaults(thinking_budget=6), thinking_budget=9)
    of_the_server = service_of(engine, thinking_budget=9)
    assert [reasoned(service) for service in (of_the_model, of_the_server)] == [6, 9]
    assert reasoned(of_the_model, thinking_budget=12) == 12
    assert reasoned(of_the_model, thinking_budget=UNLIMITED) == reasoned(Service(engine)) > 12


def test_a_server_may_keep_room_for_answers_that_no_client_asks_for(engine: Engine) -> None:
    @cache
    def tokens(service: Service, room: int | None, **fields: Any) -> tuple[int, int]:
        reply = service.chat(
            ChatRequest(messages=FRANCE, max_tokens=room, fields={"reasoning_effort": "high"}, **fields)
        )
        list(reply.events())
        return reply.usage.reasoning_tokens, reply.usage.completion_tokens

    asked = service_of(engine, prewarm=False)
    of_the_server = service_of(engine, answer_reserve=30, prewarm=False)
    of_the_model = service_of(engine, ModelDefaults(answer_reserve=12), answer_reserve=30, prewarm=False)
    for room in (20, 60):
        for service, reserve in ((of_the_server, 30), (of_the_model, 12)):
            told = tokens(service, room)
            assert told == tokens(asked, room, answer_reserve=min(reserve, room // 2))
            assert told[0] < tokens(asked, room)[0]
    for service in (of_the_server, of_the_model):
        assert tokens(service, 20, answer_reserve=8) == tokens(asked, 20, answer_reserve=8)
    assert tokens(of_the_server, None) == tokens(asked, None)
    assert tokens(of_the_server, 1)[1] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking_token_budget": 5},
        {"thinking_budget_tokens": 5},
        {"reasoning_budget": 5},
        {"reasoning_budget_tokens": 5},
        {"reasoning": {"effort": "high", "max_tokens": 5}},
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"chat_template_kwargs": {"thinking_budget": 5}},
        {"thinking_budget": 5, "thinking_token_budget": 5, "reasoning": {"max_tokens": "5"}},
    ],
    ids=str,
)
def test_a_budget_may_come_by_other_names(server: RunningServer, fields: dict[str, Any]) -> None:
    message, _, _, reasoned = answer(server, **fields)
    assert (reasoned, message["content"]) == (5, ANSWER)


@pytest.mark.parametrize("name", ["thinking_budget_message", "reasoning_budget_message"])
def test_a_message_ends_reasoning_that_is_cut_short_and_is_counted_as_reasoning(
    server: RunningServer, name: str
) -> None:
    cut, *_ = answer(server, thinking_budget=5)
    message, finish, _, reasoned = answer(server, thinking_budget=5, **{name: "I answer now."})
    assert message["reasoning_content"] == cut["reasoning_content"] + "\n\nI answer now."
    assert (message["content"], finish) == (ANSWER, "stop")
    tokens = server.call("/v1/tokenize", {"prompt": "\n\nI answer now.", "add_special_tokens": False})[1][
        "tokens"
    ]
    assert reasoned == 5 + len(tokens)


def test_the_message_of_the_server_holds_unless_the_request_has_another_or_none(engine: Engine) -> None:
    service = service_of(engine, thinking_budget=3, thinking_budget_message="Now.", prewarm=False)

    def reasoning(message: str | None) -> str:
        request = ChatRequest(
            messages=FRANCE, fields={"reasoning_effort": "high"}, thinking_budget_message=message
        )
        events = service.chat(request).events()
        return "".join(event.text for event in events if isinstance(event, ReasoningDelta))

    assert reasoning(None).endswith("\n\nNow.")
    assert reasoning("Soon.").endswith("\n\nSoon.")
    assert "\n" not in reasoning("")
