"""Faults: a failure ends as few requests as possible, and the engine recovers."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from drafting import alone, generate, loaded_batch
from engine_models import WrappedNetwork, write_model, write_qwen
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, Progress, TokenDelta
from mlx_backend.engine.jobs import Generation
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.batch_trial import BatchTrial
from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import PackedLayer
from mlx_backend.engine.mlx.mlx_lm_patches.packing import patch_for_packing
from mlx_backend.engine.mlx.prefill_queue import PrefillQueue, PrefillStep
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError, EngineFailed
from mlx_backend.models.engine_options import EngineOptions

SOON = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), eos_token_id=[])


class Fragile(MLXBatch):
    """Its network fails for prompts that hold a certain token, and with three replies if `failures` has an error next.

    It runs while `may_run` is set.
    """

    POISON = 77

    def __init__(self, model: Path) -> None:
        super().__init__(model, EngineOptions(cache_bytes=0), device=Device(8 << 30))
        self.failures: Iterator[Exception | None] = iter(())
        self.may_run = threading.Event()
        self.may_run.set()
        self.loads = 0

    def load(self, on_progress: Any) -> Any:
        info = super().load(on_progress)
        self.loads += 1
        self.runtime.networks.by_adapter[""] = FragileNetwork(self.runtime.networks.by_adapter[""], self)
        return info


class FragileNetwork(WrappedNetwork):
    def __init__(self, network: Any, batch: Fragile) -> None:
        super().__init__(network)
        self._batch = batch

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        assert self._batch.may_run.wait(SOON)
        if rows_of(inputs, cache) == 3 and (error := next(self._batch.failures, None)) is not None:
            raise error
        packed = isinstance(cache[0], PackedLayer)
        reads = any(length > 1 for _, length in cache[0].shapes) if packed else inputs.shape[1] > 1
        if reads and Fragile.POISON in as_ints(inputs.flatten()):
            raise RuntimeError("[malloc] Unable to allocate 99 bytes")
        logits: mx.array = self._network(inputs, cache=cache)
        return logits


def rows_of(inputs: mx.array, cache: Any) -> int:
    """Return how many replies' next tokens a run decodes together."""
    is_packed = isinstance(cache[0], PackedLayer)
    return max(rows for rows, _ in cache[0].shapes) if is_packed else inputs.shape[0]


def tokens(generation: Generation) -> list[int]:
    return [item.token for item in generation if isinstance(item, TokenDelta)]


def request(prompt: Sequence[int], count: int = 30) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, max_tokens=count)


def test_a_prompt_that_cannot_be_prefilled_fails_alone(model: Path) -> None:
    with load_engine(model, cache_bytes=0) as plain:
        expected = [tokens(plain.generate(request([20 + at] * 9))) for at in range(2)]
    batch = Fragile(model)
    with Engine(batch) as engine:
        first, poisoned, second = (
            engine.generate(each)
            for each in (request([20] * 9), request([5, batch.POISON, 6]), request([21] * 9))
        )
        with pytest.raises(
            EngineError, match=r"could not be prefilled: \[malloc\] Unable to allocate 99 bytes"
        ):
            tokens(poisoned)
        assert [tokens(first), tokens(second)] == expected
        assert batch.loads == 1


def test_when_the_device_fails_the_model_is_reloaded_and_generates_what_it_did_before(model: Path) -> None:
    batch = Fragile(model)
    with Engine(batch) as engine:
        expected = tokens(engine.generate(request([20] * 9)))
        batch.failures = iter([None, None, RuntimeError("[METAL] Command buffer execution failed")])
        batch.may_run.clear()  # until all three are there
        running = [engine.generate(request([20 + at] * 9, count=900)) for at in range(3)]
        batch.may_run.set()
        for generation in running:
            with pytest.raises(EngineFailed, match=r"being restarted: RuntimeError: .*Command buffer"):
                tokens(generation)
        while not engine.is_healthy():
            pass
        assert tokens(engine.generate(request([20] * 9))) == expected
        assert batch.loads == 2


class OneRow(WrappedNetwork):
    """Runs no batch of several rows, after changing the caches of its first layer."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self._network(inputs, cache=cache)
        if rows_of(inputs, cache) > 1:
            raise ValueError("[broadcast_shapes] Shapes (2,1) and (3,1) cannot be broadcast")
        return logits


@pytest.mark.parametrize("refuses", ["merge", "extend", "run"])
def test_caches_that_do_not_fit_each_other_fail_nobody(
    model: Path,
    refuses: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two of four come when the others are being decoded."""
    asked = [request([20 + at] * (1 + 4 * at), count=24 + 5 * at) for at in range(4)]
    with loaded_batch(model) as batch:
        expected = alone(batch, asked)
        assert batch.runtime.abilities.can_pack
        if refuses == "run":
            batch.runtime.networks.by_adapter[""] = OneRow(batch.runtime.networks.by_adapter[""])
        else:
            _refuse_in_the_second_layer(monkeypatch, refuses)
        assert generate(batch, asked, arrivals={2: 5, 3: 5}) == expected
    assert "were lost in decoding" in caplog.text


def _refuse_in_the_second_layer(monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    """Let `BatchKVCache`, of the layer after the first, raise after it has done what it was asked to."""
    original = getattr(BatchKVCache, refuses)

    def refused(*arguments: Any) -> Any:
        original(*arguments)
        raise ValueError("[broadcast_shapes] Shapes (1,2) and (1,3) cannot be broadcast")

    monkeypatch.setattr(BatchKVCache, refuses, staticmethod(refused) if refuses == "merge" else refused)


@pytest.mark.parametrize("refuses", ["filter", "extract"])
@pytest.mark.parametrize("leaves", ["at its end", "cancelled"])
def test_caches_that_cannot_be_taken_apart_fail_nobody_when_one_leaves(
    model: Path,
    refuses: str,
    leaves: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first of three, then the second, leaves the batch; a fourth comes when its caches have been found out."""
    asked = [request([20 + at] * (1 + 4 * at), count=15 + 12 * at) for at in range(3)]
    asked.append(request([30] * 3, count=40))
    _refuse_in_the_second_layer(monkeypatch, refuses)
    monkeypatch.setattr(BatchTrial, "try_packing", _succeed)
    with loaded_batch(model) as batch:
        expected = alone(batch, asked)
        assert batch.runtime.abilities.can_pack
        is_cancelled = leaves == "cancelled"
        first, *others = generate(
            batch,
            asked,
            arrivals={3: 12 if is_cancelled else 22},
            cancelled_after={0: 3} if is_cancelled else {},
        )
        assert others == expected[1:]
        assert is_cancelled == (first.ended is None)
        assert is_cancelled or first == expected[0]
    assert "were lost in decoding" in caplog.text


@pytest.mark.parametrize("refuses", ["filter", "extract", "run"])
def test_caches_that_become_too_long_to_stay_merged_fail_nobody_where_they_cannot_be_taken_apart(
    model: Path, refuses: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three replies the second is the first to outgrow the batch."""
    monkeypatch.setattr("mlx_backend.engine.mlx.batch_trial.MAX_MERGED_LENGTH", 60)
    asked = [request([20 + at] * length, count=90) for at, length in enumerate((3, 20, 9))]
    if refuses != "run":
        _refuse_in_the_second_layer(monkeypatch, refuses)
        monkeypatch.setattr(BatchTrial, "try_packing", _succeed)
    plan_step = PrefillQueue.plan_step

    def plan(queue: PrefillQueue, decoding_priority: int | None) -> PrefillStep:
        """A prompt has small chunks next to replies, and only next to those."""
        assert (decoding_priority is not None) == any(decoder.sequences for decoder in batch._decoders)
        return plan_step(queue, decoding_priority)

    monkeypatch.setattr(PrefillQueue, "plan_step", plan)
    with loaded_batch(model) as batch:
        expected = alone(batch, asked)
        if refuses == "run":
            batch.runtime.networks.by_adapter[""] = NoMixture(batch.runtime.networks.by_adapter[""])
        assert batch.runtime.abilities.can_pack
        assert generate(batch, asked) == expected
    assert "were lost in decoding" in caplog.text


class NoMixture(WrappedNetwork):
    """Runs no batch of rows with a reply on its own caches, after changing all caches."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self._network(inputs, cache=cache)
        if isinstance(cache[0], PackedLayer) and {(2, 1), (1, 1)} <= set(cache[0].shapes):
            raise ValueError("[broadcast_shapes] Shapes (2,1) and (3,1) cannot be broadcast")
        return logits


def _succeed(trial: BatchTrial, **_: object) -> None:
    patch_for_packing(trial._network)


class FailsAtLength(WrappedNetwork):
    """From some length of a cache on, some of its runs of one token raise after changing the caches."""

    def __init__(self, network: Any, length: int, failing: Sequence[int]) -> None:
        super().__init__(network)
        self._length = length
        self._failing = failing
        self._runs = -1

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        offset = cache[0].offset.of_tokens if isinstance(cache[0], PackedLayer) else mx.array(cache[0].offset)
        is_at_length = max(as_ints(offset.reshape(-1))) >= self._length
        logits: mx.array = self._network(inputs, cache=cache)
        if is_at_length:
            self._runs += 1
            if self._runs in self._failing:
                raise ValueError("[rope] Frequencies for 70 positions, but there are 71")
        return logits


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_a_reply_that_cannot_be_run_from_some_length_on_fails_at_most_alone(
    model: Path, again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of the three has gone well before. The caches are lost, the prompts are prefilled and decoded alone."""
    asked = [request([20 + at] * length, count=60) for at, length in enumerate((3, 20, 9))]
    with loaded_batch(model) as batch:
        expected = [generate(batch, [each])[0].tokens for each in asked]
        networks = batch.runtime.networks.by_adapter
        networks[""] = FailsAtLength(
            networks[""], 70, (0, 2) if again else (0,)
        )  # only the second gets there
        first, second, third = generate(batch, asked)
        assert [first.tokens, third.tokens] == [expected[0], expected[2]]
        if again:
            assert str(second.error) == (
                "The reply could not be continued: [rope] Frequencies for 70 positions, but there are 71"
            )
            assert second.tokens == expected[1][: len(second.tokens)]
        else:
            assert second.tokens == expected[1]
        assert batch.runtime.cache_budget.used == 0
    assert "Their prompts are prefilled again" in caplog.text


class NotTwo(WrappedNetwork):
    """Runs no batch of exactly two rows, after changing its caches."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        is_packed = isinstance(cache[0], PackedLayer)
        rows = max(rows for rows, _ in cache[0].shapes) if is_packed else inputs.shape[0]
        logits: mx.array = self._network(inputs, cache=cache)
        if rows == 2:
            raise RuntimeError("[malloc] Unable to allocate 99 bytes")
        return logits


@pytest.mark.parametrize("count", [2, 3])
def test_a_device_that_fails_in_the_first_step_of_several_replies_together_fails_nobody(
    model: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Of three, one leaves."""
    asked = [request([20 + at] * 9, count=12 + 9 * at) for at in range(count)]
    with loaded_batch(model) as batch:
        expected = [generate(batch, [each])[0].tokens for each in asked]
        networks = batch.runtime.networks.by_adapter
        networks[""] = NotTwo(networks[""])
        assert [each.tokens for each in generate(batch, asked)] == expected
    assert "The caches of 2 replies were lost in decoding" in caplog.text
    assert "RuntimeError('[malloc]" in caplog.text


def test_caches_that_cannot_be_rewound_to_a_checkpoint_are_not_stored_and_fail_nobody(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = GenerationRequest(prompt=list(range(20, 60)), max_tokens=9, checkpoints=(10, 20))
    with load_engine(model) as engine:
        expected = tokens(engine.generate(asked))
    with load_engine(model) as engine:
        monkeypatch.setattr(KVCache, "trim", _refuse)
        assert tokens(engine.generate(asked)) == expected
        assert engine.is_healthy()
    assert "of a prefix of 10 tokens could not be stored" in caplog.text


@pytest.mark.parametrize("fails", ["copy", "file"])
def test_a_stored_prefix_that_cannot_be_used_is_prefilled_and_one_that_cannot_be_copied_is_used(
    fails: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = GenerationRequest(prompt=list(range(20, 60)), max_tokens=9, checkpoints=(10, 20))
    folder = tmp_path / "cache"
    with load_engine(model, cache_folder=folder) as engine:
        expected = tokens(engine.generate(asked))
    refused = "prefix_cache.compact_copies" if fails == "copy" else "disk_cache.read_layers"
    with load_engine(model, cache_folder=folder) as engine:
        monkeypatch.setattr(f"mlx_backend.engine.mlx.{refused}", _refuse if fails == "copy" else _run_out)
        *items, last = engine.generate(asked)
        assert [item.token for item in items if isinstance(item, TokenDelta)] == expected
        assert isinstance(last, Finished)
        assert last.cached_tokens == (20 if fails == "copy" else 0)
        assert engine.is_healthy()
    assert ("could not be stored" if fails == "copy" else "could not be used") in caplog.text


def _refuse(*_: Any) -> Any:
    raise ValueError("[contiguous] not this one")


def _run_out(*_: Any) -> Any:
    raise MemoryError


def test_caches_that_cannot_be_copied_are_not_stored_and_fail_nobody(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = GenerationRequest(prompt=list(range(20, 60)), max_tokens=9, checkpoints=(10, 20))
    with load_engine(model, cache_bytes=0) as plain:
        expected = tokens(plain.generate(asked))

    with load_engine(model) as engine:
        monkeypatch.setattr("mlx_backend.engine.mlx.prefix_cache.compact_copies", _refuse)
        assert [tokens(engine.generate(asked)) for _ in range(2)] == [expected] * 2
        assert engine.is_healthy()
    assert "of a prefix of 10 tokens could not be stored" in caplog.text


def test_two_engines_in_one_process_generate_what_each_does_alone(model: Path, tmp_path: Path) -> None:
    other = write_qwen(tmp_path / "qwen")
    prompts = [list(range(20, 60)), list(range(30, 50))]
    device = Device(8 << 30)
    with load_engine(model, device=device) as one, load_engine(other, device=device) as two:
        alone = [[tokens(engine.generate(request(prompt))) for prompt in prompts] for engine in (one, two)]
        generations = [[engine.generate(request(prompt)) for prompt in prompts] for engine in (one, two)]
        assert [[tokens(generation) for generation in each] for each in generations] == alone


def test_a_long_prompt_delays_a_reply_by_no_more_than_a_chunk(model: Path) -> None:
    with load_engine(model, cache_bytes=0, prefill_chunk=50) as engine:
        running = engine.generate(request([20] * 9, count=900))
        while not isinstance(running.next(SOON), TokenDelta):
            pass
        long = engine.generate(request([21] * 600, count=1))
        progress = [item.processed for item in long if isinstance(item, Progress)]
        assert all(b - a <= 50 for a, b in zip([0, *progress], progress, strict=False))
        assert progress[-1] == 600


def test_a_short_prompt_is_prefilled_beside_a_long_one(model: Path) -> None:
    with loaded_batch(model, prefill_chunk=40) as batch:
        batch.insert(0, request([21] * 900, count=1))
        list(batch.step())  # it is being prefilled
        batch.insert(1, request([22] * 15, count=1))
        order: list[int] = []
        while len(order) < 2:
            order += [key for key, outcome in batch.step() if isinstance(outcome, TokenDelta)]
    assert order == [1, 0]
