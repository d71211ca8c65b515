"""Trying batches when a model is loaded: what is apart from the same texts alone, or raises, is not batched."""

import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from engine_models import WrappedNetwork, write_model, write_random
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlx_backend.api.openai.models import model_object
from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch_trial import (
    TEXTS,
    BatchTrial,
    BatchTrialError,
    _try_packing,
    is_span,
    short_spans,
)
from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import PackedLayer
from mlx_backend.models.description import ModelDescription
from mlx_backend.registry.base import ModelStatus

SIZES = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
}
LLAMA = {"model_type": "llama", **SIZES, "tie_word_embeddings": False}
GEMMA2 = {"model_type": "gemma2", **SIZES}
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 512}
BIGCODE = {
    "model_type": "gpt_bigcode",
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 2,
    "n_inner": 64,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
}
AFM = {
    "model_type": "afm7",
    "vocab_size": 128,
    "hidden_dim": 64,
    "num_layers": 4,
    "num_kv_reuse_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}


def network_of(config: dict[str, Any], *, seed: int = 3) -> Any:
    """Return a network with random weights that are not so small that attention is flat."""
    mx.random.seed(seed)
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    network = module.Model(module.ModelArgs.from_dict(config))
    network.update(tree_map(lambda weight: weight * 1.5 if weight.ndim > 1 else weight, network.parameters()))
    return network


NAS = {
    "model_type": "nemotron-nas",
    **{name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")},
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ATTENTION = {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 1.5}}
LINEAR = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.5}}
PHI3_SMALL = {
    "model_type": "phi3small",
    "vocab_size": 100_352,  # mlx-lm rules out tokens by their ids in the real vocabulary
    "hidden_size": 64,
    "dense_attention_every_n_layers": 2,
    "ff_intermediate_size": 32,
    "gegelu_limit": 20.0,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_norm_epsilon": 1e-5,
    "blocksparse_num_local_blocks": 1,
    "blocksparse_vert_stride": 2,
}


def trial_of(network: Any) -> BatchTrial:
    return BatchTrial(network, partial(make_prompt_cache, network))


SPARSE = {
    "model_type": "minimax_m3_vl",
    "text_config": {
        **SIZES,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 128,
            "sparse_topk_blocks": 16,
        },
    },
}
"""With the block size of the real model, in which texts of 2,048 tokens are attended as a whole."""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GEMMA2, "logits of one are off by"),
        (GEMMA2 | {"num_key_value_heads": 3}, "several at once raise ValueError"),
        (LLAMA | DYNAMIC, "several at once raise ValueError"),
        (
            {"model_type": "internlm2", **SIZES, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "raise ValueError",
        ),
        (BIGCODE, "several at once raise ValueError"),
        (AFM, "logits of one are off by"),
        (PHI3_SMALL, r"logits of one are off by \d+%"),
        (NAS | {"block_configs": [LINEAR, ATTENTION, ATTENTION]}, "logits of one are off by"),
        (SPARSE, "logits of one are off by"),
    ],
    ids=[
        *("gemma2", "gemma2 with three heads", "dynamic rope", "internlm2", "gpt_bigcode", "afm7"),
        *("phi3small, where some logits are minus infinity", "Nemotron NAS, no attention in its first layer"),
        "MiniMax M3, whose blocks of keys begin with the padding",
    ],
)
def test_networks_made_for_one_sequence_are_found_out(config: dict[str, Any], words: str) -> None:
    trial = trial_of(network_of(config))
    with pytest.raises(BatchTrialError, match=words):
        trial.try_packing(packs_replies=False)


def test_layers_without_attention_whose_caches_stay_empty_are_batched_and_packed() -> None:
    trial = trial_of(network_of(NAS | {"block_configs": [ATTENTION, LINEAR, ATTENTION]}))
    trial.try_packing(packs_replies=False)
    trial.try_packing()
    assert trial.difference < 0.01


class RulesOut(nn.Module):  # type: ignore[misc]  # MLX declares it without types
    """A network for which some tokens are impossible: `ruled_out`, and `beside_others` in a batch."""

    def __init__(self, ruled_out: list[int], beside_others: list[int]) -> None:
        super().__init__()
        self.inner = network_of(LLAMA)
        self._ruled_out = ruled_out, beside_others

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.inner(tokens, cache=cache)
        logits[..., mx.array(self._ruled_out[tokens.shape[0] > 1])] = -mx.inf
        return logits


def test_tokens_that_a_network_rules_out_have_to_be_the_same_ones() -> None:
    network = RulesOut([7, 9], [7, 9])
    trial = BatchTrial(network, partial(make_prompt_cache, network.inner))
    trial.try_packing(packs_replies=False)
    assert trial.difference < 0.01
    for ruled_out, beside_others in (([7, 9], [7]), ([7], [7, 9])):
        network = RulesOut(ruled_out, beside_others)
        with pytest.raises(BatchTrialError, match="logits of one are wrong"):
            BatchTrial(network, partial(make_prompt_cache, network.inner)).try_packing(packs_replies=False)


@pytest.mark.parametrize("beside_others", [[7], [7, 9]], ids=["wrong", "right"])
def test_replies_are_rows_of_a_batch_unless_only_packed_runs_are_right(beside_others: list[int]) -> None:
    network = RulesOut([7, 9], beside_others)
    trial = BatchTrial(network, partial(make_prompt_cache, network.inner))
    found = _try_packing([trial], can_be_merged=True, always_packs=False)
    assert found == (beside_others == [7, 9], "")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_network_that_can_be_batched_is_in_every_precision(dtype: str, bits: int | None) -> None:
    network = network_of(LLAMA)
    network.set_dtype(getattr(mx, dtype))
    if bits is not None:
        nn.quantize(network, 32, bits)
    trial = trial_of(network)
    trial.try_packing(packs_replies=False)
    trial.try_packing()
    assert trial.difference < 0.01


def _attend_padding(*_: Any, **__: Any) -> None:
    return None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 4], ids=["plain", "4 bits"])
@pytest.mark.parametrize("mistake", ["padding is attended", "rotated by the longest row's length"])
def test_mistakes_are_found_in_every_precision(
    dtype: str, bits: int | None, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = network_of(LLAMA)
    network.set_dtype(getattr(mx, dtype))
    if bits is not None:
        nn.quantize(network, 32, bits)
    if mistake == "padding is attended":
        monkeypatch.setattr(BatchKVCache, "make_mask", _attend_padding)
    else:
        merge = BatchKVCache.merge

        def merge_wrongly(caches: Any) -> Any:
            batch = merge(caches)
            batch.offset = mx.full(batch.offset.shape, batch.offset.max())
            return batch

        monkeypatch.setattr(BatchKVCache, "merge", staticmethod(merge_wrongly))
    with pytest.raises(BatchTrialError, match="off by"):
        trial_of(network).try_packing(packs_replies=False)


class Experts(nn.Module):  # type: ignore[misc]  # MLX declares it without types
    """A network that answers something else for a certain token in a batch, as if another expert had been chosen."""

    def __init__(self, token: int | None) -> None:
        super().__init__()
        self.inner = network_of(LLAMA)
        self._token = token

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self.inner(tokens, cache=cache)
        hit = tokens == self._token if self._token is not None else tokens >= 0
        return mx.where(hit[..., None] & (tokens.shape[0] > 1), logits[..., ::-1], logits)


def test_what_is_off_with_one_text_only_is_rounding_and_with_every_text_a_mistake() -> None:
    network = Experts(4)
    BatchTrial(network, partial(make_prompt_cache, network.inner)).try_packing(packs_replies=False)
    network = Experts(None)
    with pytest.raises(BatchTrialError, match="with 2 sequences at once the logits of one are off by"):
        BatchTrial(network, partial(make_prompt_cache, network.inner)).try_packing(packs_replies=False)


class LongTexts(nn.Module):  # type: ignore[misc]  # MLX declares it without types
    """A network that answers something else to a text longer than a setting says, and in a batch something wrong."""

    def __init__(
        self, settings: dict[str, Any], can_be: range = range(1 << 20), *, is_right: bool = False
    ) -> None:
        super().__init__()
        self.inner = network_of(LLAMA)
        self.runs = 0
        self._settings = settings
        self._can_be = can_be
        self._is_right = is_right

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        self.runs += 1
        logits: mx.array = self.inner(tokens, cache=cache)
        [length] = self._settings.values()
        if length not in self._can_be:
            raise ValueError(f"{length} is too short")
        if self._is_right or type(cache[0]) is PackedLayer or cache[0].size() <= length:
            return logits
        return (
            logits[..., ::-1]
            if tokens.shape[0] > 1
            else mx.concatenate([logits[..., 1:], logits[..., :1]], axis=-1)
        )


@pytest.mark.parametrize(
    "name",
    ["sliding_window", "attention_chunk_size", "index_topk", "sparse_topk_blocks", "max_position_embeddings"],
)
def test_what_a_network_does_with_long_texts_only_is_tried_with_short_ones(name: str) -> None:
    network = LongTexts({name: 131_072})
    trial = BatchTrial(network, partial(make_prompt_cache, network.inner))
    with pytest.raises(BatchTrialError, match="off by"):
        trial.try_packing(packs_replies=False)
    assert network._settings == {name: 131_072}


def test_short_lengths_with_which_a_text_alone_has_the_same_logits_are_not_tried_with_several() -> None:
    runs = []
    for settings in ({"width": 131_072}, {"max_position_embeddings": 131_072}):
        network = LongTexts(settings, is_right=True)
        network.inner.args.max_position_embeddings = 1  # too short to be made shorter
        BatchTrial(network, partial(make_prompt_cache, network.inner)).try_packing(packs_replies=False)
        runs.append(network.runs)
    without, with_lengths = runs
    assert with_lengths == without + 3 * len(TEXTS)  # each text, and the two tokens after it


def test_no_architecture_of_mlx_lm_has_a_length_that_counts_under_a_name_that_is_not_known() -> None:
    names = {
        name
        for folder in mlx_lm.models.__path__
        for file in Path(folder).glob("*.py")
        for name in re.findall(
            r"^    (\w*(?:window|chunk|block|top_?k|stride|position|floor|compress)\w*): *(?:Optional\[)?int\b",
            file.read_text(),
            re.MULTILINE,
        )
    }
    of_experts = {"moe_top_k", "moe_topk", "top_k", "top_k_experts", "topk_group"}
    of_weights = {"block_dim", "block_ff_dim", "block_multiple_of", "conv_window"}
    found = {name for name in names if is_span(name)}
    assert found >= {
        "sliding_window",
        "attention_chunk_size",
        "index_topk",
        "index_block_size",
        "floor_scale",
    }
    assert names - found == of_experts | of_weights | {"sliding_window_pattern"}


def test_a_length_that_a_network_cannot_have_short_stays_and_the_others_are_short() -> None:
    network = LongTexts({"block_size": 64}, range(64, 65))
    network.window_size = 4096
    trial = BatchTrial(network, partial(make_prompt_cache, network.inner))
    seen: list[int] = []
    with short_spans(network, lambda: trial._run_one([1], 2, 3)):
        seen += [network._settings["block_size"], network.window_size]
    assert seen == [64, 2]
    assert [network._settings["block_size"], network.window_size] == [64, 4096]


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is off by chance, by so much that no text has the logits that it has run in another way."""
    mx.random.seed(1)
    multiply = nn.Linear.__call__

    def multiply_roughly(self: Any, values: mx.array) -> mx.array:
        product: mx.array = multiply(self, values)
        return product * (1 + 0.02 * mx.random.normal(product.shape))

    monkeypatch.setattr(nn.Linear, "__call__", multiply_roughly)


@pytest.mark.usefixtures("rounding")
def test_what_rounding_does_to_a_text_alone_is_no_mistake_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = trial_of(network_of(LLAMA))
    trial.try_packing(packs_replies=False)
    assert trial.difference > 0.02
    monkeypatch.setattr(BatchKVCache, "make_mask", _attend_padding)
    with pytest.raises(BatchTrialError, match="off by"):
        trial_of(network_of(LLAMA)).try_packing(packs_replies=False)


def test_a_trial_is_a_few_runs_of_a_few_tokens(tmp_path: Path) -> None:
    network, _ = load_model(write_model(tmp_path))
    sizes: list[int] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(network, name)

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            sizes.append(tokens.size)
            logits: mx.array = network(tokens, cache=cache)
            return logits

    trial = BatchTrial(Counted(), partial(make_prompt_cache, network))
    trial.try_packing()
    trial.try_packing(packs_replies=False)
    assert len(sizes) <= 2 * 36
    assert max(sizes) <= 8


def test_a_model_whose_rows_cannot_be_padded_answers_several_at_once_as_it_does_each_alone(
    tmp_path: Path,
) -> None:
    model = write_random(tmp_path / "gemma2", GEMMA2 | {"vocab_size": 512, "eos_token_id": []}, seed=4)
    asked = [GenerationRequest(prompt=[20 + at] * (2 + 3 * at), max_tokens=12) for at in range(4)]

    with load_engine(model) as engine:
        assert not engine.status().unbatched
        alone = [[item for item in engine.generate(each) if isinstance(item, TokenDelta)] for each in asked]
        generations = [engine.generate(each) for each in asked]
        together = [[item for item in each if isinstance(item, TokenDelta)] for each in generations]
        assert together == alone


def test_what_is_listed_of_a_model_says_why_its_replies_are_not_batched() -> None:
    batched, apart = ModelDescription(), ModelDescription(unbatched="several at once raise ValueError")
    assert "unbatched" not in model_object(ModelStatus(name="m"), batched, 0)
    assert model_object(ModelStatus(name="m"), apart, 0)["unbatched"] == "several at once raise ValueError"


class _Own(nn.Module):  # type: ignore[misc]  # MLX declares it without types
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
    with pytest.raises(BatchTrialError):
        BatchTrial(_Own(attends=attends), lambda: [KVCache()]).try_packing()


def test_a_network_that_accepts_packing_but_computes_it_wrong_is_not_run_packed(tmp_path: Path) -> None:
    network, _ = load_model(write_model(tmp_path))

    class Mistaken(nn.Module):  # type: ignore[misc]  # MLX declares it without types
        """Changes the positions of tokens as soon as there are several sequences."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            if not isinstance(cache[0].offset, int | mx.array):
                cache[0].offset.of_tokens[...] = 97 * cache[0].offset.of_tokens
            logits: mx.array = network(tokens, cache=cache)
            return logits

    with pytest.raises(BatchTrialError, match="off by"):
        BatchTrial(Mistaken(), partial(make_prompt_cache, network)).try_packing()


def test_a_network_whose_kernels_take_only_few_tokens_at_once_is_not_run_packed(tmp_path: Path) -> None:
    network: Any = load_model(write_model(tmp_path))[0]

    class FewTokens(WrappedNetwork):
        longest = 0

        def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
            if isinstance(cache[0], PackedLayer):
                self.longest = max(self.longest, tokens.size)
                if tokens.size > 100:
                    raise RuntimeError("cudaGraphAddKernelNode failed: invalid argument")
            logits: mx.array = network(tokens, cache=cache)
            return logits

    few = FewTokens(network)
    BatchTrial(few, partial(make_prompt_cache, network)).try_packing()
    assert few.longest < 100
    with pytest.raises(BatchTrialError, match=r"^several at once raise RuntimeError: cudaGraph.*argument$"):
        BatchTrial(few, partial(make_prompt_cache, network)).try_packing(many_tokens=True)
    BatchTrial(network, partial(make_prompt_cache, network)).try_packing(many_tokens=True)


def test_a_network_that_fails_with_several_sequences_is_not_batched(tmp_path: Path) -> None:
    network, _ = load_model(write_model(tmp_path))

    class Alone(WrappedNetwork):
        """Takes one sequence at a time."""

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            if tokens.shape[0] > 1:
                raise ValueError("one sequence at a time")
            logits: mx.array = network(tokens, cache=cache)
            return logits

    trial = BatchTrial(Alone(network), partial(make_prompt_cache, network))
    with pytest.raises(BatchTrialError, match="one sequence at a time"):
        trial.try_packing(packs_replies=False)
