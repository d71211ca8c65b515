"""A prompt far too long for the context is refused before tokens are made of all of it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from running_server import RunningServer, running
from scripted_engine import ScriptedEngine, ScriptedTokenizer
from scripted_server import ANSWER

from mlx_backend.chat.limits import MIN_TOKENIZED

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT = 1000
LONG = "abc" * 700_000  # the scripted tokenizer makes a token of three letters


class CountingTokenizer(ScriptedTokenizer):
    """Counts the characters of which tokens are made."""

    characters = 0

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        self.characters += len(text)
        return super().encode(text, control_tokens=control_tokens)


@pytest.fixture
def tokenizer() -> CountingTokenizer:
    return CountingTokenizer()


@pytest.fixture
def server(tokenizer: CountingTokenizer) -> Iterator[RunningServer]:
    with ExitStack() as stack:
        engine = ScriptedEngine(lambda _: ANSWER, tokenizer=tokenizer, context_length=CONTEXT)
        yield stack.enter_context(running(engine, max_queue=2))


def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": messages(LONG)}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [*messages("a"), {"role": "assistant", "content": LONG}]},
            "messages",
        ),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
    ],
    ids=["a question", "an answer to be continued", "a text"],
)
def test_only_the_beginning_of_a_prompt_far_too_long_is_tokenised(
    server: RunningServer, tokenizer: CountingTokenizer, path: str, fields: dict[str, Any], param: str
) -> None:
    server.chat()
    before = tokenizer.characters
    status, body = server.call(path, fields)
    error = body["error"]
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert tokenizer.characters - before < len(LONG) / 10
    # How many it has is estimated by its beginning, and said: a client that leaves out turns needs the number.
    assert error["prompt_tokens"] == pytest.approx(len(LONG) / 3, rel=0.01)
    assert error["message"].startswith(f"The prompt has about {error['prompt_tokens']} tokens")


def test_a_prompt_that_is_a_little_too_long_is_counted_exactly(server: RunningServer) -> None:
    status, body = server.call("/v1/chat/completions", {"messages": messages("abc" * CONTEXT)})
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    assert body["error"]["message"].startswith(f"The prompt has {body['error']['prompt_tokens']} tokens")
    assert (
        server.call("/v1/tokenize", {"messages": messages("abc" * CONTEXT)})[1]["count"]
        == (body["error"]["prompt_tokens"])
    )


def test_more_messages_than_the_context_has_tokens_are_not_rendered(
    server: RunningServer, tokenizer: CountingTokenizer
) -> None:
    server.chat()
    before = tokenizer.characters
    many = [{"role": role, "content": "a"} for _ in range(CONTEXT) for role in ("user", "assistant")]
    status, body = server.call("/v1/chat/completions", {"messages": many})
    assert (status, body["error"]["code"], tokenizer.characters) == (400, "context_length_exceeded", before)
    assert f"has {len(many)} messages; the context holds {CONTEXT} tokens" in body["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"prompt": LONG}, {"prompt": [LONG[:500_000], LONG[500_000:]]}, {"messages": messages(LONG)}]
)
def test_a_text_that_is_only_tokenised_may_be_longer_and_has_a_limit_too(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    status, body = server.call("/v1/tokenize", fields)
    assert (status, f"at most {MIN_TOKENIZED} are tokenised" in body["error"]["message"]) == (400, True)
    status, body = server.call("/v1/tokenize", {"prompt": LONG[:60_000], "return_token_strs": True})
    assert (status, body["count"], "".join(body["token_strs"])) == (200, 20_000, LONG[:60_000])
