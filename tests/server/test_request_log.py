"""What the log says of a request: when it comes and how it ends, of whom, and nothing of what it contains."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER, CHAT, USER, client_of

from mlx_backend.commands.output import MAX_LINE_CHARACTERS, JsonFormatter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from werkzeug.test import Client

SECRET = "the words of a user"


@pytest.fixture
def client(caplog: pytest.LogCaptureFixture) -> Iterator[Client]:
    caplog.set_level("INFO", "mlx_backend.requests")
    with ScriptedEngine(lambda _: ANSWER) as engine:
        yield client_of(engine, api_keys=(("alice", "sk-of-alice"),))


def test_a_line_when_it_comes_and_one_when_it_ends_with_id_client_and_key(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"X-Request-Id": "trace-42", "x-api-key": "sk-of-alice"}
    body = {"messages": [{"role": "user", "content": SECRET}]}
    with client.post(CHAT, json=body, headers=headers, environ_base={"REMOTE_ADDR": "192.0.2.7"}) as response:
        assert response.headers["x-request-id"] == "trace-42"
        reply = response.get_json()["id"]
    first, last = caplog.messages
    assert first == "trace-42 192.0.2.7 key=alice POST /v1/chat/completions"
    assert last.startswith(
        f"trace-42 192.0.2.7 key=alice {reply} model=scripted effort=medium (default) prompt="
    )
    assert "finish=stop" in last
    assert SECRET not in caplog.text
    assert "sk-of-alice" not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
def test_the_part_of_a_request_that_broke_its_prefix_is_in_the_log_and_in_timings(
    client: Client, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    headers = {"x-api-key": "sk-of-alice"}
    instructions = ({"role": "system", "content": f"It is {hour} o'clock. {SECRET}"} for hour in (1, 2))
    answered = [{"role": "assistant", "content": "Paris."}, USER]
    for messages in ([next(instructions), USER], [next(instructions), USER, *answered]):
        body = {"messages": messages, "stream": stream, "reasoning_effort": "low"}
        with client.post(CHAT, json=body, headers=headers) as response:
            reply = response.get_data(as_text=True)
    assert 'broken_by="the system message"' in caplog.messages[-1]
    assert "broken_by" not in caplog.messages[1]
    fields = caplog.records[-1].fields  # type: ignore[attr-defined]  # given by `extra`
    assert fields["broken_by"] == "the system message"
    assert f'"cache_matched_n":{fields["matched_tokens"]}' in reply.replace(": ", ":")
    assert '"cache_broken_by":"the system message"' in reply.replace(": ", ":")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "bad\x1b[31m", "ä"])
def test_an_id_that_is_not_sane_is_replaced(client: Client, given: str) -> None:
    headers = {"X-Request-Id": given, "x-api-key": "sk-of-alice"}
    ids = [client.get("/v1/models", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(each.startswith("req_") for each in ids)
    assert ids[0] != ids[1]


@pytest.mark.parametrize("stream", [True, False])
def test_every_request_ends_once_however_it_ends(
    client: Client, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = {"messages": [USER], "stream": stream}
    with client.post(CHAT, json=body, headers={"x-api-key": "sk-of-alice"}) as response:
        response.get_data()
    client.post(CHAT, json=body, headers={"x-api-key": "sk-of-alice"}, buffered=False).close()  # left at once
    client.post(CHAT, json=body).close()
    client.post(CHAT, data=b"{", headers={"x-api-key": "sk-of-alice"}).close()
    client.get("/nowhere").close()
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]  # given by `extra`
    lines = [each["event"] for each in fields]
    assert lines.count("request") == lines.count("response") == 5
    statuses = [each["status"] for each in fields if each["event"] == "response"]
    assert statuses[2:] == [401, 400, 404]


def test_of_a_request_that_is_wrong_the_field_is_named_and_its_value_is_not(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": SECRET}
    with client.post(CHAT, json=body, headers={"x-api-key": "sk-of-alice"}) as response:
        assert response.status_code == 400
        assert SECRET in response.get_data(as_text=True)
    assert any("refused 400 param=reasoning_effort" in line for line in caplog.messages)
    assert SECRET not in caplog.text


def test_probes_are_not_logged(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/", "/health"):
        client.get(path).close()
    assert caplog.messages == []


def test_as_json_a_line_is_an_object_with_the_parts_of_the_request(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with client.post(CHAT, json={"messages": [USER]}, headers={"x-api-key": "sk-of-alice"}) as response:
        response.get_data()
    first, last = (json.loads(JsonFormatter().format(record)) for record in caplog.records)
    assert (first["event"], first["key"], first["method"], first["path"]) == (
        "request",
        "alice",
        "POST",
        CHAT,
    )
    assert (last["event"], last["status"], last["finish"], last["model"]) == (
        "response",
        200,
        "stop",
        "scripted",
    )
    assert last["request_id"] == first["request_id"]
    assert last["completion_tokens"] > 0
    assert last["time"].endswith("+00:00")


def test_as_json_nothing_begins_another_line_and_no_text_is_endless() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "a\nb\u2028\x1b%s", ("c" * 10_000,), None)
    record.fields = {"path": "\r\n" + "d" * 10_000}
    line = JsonFormatter().format(record)
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 2 * MAX_LINE_CHARACTERS + 200
    assert json.loads(line)["message"].startswith("a\nb\u2028\x1bccc")
