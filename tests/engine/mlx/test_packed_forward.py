"""Packed runs: each sequence gets the logits it would get alone, and keeps caches of its own."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import write
from engine_models import write_model, write_qwen
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.batch_trial import BatchTrial
from mlx_backend.engine.mlx.kv_cache import merged
from mlx_backend.engine.mlx.mlx_lm_patches.packing import patch_for_packing
from mlx_backend.engine.mlx.mlx_lm_patches.sliding_windows import patch_for_windows
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, run_packed

BY_SEGMENT = {
    "qwen3_5": set[str](),
    "nemotron_h": set[str](),
    "granitemoehybrid": set[str](),
    "lfm2": set[str](),
    "falcon_h1": set[str](),
    "bailing_hybrid": {"MultiLatentAttention"},
    "kimi_linear": {"KimiMLAAttention"},
    "deepseek_v2": {"DeepseekV2Attention"},
    "jamba": {"JambaMambaMixer"},
    "baichuan_m1": {"Attention"},
    "gpt2": set[str](),
    "gpt_bigcode": set[str](),
    "rwkv7": {"Rwkv7TimeMixing", "Rwkv7ChannelMixing"},
}
"""The modules that run for each sequence by itself: others do with states what is known."""


@pytest.fixture(scope="module", params=["windowed", "qwen", *BY_SEGMENT])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, name = tmp_path_factory.mktemp("model"), request.param
    writers = {"windowed": write_model, "qwen": write_qwen}
    network = load_model(writers[name](folder) if name in writers else write(folder, name))[0]
    BatchTrial(network, partial(make_prompt_cache, network)).try_packing()
    assert {kind.__name__ for kind in patch_for_packing(network).by_segment} == BY_SEGMENT.get(name, set())
    return network


def text(seed: int, length: int) -> list[int]:
    return as_ints(mx.random.randint(10, 60, (length,), key=mx.random.key(seed)))


def read(network: Any, tokens: Sequence[int]) -> list[Any]:
    """Return caches that hold a text."""
    layers: list[Any] = make_prompt_cache(network)
    network(mx.array([list(tokens)]), cache=layers)
    return layers


def same(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and mx.allclose(one, other, rtol=1e-3, atol=1e-4).item() is True


@pytest.mark.parametrize("known", [(5, 3, 9), (31, 32, 33), (120, 4, 60)], ids=str)
def test_replies_and_prompts_in_one_run_get_what_each_gets_alone(
    network: Any, known: tuple[int, ...]
) -> None:
    texts = [text(at, length) for at, length in enumerate(known)]
    prompts = [text(7, 1), text(8, 40), text(9, 17)]
    expected = [network(mx.array([[each[0]]]), cache=read(network, each))[0] for each in texts] + [
        network(mx.array([each]), cache=read(network, texts[0]))[0] for each in prompts
    ]
    singles = [read(network, each) for each in texts]
    batch = merged(singles)
    parts = [Segment(mx.array([[each[0]] for each in texts]), batch)]
    parts += [Segment(mx.array([each]), read(network, texts[0])) for each in prompts]
    assert same(run_packed(network, parts), mx.concatenate(expected))
    for part, tokens in zip(parts[1:], prompts, strict=True):  # each continues from its own caches
        nexts = run_packed(network, [Segment(mx.array([[5]]), part.layers)])
        assert same(nexts, network(mx.array([[5]]), cache=read(network, [*texts[0], *tokens]))[0])
    assert same(
        run_packed(network, [Segment(mx.array([[6]] * 3), batch)]),
        mx.concatenate(
            [network(mx.array([[6]]), cache=read(network, [*each, each[0]]))[0] for each in texts]
        ),
    )


def test_a_failed_run_leaves_all_caches_unchanged(network: Any) -> None:
    parts = [Segment(mx.array([text(at, 9)]), read(network, text(at, 20))) for at in range(2)]
    expected = run_packed(
        network, [Segment(part.tokens, read(network, text(at, 20))) for at, part in enumerate(parts)]
    )

    def broken(tokens: mx.array, cache: Any) -> mx.array:
        network(tokens, cache=cache)
        raise RuntimeError("[malloc] Unable to allocate 99 bytes")

    with pytest.raises(ForwardError) as caught:
        run_packed(broken, parts)
    assert "Unable to allocate" in str(caught.value.__cause__)
    assert same(run_packed(network, parts), expected)


def test_modules_that_have_been_replaced_are_not_replaced_again(tmp_path: Path) -> None:
    """Each attempt of the trial asks for it."""
    network, _ = load_model(write(tmp_path, "deepseek_v3"))
    patch_for_packing(network)
    before = [type(module) for module in network.modules()]
    patch_for_packing(network)
    assert [type(module) for module in network.modules()] == before


@pytest.mark.parametrize(("name", "by_segment"), [("llama4", set[str]()), ("afm7", {"KVReuseAttention"})])
def test_networks_that_cannot_be_merged_are_packed_on_caches_of_their_own(
    tmp_path: Path, name: str, by_segment: set[str]
) -> None:
    network, mlx_lms = (load_model(write(tmp_path, name))[0] for _ in range(2))
    patch_for_windows(network)
    trial = BatchTrial(network, partial(make_prompt_cache, network))
    trial.merges = False
    trial.try_packing()
    assert {kind.__name__ for kind in patch_for_packing(network).by_segment} == by_segment
    texts = [text(at, 150) for at in range(3)]
    expected = [mlx_lms(mx.array([each]), cache=make_prompt_cache(mlx_lms))[0] for each in texts]
    layers: list[Any] = [make_prompt_cache(network) for _ in texts]
    starts = [0, 0, 0]
    # Prompts' parts of several lengths and single tokens, before, at and after the ends of chunks of 32.
    for lengths in [
        (5, 31, 32),
        (1, 1, 1),
        (1, 1, 31),
        (60, 1, 1),
        (1, 33, 1),
        *[(1, 1, 1)] * 40,
        (7, 30, 1),
    ]:
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        parts = [
            Segment(mx.array([each[start:end]]), own)
            for each, start, end, own in zip(texts, starts, ends, layers, strict=True)
        ]
        own = [each[start:end] for each, start, end in zip(expected, starts, ends, strict=True)]
        assert same(run_packed(network, parts), mx.concatenate(own))
        starts = ends
