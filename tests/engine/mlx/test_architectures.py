"""The most used architectures: whatever else runs, a reply is the one that mlx-lm gives to the prompt alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from architectures import write
from engine_models import MARKERS
from mlx_lm.generate import generate_step
from tolerances import check_replies

from mlx_backend.engine.base import Engine, Finished, GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine

MOST_USED = (
    *("gpt_oss", "llama", "qwen3", "qwen3_5", "qwen3_moe", "gemma3_text", "gemma4_text"),
    *("ministral3", "glm4_moe", "deepseek_v3", "lfm2", "nemotron_h", "mamba2"),
)
REPLY = 10  # tokens
END = MARKERS.index("<|return|>")
LENGTHS = (1, 2, 31, 45, 70)  # of prompts; the windows hold 32


@pytest.fixture(scope="module", params=MOST_USED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def network(model: Path) -> Any:
    return mlx_lm.load(str(model))[0]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with load_engine(model) as loaded:
        yield loaded


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = mx.random.randint(10, 250, (length,), key=mx.random.key(seed)).tolist()  # type: ignore[assignment]
    return tokens


def by_mlx_lm(network: Any, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Generate each reply with mlx-lm, alone and from empty caches, up to the tokenizer's end token."""
    replies = []
    for each in requests:
        prompt = mx.array(list(each.prompt))
        tokens = [token for token, _ in generate_step(prompt, network, max_tokens=each.max_tokens)]
        replies.append(tokens[: tokens.index(END) + 1] if END in tokens else tokens)
    return replies


def reply(engine: Engine, request: GenerationRequest) -> tuple[list[int], int]:
    """Return a reply and how many tokens of its prompt were cached."""
    *items, last = engine.generate(request)
    assert isinstance(last, Finished)
    return [item.token for item in items if isinstance(item, TokenDelta)], last.cached_tokens


def at_once(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    generations = [engine.generate(each) for each in requests]
    return [[item.token for item in each if isinstance(item, TokenDelta)] for each in generations]


def requests(**fields: Any) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt=text(at, length), max_tokens=REPLY, **fields)
        for at, length in enumerate(LENGTHS)
    ]


def test_a_reply_is_mlx_lms_alone_in_a_crowd_in_its_next_turn_and_when_its_prompt_was_edited(
    engine: Engine, network: Any
) -> None:
    asked = requests()
    expected = by_mlx_lm(network, asked)
    check_replies(engine, asked, [reply(engine, each)[0] for each in asked], expected)
    check_replies(engine, asked, at_once(engine, asked), expected)
    turns = [
        replace(each, prompt=[*each.prompt, *answer, *text(9, 5)])
        for each, answer in zip(asked, expected, strict=True)
    ]
    found = [reply(engine, each) for each in turns]
    check_replies(engine, turns, [tokens for tokens, _ in found], by_mlx_lm(network, turns))
    assert all(cached >= len(each.prompt) for (_, cached), each in zip(found, asked, strict=True))
    edited = [replace(each, prompt=[*each.prompt[:-4], *text(8, 6)]) for each in turns]
    check_replies(engine, edited, at_once(engine, edited), by_mlx_lm(network, edited))


def test_a_seed_gives_the_same_reply_alone_and_in_a_crowd(engine: Engine) -> None:
    asked = requests(sampling=Sampling(temperature=1.0, seed=4))
    alone = [reply(engine, each)[0] for each in asked]
    check_replies(engine, asked, at_once(engine, asked), alone)


def test_a_prefix_on_disk_leads_to_mlx_lms_reply_after_a_restart(
    model: Path, network: Any, tmp_path: Path
) -> None:
    first = GenerationRequest(prompt=text(1, 60), max_tokens=REPLY, checkpoints=(40,))
    other = replace(first, prompt=[*first.prompt[:40], *text(2, 9)])
    with load_engine(model, cache_folder=tmp_path) as before:
        assert [reply(before, first)[0]] == by_mlx_lm(network, [first])
    with load_engine(model, cache_folder=tmp_path, cache_bytes=0) as after:
        found, cached = reply(after, other)
        assert ([found], cached) == (by_mlx_lm(network, [other]), 40)
