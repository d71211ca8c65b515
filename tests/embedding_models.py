"""Embedding and rerank models for tests: random weights in the file formats of the real ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from engine_models import WORDS, write_qwen, write_random, write_tokenizer
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from pathlib import Path

type Shapes = dict[str, tuple[int, ...]]

PIECES = "▁abcdefghijklmnopqrstuvwxyz.,:<>/|日本語検索クエリ文書東京京都"
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": 0,
}
ROBERTA = BERT | {
    "architectures": ["XLMRobertaModel"],
    "model_type": "xlm-roberta",
    "max_position_embeddings": 66,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
}
MODERN: dict[str, Any] = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "local_attention": 8,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "pad_token_id": 3,
}


def unigram() -> Tokenizer:
    """Unigram pieces in <s> … </s>, like XLM-R's: its vocabulary lists special tokens among the ordinary ones."""
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(piece, -2.0) for piece in dict.fromkeys(PIECES)] + [("▁the", -1.0), ("▁tokyo", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<s>", "<pad>", "</s>", "<unk>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    tokenizer.enable_truncation(16)  # as some tokenizers come: it must not truncate our texts
    tokenizer.enable_padding(length=8)
    return tokenizer


def wordpiece() -> Tokenizer:
    """WordPiece in [CLS] … [SEP], like BERT's: the second of a pair has type ids of 1."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(
        vocab_size=110, special_tokens=special, initial_alphabet=list("<|>/[]")
    )
    tokenizer.train_from_iterator([*WORDS, "tokyo is in japan"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def bert_shapes(config: dict[str, Any]) -> Shapes:
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], size),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], size),
        "embeddings.LayerNorm.weight": (size,),
        "embeddings.LayerNorm.bias": (size,),
    }
    for at in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{at}."
        for name, out, into in [
            ("attention.self.query", size, size),
            ("attention.self.key", size, size),
            ("attention.self.value", size, size),
            ("attention.output.dense", size, size),
            ("intermediate.dense", inner, size),
            ("output.dense", size, inner),
        ]:
            shapes |= {f"{layer}{name}.weight": (out, into), f"{layer}{name}.bias": (out,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{layer}{name}.weight": (size,), f"{layer}{name}.bias": (size,)}
    return shapes


def modernbert_shapes(config: dict[str, Any]) -> Shapes:
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {
        "embeddings.tok_embeddings.weight": (config["vocab_size"], size),
        "embeddings.norm.weight": (size,),
        "final_norm.weight": (size,),
    }
    for at in range(config["num_hidden_layers"]):
        layer = f"layers.{at}."
        shapes |= {
            f"{layer}attn.Wqkv.weight": (3 * size, size),
            f"{layer}attn.Wo.weight": (size, size),
            f"{layer}mlp_norm.weight": (size,),
            f"{layer}mlp.Wi.weight": (2 * inner, size),
            f"{layer}mlp.Wo.weight": (size, inner),
        }
        if at:
            shapes[f"{layer}attn_norm.weight"] = (size,)
    return shapes


def write_weights(folder: Path, shapes: Shapes, *, seed: int = 1, prefix: str = "") -> None:
    import mlx.core as mx

    keys = iter(mx.random.split(mx.random.key(seed), len(shapes)))
    weights = {}
    for name, shape in sorted(shapes.items()):
        drawn = mx.random.normal(shape, key=next(keys)) * 0.3
        norm = name.endswith("norm.weight") or "LayerNorm.weight" in name
        weights[prefix + name] = drawn + 1 if norm else drawn
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def write_bert(folder: Path, *, pooling: str | None = "mean", seed: int = 1, **changes: Any) -> Path:
    """Write a BERT embedding model, with the files of sentence-transformers."""
    config = BERT | changes
    write_tokenizer(folder, wordpiece())
    (folder / "config.json").write_text(json.dumps(config))
    shapes = bert_shapes(config) | {"pooler.dense.weight": (32, 32), "pooler.dense.bias": (32,)}
    write_weights(folder, shapes, seed=seed)
    if pooling is not None:
        write_modules(folder, pooling)
    return folder


def quantise_bert(folder: Path) -> Path:
    """Quantise the matrices of a BERT's layers in its file, in 8 bits."""
    import mlx.core as mx

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 8}}))
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    weights: dict[str, mx.array] = {}
    for name, value in loaded.items():
        if value.ndim == 2 and ".layer." in name:
            stem = name.removesuffix(".weight")
            parts: Any = mx.quantize(value, 64, 8)
            weights |= {name: parts[0], f"{stem}.scales": parts[1], f"{stem}.biases": parts[2]}
        else:
            weights[name] = value
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def write_roberta(folder: Path, *, pooling: str | None = "cls", seed: int = 2, **changes: Any) -> Path:
    """Write an XLM-RoBERTa embedding model, like bge-m3 and multilingual-e5."""
    config = ROBERTA | changes
    write_tokenizer(folder, unigram())
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, bert_shapes(config), seed=seed)
    if pooling is not None:
        write_modules(folder, pooling)
    return folder


def write_modernbert(folder: Path, *, pooling: str | None = "mean", seed: int = 3, **changes: Any) -> Path:
    """Write a ModernBERT embedding model, like ruri-v3."""
    config = MODERN | changes
    write_tokenizer(folder, unigram())
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, modernbert_shapes(config), seed=seed, prefix="model.")
    if pooling is not None:
        write_modules(folder, pooling)
    return folder


def write_ranking_roberta(folder: Path, *, seed: int = 4, **changes: Any) -> Path:
    """Write a cross-encoder on XLM-RoBERTa, like bge-reranker-v2-m3."""
    config = ROBERTA | {"architectures": ["XLMRobertaForSequenceClassification"]} | changes
    write_tokenizer(folder, unigram())
    (folder / "config.json").write_text(json.dumps(config))
    size: int = config["hidden_size"]
    shapes: Shapes = {f"roberta.{name}": shape for name, shape in bert_shapes(config).items()} | {
        "classifier.dense.weight": (size, size),
        "classifier.dense.bias": (size,),
        "classifier.out_proj.weight": (1, size),
        "classifier.out_proj.bias": (1,),
    }
    write_weights(folder, shapes, seed=seed)
    return folder


def write_ranking_bert(folder: Path, *, seed: int = 5, **changes: Any) -> Path:
    """Write a cross-encoder on BERT, like those of MiniLM for MS MARCO."""
    config = BERT | {"architectures": ["BertForSequenceClassification"]} | changes
    write_tokenizer(folder, wordpiece())
    (folder / "config.json").write_text(json.dumps(config))
    size: int = config["hidden_size"]
    shapes: Shapes = {f"bert.{name}": shape for name, shape in bert_shapes(config).items()} | {
        "bert.pooler.dense.weight": (size, size),
        "bert.pooler.dense.bias": (size,),
        "classifier.weight": (1, size),
        "classifier.bias": (1,),
    }
    write_weights(folder, shapes, seed=seed)
    return folder


def write_ranking_modernbert(folder: Path, *, seed: int = 6, **changes: Any) -> Path:
    """Write a cross-encoder on ModernBERT, like ruri-v3-reranker."""
    config = MODERN | {"architectures": ["ModernBertForSequenceClassification"]} | changes
    write_tokenizer(folder, unigram())
    (folder / "config.json").write_text(json.dumps(config))
    size: int = config["hidden_size"]
    shapes: Shapes = {f"model.{name}": shape for name, shape in modernbert_shapes(config).items()} | {
        "head.dense.weight": (size, size),
        "head.norm.weight": (size,),
        "classifier.weight": (1, size),
        "classifier.bias": (1,),
    }
    write_weights(folder, shapes, seed=seed)
    return folder


def write_qwen_embedding(folder: Path, *, bare: bool = False) -> Path:
    """Write a causal embedding model like Qwen3-Embedding; with `bare`, its weights without prefix, as published."""
    write_qwen(folder, tie_word_embeddings=not bare)
    write_modules(folder, "lasttoken")
    prompts = {"query": "Instruct: find it\nQuery:", "document": ""}
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    if bare:
        import mlx.core as mx

        weights: Any = mx.load(str(folder / "model.safetensors"))
        kept = {
            name.removeprefix("model."): value
            for name, value in weights.items()
            if not name.startswith("lm_head")
        }
        mx.save_safetensors(str(folder / "model.safetensors"), kept)
    return folder


def write_modules(folder: Path, pooling: str) -> None:
    """Write the files that sentence-transformers adds to a model."""
    steps = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    listed = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    modes = {f"pooling_mode_{name}": name.startswith(pooling) for name in names}
    config = {"word_embedding_dimension": 32, **modes, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))


def write_gemma(folder: Path, *, pooling: str = "mean", **changes: Any) -> Path:
    """Write a Gemma 3 with bidirectional attention, like EmbeddingGemma."""
    config = {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "use_bidirectional_attention": True,
    }
    write_random(folder, config | changes, seed=8)
    write_modules(folder, pooling)
    return folder
