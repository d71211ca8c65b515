"""Models made for tests: small ones with random weights, and tokenizers of every supported kind."""

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

MARKERS = [
    "<|endoftext|>",
    "<|return|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|call|>",
]
WORDS = ["the quick brown fox jumps over the lazy dog", "one two three four five six seven eight"] * 4
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' + message.role) }}{% endif %}"
    "<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


class WrappedNetwork:
    """A network that does what another does. Those made of it fail or count in `__call__`."""

    def __init__(self, network: Any) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def byte_level(markers: Sequence[str] = MARKERS, *, bos: bool = False) -> Tokenizer:
    """Byte-level BPE, as of gpt-oss, Llama 3 and Qwen; the ids of the markers are 0, 1, 2 …"""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(markers), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 2)]
        )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """BPE over pieces with byte fallback, as of Llama 2 and Gemma."""
    vocabulary = {name: at for at, name in enumerate(MARKERS)}
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    for name in [*(f"<0x{byte:02X}>" for byte in range(256)), *letters, "th", "the", "▁the"]:
        vocabulary[name] = len(vocabulary)
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


def words_and_markers() -> Tokenizer:
    """A Unigram vocabulary that lists the markers among its words, so that text may spell them by accident."""
    pieces = [*MARKERS, *"▁abcdefghijklmnopqrstuvwxyz<|>", "▁the"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, **settings: Any) -> None:
    """Write a tokenizer into a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|return|>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def write_model(folder: Path, *, dtype: str = "float32", seed: int = 3, **changes: Any) -> Path:
    """Write a gpt_oss of two layers with random weights: windows of 32 tokens, and experts."""
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_theta": 10_000,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000},
        "rms_norm_eps": 1e-5,
        "eos_token_id": [MARKERS.index(name) for name in ("<|return|>", "<|call|>", "<|endoftext|>")],
    }
    return write_random(folder, config | changes, seed=seed, dtype=dtype)


def write_qwen(folder: Path, *, seed: int = 6, **changes: Any) -> Path:
    """Write a qwen3 of two layers with random weights: its caches hold everything, and it makes none itself."""
    config = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000,
        "tie_word_embeddings": False,
        "eos_token_id": [],
    }
    return write_random(folder, config | changes, seed=seed)


def write_mamba(folder: Path, *, seed: int = 7, **changes: Any) -> Path:
    """Write a mamba of two layers with random weights: its caches are states, which cannot be trimmed."""
    config = {
        "model_type": "mamba",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
        "eos_token_id": [],
    }
    return write_random(folder, config | changes, seed=seed)


def write_random(folder: Path, config: dict[str, Any], *, seed: int, dtype: str = "float32") -> Path:
    """Write a model of any architecture mlx-lm has, with random weights; the same ones every time."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    config = {"vocab_size": 512, "max_position_embeddings": 1024} | config
    write_tokenizer(folder, byte_level())
    (folder / "config.json").write_text(json.dumps(config))
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    shapes = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(seed), max(100, len(shapes)))
    weights = {
        name: (mx.random.normal(shape.shape, key=key) * 0.2).astype(getattr(mx, dtype))
        for (name, shape), key in zip(shapes, keys, strict=False)
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def write_adapter(folder: Path, model: Path, *, seed: int = 5) -> Path:
    """Write a LoRA adapter with random weights for all layers of a model, its experts too."""
    import mlx.core as mx
    import mlx_lm
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    network, _ = mlx_lm.load(str(model))
    network.freeze()
    parameters = {"rank": 4, "scale": 5.0, "dropout": 0.0}
    linear_to_lora_layers(network, len(network.layers), parameters)
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    weights = {
        name: mx.random.normal(value.shape, key=next(keys)) * 0.2
        for name, value in tree_flatten(network.trainable_parameters())
    }
    folder.mkdir(parents=True, exist_ok=True)
    config = {"fine_tune_type": "lora", "num_layers": len(network.layers), "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder
