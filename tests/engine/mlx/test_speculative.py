"""Speculative decoding: drafts can make a reply faster, and never change it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from architectures import write
from drafting import drafting_engine, first_position, generate, loaded_batch
from engine_models import write_qwen

from mlx_backend.demo import MODEL_PATH
from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.engine.mlx.speculative import DraftTask, ModelDrafter, TextDrafter, propose
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import EngineOptions

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.8, top_p=0.9, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
]


def prompts(engine: Engine) -> list[list[int]]:
    texts = ["fox", "the quick brown fox jumps over the lazy dog " * 3, "one two three four " * 12]
    return [engine.tokenizer.encode(text, control_tokens=True) for text in texts]


def reply_tokens(engine: Engine, prompt: Sequence[int], sampling: Sampling, count: int = 40) -> list[int]:
    request = GenerationRequest(prompt=prompt, max_tokens=count, sampling=sampling, logprobs=1)
    *items, last = engine.generate(request)
    assert isinstance(last, Finished)
    assert last.completion_tokens == count
    return [item.token for item in items if isinstance(item, TokenDelta)]


def replies(engine: Engine) -> list[list[int]]:
    return [reply_tokens(engine, prompt, each) for prompt in prompts(engine) for each in SAMPLINGS]


@pytest.fixture(scope="module")
def expected(windowed: Path) -> list[list[int]]:
    with load_engine(windowed, cache_bytes=0) as plain:
        return replies(plain)


@pytest.mark.parametrize(
    ("source", "count"),
    [("the same model", 6), ("another model", 1), ("another model", 6), ("the text", 6)],
)
def test_every_reply_is_the_one_without_drafts(
    windowed: Path, other: Path, source: str, count: int, expected: list[list[int]]
) -> None:
    draft = {"the same model": str(windowed), "another model": str(other)}.get(source)
    options = {"draft_model": draft, "draft_from_text": draft is None, "draft_tokens": count}
    with drafting_engine(windowed, **options) as drafting:
        assert replies(drafting) == expected


def test_right_drafts_save_steps(windowed: Path) -> None:
    with loaded_batch(windowed, draft_model=str(windowed), draft_tokens=4) as batch:
        [reply] = generate(batch, [GenerationRequest(prompt=[20, 21, 22], max_tokens=100)])
        assert batch.steps <= 25, "each generates five tokens, and one prefills the prompt"
    assert reply.ended == Ended("length", drafted_tokens=80, accepted_tokens=80)


def test_a_reply_that_others_join_and_leave_is_still_the_same(windowed: Path, other: Path) -> None:
    with (
        load_engine(windowed, cache_bytes=0) as plain,
        drafting_engine(windowed, draft_model=str(other)) as drafting,
    ):
        sampling = SAMPLINGS[1]
        long, short, third = prompts(plain)
        expected = [
            reply_tokens(plain, prompt, sampling, count)
            for prompt, count in ((long, 150), (short, 20), (third, 40))
        ]
        first = drafting.generate(GenerationRequest(prompt=long, max_tokens=150, sampling=sampling))
        while not isinstance(first.next(), TokenDelta):
            pass
        got = [
            reply_tokens(drafting, prompt, sampling, count) for prompt, count in ((short, 20), (third, 40))
        ]
        rest = [item.token for item in first if isinstance(item, TokenDelta)]
        assert got == expected[1:]
        assert rest == expected[0][1:]


def test_drafts_stop_where_the_reply_ends() -> None:
    with (
        load_engine(MODEL_PATH) as plain,
        drafting_engine(MODEL_PATH, cache_bytes=None, draft_from_text=True, draft_tokens=8) as fast,
    ):
        for question in ("Repeat: apple river stone.", "Count to 15.", "What is the capital of France?"):
            text = plain.tokenizer.render([{"role": "user", "content": question}], None)
            prompt = plain.tokenizer.encode(text, control_tokens=True)
            for limit in (5, 200):
                request = GenerationRequest(prompt=prompt, max_tokens=limit)
                expected, got = list(plain.generate(request)), list(fast.generate(request))
                assert [i for i in got if isinstance(i, TokenDelta)] == [
                    i for i in expected if isinstance(i, TokenDelta)
                ]
                assert isinstance(got[-1], Finished)
                assert isinstance(expected[-1], Finished)
                assert got[-1].reason == expected[-1].reason
            again = list(fast.generate(request))  # from the cache that the drafts left
            assert [i.token for i in again if isinstance(i, TokenDelta)] == [
                i.token for i in expected if isinstance(i, TokenDelta)
            ]


def test_the_text_drafter_continues_a_text_as_it_continued_before() -> None:
    drafter = TextDrafter()
    assert drafter.propose([1, 2], 4) == []
    assert drafter.propose([1, 2, 3, 4, 5, 6], 4) == []
    assert drafter.propose([1, 2, 3, 4, 5, 6, 1, 2, 3], 2) == [4, 5]
    assert drafter.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9], 2) == []
    assert drafter.propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 1, 2, 3], 9) == [9, 1, 2, 3, 9, 1, 2, 3, 9]


def test_the_text_drafter_finds_out_how_its_drafts_would_fare_without_drafting() -> None:
    drafter, text = TextDrafter(), [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 9, 1, 2, 3]
    outcomes = [drafter.rehearse(text[:end], 2) for end in range(6, len(text) + 1)]
    assert outcomes[:4] == [(0, 0)] * 4, "nothing is found before three tokens stood there"
    assert outcomes[4:7] == [(1, 1), (1, 1), (1, 0)], "the next token is known at once"
    assert outcomes[7:] == [(0, 0)] * 3
    assert drafter.guess == drafter.propose(text, 2) == [4, 5]
    assert drafter.rehearse([*text, 4, 5], 2) == (0, 0), "what was drafted is not rehearsed as well"


def test_a_draft_model_with_other_tokens_is_refused_at_start(windowed: Path) -> None:
    with pytest.raises(
        EngineError, match=r"/model cannot draft for this model: its tokens are not the same. Name a smaller"
    ):
        load_engine(windowed, draft_model=str(MODEL_PATH))


def test_a_draft_model_never_sees_ids_beyond_its_table(windowed: Path) -> None:
    known, at = 60, first_position(512, Sampling(temperature=1.5, seed=1))
    drafter = ModelDrafter(load_model(windowed, EngineOptions(), lambda _: None).network, known)
    assert propose([DraftTask(drafter, [20, known, 21], 4, at)]) == [[]]
    [drafts] = propose([DraftTask(drafter, [20, 30, 21], 4, at)])
    assert drafts is not None
    assert len(drafts) == 4
    assert max(drafts) < known


def test_a_draft_model_whose_caches_cannot_be_rewound_is_refused_at_start(tmp_path: Path) -> None:
    model, draft = write_qwen(tmp_path / "qwen"), write(tmp_path / "v41", "deepseek_v41")
    with pytest.raises(EngineError, match="v41' cannot draft: its LayerCache cannot be rewound"):
        load_engine(model, draft_model=str(draft))


def test_memory_is_reserved_for_the_draft_models_caches_too(windowed: Path) -> None:
    costs = []
    for draft in (None, str(windowed)):
        batch = MLXBatch(windowed, EngineOptions(draft_model=draft), device=Device(8 << 30))
        batch.load(lambda _: None)
        batch.runtime.cache_budget.reserve(0, 1000)
        costs.append(batch.runtime.cache_budget.used)
        batch.unload()
    assert costs[1] > 2 * costs[0], "windows are kept whole there"
