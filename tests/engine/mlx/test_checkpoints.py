"""Checkpoints of a prompt: which are cached, and how many runs of the network they take."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from drafting import generate, loaded_batch
from engine_models import WrappedNetwork, write_mamba, write_model

from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.prefill_queue import MIN_CHECKPOINT_DISTANCE, spaced_checkpoints
from mlx_backend.engine.threaded import Engine
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from pathlib import Path

    import mlx.core as mx

    from mlx_backend.engine.jobs import Generation

PROMPT = list(range(20, 120))


class Counting(MLXBatch):
    """Notes the lengths of the chunks that its network prefills."""

    def load(self, on_progress: Any) -> Any:
        info = super().load(on_progress)
        self.pieces: list[int] = []
        self.runtime.networks.by_adapter[""] = CountingNetwork(
            self.runtime.networks.by_adapter[""], self.pieces
        )
        return info


class CountingNetwork(WrappedNetwork):
    def __init__(self, network: Any, pieces: list[int]) -> None:
        super().__init__(network)
        self._pieces = pieces

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._pieces.append(inputs.shape[1])
        logits: mx.array = self._network(inputs, cache=cache)
        return logits


def reply(generation: Generation) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt were cached."""
    *items, last = generation
    assert isinstance(last, Finished)
    return [item.token for item in items if isinstance(item, TokenDelta)], last.cached_tokens


def from_each(model: Path, marks: tuple[int, ...], kept: dict[int, int]) -> list[int]:
    """Ask for a prompt with these checkpoints, then for others that part from it at the positions in `kept`.

    Of each of those as much has to be cached as `kept` says, and all replies are those of an engine that caches none.
    Returns the chunks in which the first prompt was prefilled.
    """
    batch = Counting(model, EngineOptions(), device=Device(8 << 30))
    with load_engine(model, cache_bytes=0) as cold, Engine(batch) as engine:
        first = GenerationRequest(prompt=PROMPT, max_tokens=1, checkpoints=marks)
        assert reply(engine.generate(first))[0] == reply(cold.generate(first))[0]
        pieces = list(batch.pieces)
        for position, cached in kept.items():
            other = GenerationRequest(prompt=[*PROMPT[:position], 200, 201], max_tokens=20)
            assert reply(engine.generate(other)) == (reply(cold.generate(other))[0], cached)
    return pieces


@pytest.mark.parametrize(("logits", "pieces"), [(1000, [100]), (0, [99, 1])])
def test_where_caches_can_be_rewound_all_are_cached_in_one_chunk_or_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logits: int, pieces: list[int]
) -> None:
    monkeypatch.setattr("mlx_backend.engine.mlx.prefill_queue.MAX_SPARE_LOGITS", logits)
    model = write_model(tmp_path, eos_token_id=[])
    assert from_each(model, (30, 60, 97), {30: 30, 60: 60, 97: 97, 99: 99}) == pieces


@pytest.mark.parametrize("name", ["windowed", "qwen"])
def test_prompts_that_begin_alike_share_that_beginning_where_caches_can_be_cut(
    name: str, request: pytest.FixtureRequest
) -> None:
    """Such as those of a classifier: instructions, and then a text. Windows hold the first 32 tokens."""
    model: Path = request.getfixturevalue(name)
    with load_engine(model, cache_bytes=0) as cold, load_engine(model) as engine:
        for instructions, text, cut in ((20, 8, 20), (70, 20, 70 if name == "qwen" else 0)):
            for at in range(4):
                prompt = [*PROMPT[:instructions], *range(200 + 10 * at, 200 + 10 * at + text)]
                asked = GenerationRequest(prompt=prompt, max_tokens=12)
                assert reply(engine.generate(asked)) == (
                    reply(cold.generate(asked))[0],
                    cut if at else 0,
                )


@pytest.mark.parametrize("name", ["windowed", "qwen"])
def test_a_turn_is_appended_to_what_is_cached_of_its_conversation_and_copies_nothing_of_it(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the client sends the reply before it back or not; of two at once, one is given a copy."""
    monkeypatch.setattr("mlx_backend.engine.mlx.batch_trial.MAX_MERGED_LENGTH", 100)
    model: Path = request.getfixturevalue(name)
    start = [20 + at % 97 for at in range(1030)]

    def asked(*tokens: int) -> GenerationRequest:
        prompt = [*start, *tokens]
        return GenerationRequest(prompt=prompt, max_tokens=12, checkpoints=(len(prompt) - 3,))

    def places() -> set[int]:
        trunks = batch.runtime.prefix_store.prefixes._trunks.values()
        return {np.asarray(each.keys).ctypes.data for trunk in trunks for each in trunk.arrays.values()}

    with (
        loaded_batch(model, cache_bytes=0) as cold,
        loaded_batch(model, cache_bytes=1 << 30) as batch,
    ):
        [first] = generate(batch, [asked()])
        before = places()
        for turns in (
            [asked(200, 201, 202)],
            [asked(*first.tokens, 203)],
            [asked(200, 201, 202, 204)],
            [asked(200, 207), asked(205)],
        ):
            found, expected = generate(batch, turns), [generate(cold, [each])[0] for each in turns]
            assert [each.tokens for each in found] == [each.tokens for each in expected]
            assert before <= places()


def test_a_warm_up_that_another_prompt_has_begun_with_is_stored_all_the_same(
    qwen: Path, tmp_path: Path
) -> None:
    """On disk, where the other prompt is not, too."""
    other = GenerationRequest(prompt=PROMPT, max_tokens=1)
    with loaded_batch(qwen, cache_bytes=1 << 28, cache_folder=tmp_path) as batch:
        generate(batch, [other])
        prefixes = batch.runtime.prefix_store.prefixes
        assert not prefixes.has(PROMPT[:40])
        generate(batch, [GenerationRequest(prompt=PROMPT[:40], max_tokens=0)])
        assert prefixes.has(PROMPT[:40])
    with load_engine(qwen, cache_folder=tmp_path) as engine:
        assert reply(engine.generate(other))[1] == 40


def test_where_they_cannot_each_is_a_run_so_none_is_close_behind_another(tmp_path: Path) -> None:
    """As in a chat: after the system part, after the history, and before the generation prompt."""
    model = write_mamba(tmp_path, eos_token_id=[])
    pieces = from_each(model, (40, 90, 96), {40: 40, 90: 90, 96: 90, 99: 90})
    assert pieces == [40, 50, 10]


def test_a_longer_prefix_that_is_cached_is_found_between_checkpoints(tmp_path: Path) -> None:
    """Such as another prompt's."""
    model = write_mamba(tmp_path, eos_token_id=[])
    batch = Counting(model, EngineOptions(), device=Device(8 << 30))
    with load_engine(model, cache_bytes=0) as cold, Engine(batch) as engine:
        reply(engine.generate(GenerationRequest(prompt=PROMPT[:95], max_tokens=1)))
        batch.pieces.clear()
        asked = GenerationRequest(prompt=PROMPT, max_tokens=1, checkpoints=(90,))
        assert reply(engine.generate(asked)) == (reply(cold.generate(asked))[0], 95)
        assert batch.pieces == [5]


@pytest.mark.parametrize(
    "positions", [[], [7], [1, 2, 3], list(range(1, 200)), [1, 17, 32, 33, 500]], ids=str
)
def test_spaced_checkpoints_are_far_apart_and_none_that_was_left_out_is_far_from_one(
    positions: list[int],
) -> None:
    spaced = spaced_checkpoints(positions)
    assert all(after - before >= MIN_CHECKPOINT_DISTANCE for before, after in pairwise(spaced))
    for position in positions:
        assert any(0 <= position - each < MIN_CHECKPOINT_DISTANCE for each in spaced)


def test_a_prompt_that_takes_more_than_all_cached_ones_may_is_named_in_the_log_once(
    qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(qwen, cache_bytes=300_000) as engine:
        for prompt in ([20] * 50, [21] * 300, [21] * 310):
            *_, end = engine.generate(GenerationRequest(prompt=prompt, max_tokens=2))
            assert isinstance(end, Finished)
            assert end.cached_tokens == 0
            assert ("is not cached" in caplog.text) == (len(prompt) >= 300)
    assert caplog.text.count("is not cached") == 1
    assert "A prompt of 299 tokens is not cached" in caplog.text
    assert "all cached prompts together may take 293 KB. --cache-gb" in caplog.text
