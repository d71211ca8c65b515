"""Caches of several sequences: short ones merged, long ones by themselves, and each is decoded as it would be alone."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from architectures import write
from drafting import FoundReply, generate, loaded_batch
from engine_models import write_model, write_qwen
from mlx_lm.models.cache import BatchKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.batch_caches import MAX_MERGED_LENGTH, BatchCaches
from mlx_backend.engine.mlx.batch_trial import try_networks
from mlx_backend.engine.mlx.kv_cache import LayerCaches
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache
from mlx_backend.engine.mlx.mlx_lm_patches.packing import patch_for_packing
from mlx_backend.engine.mlx.packed_forward import run_packed

LONG = 40  # tokens, from which a row is not merged here
LENGTHS = (7, 60, 33, 45, 12)  # two of which are longer


@pytest.fixture(scope="module", params=["windowed", "qwen"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    writer = {"windowed": write_model, "qwen": write_qwen}[request.param]
    return writer(tmp_path_factory.mktemp("model"), eos_token_id=[])


@pytest.fixture(scope="module")
def network(model: Path) -> Any:
    network = load_model(model)[0]
    patch_for_packing(network)
    return network


def text(seed: int, length: int) -> list[int]:
    return as_ints(mx.random.randint(10, 60, (length,), key=mx.random.key(seed)))


def prefilled(network: Any, tokens: Sequence[int]) -> LayerCaches:
    layers: LayerCaches = make_prompt_cache(network)
    network(mx.array([list(tokens)]), cache=layers)
    return layers


class Alone:
    """Sequences that are decoded one by one, as mlx-lm does it."""

    def __init__(self, network: Any) -> None:
        self.texts = [text(seed, length) for seed, length in enumerate(LENGTHS)]
        self._network = network
        self._layers = [prefilled(network, each) for each in self.texts]

    def step(self, row: int, token: int) -> mx.array:
        """Return the logits after one more token."""
        logits: mx.array = self._network(mx.array([[token]]), cache=self._layers[row])[0, -1]
        return logits


def join(caches: BatchCaches, joining: Sequence[LayerCaches], lengths: Sequence[int]) -> None:
    """Add rows and merge them; the lengths are those of all."""
    caches.add(joining)
    caches.merge(lengths)


def check_step(network: Any, caches: BatchCaches, rows: Sequence[int], alone: Alone, token: int) -> None:
    """Feed every row a token of its own, and expect for each the logits that it has alone."""
    tokens = [token + row for row in rows]
    logits = run_packed(network, caches.segments(mx.array(tokens)), restore=False)[
        mx.array(caches.positions())
    ]
    expected = mx.stack([alone.step(row, own) for row, own in zip(rows, tokens, strict=True)])
    assert mx.allclose(logits, expected, rtol=1e-3, atol=1e-4).item()


def merged_rows(caches: BatchCaches) -> int:
    """Return how many rows run in one batch."""
    segments = caches.segments(mx.zeros(len(LENGTHS), mx.int32))
    return max(segment.tokens.shape[0] for segment in segments)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (3, 1, 4, 2, 0)], ids=str)
def test_rows_of_every_length_get_what_each_gets_alone_while_others_join_and_leave(
    network: Any, order: Sequence[int]
) -> None:
    alone = Alone(network)
    caches, rows, lengths = BatchCaches(max_merged_length=LONG), list[int](), list[int]()
    for step, row in enumerate(order):
        rows.append(row)
        lengths = [LENGTHS[each] for each in rows]
        join(caches, [prefilled(network, alone.texts[row])], lengths)
        check_step(network, caches, rows, alone, 10 + step)
    assert merged_rows(caches) == 3, "the short ones"
    while len(rows) > 1:
        left = [at for at in range(len(rows)) if at != len(rows) // 2]
        caches.keep(left)
        rows = [rows[at] for at in left]
        check_step(network, caches, rows, alone, 20 + len(rows))
    assert not caches.is_merged, "one alone has its own caches"


def test_a_long_row_is_never_padded_nor_copied_and_a_short_one_never_padded_to_it(network: Any) -> None:
    caches = BatchCaches(max_merged_length=LONG)
    layers = [prefilled(network, text(seed, length)) for seed, length in enumerate(LENGTHS)]
    join(caches, layers, LENGTHS)
    segments = caches.segments(mx.zeros(len(LENGTHS), mx.int32))
    own = {id(segment.layers) for segment in segments}
    assert {id(layers[1]), id(layers[3])} <= own, "they are the very objects that came"
    [batch] = [segment for segment in segments if segment.tokens.shape[0] > 1]
    assert batch.tokens.shape == (3, 1)
    assert max(layer.keys.shape[2] for layer in batch.layers) <= max(LENGTHS[row] for row in (0, 2, 4))


def test_a_row_that_becomes_too_long_gets_caches_of_its_own(network: Any) -> None:
    alone = Alone(network)
    caches, rows = BatchCaches(max_merged_length=LONG), [0, 2, 4]
    lengths = [LENGTHS[row] for row in rows]
    join(caches, [prefilled(network, alone.texts[row]) for row in rows], lengths)
    assert merged_rows(caches) == 3
    for step in range(LONG - LENGTHS[2] + 1):
        check_step(network, caches, rows, alone, 10 + step)
    lengths = [length + step + 1 for length in lengths]
    caches.separate_long([length - 1 for length in lengths])
    assert merged_rows(caches) == 3, "as long as allowed"
    caches.separate_long(lengths)
    assert merged_rows(caches) == 2
    assert all(type(layer) in (GrowingKVCache, RotatingKVCache) for layer in caches.extract(1))
    for step in range(3):
        check_step(network, caches, rows, alone, 30 + step)


def test_without_a_limit_all_rows_are_one_batch(network: Any) -> None:
    caches = BatchCaches()
    join(caches, [prefilled(network, text(1, length)) for length in LENGTHS], LENGTHS)
    assert merged_rows(caches) == len(LENGTHS)
    assert len(caches.segments(mx.zeros(len(LENGTHS), mx.int32))) == 1


def test_a_long_row_leaves_without_the_others_being_touched(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Alone(network)
    caches, rows = BatchCaches(max_merged_length=LONG), list(range(len(LENGTHS)))
    join(caches, [prefilled(network, each) for each in alone.texts], LENGTHS)
    with monkeypatch.context() as patched:
        for refused in ("filter", "extract"):
            patched.delattr(BatchKVCache, refused)
        caches.keep([0, 2, 3, 4])
    rows.remove(1)
    check_step(network, caches, rows, alone, 10)


# -- in the engine ----------------------------------------------------------------------------------------------


SAMPLINGS = (Sampling(), Sampling(temperature=0.8, seed=5), Sampling(repetition_penalty=1.2))


def asked(reply: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt=text(seed, length), max_tokens=reply + seed, sampling=sampling)
        for (seed, length), sampling in zip(enumerate(LENGTHS), itertools.cycle(SAMPLINGS), strict=False)
    ]


def tokens(found: Sequence[FoundReply]) -> list[list[int]]:
    assert all(reply.ended is not None for reply in found)
    return [reply.tokens for reply in found]


def expected(batch: MLXBatch, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    return [tokens(generate(batch, [each]))[0] for each in requests]


def test_long_and_short_replies_together_are_those_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_backend.engine.mlx.batch_trial.MAX_MERGED_LENGTH", LONG)
    seen = set[tuple[int, ...]]()  # how many rows the segments of a step had
    segments = BatchCaches.segments

    def noting(caches: BatchCaches, fed: mx.array, shifts: Sequence[int]) -> Any:
        found = segments(caches, fed, shifts)
        seen.add(tuple(each.tokens.shape[0] for each in found))
        return found

    requests = asked(reply=40)
    with loaded_batch(model) as batch:
        wanted = expected(batch, requests)
        monkeypatch.setattr(BatchCaches, "segments", noting)
        assert tokens(generate(batch, requests)) == wanted
        assert {(3, 1, 1), (2, 1, 1, 1)} <= {tuple(sorted(each, reverse=True)) for each in seen}
        assert tokens(generate(batch, requests, arrivals={0: 2, 1: 9, 3: 5, 4: 12})) == wanted
        left = generate(batch, requests, arrivals={2: 3}, cancelled_after={1: 8, 4: 5})
    assert [left[at].tokens for at in (0, 2, 3)] == [wanted[at] for at in (0, 2, 3)]


def test_a_long_prompt_reserves_no_padding_for_the_short_ones_beside_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_backend.engine.mlx.batch_trial.MAX_MERGED_LENGTH", 200)
    long, short = (
        GenerationRequest(prompt=text(1, 900), max_tokens=1),
        GenerationRequest(prompt=[5], max_tokens=20),
    )
    with loaded_batch(model) as batch:
        budget = batch.runtime.cache_budget
        assert batch.admits(long)
        batch.insert(1, long)
        alone = budget.used
        assert batch.admits(short)
        batch.insert(2, short)
        assert budget.used <= alone + alone // 3
        batch.remove(1)
        batch.remove(2)


@pytest.mark.parametrize(("architecture", "merges"), [("lfm2", False), ("jamba", True), ("mamba2", True)])
def test_long_rows_stay_merged_where_nothing_is_padded_or_recurrent_layers_would_run_for_each(
    tmp_path: Path, architecture: str, merges: bool
) -> None:
    with loaded_batch(write(tmp_path / "model", architecture)) as batch:
        assert batch.runtime.abilities.can_pack
        assert batch.runtime.abilities.max_merged_length == (None if merges else MAX_MERGED_LENGTH)


@pytest.mark.parametrize(("theirs", "agreed"), [(None, MAX_MERGED_LENGTH), (0, 0), (100, 100)])
def test_ranks_agree_on_the_length_up_to_which_all_of_them_merge(
    tmp_path: Path, theirs: int | None, agreed: int
) -> None:
    ranks: Any = SimpleNamespace(all_gather=lambda mine: [mine, ["", True, theirs]])
    with loaded_batch(write(tmp_path / "model", "llama")) as batch:
        abilities = try_networks(batch.runtime.networks, ranks)
    assert (abilities.unbatched, abilities.max_merged_length) == ("", agreed)
