"""Packed runs: each sequence gets the logits it would get alone, and keeps caches of its own."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_models import write_model, write_qwen
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_backend.engine.mlx.kv_cache import merged
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, can_pack, run_packed


@pytest.fixture(scope="module", params=["windowed", "qwen"])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    write = {"windowed": write_model, "qwen": write_qwen}[request.param]
    return load_model(write(tmp_path_factory.mktemp("model")))[0]


def text(seed: int, length: int) -> list[int]:
    tokens: list[int] = mx.random.randint(10, 60, (length,), key=mx.random.key(seed)).tolist()  # type: ignore[assignment]
    return tokens


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
    assert can_pack(network, partial(make_prompt_cache, network))
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
    assert can_pack(network, partial(make_prompt_cache, network))
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


class _Own(nn.Module):  # type: ignore[misc]
    """A network of one layer with attention, or with positions, of its own."""

    def __init__(self, *, attends: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.rope = nn.RoPE(16)
        self._attends = attends

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        x = self.embed(tokens)[:, None]
        position = cache[0].offset if self._attends else cache[0].offset + 1
        keys, values = cache[0].update_and_fetch(self.rope(x, offset=position), x)
        found = mx.fast.scaled_dot_product_attention(self.rope(x, offset=position), keys, values, scale=0.25)
        logits: mx.array = self.embed.as_linear(found[:, 0])
        return logits


@pytest.mark.parametrize("attends", [False, True])
def test_a_network_with_attention_or_positions_of_its_own_is_not_run_packed(attends: bool) -> None:
    assert not can_pack(_Own(attends=attends), lambda: [KVCache()])


def test_a_network_that_accepts_packing_but_computes_it_wrong_is_not_run_packed(tmp_path: Path) -> None:
    network, _ = load_model(write_model(tmp_path))

    class Mistaken(nn.Module):  # type: ignore[misc]
        """Changes the positions of tokens as soon as there are several sequences."""

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            if not isinstance(cache[0].offset, int | mx.array):
                cache[0].offset.of_tokens[...] = 97 * cache[0].offset.of_tokens
            logits: mx.array = network(tokens, cache=cache)
            return logits

    assert not can_pack(Mistaken(), partial(make_prompt_cache, network))


def test_a_network_that_fails_with_several_sequences_is_not_run_packed(tmp_path: Path) -> None:
    network, _ = load_model(write_model(tmp_path))

    class Alone(nn.Module):  # type: ignore[misc]
        """Takes one sequence at a time."""

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            if tokens.shape[0] > 1:
                raise ValueError("one sequence at a time")
            logits: mx.array = network(tokens, cache=cache)
            return logits

    assert not can_pack(Alone(), partial(make_prompt_cache, network))
