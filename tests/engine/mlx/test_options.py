"""An engine's options: adapters, quantised caches, limits. Each is honoured, or refused with a reason."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_models import write_adapter, write_mamba, write_model, write_qwen, write_random
from tolerances import check_replies

from mlx_backend.device import Device
from mlx_backend.engine.base import Engine, Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.threaded import ThreadedEngine
from mlx_backend.errors import EngineBusy, EngineError, EngineRefused
from mlx_backend.models.engine_options import EngineOptions

TEXT = "the quick brown fox jumps over the lazy dog "


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gpt-oss"), eos_token_id=[])


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("qwen"))


def request_for(engine: Engine, text: str = TEXT, count: int = 30, **fields: object) -> GenerationRequest:
    prompt = engine.tokenizer.encode(text, control_tokens=True)
    return GenerationRequest(prompt=prompt, max_tokens=count, **fields)  # type: ignore[arg-type]


def reply_tokens(engine: Engine, request: GenerationRequest) -> list[int]:
    return [item.token for item in engine.generate(request) if isinstance(item, TokenDelta)]


def together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    generations = [engine.generate(each) for each in requests]
    return [[item.token for item in generation if isinstance(item, TokenDelta)] for generation in generations]


def room_beside(model: Path, caches: int) -> int:
    """Return a limit that leaves so many bytes for caches beside the model."""
    return int(((model / "model.safetensors").stat().st_size + caches) / 0.95) + 1000


# -- adapters ------------------------------------------------------------------------------------------------


def test_requests_with_different_adapters_run_side_by_side_and_leave_nothing_behind(
    windowed: Path, tmp_path: Path
) -> None:
    one, other = (write_adapter(tmp_path / f"adapter-{seed}", windowed, seed=seed) for seed in (5, 6))
    with (
        load_engine(windowed) as plain,
        load_engine(windowed, adapters={"one": one}, adapter="one") as with_one,
        load_engine(windowed, adapters={"one": one, "other": other}) as engine,
    ):
        requests = [request_for(engine, adapter=name) for name in (None, "one", "other", "one", None)]
        expected = [reply_tokens(plain, requests[0]), reply_tokens(with_one, request_for(with_one))]
        alone = [reply_tokens(engine, each) for each in requests]
        assert alone[0] == alone[4] == expected[0]
        assert alone[1] == alone[3] == expected[1]
        assert len({tuple(each) for each in alone}) == 3
        check_replies(engine, requests, together(engine, requests), alone)
        assert reply_tokens(engine, requests[0]) == expected[0], "after all of them the model is what it was"


def test_a_prefix_prefilled_with_one_adapter_is_not_used_with_another(windowed: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", windowed)
    with load_engine(windowed, adapters={"a": adapter}) as engine:
        for name, cached in ((None, 0), ("a", 0), (None, 1), ("a", 1)):
            *_, last = engine.generate(request_for(engine, adapter=name))
            assert isinstance(last, Finished)
            assert bool(last.cached_tokens) == bool(cached)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "holds no adapter: there is no adapter_config.json"),
        ("another model's", "does not fit"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_at_start(
    windowed: Path, qwen: Path, tmp_path: Path, damage: str, words: str
) -> None:
    folder = tmp_path / "adapter"
    if damage == "another model's":
        write_adapter(folder, qwen)
    with pytest.raises(EngineError, match=words):
        load_engine(windowed, adapters={"a": folder})


# -- caches of other kinds -----------------------------------------------------------------------------------


def test_quantised_caches_are_refused_at_start_where_the_model_cannot_have_them(windowed: Path) -> None:
    with pytest.raises(
        EngineError, match=r"--kv-bits is not possible .* RotatingKVCache cannot be quantised"
    ):
        load_engine(windowed, kv_bits=8)


def test_quantised_caches_are_refused_in_words_where_the_models_layers_cannot_run_on_them(
    qwen: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
    }
    config |= {"num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5}
    gemma = write_random(tmp_path / "gemma2", {"model_type": "gemma2", **config}, seed=4)
    with pytest.raises(EngineError, match=r"^--kv-bits is not possible .* cannot run on caches of 8 bits"):
        load_engine(gemma, kv_bits=8)
    with pytest.raises(EngineError, match=r"^--kv-bits is not possible .* in groups of 128"):
        load_engine(qwen, kv_bits=8, kv_group_size=128)


def test_replies_with_quantised_caches_are_decoded_one_by_one_and_their_prefixes_are_cached(
    qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = MLXBatch(qwen, EngineOptions(kv_bits=8), device=Device(8 << 30))
    with ThreadedEngine(batch) as engine:
        assert "one after the other in each step: its QuantizedKVCache cannot be merged" in caplog.text
        requests = [
            request_for(engine, TEXT * count, sampling=Sampling(temperature=1, seed=2)) for count in (1, 3)
        ]
        alone = [reply_tokens(engine, each) for each in requests]
        assert together(engine, requests) == alone
        *_, last = engine.generate(requests[1])
        assert isinstance(last, Finished)
        assert last.cached_tokens == len(requests[1].prompt) - 1


def test_a_model_without_windows_generates_the_same_alone_in_a_batch_and_from_cached_prefixes(
    qwen: Path,
) -> None:
    with load_engine(qwen) as engine, load_engine(qwen, cache_bytes=0) as cold:
        requests = [request_for(engine, TEXT * count) for count in (1, 2, 3)]
        expected = [reply_tokens(cold, each) for each in requests]
        check_replies(engine, requests, [reply_tokens(engine, each) for each in requests], expected)
        check_replies(engine, requests, together(engine, requests), expected)


def test_a_sliding_context_is_honoured_where_the_model_has_none_of_its_own_and_refused_elsewhere(
    windowed: Path, qwen: Path
) -> None:
    with pytest.raises(EngineError, match=r"--max-kv-size is not possible .* limit the context"):
        load_engine(windowed, max_kv_size=64)
    with load_engine(qwen, max_kv_size=32) as engine:
        requests = [request_for(engine, TEXT * count, count=60) for count in (1, 2)]
        assert max(len(each.prompt) for each in requests) <= 32
        assert together(engine, requests) == [reply_tokens(engine, each) for each in requests]
        with pytest.raises(EngineRefused, match=r"prompt has 33 tokens, and --max-kv-size keeps 32"):
            reply_tokens(engine, GenerationRequest(prompt=[9] * 33, max_tokens=1))


@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_with_a_sliding_context_an_answer_does_not_depend_on_how_the_prompt_was_cut(
    qwen: Path, chunk: int
) -> None:
    asked = GenerationRequest(prompt=list(range(20, 52)), max_tokens=60, checkpoints=(11, 20))
    with load_engine(qwen, max_kv_size=32, cache_bytes=0) as whole:
        expected = reply_tokens(whole, asked)
    with load_engine(qwen, max_kv_size=32, prefill_chunk=chunk) as engine:
        assert [reply_tokens(engine, asked) for _ in range(2)] == [expected] * 2


def test_with_a_sliding_context_a_preempted_reply_is_resumed_unchanged(qwen: Path) -> None:
    asked = GenerationRequest(prompt=list(range(20, 50)), max_tokens=50)
    with load_engine(qwen, max_kv_size=32) as engine:
        expected = reply_tokens(engine, asked)
    batch = MLXBatch(qwen, EngineOptions(max_kv_size=32), device=Device(8 << 30))
    batch.load(lambda _: None)
    batch.insert(0, asked)
    found: list[int] = []
    while batch.loaded.sequences:
        found += [outcome.token for _, outcome in batch.step() if isinstance(outcome, TokenDelta)]
        if len(found) in (10, 20) and batch.loaded.sequences:
            batch.loaded.preempt(batch.loaded.sequences[0])
    batch.unload()
    assert found == expected


def test_a_draft_model_is_refused_where_a_cache_cannot_be_rewound(tmp_path: Path) -> None:
    mamba = write_mamba(tmp_path / "mamba")
    with pytest.raises(
        EngineError, match="Drafts are not possible with this model: its ArraysCache cannot be"
    ):
        load_engine(mamba, draft_model=str(mamba))
    with load_engine(mamba) as engine:
        requests = [request_for(engine, TEXT * count) for count in (1, 2, 3)]
        alone = [reply_tokens(engine, each) for each in requests]
        check_replies(engine, requests, together(engine, requests), alone)
        from_kept_states = [reply_tokens(engine, each) for each in requests]
        check_replies(engine, requests, from_kept_states, alone)


# -- memory --------------------------------------------------------------------------------------------------


def test_what_could_never_fit_is_refused_with_the_figures(qwen: Path) -> None:
    with load_engine(qwen, cache_bytes=0, memory_bytes=room_beside(qwen, 1_200_000)) as engine:
        assert reply_tokens(engine, request_for(engine, count=5))
        with pytest.raises(
            EngineError, match=r"9 tokens of prompt and 1000 of reply would need .* the model leaves"
        ):
            reply_tokens(engine, GenerationRequest(prompt=[9] * 9, max_tokens=1000))


def test_requests_wait_until_there_is_room_for_their_caches(qwen: Path) -> None:
    with load_engine(qwen, cache_bytes=0) as unlimited:
        requests = [request_for(unlimited, TEXT * count, count=40) for count in (1, 2, 3, 1, 2)]
        expected = [reply_tokens(unlimited, each) for each in requests]
    with load_engine(qwen, cache_bytes=0, memory_bytes=room_beside(qwen, 1_200_000)) as engine:
        assert together(engine, requests) == expected
        assert engine.is_healthy()


def test_replies_that_outgrow_their_reservations_are_preempted_and_resumed_unchanged(
    windowed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_backend.engine.mlx.loaded_batch.RESERVED_REPLY_TOKENS", 100)
    caplog.set_level("INFO")
    sampling = Sampling(temperature=1, seed=1, frequency_penalty=0.3, logit_bias=((1, -100.0),))
    fields = {"count": 600, "expected_tokens": 50, "sampling": sampling, "logprobs": 0}
    with load_engine(windowed, cache_bytes=0) as unlimited:
        requests = [request_for(unlimited, TEXT * count, **fields) for count in (1, 2, 3)]  # type: ignore[arg-type]
        expected = together(unlimited, requests)
    with load_engine(windowed, cache_bytes=0, memory_bytes=room_beside(windowed, 2 * 420_000)) as engine:
        assert together(engine, requests) == expected
    assert "Memory is short" in caplog.text


def test_replies_that_cannot_be_batched_are_preempted_and_resumed_unchanged(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_backend.engine.mlx.loaded_batch.RESERVED_REPLY_TOKENS", 100)
    caplog.set_level("INFO")
    fields = {"count": 600, "expected_tokens": 50, "sampling": Sampling(temperature=1, seed=1)}
    options = {"cache_bytes": 0, "kv_bits": 8}
    with load_engine(qwen, **options) as unlimited:  # type: ignore[arg-type]
        requests = [request_for(unlimited, TEXT * count, **fields) for count in (1, 2, 3)]  # type: ignore[arg-type]
        expected = together(unlimited, requests)
    with load_engine(qwen, memory_bytes=room_beside(qwen, 1_000_000), **options) as engine:  # type: ignore[arg-type]
        assert together(engine, requests) == expected
    assert "Memory is short" in caplog.text


def test_another_models_passing_work_neither_refuses_a_request_for_good_nor_cuts_a_reply_short(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_backend.engine.mlx.loaded_batch.RESERVED_REPLY_TOKENS", 100)
    device = Device(room_beside(windowed, 2_000_000))
    asked = [GenerationRequest(prompt=[20 + at] * 30, max_tokens=400, expected_tokens=20) for at in range(2)]

    def replies(batch: MLXBatch, steps: int) -> Iterator[dict[int, list[object]]]:
        outcomes: dict[int, list[object]] = {0: [], 1: []}
        for _ in range(steps):
            for key, outcome in batch.step():
                outcomes[key].append(outcome.token if isinstance(outcome, TokenDelta) else outcome)
            yield outcomes

    def tokens(outcomes: list[object]) -> list[object]:
        return [each for each in outcomes if not isinstance(each, Progress)]

    def batch_of_two() -> MLXBatch:
        batch = MLXBatch(windowed, EngineOptions(cache_bytes=0), device=device)
        batch.load(lambda _: None)
        for key, each in enumerate(asked):
            assert batch.admits(each)
            batch.insert(key, each)
        return batch

    calm = batch_of_two()
    *_, expected = replies(calm, 402)
    calm.unload()
    batch, other = batch_of_two(), device.memory.reserve(0)
    try:
        running = replies(batch, 5000)
        for _ in range(50):
            next(running)
        other.set_working(1_900_000)
        with pytest.raises(EngineBusy, match="other models' work leaves"):
            batch.admits(GenerationRequest(prompt=[1], max_tokens=1000))
        with pytest.raises(EngineRefused, match="the model leaves"):
            batch.admits(GenerationRequest(prompt=[1], max_tokens=100_000))
        for _ in range(390):  # the first continues alone, past its reservation
            outcomes = next(running)
        assert tokens(outcomes[0]) == tokens(expected[0])
        assert len(tokens(outcomes[1])) < 400
        other.set_working(0)
        while batch.loaded.sequences:
            outcomes = next(running)
        assert tokens(outcomes[1]) == tokens(expected[1])
    finally:
        other.close()
        batch.unload()


def test_a_model_that_cannot_be_loaded_takes_no_memory_from_the_others(qwen: Path, tmp_path: Path) -> None:
    taken = tmp_path / "not a folder"
    taken.write_text("")

    device = Device(8 << 30)
    for options in (EngineOptions(cache_folder=taken), EngineOptions(memory_bytes=1000)):
        with pytest.raises(EngineError):
            load_engine(qwen, options, device=device)
        assert device.memory.reserved == 0


def test_five_hundred_requests_leave_no_memory_behind(qwen: Path) -> None:
    import mlx.core as mx

    with load_engine(qwen, cache_bytes=1 << 20) as engine:
        others = mx.get_active_memory()

        def some(count: int) -> None:
            threads = [
                threading.Thread(
                    target=lambda at=at: [
                        reply_tokens(engine, request_for(engine, f"{at} {turn}", count=3))
                        for turn in range(count)
                    ]
                )
                for at in range(5)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        def at_rest() -> int:
            """Measure once the last sequences are gone, which is one step after their last tokens."""
            deadline = time.monotonic() + 20
            while (kept := mx.get_active_memory() - others) > 2 << 20 and time.monotonic() < deadline:
                time.sleep(0.01)
            return kept

        some(10)
        assert at_rest() <= 2 << 20
        some(100)
        assert at_rest() <= 2 << 20


# -- prefixes on disk ----------------------------------------------------------------------------------------


def cached_of(engine: Engine, request: GenerationRequest) -> tuple[int, list[int]]:
    *items, last = engine.generate(request)
    assert isinstance(last, Finished)
    return last.cached_tokens, [item.token for item in items if isinstance(item, TokenDelta)]


@pytest.mark.parametrize("kind", ["windowed", "qwen"])
def test_prefixes_outlive_the_engine_in_a_folder(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: Path = request.getfixturevalue(kind)
    prompt = list(range(20, 120))
    first = GenerationRequest(prompt=prompt, max_tokens=20, checkpoints=(60, 90))
    other = GenerationRequest(prompt=[*prompt[:60], 9, 9, 9], max_tokens=20)
    with load_engine(model, cache_bytes=0) as cold:
        expected = [cached_of(cold, each)[1] for each in (first, other)]
    with load_engine(model, cache_folder=tmp_path) as engine:
        assert cached_of(engine, first) == (0, expected[0])
    with load_engine(model, cache_folder=tmp_path, cache_bytes=0) as engine:
        assert cached_of(engine, first) == (90, expected[0])
        assert cached_of(engine, other) == (60, expected[1])
    with load_engine(model, cache_folder=tmp_path, cache_folder_bytes=0) as engine:
        assert cached_of(engine, first) == (0, expected[0])


def test_a_folder_is_not_used_by_an_engine_with_other_kinds_of_caches(qwen: Path, tmp_path: Path) -> None:
    asked = GenerationRequest(prompt=list(range(20, 60)), max_tokens=5, checkpoints=(30,))
    for options, cached in (({"max_kv_size": 64}, 0), ({}, 0), ({"max_kv_size": 64}, 30)):
        with load_engine(qwen, cache_folder=tmp_path, **options) as engine:  # type: ignore[arg-type]
            assert cached_of(engine, asked)[0] == cached


def test_prefixes_of_the_adapter_that_is_always_on_outlive_the_engine(windowed: Path, tmp_path: Path) -> None:
    asked = GenerationRequest(prompt=list(range(20, 60)), max_tokens=5, checkpoints=(30,))
    one, other = (write_adapter(tmp_path / f"adapter-{seed}", windowed, seed=seed) for seed in (5, 6))
    for adapter, cached in ((one, 0), (other, 0), (one, 30), (other, 30)):
        with load_engine(
            windowed, cache_folder=tmp_path / "kept", adapters={"a": adapter}, adapter="a"
        ) as engine:
            assert cached_of(engine, asked)[0] == cached


def test_a_warm_up_uses_the_adapter_it_is_for(windowed: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", windowed)
    prompt = list(range(20, 120))
    with load_engine(windowed, adapters={"a": adapter}) as engine:
        planned = threading.Event()

        def plan() -> list[int]:
            planned.set()
            return prompt[:80]

        for _ in range(2):  # the second is cached already
            planned.clear()
            engine.prewarm(plan, "a")
            assert planned.wait(20)
        for name, cached in (("a", 80), (None, 0)):
            asked = GenerationRequest(prompt=prompt, max_tokens=2, adapter=name)
            # It is prefilled while the queue is empty: before or after the first request, if that arrives too soon.
            found = [cached_of(engine, asked)[0] for _ in range(3)]
            assert found[-1] >= cached
            assert name or found[0] == 0


def test_a_warm_up_of_a_cached_prompt_prefills_nothing(
    windowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = MLXBatch(windowed, EngineOptions(), device=Device(8 << 30))
    batch.load(lambda _: None)
    ahead = GenerationRequest(prompt=list(range(20, 90)), max_tokens=0)
    for key in range(2):
        assert batch.admits(ahead)
        batch.insert(key, ahead)
        assert (key, Ended("length")) in list(batch.step())
    batch.unload()
    assert not caplog.records


def test_drafts_come_from_one_source(windowed: Path) -> None:
    with pytest.raises(EngineError, match="not from both"):
        load_engine(windowed, draft_model=str(windowed), draft_from_text=True)


def test_a_model_that_leaves_no_memory_for_a_reply_is_refused_and_one_that_leaves_little_is_warned_about(
    qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError, match=r"leaves .* for replies, and a single token needs .* --memory-gb"):
        load_engine(qwen, memory_bytes=room_beside(qwen, 0))
    with load_engine(qwen, memory_bytes=room_beside(qwen, 1_000_000)):
        assert "of memory for requests, and one of" in caplog.text
    caplog.clear()
    with load_engine(qwen):
        assert "of memory for requests" not in caplog.text
