"""Models on one device, and on two: an engine and an embedding model see what the others reserve, or nothing."""

from pathlib import Path

import pytest
from embedding_models import write_bert
from engine_models import write_model, write_qwen
from engine_requests import engine_and_batch

from mlx_backend.device import Device
from mlx_backend.device.memory import MemoryReservation, room_for_weights
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.embedding.mlx import load_worker
from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.chunk_cost import ChunkCost
from mlx_backend.engine.mlx.warm_up import WarmUp
from mlx_backend.errors import EngineBusy
from mlx_backend.layers.many_rows import ManyRows
from mlx_backend.models.engine_options import EngineOptions

LIMIT = 64 << 20
REQUEST = GenerationRequest(prompt=[9, 10, 11], max_tokens=3)


def cached_bytes(device: Device, reservation: MemoryReservation) -> int:
    """Return what a model has cached after its step: a reply has ended before its caches are counted as cached."""
    with device.lock:
        return reservation.cached


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def test_engines_that_share_a_device_see_each_others_reservations(model: Path) -> None:
    device = Device(LIMIT)
    with load_engine(model, device=device) as one:
        alone = device.memory.reserved
        assert alone >= (model / "model.safetensors").stat().st_size * 0.9
        with load_engine(model, device=device):
            assert device.memory.reserved >= 2 * alone
            for reservation in device.memory._reservations:
                reservation.set_working(LIMIT)
            with pytest.raises(EngineBusy, match="other models' work leaves 0 KB"):
                list(one.generate(REQUEST))
        assert len(device.memory._reservations) == 1, "what the second engine had is free"
        assert [item for item in one.generate(REQUEST) if isinstance(item, TokenDelta)]
    assert device.memory.reserved == 0


def test_engines_on_two_devices_do_not(model: Path) -> None:
    here, there = Device(LIMIT), Device(LIMIT)
    with load_engine(model, device=here) as engine:
        there.memory.reserve(0).set_working(LIMIT)
        assert [item for item in engine.generate(REQUEST) if isinstance(item, TokenDelta)]
        assert here.memory.reserved > 0
    assert here.memory.reserved == 0


def test_an_embedding_model_is_no_room_for_the_engine_on_its_device(model: Path, tmp_path: Path) -> None:
    device = Device(LIMIT)
    worker = load_worker(
        str(write_bert(tmp_path)), "embedding", EmbeddingOptions(allow_download=False), device=device
    )
    try:
        with load_engine(model, device=device):
            embedding, engine = device.memory._reservations
            assert embedding.weights > 0
            assert engine.room == int(LIMIT * 0.95) - engine.weights - embedding.total
    finally:
        worker.stop()
    assert device.memory.reserved == 0


def test_what_a_chunk_takes_is_measured_while_no_other_model_computes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, held, measure = Device(LIMIT), [], WarmUp.measure

    def watched(warm_up: WarmUp, *given: ManyRows | None) -> ChunkCost:
        held.append(device.lock._held)
        return measure(warm_up, *given)

    monkeypatch.setattr(WarmUp, "measure", watched)
    with load_engine(model, device=device):
        assert held == [True], "MLX counts the memory of all models together"


def test_the_cached_prompts_of_one_model_give_way_to_a_request_to_another(model: Path) -> None:
    """Its thread sleeps until it is asked for their memory."""
    device = Device(LIMIT)
    with (
        load_engine(model, device=device, cache_bytes=LIMIT) as one,
        load_engine(model, device=device, cache_bytes=LIMIT) as two,
    ):
        reservation, other = device.memory._reservations
        taken = device.memory.reserve(0)
        long = [20 + at % 200 for at in range(900)]
        list(two.generate(GenerationRequest(prompt=long, max_tokens=3)))
        needed = cached_bytes(device, other)  # by its prompt
        for at in range(6):
            list(one.generate(GenerationRequest(prompt=[*long[at * 7 :], at], max_tokens=3)))
        cached = cached_bytes(device, reservation)
        assert cached > 3 * needed > 0
        taken.set_working(other.room - needed // 2)
        assert other.room < needed
        available = two.status().available_context
        assert available is not None
        assert available > len(long)
        second = GenerationRequest(prompt=long[::-1], max_tokens=3)
        assert sum(isinstance(item, TokenDelta) for item in two.generate(second)) == 3
        assert reservation.cached < cached
        assert device.memory.reserved <= LIMIT


def test_cached_prompts_stay_once_the_requests_that_needed_their_memory_have_ended(model: Path) -> None:
    device = Device(LIMIT)
    with (
        load_engine(model, device=device, cache_bytes=LIMIT) as one,
        load_engine(model, device=device, cache_bytes=0) as two,
    ):
        reservation, other = device.memory._reservations
        taken = device.memory.reserve(0)
        long = [20 + at % 200 for at in range(900)]
        taken.set_working(other.room - (1 << 20))
        list(two.generate(GenerationRequest(prompt=long, max_tokens=3)))
        taken.close()
        for at in range(3):
            list(one.generate(GenerationRequest(prompt=[*long[at * 7 :], at], max_tokens=3)))
        cached = cached_bytes(device, reservation)
        assert cached > 1 << 20
        one._scheduler.wake()  # as whenever another model asks for memory, however little
        list(one.generate(REQUEST))
        assert cached_bytes(device, reservation) >= cached


def test_what_is_stored_of_a_reply_is_counted_before_others_are_told_that_its_memory_is_free(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(LIMIT)
    with load_engine(model, device=device, cache_bytes=LIMIT) as engine:
        cached, counted = [], []

        def note(reservation: MemoryReservation, _nbytes: int) -> None:
            counted.append(reservation.cached)
            cached.append(prefixes.nbytes)

        prefixes = engine._scheduler._batch.runtime.prefix_store.prefixes  # type: ignore[attr-defined]  # of MLX's
        monkeypatch.setattr(device.memory, "on_freed", note)
        list(engine.generate(GenerationRequest(prompt=[20 + at % 200 for at in range(900)], max_tokens=40)))
        list(engine.generate(REQUEST))  # by its first step the other's last has ended
        assert counted == cached
        assert max(cached) > 0


def test_cached_prompts_give_way_while_another_model_is_still_being_read(model: Path) -> None:
    """Not when it has been read: until then both would take more than the limit."""
    with engine_and_batch(model) as (_, alone):
        weights = alone.runtime.weight_bytes
    device = Device(LIMIT)
    with load_engine(model, device=device, cache_bytes=LIMIT) as one:
        prompt = [20 + at % 200 for at in range(900)]
        list(one.generate(GenerationRequest(prompt=prompt, max_tokens=3)))
        [reservation] = device.memory._reservations
        cached = cached_bytes(device, reservation)
        taken = device.memory.reserve(0)
        taken.set_working(reservation.room - weights - cached // 2)
        has_asked: list[bool] = []

        def on_progress(share: float) -> None:
            other = device.memory._reservations[-1]
            if share < 1 and other.weights and not has_asked:
                has_asked.append(other.asked > 0 or reservation.cached < cached)

        with load_engine(model, device=device, on_progress=on_progress):
            pass
        assert has_asked == [True]
        assert reservation.cached < cached
        assert device.memory.others(taken) == [reservation]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_a_reply_leaves_cached_gives_way_to_a_model_that_was_read_meanwhile(
    tmp_path: Path, is_cancelled: bool
) -> None:
    """While it runs that is a part of its own memory, and cannot be given up when it is asked for."""
    device = Device(LIMIT)
    batch = MLXBatch(write_qwen(tmp_path), EngineOptions(cache_bytes=LIMIT), device=device)
    batch.load(lambda _: None)
    try:
        [reservation] = device.memory._reservations
        prompt = [20 + at % 200 for at in range(900)]
        batch.insert(0, GenerationRequest(prompt=prompt, max_tokens=8, checkpoints=(500,)))
        for _ in range(3):
            list(batch.step())
        other = device.memory.reserve(0)
        other.set_weights(room_for_weights(LIMIT) - reservation.weights)
        assert reservation.working > 0
        if is_cancelled:
            batch.remove(0)
        while batch.sequences:
            list(batch.step())
        assert reservation.working == reservation.cached == 0
    finally:
        batch.unload()
