"""An engine's memory: what fits, what waits, what is preempted and resumed, and what is refused with the figures."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from drafting import loaded_batch
from engine_requests import TEXT, reply_tokens, request_for, room_beside, together

from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.errors import EngineBusy, EngineError, EngineRefused
from mlx_backend.models.engine_options import EngineOptions


def test_what_could_never_fit_is_refused_with_the_figures(qwen: Path) -> None:
    with load_engine(qwen, cache_bytes=0, memory_bytes=room_beside(qwen, 1_200_000)) as engine:
        assert reply_tokens(engine, request_for(engine, count=5))
        with pytest.raises(
            EngineError, match=r"9 tokens of prompt and 1000 of reply would need .* the model leaves"
        ):
            reply_tokens(engine, GenerationRequest(prompt=[9] * 9, max_tokens=1000))


@pytest.mark.parametrize("expected", [20, 2048])
def test_a_reply_without_a_limit_of_its_own_gets_all_tokens_that_fit(windowed: Path, expected: int) -> None:
    with load_engine(windowed, memory_bytes=room_beside(windowed, 420_000)) as engine:
        available = engine.status().available_context
        assert available is not None
        assert 200 < available < 700
        for length in (available - 1, available // 2, 10):
            prompt = [20 + at % 50 for at in range(length)]
            request = GenerationRequest(prompt=prompt, max_tokens=1000, expected_tokens=expected)
            *_, end = engine.generate(request)
            assert isinstance(end, Finished)
            assert end.reason == "length"
            assert available - length <= end.completion_tokens < 1000, "more, where no chunk needs memory"
        too_long = GenerationRequest(prompt=[20] * available, max_tokens=1000, expected_tokens=expected)
        with pytest.raises(EngineRefused, match=f"of prompt and 1 of reply .* enough for {available} tokens"):
            reply_tokens(engine, too_long)


def test_a_reply_that_ends_because_memory_does_reports_its_drafts(windowed: Path) -> None:
    memory = room_beside(windowed, 420_000)
    with load_engine(windowed, memory_bytes=memory, draft_from_text=True) as engine:
        request = GenerationRequest(prompt=[20, 21, 22] * 20, max_tokens=1000, expected_tokens=20)
        *_, end = engine.generate(request)
    assert isinstance(end, Finished)
    assert end.completion_tokens < 1000
    assert end.drafted_tokens > 0


def test_a_request_without_a_limit_of_its_own_that_needs_all_memory_waits_for_the_others(
    windowed: Path,
) -> None:
    with load_engine(windowed, cache_bytes=0) as unlimited:
        short = request_for(unlimited, count=100)
        long = request_for(unlimited, TEXT * 10, count=400, expected_tokens=2048)
        expected = [reply_tokens(unlimited, each) for each in (short, long, short)]
    with load_engine(windowed, cache_bytes=0, memory_bytes=room_beside(windowed, 420_000)) as engine:
        assert together(engine, [short, long, short]) == expected


def test_a_conversation_that_takes_more_than_half_of_the_memory_is_still_cached_in_its_next_turn(
    qwen: Path,
) -> None:
    """A turn takes the memory of what it goes on with once."""
    prompt = [20 + at % 50 for at in range(900)]
    with loaded_batch(qwen, cache_bytes=0) as batch:
        needed = batch.runtime.cache_budget._cost(len(prompt) + 100)
    with load_engine(qwen, cache_bytes=1 << 30, memory_bytes=room_beside(qwen, needed * 3 // 2)) as engine:
        for turn in range(4):
            *_, end = engine.generate(GenerationRequest(prompt=prompt, max_tokens=8))
            assert isinstance(end, Finished)
            assert end.cached_tokens == (len(prompt) - 10 - 1 if turn else 0)
            prompt += range(60, 70)


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
    monkeypatch.setattr("mlx_backend.engine.kv_cache_budget.RESERVED_REPLY_TOKENS", 100)
    caplog.set_level("INFO")
    sampling = Sampling(temperature=1, seed=1, frequency_penalty=0.3, logit_bias=((1, -100.0),))
    fields: dict[str, Any] = {"count": 600, "expected_tokens": 50, "sampling": sampling, "logprobs": 0}
    with load_engine(windowed, cache_bytes=0) as unlimited:
        requests = [request_for(unlimited, TEXT * count, **fields) for count in (1, 2, 3)]
        expected = together(unlimited, requests)
    with load_engine(windowed, cache_bytes=0, memory_bytes=room_beside(windowed, 2 * 420_000)) as engine:
        assert together(engine, requests) == expected
    assert "Memory is short" in caplog.text


def test_replies_that_cannot_be_batched_are_preempted_and_resumed_unchanged(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_backend.engine.kv_cache_budget.RESERVED_REPLY_TOKENS", 100)
    caplog.set_level("INFO")
    fields: dict[str, Any] = {
        "count": 300,
        "expected_tokens": 50,
        "sampling": Sampling(temperature=1, seed=1),
    }
    options: dict[str, Any] = {"cache_bytes": 0, "kv_bits": 8, "packing": False}
    with load_engine(qwen, **options) as unlimited:
        requests = [request_for(unlimited, TEXT * count, **fields) for count in (1, 2, 3)]
        expected = together(unlimited, requests)
    with load_engine(qwen, memory_bytes=room_beside(qwen, 600_000), **options) as engine:
        assert together(engine, requests) == expected
    assert "Memory is short" in caplog.text


def test_another_models_passing_work_neither_refuses_a_request_for_good_nor_cuts_a_reply_short(
    windowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_backend.engine.kv_cache_budget.RESERVED_REPLY_TOKENS", 100)
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
        while batch.sequences:
            outcomes = next(running)
        assert tokens(outcomes[1]) == tokens(expected[1])
    finally:
        other.close()
        batch.unload()


def test_a_request_without_a_limit_of_its_own_starts_in_no_memory_that_other_models_requests_take(
    windowed: Path,
) -> None:
    device = Device(room_beside(windowed, 2_000_000))
    other = device.memory.reserve(0)
    with load_engine(windowed, device=device, cache_bytes=0) as engine:
        asked = GenerationRequest(prompt=[20] * 30, max_tokens=5000, expected_tokens=2000)
        other.set_working(1_700_000)
        with pytest.raises(EngineBusy, match="other models' work leaves"):
            list(engine.generate(asked))
        other.set_working(0)
        assert reply_tokens(engine, asked)


def test_no_reply_is_preempted_for_memory_that_another_model_is_about_to_give_up(
    windowed: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mlx_backend.engine.kv_cache_budget.RESERVED_REPLY_TOKENS", 100)
    caplog.set_level("INFO")
    device = Device(room_beside(windowed, 2_000_000))
    batch = MLXBatch(windowed, EngineOptions(cache_bytes=0), device=device)
    batch.load(lambda _share: None)
    other = device.memory.reserve(0)
    for key in range(2):
        batch.insert(key, GenerationRequest(prompt=[20 + key] * 30, max_tokens=400, expected_tokens=20))
    list(batch.step())
    left = batch.runtime.cache_budget.reservation.room - batch.runtime.cache_budget.used
    other.set_working(left, cached=left)
    while batch.sequences:
        list(batch.step())
        if other.needed_by_others and batch.steps % 5 == 0:  # it is in a step of its own meanwhile
            rest = other.cached - other.needed_by_others
            other.set_working(rest, cached=rest)
    assert 0 < other.cached < left
    assert "Memory is short" not in caplog.text
    batch.unload()


def test_a_model_that_cannot_be_loaded_takes_no_memory_from_the_others(qwen: Path, tmp_path: Path) -> None:
    taken = tmp_path / "not a folder"
    taken.write_text("")

    device = Device(8 << 30)
    for options in (EngineOptions(cache_folder=taken), EngineOptions(memory_bytes=1000)):
        with pytest.raises(EngineError):
            load_engine(qwen, options, device=device)
        assert device.memory.reserved == 0


def test_two_hundred_requests_leave_no_memory_behind(qwen: Path) -> None:
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
            """Measure after one more reply: sequences are gone one step after their last tokens."""
            assert reply_tokens(engine, request_for(engine, "last", count=3))
            return mx.get_active_memory() - others

        some(10)
        assert at_rest() <= 2 << 20
        some(40)
        assert at_rest() <= 2 << 20


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


def test_a_request_that_cannot_be_started_leaves_no_memory_reserved(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("[malloc] Unable to allocate 99 bytes")

    batch = MLXBatch(qwen, EngineOptions(), device=Device(8 << 30))
    batch.load(lambda _: None)
    try:
        monkeypatch.setattr(batch.runtime.prefix_store, "evict_to_fit", fail)
        with pytest.raises(RuntimeError, match="Unable to allocate"):
            batch.insert(0, GenerationRequest(prompt=[9], max_tokens=5))
        assert batch.runtime.cache_budget.used == 0
        assert not batch.sequences
    finally:
        batch.unload()
