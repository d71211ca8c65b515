"""The plain engine, which is mlx-lm's batch generator, and the engine proper: the same tokens, in crowds too."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from architectures import write
from drafting import drafting_engine
from engine_requests import reply_tokens, together
from prepared_images import prepared
from tolerances import ON_CPU, check_replies

from mlx_backend.constraints.reasoning_budget import ReasoningBudgets
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.demo import MODEL_PATH
from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, Progress, PromptStart, Sampling, TokenDelta
from mlx_backend.engine.images import PromptImage
from mlx_backend.engine.mlx import load_engine
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any

    from mlx_backend.engine.threaded import Engine

QUESTIONS = ("What is the capital of France?", "Count to 12.", "Say hello.", "What is 3 plus 4?")
SAMPLINGS = [
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=1.3, seed=8, top_p=0.9, min_p=0.01),
    Sampling(temperature=0.8, seed=9, top_k=5, repetition_penalty=1.2),
    Sampling(frequency_penalty=0.4, presence_penalty=0.2, logit_bias=((9, 2.0), (40, -100.0))),
]


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with load_engine(MODEL_PATH, engine="plain") as engine:
        yield engine


def asked(engine: Engine, question: str, **fields: Any) -> GenerationRequest:
    text = engine.tokenizer.render([{"role": "user", "content": question}], None, reasoning_effort="low")
    prompt = engine.tokenizer.encode(text, control_tokens=True)
    return GenerationRequest(prompt=prompt, **({"max_tokens": 100} | fields))


def crowd(engine: Engine, count: int) -> list[GenerationRequest]:
    """Return requests of all lengths: more prompts than are prefilled at once, some longer than a chunk."""
    draws, size = random.Random(5), engine.tokenizer.vocabulary_size
    lengths = [1, 2, 33, 64, 65, 300, *(draws.randrange(1, 150) for _ in range(count - 6))]
    return [
        GenerationRequest(
            prompt=[draws.randrange(size) for _ in range(length)], max_tokens=draws.choice((1, 2, 30, 60))
        )
        for length in lengths
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"packing": False}, {"cache_bytes": 0, "prefill_chunk": 16}],
    ids=["as served", "without packing", "short chunks"],
)
def test_a_crowd_gets_the_same_tokens(windowed: Path, options: dict[str, Any]) -> None:
    with (
        load_engine(windowed, engine="plain", prefill_chunk=64) as plain,
        load_engine(windowed, **options) as full,
    ):
        requests = crowd(plain, 20)
        expected = together(plain, requests)
        check_replies(full, requests, together(full, requests), expected)
        check_replies(full, requests, together(full, requests), expected)  # with prompts that are cached


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2", "deepseek_v3"])
def test_a_crowd_gets_the_same_tokens_from_other_architectures(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, name)
    with load_engine(folder, engine="plain", prefill_chunk=64) as plain, load_engine(folder) as full:
        requests = crowd(plain, 12)
        check_replies(full, requests, together(full, requests), together(plain, requests))


def test_drafts_change_no_token(plain: Engine) -> None:
    requests = [
        asked(plain, question, sampling=each) for question in QUESTIONS for each in (Sampling(), SAMPLINGS[0])
    ]
    expected = together(plain, requests)
    with drafting_engine(MODEL_PATH, draft_from_text=True) as drafting:
        if ON_CPU:
            assert together(drafting, requests) == expected
        else:
            check_replies(drafting, requests[::2], together(drafting, requests)[::2], expected[::2])


def test_the_demo_model_answers_the_same_alone_and_together(plain: Engine) -> None:
    requests = [asked(plain, question) for question in QUESTIONS]
    expected = [reply_tokens(plain, each) for each in requests]
    assert together(plain, requests) == expected
    with load_engine(MODEL_PATH) as full:
        check_replies(full, requests, together(full, requests), expected)


@pytest.mark.skipif(
    not ON_CPU, reason="a draw near the border of two tokens differs with the kernels' rounding"
)
def test_a_seed_gives_the_same_reply(plain: Engine) -> None:
    with load_engine(MODEL_PATH) as full:
        requests = [asked(plain, question, sampling=each) for question in QUESTIONS for each in SAMPLINGS]
        assert together(full, requests) == together(plain, requests)


def test_a_constraint_holds_as_in_the_engine_proper(plain: Engine) -> None:
    def requests() -> Sequence[GenerationRequest]:
        budgets = ReasoningBudgets(plain.tokenizer, DIALECTS["harmony"])
        text = plain.tokenizer.render(
            [{"role": "user", "content": QUESTIONS[1]}], None, reasoning_effort="high"
        )
        prompt = plain.tokenizer.encode(text + "<|channel|>analysis<|message|>", control_tokens=True)
        return [
            GenerationRequest(
                prompt=prompt,
                max_tokens=100,
                constraint=budgets.start(prompt, Channel.ANALYSIS, room=100, tokens=tokens, reserve=None),
            )
            for tokens in (0, 3, 20)
        ]

    with load_engine(MODEL_PATH) as full:
        expected = together(plain, requests())
        assert len(set(map(tuple, expected))) > 1
        check_replies(full, requests(), together(full, requests()), expected)


def test_its_items_are_those_of_an_engine(plain: Engine) -> None:
    request = asked(plain, QUESTIONS[0])
    items = list(plain.generate(request))
    progress = [item for item in items if isinstance(item, Progress)]
    deltas = [item for item in items if isinstance(item, TokenDelta)]
    assert progress[-1] == Progress(len(request.prompt), len(request.prompt))
    assert "".join(item.text for item in deltas).endswith("Paris.<|return|>")
    end = items[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.completion_tokens, end.cached_tokens) == ("stop", len(deltas), 0)


def test_a_reply_that_is_closed_leaves_the_others_as_they_are(windowed: Path) -> None:
    with load_engine(windowed, engine="plain") as engine:
        request, *others = [
            GenerationRequest(prompt=list(range(20, 20 + length)), max_tokens=200) for length in (30, 31, 32)
        ]
        alone = [reply_tokens(engine, each) for each in others]
        generation = engine.generate(request)
        running = [engine.generate(each) for each in others]
        for item in generation:
            if isinstance(item, TokenDelta):
                break
        generation.close()
        assert [[item.token for item in each if isinstance(item, TokenDelta)] for each in running] == alone


def test_a_prompt_that_is_cancelled_while_it_is_prefilled_leaves_the_others_as_they_are(
    windowed: Path,
) -> None:
    with load_engine(windowed, engine="plain", prefill_chunk=8) as engine:
        others = [
            GenerationRequest(prompt=list(range(20, 20 + length)), max_tokens=30) for length in (40, 90)
        ]
        alone = [reply_tokens(engine, each) for each in others]
        generation = engine.generate(GenerationRequest(prompt=[7] * 400, max_tokens=5))
        running = [engine.generate(each) for each in others]
        assert isinstance(generation.next(), Progress)
        generation.close()
        assert [[item.token for item in each if isinstance(item, TokenDelta)] for each in running] == alone


class _Broken:
    """A constraint that fails at its third token."""

    never_raises = False

    def __init__(self) -> None:
        self.tokens = 0

    def unconstrained_tokens(self) -> int:
        return 0

    def allowed_mask(self) -> None:
        if self.tokens == 2:
            raise RuntimeError("no mask")

    def advance(self, token: int) -> None:
        self.tokens += 1


def test_a_constraint_that_fails_fails_its_own_request(plain: Engine) -> None:
    good = asked(plain, QUESTIONS[1])
    expected = reply_tokens(plain, good)
    bad, other = plain.generate(asked(plain, QUESTIONS[0], constraint=_Broken())), plain.generate(good)
    with pytest.raises(EngineError, match="Choosing the next token failed: no mask"):
        list(bad)
    assert [item.token for item in other if isinstance(item, TokenDelta)] == expected


def test_what_it_lacks_is_refused_by_name(plain: Engine, qwen: Path) -> None:
    image = prepared()
    for fields in ({"logprobs": 1}, {"prompt_logprobs": 1}, {"images": [PromptImage(0, image)]}):
        with pytest.raises(EngineRefused, match="sees no images, and gives no log probabilities"):
            list(plain.generate(asked(plain, QUESTIONS[0], **fields)))
    with pytest.raises(EngineError, match="does not support --kv-bits, --prompt-cache-dir: leave that out"):
        load_engine(qwen, engine="plain", kv_bits=8, cache_folder=qwen)


def test_a_prompt_that_is_likely_to_come_is_not_prefilled(plain: Engine) -> None:
    request = asked(plain, QUESTIONS[0])
    asked_for: list[str] = []

    def make_start() -> PromptStart:
        asked_for.append("a warm-up")
        return PromptStart(request.prompt)

    plain.prewarm(make_start)
    assert isinstance((end := list(plain.generate(request))[-1]), Finished)
    assert end.cached_tokens == 0
    list(plain.generate(request))  # after it the queue was empty
    assert not asked_for


def test_it_says_which_options_have_no_effect(qwen: Path, caplog: pytest.LogCaptureFixture) -> None:
    with load_engine(qwen, engine="plain"):
        assert "caches no prompts, wires no memory, has no faster layers" in caplog.text


def test_its_weights_are_reserved_while_it_is_loaded(qwen: Path) -> None:
    device = Device(1 << 30)
    with load_engine(qwen, engine="plain", device=device):
        assert device.memory.reserved >= (qwen / "model.safetensors").stat().st_size * 0.9
    assert device.memory.reserved == 0
