"""POST /v1/responses: what a conversation of items becomes, and what comes back, against OpenAI's own types."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from byte_tokenizer import ByteTokenizer
from openai.types.responses import Response, ResponseCompactionItem, ResponseStreamEvent, ResponseUsage
from pydantic import TypeAdapter
from scripted_engine import HARMONY_MARKERS, HARMONY_TEMPLATE, ScriptedEngine
from scripted_server import ANSWER, CALL, client_of

from mlx_backend.api.responses.stream import ResponseWriter
from mlx_backend.api.sealed_reasoning import seal
from mlx_backend.api.tools import Tools
from mlx_backend.engine.base import Progress, Queued

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client

PATH = "/v1/responses"
COMPACT = f"{PATH}/compact"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "description": "Changes a file."}
CUSTOM_CALL = (
    "<|channel|>commentary to=functions.patch <|constrain|>json<|message|>"
    '{"input": "*** Begin\\n\\"Oslo\\" \\ud83d\\ude00 é"}<|call|>'
)
PATCH_TEXT = '*** Begin\n"Oslo" 😀 é'

event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Prompts(list[str]):
    """What the engine was given."""


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture
def engine(prompts: Prompts) -> Iterator[ScriptedEngine]:
    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "functions.patch" in prompt:
            return CUSTOM_CALL
        return CALL if "functions.weather" in prompt else ANSWER

    with ScriptedEngine(reply) as engine:
        yield engine


@pytest.fixture
def client(engine: ScriptedEngine) -> Client:
    return client_of(engine)


def created(client: Client, input: Any = "hello", **fields: Any) -> dict[str, Any]:
    """The response object, which OpenAI's client can read."""
    response = client.post(PATH, json={"input": input, **fields})
    assert response.status_code == 200, response.get_data(as_text=True)
    body: dict[str, Any] = response.get_json()
    Response.model_validate(body, strict=True)
    return body


def refused(client: Client, input: Any = "hello", **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"input": input, **fields})
    assert response.status_code == 400, response.get_data(as_text=True)
    error: dict[str, Any] = response.get_json()["error"]
    return error


def streamed(client: Client, input: Any = "hello", **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, each of which OpenAI's client can read."""
    response = client.post(PATH, json={"input": input, "stream": True, **fields})
    assert response.mimetype == "text/event-stream", response.get_data(as_text=True)
    *blocks, last = response.get_data(as_text=True).split("\n\n")
    assert last == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        event_type.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """The same, without what differs from response to response."""
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at", "timings")
        return {key: without_ids(each) for key, each in value.items() if key not in changing}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def test_an_answer_is_a_reasoning_item_and_a_message(client: Client) -> None:
    body = created(client, reasoning={"effort": "high"}, logit_bias={"5": -100})
    reasoning, message = body["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Capital of France."}]
    assert reasoning["summary"] == []
    assert message["content"][0]["text"] == "The capital is Paris."
    assert body["status"] == "completed"
    assert body["reasoning"] == {"effort": "high", "summary": None}
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"tools": [WEATHER]},
        {"tools": [PATCH]},
    ],
    ids=["an answer", "with a summary", "a call", "a custom call"],
)
def test_a_stream_ends_with_the_object_that_is_sent_whole(client: Client, fields: dict[str, Any]) -> None:
    events = streamed(client, **fields)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    whole = events[-1]["response"]
    assert without_ids(whole) == without_ids(created(client, **fields))
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


def test_the_deltas_of_a_stream_are_its_texts(client: Client) -> None:
    events = streamed(client, tools=[WEATHER], reasoning={"summary": "auto"})

    def joined(kind: str) -> str:
        return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")

    assert joined("reasoning_text") == joined("reasoning_summary_text") == "Look it up."
    assert joined("output_text") == "One moment."
    assert joined("function_call_arguments") == '{"city": "Oslo"}'
    reasoning, message, call = events[-1]["response"]["output"]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "Look it up."}]
    assert message["phase"] == "commentary"
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Oslo"}')


def test_a_silence_is_filled_with_events_that_say_how_far_the_prompt_is() -> None:
    writer = ResponseWriter({}, Tools(), call_id=str)
    reasons = (None, Progress(300, 1000, 200), Queued(3))
    sent = [writer.open(), *(writer.keepalive(reason) for reason in reasons)]
    datas = [line.removeprefix(b"data: ") for line in b"".join(sent).split(b"\n") if line[:5] == b"data:"]
    events = [json.loads(data) for data in datas]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3, 4]
    assert {event["type"] for event in events[1:]} == {"response.in_progress"}
    assert "prompt_progress" not in events[2]
    assert events[3]["prompt_progress"] == {"total": 1000, "cache": 200, "processed": 300}
    assert events[4]["queue_position"] == 3


def test_a_custom_tool_gets_its_text(client: Client) -> None:
    events = streamed(client, tools=[PATCH])
    deltas = [event["delta"] for event in events if event["type"].endswith("input.delta")]
    assert "".join(deltas) == PATCH_TEXT
    assert len(deltas) > 3
    [call] = events[-1]["response"]["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", PATCH_TEXT)


def test_a_tool_in_a_namespace_is_called_by_both_names(client: Client, prompts: Prompts) -> None:
    tools = [{"type": "namespace", "name": "mcp__sky", "description": "", "tools": [WEATHER]}]
    created(client, tools=tools)
    assert "mcp__sky__weather" in prompts[-1]


def test_the_kinds_of_tools_that_run_elsewhere_are_left_out_and_named(client: Client) -> None:
    response = client.post(PATH, json={"input": "hello", "tools": [WEATHER, {"type": "web_search"}]})
    assert response.headers["x-mlx-backend-ignored"] == "tools.web_search"
    assert refused(client, tools=[{"type": "web_search"}], tool_choice={"type": "web_search"})["param"] == (
        "tool_choice"
    )


HISTORY = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Ask."}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
]


@pytest.mark.parametrize(
    "reasoning",
    [
        {"summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
        {"summary": [], "encrypted_content": seal("Ask.")},
        {"summary": [{"type": "summary_text", "text": "Ask."}], "encrypted_content": None},
    ],
    ids=["text", "encrypted", "summary"],
)
def test_reasoning_comes_back_in_each_of_its_forms(
    client: Client, prompts: Prompts, reasoning: dict[str, Any]
) -> None:
    created(client, [*HISTORY[:2], {"type": "reasoning", "id": "rs_1", **reasoning}, *HISTORY[3:]])
    assert "<|channel|>analysis<|message|>Ask.<|end|>" in prompts[-1]
    assert "Be brief." in prompts[-1]
    assert "Rain." in prompts[-1]


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ({}, "<|channel|>analysis<|message|>Hm."),
        ({"id": "rs_1"}, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"),
        ({"id": "rs_1", "status": "incomplete"}, "<|channel|>analysis<|message|>Hm."),
    ],
)
def test_a_reply_goes_on_after_reasoning_that_was_done_and_within_reasoning_that_was_not(
    client: Client, prompts: Prompts, last: dict[str, str], end: str
) -> None:
    """A client whose stream broke sends again what had been done of it."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    created(client, [{"role": "user", "content": "hello"}, thought | last])
    assert prompts[-1].endswith(f"<|start|>assistant{end}")


@pytest.mark.parametrize(
    ("fields", "end"), [({}, "I will look."), ({"id": "msg_1"}, "<|end|><|start|>assistant")]
)
def test_a_message_that_was_sent_whole_is_answered_and_one_that_a_client_has_begun_is_continued(
    client: Client, prompts: Prompts, fields: dict[str, str], end: str
) -> None:
    created(
        client,
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I will look.", **fields}],
    )
    assert prompts[-1].endswith(end)


def test_a_response_is_continued_by_its_id_without_its_instructions(client: Client, prompts: Prompts) -> None:
    first = created(client, "Capital of France?", instructions="Be brief.")
    second = created(client, "And its river?", previous_response_id=first["id"])
    assert "Capital of France?" in prompts[-1]
    assert "The capital is Paris." in prompts[-1]
    assert "Be brief." not in prompts[-1]
    third = created(client, "Longer?", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    assert prompts[-1].count("The capital is Paris.") == 2


def test_a_stored_response_is_read_listed_and_deleted(client: Client) -> None:
    first = created(client, "Capital of France?")
    body = created(client, HISTORY, previous_response_id=first["id"])
    path = f"{PATH}/{body['id']}"
    assert client.get(path).get_json() == body
    page = client.get(f"{path}/input_items?limit=2&order=asc").get_json()
    assert page["data"][0]["content"] == "Capital of France?"
    assert page["has_more"]
    rest = client.get(f"{path}/input_items?order=asc&after={page['last_id']}").get_json()
    assert [item["type"] for item in page["data"] + rest["data"]] == [
        *("message", "reasoning", "message"),
        *("message", "message", "reasoning", "function_call", "function_call_output"),
    ]
    for wrong in ("limit=0", "limit=" + "9" * 5000, "order=up", "after=x"):
        assert client.get(f"{path}/input_items?{wrong}").status_code == 400
    assert client.post(f"{path}/cancel").status_code == 400
    assert client.delete(path).get_json() == {"id": body["id"], "object": "response", "deleted": True}
    assert client.get(path).status_code == 404
    assert client.post(PATH, json={"input": "x", "previous_response_id": body["id"]}).status_code == 404


def test_what_is_not_to_be_stored_is_not(client: Client) -> None:
    body = created(client, store=False)
    assert client.get(f"{PATH}/{body['id']}").status_code == 404


def test_an_item_reference_is_the_item(client: Client, prompts: Prompts) -> None:
    [_, message] = created(client)["output"]
    created(client, [{"type": "item_reference", "id": message["id"]}, {"role": "user", "content": "More."}])
    assert "The capital is Paris." in prompts[-1]


def test_an_item_is_referred_to_once(client: Client) -> None:
    [_, message] = created(client)["output"]
    reference = {"type": "item_reference", "id": message["id"]}
    refused = client.post(PATH, json={"input": [reference, {"role": "user", "content": "x"}, reference]})
    assert refused.status_code == 400
    assert refused.get_json()["error"]["param"] == "input[2].id"


def test_a_conversation_is_compacted_and_goes_on_from_what_the_model_wrote_down(
    client: Client, prompts: Prompts
) -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What is the capital?"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "user", "content": [{"type": "input_text", "text": "Of France."}]},
    ]
    text = {"format": {"type": "json_object"}}
    response = client.post(
        COMPACT, json={"model": "scripted", "input": items, "tools": [WEATHER], "text": text}
    )
    assert response.status_code == 200, response.get_data(as_text=True)
    compacted = response.get_json()
    assert compacted["object"] == "response.compaction"
    *users, summary = compacted["output"]
    assert [each["content"][0]["text"] for each in users] == ["What is the capital?", "Of France."]
    ResponseCompactionItem.model_validate(summary, strict=True)
    ResponseUsage.model_validate(compacted["usage"], strict=True)
    assert "rain" in prompts.pop()
    again = {"role": "user", "content": "And now?"}
    created(client, [*compacted["output"], again])
    prompt = prompts.pop()
    assert re.search("What is the capital.*Of France.*written down of it.*One moment.*And now", prompt, re.S)
    assert "rain" not in prompt


def test_a_conversation_with_a_name_is_compacted_with_its_tools_in_the_prompt() -> None:
    tokenizer = ByteTokenizer(HARMONY_MARKERS, HARMONY_TEMPLATE)
    with ScriptedEngine(lambda _: ANSWER, tokenizer=tokenizer, caches=True) as engine:
        client = client_of(engine)
        created(client, "Which city?", tools=[WEATHER], prompt_cache_key="a")
        client.post(COMPACT, json={"model": "scripted", "input": "Which city?", "prompt_cache_key": "a"})
        before, compacting = engine.requests
        assert "functions.weather" in compacting.prompt
        assert compacting.repeated >= len(before.request.prompt) - len("<|start|>assistant")


def test_a_stored_conversation_is_compacted_by_its_id(client: Client) -> None:
    first = created(client, "Which city?")
    response = client.post(COMPACT, json={"model": "scripted", "previous_response_id": first["id"]})
    *users, summary = response.get_json()["output"]
    assert [each["content"][0]["text"] for each in users] == ["Which city?"]
    assert summary["type"] == "compaction"


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"max_output_tokens": 12}, 422, "compaction_failed"),
        ({"stream": True}, 400, "unsupported_value"),
        ({"input": []}, 400, None),
        ({"model": None}, 400, None),
        (
            {"input": [{"type": "compaction", "encrypted_content": "made up"}]},
            400,
            "invalid_encrypted_content",
        ),
    ],
)
def test_what_cannot_be_compacted_is_refused(
    client: Client, fields: dict[str, Any], status: int, code: str | None
) -> None:
    response = client.post(COMPACT, json={"model": "scripted", "input": "hello", **fields})
    assert (response.status_code, response.get_json()["error"]["code"]) == (status, code)


def test_the_tokens_of_a_prompt_are_counted(client: Client) -> None:
    counted = client.post(f"{PATH}/input_tokens", json={"input": HISTORY, "tools": [WEATHER]}).get_json()
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] == created(client, HISTORY, tools=[WEATHER])["usage"]["input_tokens"]


def test_a_response_that_is_cut_is_incomplete_and_its_call_is_none(client: Client) -> None:
    tokens = created(client, tools=[WEATHER])["usage"]["output_tokens"]
    events = streamed(client, tools=[WEATHER], max_output_tokens=tokens - 3)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert all(item["type"] != "function_call" for item in response["output"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [7]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}]},
            "input[0].encrypted_content",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": 7}]},
            "input[0].encrypted_content",
        ),
        ({"input": [{"type": "reasoning", "summary": "Hm."}]}, "input[0].summary"),
        (
            {"input": [{"type": "function_call", "name": "f", "call_id": "c", "namespace": 7}]},
            "input[0].namespace",
        ),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": "high"}, "reasoning"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [WEATHER, {**WEATHER, "description": "Other."}]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}}]},
            "tools[0].format",
        ),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format"),
        # Brackets around it would make it one expression.
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "a)|(b"}}]},
            "tools[0].format",
        ),
        # Tools that are one to the model.
        (
            {
                "tools": [
                    {"type": "namespace", "name": "maps", "tools": [WEATHER]},
                    {**WEATHER, "name": "maps__weather"},
                ]
            },
            "tools[1].name",
        ),
        (
            {
                "tools": [
                    {"type": "namespace", "name": "a", "tools": [{**WEATHER, "name": "b__c"}]},
                    {"type": "namespace", "name": "a__b", "tools": [{**WEATHER, "name": "c"}]},
                ]
            },
            "tools[1].tools[0].name",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(client: Client, fields: dict[str, Any], param: str) -> None:
    error = refused(client, **fields)
    assert error["param"] == param
    assert error["message"]


def test_a_limit_on_messages_names_the_field_that_they_come_from(engine: ScriptedEngine) -> None:
    item = {"role": "user", "content": "hello"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for items in ([item] * 3, [item, call, call]):
        assert refused(client_of(engine, max_messages=2), items)["param"] == "input"


def test_a_value_that_was_not_stored_for_this_client_is_not_found(client: Client) -> None:
    response = client.post(PATH, json={"input": "x", "previous_response_id": "resp_1"})
    assert response.status_code == 404
    assert response.get_json()["error"]["code"] == "previous_response_not_found"
