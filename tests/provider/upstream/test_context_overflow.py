"""Each server's way of saying that a prompt is too long, and the numbers in it; and errors that say something else."""

from __future__ import annotations

from typing import Any

import pytest

from dify_mlx_provider.upstream.errors import (
    ContextOverflow,
    PromptTooLong,
    from_error_object,
    from_status,
    parse_context_overflow,
)

OPENAI = (
    "This model's maximum context length is 16384 tokens. However, you requested 122946 tokens (112946 in the "
    "messages, 10000 in the completion). Please reduce the length of the messages or completion."
)
SENTENCES: list[tuple[str, int | None, int | None]] = [
    (OPENAI, 112_946, 16_384),
    (
        "This model's maximum context length is 16385 tokens. However, your messages resulted in 29429 tokens (28993 "
        "in the messages, 436 in the functions).",
        28_993,
        16_385,
    ),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 8192. This model's maximum context length is 4096 "
        "tokens and your request has 3000 input tokens (8192 > 4096 - 3000). None",
        3000,
        4096,
    ),
    (
        "This model's maximum context length is 40960 tokens. However, your request has 50000 input tokens. Please "
        "reduce the length of the input messages.",
        50_000,
        40_960,
    ),
    (
        "Requested token count exceeds the model's maximum context length of 131072 tokens. You requested a total of "
        "140000 tokens: 123616 tokens from the input messages and 16384 tokens for the completion.",
        123_616,
        131_072,
    ),
    (
        "The input (150000 tokens) is longer than the model's context length (128000 tokens).",
        150_000,
        128_000,
    ),
    (
        "Trying to keep the first 15857 tokens when context the overflows. However, the model is loaded with context "
        "length of only 7866 tokens, which is not enough.",
        15_857,
        7866,
    ),
    (
        "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 10247 >= "
        "n_ctx: 4096). Try to load the model with a larger context length, or provide a shorter prompt.",
        10_247,
        4096,
    ),
    (
        "The number of tokens to keep from the initial prompt is greater than the context length. Try to load …",
        None,
        None,
    ),
    (
        "request (5,000 tokens) exceeds the available context size (4,096 tokens), try increasing it",
        5000,
        4096,
    ),
    ("Requested tokens (2285) exceed context window of 2048", 2285, 2048),
    ("Prompt contains 9000 tokens, too large for model with 8192 maximum context length", 9000, 8192),
    ("prompt is too long: 210000 tokens > 200000 maximum", 210_000, 200_000),
]


@pytest.mark.parametrize(("message", "prompt", "context"), SENTENCES)
def test_a_sentence_gives_its_numbers(message: str, prompt: int | None, context: int | None) -> None:
    expected = ContextOverflow(prompt_tokens=prompt, context_length=context)
    assert parse_context_overflow(message) == expected
    for error in (
        from_status(400, {"error": {"message": message}}, address="http://a/v1"),
        from_status(500, {"error": {"message": message}}, address="http://a/v1"),
        from_status(400, {"object": "error", "message": message, "code": 400}, address="http://a/v1"),
        from_error_object({"message": message}),
        from_error_object(message),
    ):
        assert isinstance(error, PromptTooLong)
        assert error.overflow == expected


@pytest.mark.parametrize(
    "error",
    [
        {
            "code": 400,
            "message": "the request exceeds the available context size. try increasing the context size",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": 1407,
            "n_ctx": 256,
        },
        {
            "message": "The prompt has 1407 tokens; the context holds 256, and the reply needs room too.",
            "type": "invalid_request_error",
            "code": "context_length_exceeded",
            "prompt_tokens": 1407,
            "max_model_len": 256,
        },
        {
            "message": "Your input exceeds the context window of this model.",
            "code": "context_length_exceeded",
        },
    ],
)
def test_numbers_in_fields_go_before_those_in_the_sentence(error: dict[str, Any]) -> None:
    stated = "prompt_tokens" in error or "n_prompt_tokens" in error
    found = parse_context_overflow(error["message"], error)
    assert found == (ContextOverflow(prompt_tokens=1407, context_length=256) if stated else ContextOverflow())
    refused = from_status(400, {"error": error}, address="http://a/v1")
    assert isinstance(refused, PromptTooLong)
    assert refused.overflow == found


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens must be at most 4096",
        "Unrecognized request argument supplied: context_length",
        "top_k: must be at least 0.",
        "The server is busy: 272 requests are running or waiting already.",
        "The model needs a context; start it with one.",
        "Unknown parameter: 'context_size'.",
        "",
    ],
)
def test_other_errors_are_not_taken_for_it(message: str) -> None:
    assert parse_context_overflow(message) is None
    assert not isinstance(from_status(400, {"error": {"message": message}}, address="a"), PromptTooLong)


@pytest.mark.parametrize("fields", [None, "text", [], {"prompt_tokens": "many", "max_model_len": True}])
def test_fields_of_a_wrong_kind_count_as_not_sent(fields: Any) -> None:
    assert parse_context_overflow(OPENAI, fields) == ContextOverflow(
        prompt_tokens=112_946, context_length=16_384
    )
