"""POST /v1/messages: what a conversation of content blocks becomes, and what comes back, against Anthropic's types."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from picture_files import data_uri, png
from pydantic import TypeAdapter
from running_server import running
from scripted_engine import (
    HARMONY_MARKERS,
    HARMONY_TEMPLATE,
    IMAGE_MARKERS,
    ScriptedEngine,
    ScriptedImageProcessor,
    ScriptedTokenizer,
    Transcript,
)
from scripted_server import ANSWER, CALL, client_of

from mlx_backend.api.sealed_reasoning import seal, sign

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client

PATH = "/v1/messages"
USER = {"role": "user", "content": "hello"}
WEATHER = {"name": "weather", "description": "The weather", "input_schema": {"type": "object"}}
LOOKUP = {"name": "lookup", "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}}}

event_type: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture
def prompts() -> list[str]:
    """What the engine was given."""
    return []


@pytest.fixture
def engine(prompts: list[str]) -> Iterator[ScriptedEngine]:
    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return CALL if "functions.weather" in prompt else ANSWER

    with ScriptedEngine(reply) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return client_of(engine)


def created(client: Client, *messages: Any, **fields: Any) -> dict[str, Any]:
    """The message, which Anthropic's client can read."""
    response = client.post(PATH, json={"messages": messages or [USER], "max_tokens": 1000, **fields})
    assert response.status_code == 200, response.get_data(as_text=True)
    assert response.headers["request-id"] == response.headers["x-request-id"]
    body: dict[str, Any] = response.get_json()
    Message.model_validate(body)
    return body


def streamed(client: Client, *messages: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which Anthropic's client can read."""
    body = {"messages": messages or [USER], "max_tokens": 1000, "stream": True, **fields}
    response = client.post(PATH, json=body)
    assert response.mimetype == "text/event-stream", response.get_data(as_text=True)
    comment, *blocks, last = response.get_data(as_text=True).split("\n\n")
    assert comment.startswith(":")
    assert last == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if name != "event: ping":  # which that client takes out of the stream itself
            event_type.validate_python(event)
        events.append(event)
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream describes, put together as a client does."""
    message: dict[str, Any] = {**events[0]["message"], "content": []}
    inputs: dict[int, str] = {}
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(dict(block))
                inputs[index] = ""
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **delta}}:
                block = message["content"][index]
                if kind == "input_json_delta":
                    inputs[index] += str(delta["partial_json"])
                else:
                    name, text = delta.popitem()
                    block[name] = f"{block[name]}{text}"
            case {"type": "content_block_stop", "index": index}:
                if message["content"][index]["type"] == "tool_use":
                    message["content"][index]["input"] = json.loads(inputs[index])
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= delta
                message["usage"] = usage
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_an_answer_is_a_thinking_block_and_a_text(client: Client) -> None:
    message = created(client, output_config={"effort": "high"})
    thinking, text = message["content"]
    assert thinking == {
        "type": "thinking",
        "thinking": "Capital of France.",
        "signature": sign("Capital of France."),
    }
    assert text == {"type": "text", "text": "The capital is Paris."}
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["input_tokens"] > 0
    assert usage["cache_read_input_tokens"] == 0
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER]},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"stop_sequences": ["Paris"]},
    ],
    ids=["an answer", "a call", "thinking omitted", "stopped"],
)
def test_a_stream_is_the_message_that_is_sent_whole(client: Client, fields: dict[str, Any]) -> None:
    events = streamed(client, **fields)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert without_ids(folded(events)) == without_ids(created(client, **fields))


def test_a_call_is_a_tool_use_with_its_input_as_an_object(client: Client) -> None:
    message = created(client, tools=[WEATHER])
    *_, call = message["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Oslo"})
    assert message["stop_reason"] == "tool_use"


def test_a_stop_sequence_is_named(client: Client) -> None:
    message = created(client, stop_sequences=["nowhere", "Paris"])
    assert message["content"][-1]["text"] == "The capital is "
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "Paris")


def test_a_reply_that_fills_the_context_says_so() -> None:
    with ScriptedEngine([ANSWER], context_length=40) as engine:
        message = created(client_of(engine))
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_a_server_that_is_too_busy_says_when_to_try_again() -> None:
    body = {"messages": [USER], "max_tokens": 9, "stream": True}
    with ScriptedEngine(lambda _: ANSWER, gated=True, max_concurrent=1, max_waiting=0) as engine:
        client = client_of(engine)
        running_reply = client.post(PATH, json=body)
        refused = client.post(PATH, json=body)
        running_reply.close()
    assert refused.status_code == 529
    assert int(refused.headers["Retry-After"]) > 0
    assert refused.get_json()["error"]["type"] == "overloaded_error"


def test_a_ping_says_how_much_of_the_prompt_has_been_read() -> None:
    body = {"messages": [USER], "max_tokens": 9, "stream": True}
    with ScriptedEngine([Transcript(text=ANSWER, prefill=2)], gated=True) as engine:
        response = client_of(engine, keepalive_seconds=0).post(PATH, json=body)
        pieces = response.iter_encoded()
        assert next(pieces).startswith(b":")
        assert next(pieces) == b'event: ping\ndata: {"type":"ping"}\n\n'  # it waits
        engine.advance()
        assert any(b"message_start" in piece for piece in pieces)
        engine.advance()
        assert any(b'"processed":22,"total":22' in piece for piece in pieces)
        response.close()


def test_a_message_that_is_cut_has_no_half_call(client: Client) -> None:
    tokens = created(client, tools=[WEATHER])["usage"]["output_tokens"] - 3
    message = created(client, tools=[WEATHER], max_tokens=tokens)
    assert message["stop_reason"] == "max_tokens"
    assert all(block["type"] != "tool_use" for block in message["content"])
    events = streamed(client, tools=[WEATHER], max_tokens=tokens)
    begun = [event["index"] for event in events if event["type"] == "content_block_start"]
    ended = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert begun == [*ended, len(ended)]


THINKING = {"type": "thinking", "thinking": "Ask.", "signature": sign("Ask.")}
HISTORY: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}],
    },
    {
        "role": "assistant",
        "content": [
            THINKING,
            {"type": "text", "text": "One moment."},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."}]},
]


@pytest.mark.parametrize(
    "block",
    [
        THINKING,
        {"type": "thinking", "thinking": "", "signature": seal("Ask.")},
        {"type": "thinking", "thinking": "Ask."},
        {"type": "redacted_thinking", "data": seal("Ask.")},
    ],
    ids=["signed", "omitted", "without a signature", "redacted"],
)
def test_reasoning_comes_back_in_each_of_its_forms(
    client: Client, prompts: list[str], block: dict[str, Any]
) -> None:
    user, assistant, result = HISTORY
    created(client, user, {**assistant, "content": [block, *assistant["content"][1:]]}, result)
    assert "<|channel|>analysis<|message|>Ask.<|end|>" in prompts[-1]
    assert "Rain." in prompts[-1]


BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=abc;"


@pytest.mark.parametrize(
    "system",
    [
        [
            {"type": "text", "text": BILLING},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ],
        f"{BILLING}\n\nBe brief.",
        "Be brief.",
    ],
)
def test_instructions_are_kept_but_for_what_is_no_models(
    client: Client, prompts: list[str], system: Any
) -> None:
    created(client, USER, {"role": "system", "content": "It is Monday."}, system=system)
    assert "billing" not in prompts[-1]
    assert prompts[-1].index("Be brief.") < prompts[-1].index("hello") < prompts[-1].index("It is Monday.")


def test_what_is_only_written_in_another_way_is_the_same_prompt(client: Client, prompts: list[str]) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "lookup", "input": {"key": "w"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "Found."}
    conversation: list[Any] = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    created(client, *conversation, tools=[LOOKUP, WEATHER], system="Be brief.")
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    text = {"type": "text", "text": "hello", **mark}
    marked = {**result, "content": [{"type": "text", "text": "Found."}], "is_error": False, **mark}
    created(
        client,
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": [{**call, "caller": {"type": "direct"}, **mark}]},
        {"role": "user", "content": [marked]},
        tools=[{**WEATHER, **mark}, LOOKUP],
        system=[{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief.", **mark}],
        metadata={"user_id": "another"},
        **mark,
    )
    assert prompts[-1] == prompts[-2]


def test_a_deferred_tool_comes_in_where_it_is_referenced(client: Client, prompts: list[str]) -> None:
    tools = [LOOKUP, {**WEATHER, "defer_loading": True}]
    created(client, tools=tools)
    assert "weather" not in prompts[-1]
    reference = {"type": "tool_reference", "tool_name": "weather"}
    call = {"type": "tool_use", "id": "t1", "name": "lookup", "input": {"key": "w"}}
    created(
        client,
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [reference]}]},
        tools=tools[::-1],
    )
    head, _, rest = prompts[-1].partition("hello")
    assert "weather" not in head
    assert '"name": "weather", "description": "The weather"' in rest
    assert prompts[-1].startswith(prompts[-2].partition("hello")[0])


ADDED = {"type": "tool_definition", "definition": WEATHER}
ADDED_TOOL = {"type": "tool_addition", "tool": ADDED}
NAMED = {"type": "tool_reference", "name": "weather"}


def changes(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks)}


@pytest.mark.parametrize(
    ("tool", "tools"),
    [(NAMED, [LOOKUP, {**WEATHER, "defer_loading": True}]), (ADDED, [LOOKUP])],
    ids=["a tool of the list", "a tool of its own"],
)
def test_a_system_message_adds_a_tool_and_removes_it(
    client: Client, prompts: list[str], tool: dict[str, Any], tools: list[dict[str, Any]]
) -> None:
    def offered(*messages: dict[str, Any]) -> str:
        body = {"messages": messages, "tools": tools, "tool_choice": {"type": "tool", "name": "x"}}
        told: str = client.post(PATH, json=body).get_json()["error"]["message"]
        return told.partition("the request's tools: ")[2]

    addition, removal = {"type": "tool_addition", "tool": tool}, {"type": "tool_removal", "tool": NAMED}
    added = changes({"type": "text", "text": "Mind."}, addition)
    created(client, USER, added, tools=tools)
    head, _, rest = prompts[-1].partition("Mind.")
    assert "weather" not in head
    assert '"name": "weather", "description": "The weather"' in rest
    assert offered(USER, added) == "lookup, weather."
    assert offered(USER, added, changes(removal)) == "lookup."


def test_a_tool_is_defined_once_however_often_it_is_named(client: Client, prompts: list[str]) -> None:
    tools = [LOOKUP, {**WEATHER, "defer_loading": True}]
    added, removed = ({"type": f"tool_{what}", "tool": NAMED} for what in ("addition", "removal"))
    created(client, USER, changes(added, added), changes(removed), changes(added), tools=tools)
    assert prompts[-1].count('"The weather"') == 1
    assert prompts[-1].count("This tool can be called now: ") == 3


def test_a_system_message_that_is_for_one_turn_is_gone_in_the_next(
    client: Client, prompts: list[str]
) -> None:
    brief = {"role": "system", "content": "Be quick.", "clear_at": "next_user_message"}
    created(client, USER, brief)
    assert "Be quick." in prompts[-1]
    created(client, USER, brief, {"role": "assistant", "content": "Yes."}, USER)
    assert "Be quick." not in prompts[-1]


@pytest.mark.parametrize(
    ("fields", "messages", "effort"),
    [
        ({"output_config": {"effort": "high"}}, [], "high (output_config.effort)"),
        ({"output_config": {"effort": "high"}}, [{"effort": "low"}], "low (output_config.effort)"),
        ({}, [{"effort": "low"}, {"effort": "high"}, {}], "high (output_config.effort)"),
        (
            {"output_config": {"effort": "high"}, "thinking": {"type": "disabled"}},
            [],
            "none (thinking.type)",
        ),
        ({"thinking": {"type": "between_tools"}}, [{"effort": "low"}], "none (thinking.type)"),
    ],
)
def test_the_last_message_that_asks_for_an_effort_decides_it_unless_thinking_is_off(
    client: Client, fields: dict[str, Any], messages: list[dict[str, Any]], effort: str
) -> None:
    asking = [{"role": "system", "content": [], "output_config": config} for config in messages]
    response = client.post(PATH, json={"messages": [USER, *asking], "max_tokens": 9, **fields})
    assert response.headers["x-mlx-backend-effort"].startswith(effort)


def test_a_failed_tool_says_so_to_the_model(client: Client, prompts: list[str]) -> None:
    user, assistant, _ = HISTORY
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such file", "is_error": True}
    created(client, user, assistant, {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]})
    assert "Error: no such file" in prompts[-1]
    assert prompts[-1].index("no such file") < prompts[-1].index("Well?")


PICTURE = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": data_uri(png(60, 90)).partition(",")[2],
    },
}
SEARCHED = {
    "role": "user",
    "content": [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_1",
            "content": [PICTURE, {"type": "tool_reference", "tool_name": "lookup"}],
        },
        {"type": "text", "text": "Well?"},
    ],
}


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        (HISTORY, {"tools": [WEATHER]}),
        (HISTORY, {"tools": [WEATHER], "tool_choice": {"type": "none"}, "system": "Be brief."}),
        ([USER, changes(ADDED_TOOL), USER], {"system": [{"type": "text", "text": "Be brief."}]}),
        ([{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is it?"}]}], {}),
        ([*HISTORY[:2], SEARCHED], {"tools": [WEATHER, {**LOOKUP, "defer_loading": True}]}),
        (HISTORY, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
        ([USER, {"role": "assistant", "content": "I say"}], {"output_config": {"effort": "low"}}),
    ],
)
def test_tokens_are_counted_as_they_are_used(messages: list[Any], fields: dict[str, Any]) -> None:
    tokenizer = ScriptedTokenizer((*HARMONY_MARKERS, *IMAGE_MARKERS), HARMONY_TEMPLATE)
    processor = ScriptedImageProcessor(tokenizer)
    engine = ScriptedEngine(lambda _: ANSWER, tokenizer=tokenizer, image_processor=processor)
    body = {"messages": messages, "max_tokens": 9, **fields}
    with running(engine) as server:
        _, counted = server.call(f"{PATH}/count_tokens", body)
        _, message = server.call(PATH, body)
    usage = message["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("tool", "arguments"),
    [
        ({"type": "bash_20250124", "name": "bash"}, {"command", "restart"}),
        (
            {
                "type": "text_editor_20250728",
                "name": "str_replace_based_edit_tool",
                "max_characters": 9,
            },
            {"command", "path", "file_text", "old_str", "new_str", "view_range"},
        ),
        ({"type": "memory_20250818", "name": "memory"}, {"command", "path", "old_path", "new_path"}),
    ],
)
def test_tools_that_the_client_runs_are_described_though_the_api_says_what_they_take(
    client: Client, prompts: list[str], tool: dict[str, Any], arguments: set[str]
) -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    created(client, USER, changes(added))
    definition = json.loads(re.search(r"can be called now: (\{.*?\})<\|end", prompts[-1])[1])  # type: ignore[index]
    assert definition["name"] == tool["name"]
    assert arguments <= definition["parameters"]["properties"].keys()
    created(client, tools=[tool])
    assert f"functions.{tool['name']}" in prompts[-1]


def test_tools_that_run_at_anthropic_are_left_out_and_named(client: Client) -> None:
    tools = [WEATHER, {"type": "web_search_20250305", "name": "web_search"}]
    response = client.post(PATH, json={"messages": [USER], "max_tokens": 9, "tools": tools})
    assert response.headers["x-mlx-backend-ignored"] == "tools.web_search_20250305"


def test_the_models_are_listed_in_the_shape_of_who_asks(client: Client) -> None:
    listed = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).get_json()
    [model] = listed["data"]
    assert model["type"] == "model"
    assert listed["first_id"] == listed["last_id"] == model["id"]
    assert client.get("/v1/models").get_json()["object"] == "list"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        (
            {"messages": [{"role": "assistant", "content": [{**THINKING, "signature": "EuY"}]}]},
            "messages[0].content[0].signature",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{**THINKING, "thinking": "Changed."}]}]},
            "messages[0].content[0].signature",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [{"type": "tool_reference", "tool_name": "x"}],
                            }
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0].tool_name",
        ),
        ({"system": [7]}, "system[0]"),
        ({"tools": [{"name": ""}]}, "tools[0].name"),
        ({"tools": [WEATHER, {**WEATHER, "description": "x"}]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"output_config": "high"}, "output_config: must be an object"),
        ({"messages": [{"role": "system", "content": "x", "output_config": 7}]}, "messages[0].output_config"),
        ({"messages": [{"role": "system", "content": "x", "clear_at": 7}]}, "messages[0].clear_at"),
        (
            {"messages": [{"role": "assistant", "content": [{**THINKING, "signature": 7}]}]},
            "messages[0].content[0].signature: must be a text",
        ),
        ({"system": 7}, "system: input should be"),
        ({"tools": [None]}, "tools[0]: must be an object"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"effort": "enormous"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        (
            {"messages": [changes({"type": "tool_addition", "tool": NAMED})]},
            "messages[0].content[0].tool.name",
        ),
        (
            {"messages": [changes({"type": "tool_addition", "tool": {**ADDED, "definition": {}}})]},
            "messages[0].content[0].tool.definition.name",
        ),
        ({"messages": [changes({"type": "tool_removal"})]}, "messages[0].content[0].tool.name"),
        ({"messages": [changes({"type": "image"})]}, "messages[0].content[0]"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(client: Client, fields: dict[str, Any], place: str) -> None:
    response = client.post(PATH, json={"messages": [USER], "max_tokens": 9, **fields})
    assert response.status_code == 400, response.get_data(as_text=True)
    body = response.get_json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert place in body["error"]["message"]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "thinking", "thinking": "Hm.", "signature": "EuYBCkQ"},
        {"type": "redacted_thinking", "data": "EuYBCkQ"},
    ],
)
def test_thinking_of_another_server_is_refused_in_the_words_that_make_clients_leave_it_out(
    client: Client, block: dict[str, Any]
) -> None:
    messages = [USER, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}, USER]
    response = client.post(PATH, json={"messages": messages, "max_tokens": 9})
    assert response.status_code == 400
    told = response.get_json()["error"]["message"].replace("`", "")
    assert f"Invalid {'signature' if 'signature' in block else 'data'} in {block['type']} block" in told


@pytest.mark.parametrize("path", ["/v1/messages/batches", "/v1/files", "/v1/skills"])
def test_an_address_that_is_not_here_is_told_in_the_shape_of_who_asks(client: Client, path: str) -> None:
    theirs = client.post(path, json={}, headers={"anthropic-version": "2023-06-01"})
    assert theirs.status_code == 404
    assert theirs.get_json()["error"]["type"] == "not_found_error"
    assert path in theirs.get_json()["error"]["message"]
    assert client.post(path, json={}).get_json()["error"]["code"] is None


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_make_clients_compact() -> None:
    with ScriptedEngine(ANSWER, context_length=512) as engine:
        message = {"role": "user", "content": "word " * 2_000}
        response = client_of(engine).post(PATH, json={"messages": [message], "max_tokens": 9})
    assert response.status_code == 400
    told = response.get_json()["error"]["message"]
    found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum\. ", told)
    assert found is not None
    assert int(found[1]) > int(found[2]) == 512


def test_a_prompt_with_tools_leaves_room_for_a_call_or_is_too_long() -> None:
    with ScriptedEngine(lambda _: ANSWER, context_length=4096) as engine:
        client = client_of(engine)

        def answered(words: int, **fields: Any) -> Any:
            message = {"role": "user", "content": "word " * words}
            return client.post(PATH, json={"messages": [message], "max_tokens": 32_000, **fields})

        assert answered(1700, tools=[WEATHER]).status_code == 200
        assert answered(2000).status_code == 200
        assert answered(2000, tools=[WEATHER], max_tokens=100).status_code == 200
        refused = answered(2000, tools=[WEATHER])
    assert refused.status_code == 400
    assert "tokens > 3072 maximum" in refused.get_json()["error"]["message"]
    assert "the reply needs room for 1024" in refused.get_json()["error"]["message"]
