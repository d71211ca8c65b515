"""`--kv-bits`: replies together, on quantised caches of their own, are what each is alone on the same."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx_lm
import pytest
from architecture_checks import REPLY, Model, crowd, edited, next_turn, requests, restart, seeds, text_drafts
from architectures import write
from drafting import alone, generate, loaded_batch, tokens
from engine_requests import together
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache
from mtp_heads import add_head, extra_layer, learnt_head, original, random_head, weights_of
from seeing import LAYOUTS, Seeing, noise
from seeing import TEXT as SEEN_TEXT
from tolerances import VECTOR_ATOL, check_replies
from vision_models import needs_mlx_vlm, write_gemma4, write_qwen3_5

from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.kv_cache import is_quantized
from mlx_backend.engine.mlx.mlx_lm_patches.attention import DequantizedArray, Quantization, compute_attention
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache, SharedArrays
from mlx_backend.layers.architecture import load_network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from architecture_checks import Reply
    from vision_models import SeeingModel

WIDE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 32},  # windows and sinks
    "gemma4_text": {"head_dim": 32, "global_head_dim": 32},  # layers that share keys and values
    "gemma2": {"head_dim": 32},  # attention of its own
    "deepseek_v3": {"qk_rope_head_dim": 32},  # latents
    "qwen3_5": {"head_dim": 32},  # states
    "falcon_h1": {"head_dim": 32},  # states and keys in one layer
    "llama4": {"head_dim": 32},  # chunks
    "longcat_flash": {"qk_rope_head_dim": 32},  # two attentions in one layer
}
"""Architectures, with sizes that can be quantised in groups of 32."""


@pytest.fixture(scope="module", params=[(name, 4 if name == "gemma4_text" else 8) for name in WIDE])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    name, bits = request.param
    folder = write(tmp_path_factory.mktemp("model") / name, name, sizes=WIDE[name])
    with Model(folder, kv_bits=bits, kv_group_size=32) as model:
        assert model.batching() == "packed"
        yield model


@pytest.mark.parametrize("check", [crowd, seeds, next_turn, edited, restart, text_drafts])
def test_a_reply_is_the_one_that_mlx_lm_generates_alone_on_the_same_caches(
    model: Model, check: Callable[[Model], list[Reply]]
) -> None:
    replies = check(model)
    check_replies(
        model.engine,
        [each.request for each in replies],
        [each.found for each in replies],
        [each.expected for each in replies],
    )


def test_replies_are_packed_on_caches_of_their_own_and_the_log_says_which_layers_are_quantised(
    windowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = [replace(each, max_tokens=40) for each in requests()]
    with loaded_batch(windowed, kv_bits=4, kv_group_size=32) as batch:
        abilities = batch.runtime.abilities
        assert (abilities.can_pack, abilities.max_merged_length, abilities.unbatched) == (True, 0, "")
        expected = tokens(alone(batch, asked))
        late, left = {1: 4, 3: 9, 4: 20}, {0: 12}
        found = generate(batch, asked, arrivals=late, cancelled_after=left)
    assert [each.tokens for each in found[1:]] == expected[1:]
    assert found[0].tokens == expected[0][: len(found[0].tokens)]
    text = "The KV caches of 1 of 2 layers are quantised to 4 bits; RotatingKVCache stay as they are."
    assert text in caplog.text


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        ("falcon_h1", "4 of 4 layers are quantised to 8 bits; ArraysCache stay as they are."),
        ("qwen3_5", "2 of 4 layers are quantised to 8 bits; ArraysCache stay as they are."),
    ],
)
def test_the_log_counts_the_models_own_layers(
    tmp_path: Path, architecture: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = write(tmp_path / "model", architecture, sizes={"head_dim": 32})
    if architecture == "qwen3_5":
        add_head(folder, weights_of(random_head(folder)))
    with loaded_batch(folder, kv_bits=8, kv_group_size=32):
        assert text in caplog.text


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_every_number_of_bits_is_the_same_alone_and_together(qwen: Path, bits: int) -> None:
    with loaded_batch(qwen, kv_bits=bits) as batch:
        expected = tokens(alone(batch, requests()))
        assert tokens(generate(batch, requests())) == expected


def test_one_reply_is_what_mlx_lms_own_quantised_caches_make_of_it(qwen: Path) -> None:
    network, asked = mlx_lm.load(str(qwen))[0], requests()
    expected: list[list[int]] = []
    for each in asked:
        layers = [QuantizedKVCache(64, 8) for _ in network.layers]
        logits = [network(mx.array([[token]]), cache=layers) for token in each.prompt][-1]
        expected.append([])
        for _ in range(each.max_tokens):
            expected[-1] += as_ints(mx.argmax(logits[0, -1:], axis=-1))
            logits = network(mx.array([expected[-1][-1:]]), cache=layers)
    with loaded_batch(qwen, kv_bits=8) as batch:
        found = tokens(generate(batch, asked))  # up to an end token
    assert found == [each[: len(own)] for each, own in zip(expected, found, strict=True)]


@pytest.mark.parametrize("architecture", ["glm4_moe", "qwen3_5"])
def test_an_mtp_head_drafts_from_quantised_pairs_and_changes_nothing(
    tmp_path: Path, architecture: str
) -> None:
    folder = write(tmp_path / "model", architecture, sizes={"head_dim": 32})
    asked, options = requests(), {"kv_bits": 8, "kv_group_size": 32}
    with loaded_batch(folder, **options) as batch:
        expected = tokens(alone(batch, asked))
    head = weights_of(learnt_head(folder, [asked[-1].prompt], tokens=REPLY))
    count = len(load_network(folder)[0].layers)
    if architecture == "glm4_moe":
        add_head(folder, extra_layer(head), form="pt", prefix=f"model.layers.{count}.")
    else:
        add_head(folder, original(head), form="pt")
    with loaded_batch(folder, draft_tokens=3, **options) as drafting:
        *_, pairs, hidden = drafting.runtime.networks.fresh_layers()
        assert (is_quantized(pairs), is_quantized(hidden)) == (True, False)
        found = [*alone(drafting, asked[-1:]), *generate(drafting, asked[-3:])]
    assert tokens(found) == [*expected[-1:], *expected[-3:]]
    assert sum(each.ended.accepted_tokens for each in found if each.ended is not None) > 0


@needs_mlx_vlm
@pytest.mark.parametrize("write_seeing", [write_gemma4, write_qwen3_5], ids=["windows", "states"])
def test_images_are_seen_through_quantised_caches(
    tmp_path: Path, write_seeing: Callable[[Path], SeeingModel]
) -> None:
    model = write_seeing(tmp_path)
    with load_engine(model.folder, kv_bits=8, kv_group_size=32) as engine:
        seeing = Seeing(model, engine)
        asked = [seeing.request(*layout) for layout in LAYOUTS.values()]
        expected = [seeing.reply(each) for each in asked]
        assert expected[0] != seeing.reply(seeing.request((2, 10, 11), noise(2), SEEN_TEXT))
        check_replies(engine, asked, together(engine, asked), expected)


def random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.parametrize("on_cuda", [False, True])
@pytest.mark.parametrize("sinks", [None, random(8, seed=7)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize(
    ("length", "mask"),
    [
        (1, None),
        (5, "causal"),
        (5, random(5, 40, seed=4) > 0),
        (5, random(8, 5, 40, seed=5)),
        (33, "causal"),
    ],
    ids=["a token", "causal", "some keys", "scores", "a chunk"],
)
def test_attention_on_what_is_held_is_that_on_what_it_stands_for(
    length: int, mask: Any, sinks: mx.array | None, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlx_backend.engine.mlx.mlx_lm_patches.attention.prepares_for_lengths", lambda: on_cuda
    )
    layer = GrowingKVCache(SharedArrays((), Quantization(32, 4)))
    keys, values = layer.update_and_fetch(random(1, 2, 40, 64, seed=1), random(1, 2, 40, 32, seed=2))
    assert isinstance(keys, DequantizedArray)
    queries = random(1, 8, length, 64, seed=3)
    found = compute_attention(queries, keys, values, layer, 0.125, mask, sinks)
    plain = mx.array(keys), mx.array(values)
    expected = base.scaled_dot_product_attention(queries, *plain, None, 0.125, mask, sinks)
    assert mx.allclose(found, expected, rtol=1e-4, atol=VECTOR_ATOL).item()


def test_what_is_held_is_shared_and_read_by_mlx_lm() -> None:
    layer = GrowingKVCache(SharedArrays((), Quantization(32, 8)))
    layer.update_and_fetch(random(1, 2, 300, 64, seed=1), random(1, 2, 300, 64, seed=2))
    stored = layer.to_file()
    assert type(stored) is QuantizedKVCache
    again = GrowingKVCache.of(QuantizedKVCache.from_state(stored.state))
    for one, other in zip(again.keys_and_values(), layer.keys_and_values(), strict=True):
        assert mx.array_equal(one, other).item()


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "share"), [(8, (8 + 2) / 32), (4, (4 + 2) / 32)])
def test_a_requests_memory_is_counted_in_the_bits_that_it_takes(qwen: Path, bits: int, share: float) -> None:
    """Of each 32 bits; a group of 32 has a scale and a bias of 32 bits each, which is two bits for each number."""
    with (
        loaded_batch(qwen, cache_bytes=None) as plain,
        loaded_batch(qwen, cache_bytes=None, kv_bits=bits, kv_group_size=32) as batch,
    ):
        reserved = []
        for each in (plain, batch):
            each.insert(0, replace(requests()[-1], max_tokens=2000))
            reserved.append(each.runtime.cache_budget.used)
            each.remove(0)
        assert reserved[1] == pytest.approx(reserved[0] * share, rel=0.01)
        prompt = requests()[-1]
        generate(batch, [prompt])
        held = batch.runtime.prefix_store.prefixes.nbytes
    per_token = 2 * 2 * 2 * 64 * 4 * share  # layers, keys and values, heads, sizes, bytes
    assert held == pytest.approx(per_token * len(prompt.prompt), rel=0.3)


def test_what_a_chunk_dequantises_of_a_layer_is_working_memory(qwen: Path) -> None:
    with loaded_batch(qwen, kv_bits=8) as batch:
        cost = batch.runtime.chunk_cost
        assert cost.context_bytes == 2 * 2 * 64 * 4  # keys and values, heads, sizes, bytes
        more = cost.working_bytes(64, 100_000) - cost.memory(64, 100_000)
    assert more == 100_000 * cost.context_bytes
