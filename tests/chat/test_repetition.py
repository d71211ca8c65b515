"""Replies that repeat themselves without end are ended, and what people ask for is not."""

from __future__ import annotations

import base64
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from running_server import running
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from mlx_backend.chat.repetition import MIN_REPEATS, RepetitionGuard
from mlx_backend.chat.reply import Reply, ReplySetup
from mlx_backend.conversation.parser import ChannelParser, fold
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.base import GenerationRequest
from mlx_backend.engine.mlx import load_engine
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from running_server import RunningServer

    from mlx_backend.conversation.events import Message

REPOSITORY = Path(__file__).parents[2]


def found(tokens: Sequence[int], limit: int) -> tuple[int, int] | None:
    """Return after how many tokens a reply is found to repeat itself, and how many it repeats."""
    guard = RepetitionGuard(limit)
    for count, token in enumerate(tokens, 1):
        if (run := guard.add(token)) is not None:
            return count, run
    return None


def shortest_run(tokens: Sequence[int], limit: int) -> int | None:
    last = list(tokens[-limit:])
    runs = range(1, max(1, limit // MIN_REPEATS) + 1) if len(last) == limit else ()
    return next((run for run in runs if last[run:] == last[:-run]), None)


@pytest.mark.parametrize("letters", [1, 2, 3])
def test_what_is_found_is_what_trying_every_length_finds(letters: int) -> None:
    chance = random.Random(letters)
    for _ in range(150):
        limit = chance.choice([3, 4, 31, 64, 100])
        before = [chance.randrange(letters) for _ in range(chance.randrange(150))]
        run = [chance.randrange(letters) for _ in range(chance.randrange(1, 40))]
        tokens = before + run * chance.randrange(1, 30)
        ends = range(64, len(tokens) + 1, 64)
        tried = ((end, shortest_run(tokens[:end], limit)) for end in ends)
        assert found(tokens, limit) == next(((end, run) for end, run in tried if run is not None), None)


def test_token_ids_of_any_size_are_told_apart() -> None:
    assert found([2**31 + 5, 0xD800, 7] * 100, 90) == (128, 3)
    assert found(range(0xD000, 0x120000, 17), 64) is None


# -- what people ask for ------------------------------------------------------------------------------------

LEGAL = {
    "a list of zeros": "[" + ", ".join(["0"] * 2000) + "]",
    "a matrix of zeros": "\n".join(["    [" + ", ".join(["0.0"] * 40) + "],"] * 40),
    "a table with equal rows": "| a | b | c |\n|---|---|---|\n" + "| - | - | - |\n" * 500,
    "CSV with equal rows": "id,name,value\n" + "0,none,0.00\n" * 800,
    "separators": ("-" * 80 + "\n") * 90,
    "one letter": "a" * 8000,
    "a line as a punishment": "I must not talk in class.\n" * 500,
    "laughter": "ha" * 3000,
    "emoji": "😀" * 2000,
    "base64 of nothing": base64.b64encode(bytes(6000)).decode(),
    "hexadecimal of nothing": bytes(8000).hex(),
    "a drawn box": "+" + "-" * 78 + "+\n" + ("|" + " " * 78 + "|\n") * 90,
    "JSON of equal objects": "[\n" + '  {"x": 0, "y": 0, "z": 0},\n' * 400 + "]",
    "markup": "<td></td>" * 800,
    "instructions that do nothing": "    nop\n" * 2000,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    # Of 1,750 words: most texts are two to five times as long in them as in those of a large model.
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


@pytest.mark.parametrize("text", LEGAL.values(), ids=LEGAL)
def test_long_repetition_that_was_asked_for_is_left_alone(text: str, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(tokens) > 1500
    assert found(tokens, Settings().max_repeated_tokens) is None


def test_no_code_table_or_list_of_this_project_comes_near_the_limit(tokenizer: Tokenizer) -> None:
    folders = ("docs", "mlx_backend/server", "provider_assets", "tests/conversation/cases")
    files = [file for folder in folders for file in (REPOSITORY / folder).rglob("*.*") if _is_text(file)]
    assert len(files) > 50
    for encoded in tokenizer.encode_batch([file.read_text(encoding="utf-8") for file in files]):
        assert found(encoded.ids, Settings().max_repeated_tokens // 16) is None


def _is_text(file: Path) -> bool:
    return file.suffix in {".md", ".py", ".yaml", ".toml", ".html", ".js", ".css", ".svg"}


# -- a reply ------------------------------------------------------------------------------------------------

LOOP = "Wait, let me check that again. "
ENDLESS = {
    "reasoning": f"<think>So. {LOOP * 200}</think>Never.<|im_end|>",
    "answer": f"<think>So.</think>Well. {LOOP * 200}<|im_end|>",
    "call": f'<tool_call>\n{{"name": "f", "arguments": {{"a": "{LOOP * 200}"}}}}\n</tool_call><|im_end|>',
}
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>")


def said(text: str, limit: int = 200, *, is_constrained: bool = False) -> tuple[Message, Reply]:
    with ScriptedEngine([text], markers=MARKERS) as engine:
        special_tokens = engine.tokenizer.special_tokens
        setup = ReplySetup(
            parser=ChannelParser("hermes-json", tools=["f"], special_tokens=special_tokens),
            prompt_tokens=1,
            special_tokens=special_tokens,
            max_repeated_tokens=limit,
            is_constrained=is_constrained,
        )
        reply = Reply(engine.generate(GenerationRequest(prompt=[1], max_tokens=9000)), setup)
        events: list[Any] = list(reply.events())
        return fold(events), reply


@pytest.mark.parametrize("where", ENDLESS)
def test_a_reply_that_repeats_itself_ends_as_one_that_was_cut(where: str) -> None:
    message, reply = said(ENDLESS[where])
    assert (message.finish, reply.finish) == ("length", "length")
    assert reply.usage.repeated_run == len(LOOP), "31 bytes, which are 31 tokens of three once they repeat"
    assert 200 <= reply.usage.completion_tokens < 300
    assert not any(call.complete for call in message.tool_calls)


@pytest.mark.parametrize("where", ENDLESS)
def test_a_limit_of_zero_ends_nothing(where: str) -> None:
    message, reply = said(ENDLESS[where], 0)
    assert message.finish == ("tool_calls" if where == "call" else "stop")
    assert reply.usage.repeated_run is None


@pytest.mark.parametrize(
    ("where", "finish"), [("reasoning", "length"), ("answer", "stop"), ("call", "tool_calls")]
)
def test_what_a_grammar_holds_may_repeat_itself_and_its_reasoning_may_not(where: str, finish: str) -> None:
    assert said(ENDLESS[where], is_constrained=True)[0].finish == finish


# -- the server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with load_engine(MODEL_PATH) as engine, running(engine, max_repeated_tokens=128) as server:
        yield server


@pytest.fixture(scope="module")
def endless(server: RunningServer) -> dict[str, Any]:
    """A request to which the model says one letter over and over."""
    [token] = server.call("/v1/tokenize", {"prompt": "a", "add_special_tokens": False})[1]["tokens"]
    return {
        "messages": [{"role": "user", "content": "Hi"}],
        "logit_bias": {str(token): 100},
        "max_tokens": 300,
    }


def test_timings_header_and_log_say_why_it_ended(
    server: RunningServer, endless: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with server.open("/v1/chat/completions", endless) as response:
        assert response.headers["x-mlx-backend-stopped-by"] == "repetition; tokens=1"
    reply = server.chat(**endless)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert 128 <= reply["usage"]["completion_tokens"] <= 192
    assert (reply["timings"]["stopped_by"], reply["timings"]["repeated_n"]) == ("repetition", 1)
    assert "finish=length stopped_by=repetition(1)" in caplog.text


def test_the_others_in_the_batch_go_on(server: RunningServer, endless: dict[str, Any]) -> None:
    question = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    alone = server.chat(**question)["choices"]
    with ThreadPoolExecutor(3) as clients:
        answers = list(clients.map(lambda body: server.chat(**body), [endless, question, endless]))
    assert [each["choices"][0]["finish_reason"] for each in answers] == ["length", "stop", "length"]
    assert answers[1]["choices"] == alone


def test_a_stream_says_it_in_its_last_chunk(server: RunningServer, endless: dict[str, Any]) -> None:
    last = server.chunks(**endless)[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["stopped_by"] == "repetition"


@pytest.mark.parametrize(
    ("path", "limit", "most"),
    [
        ("/v1/chat/completions", None, 192),
        ("/v1/chat/completions", 200, 264),
        ("/v1/chat/completions", 0, 300),
        ("/v1/completions", 200, 264),
    ],
)
def test_a_request_may_set_its_own_limit(
    server: RunningServer, endless: dict[str, Any], path: str, limit: int | None, most: int
) -> None:
    body = {**endless, "max_repeated_tokens": limit, "prompt": "Hi"}
    del body["prompt" if "chat" in path else "messages"]
    status, reply = server.call(path, body)
    assert status == 200, reply
    assert ((limit or 128) if limit != 0 else 300) <= reply["usage"]["completion_tokens"] <= most
    assert ("stopped_by" in reply["timings"]) == (limit != 0)


def test_an_array_of_zeros_that_a_schema_asks_for_is_whole(server: RunningServer) -> None:
    zeros = {"type": "array", "items": {"const": 0}, "minItems": 120, "maxItems": 120}
    schema = {"type": "json_schema", "json_schema": {"name": "zeros", "schema": zeros}}
    reply = server.chat(response_format=schema, max_tokens=2000, reasoning_effort="none")
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["message"]["content"].count("0") == 120
    assert reply["usage"]["completion_tokens"] > 192
