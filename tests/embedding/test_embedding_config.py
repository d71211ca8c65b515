"""A model's type, and how its vectors are made: by its files, by its name, by its settings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from embedding_models import write_modules

from mlx_backend.embedding.embedding_config import (
    EmbeddingConfig,
    EmbeddingOptions,
    embedding_config,
    folder_context_length,
)
from mlx_backend.errors import EngineError
from mlx_backend.models.files import detect_model_type

if TYPE_CHECKING:
    from pathlib import Path

SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


def folder_of(folder: Path, **files: Any) -> Path:
    """Write JSON files; `config` is config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def config_of(folder: Path, name: str = "m", *, causal: bool = False, **options: Any) -> EmbeddingConfig:
    return embedding_config(folder, name, EmbeddingOptions(**options), causal=causal)


@pytest.mark.parametrize(
    ("name", "config", "model_type"),
    [
        ("BAAI/bge-m3", {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}, "embedding"),
        (
            "BAAI/bge-reranker-v2-m3",
            {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForSequenceClassification"]},
            "rerank",
        ),
        (
            "cl-nagoya/ruri-v3-310m",
            {"model_type": "modernbert", "architectures": ["ModernBertModel"]},
            "embedding",
        ),
        (
            "Qwen/Qwen3-Embedding-0.6B",
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
            "embedding",
        ),
        (
            "Qwen/Qwen3-Reranker-0.6B",
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
            "rerank",
        ),
        ("Qwen/Qwen3-0.6B", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "llm"),
        ("embeddings/Qwen3-0.6B", {"model_type": "qwen3"}, "llm"),
        ("mine", {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "embedding"),
        ("mine", {"architectures": 7}, "llm"),
    ],
)
def test_the_type_comes_from_the_files_and_otherwise_from_the_name(
    name: str, config: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    assert detect_model_type(folder_of(tmp_path, config=config), name) == model_type


def test_a_causal_model_with_the_files_of_sentence_transformers_is_an_embedding_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, config={"model_type": "qwen3"})
    assert detect_model_type(folder, "mine") == "llm"
    write_modules(folder, "lasttoken")
    assert detect_model_type(folder, "mine") == "embedding"


def test_the_type_of_a_model_that_is_not_downloaded_comes_from_its_name() -> None:
    assert detect_model_type(None, "Qwen/Qwen3-Embedding-8B") == "embedding"
    assert detect_model_type(None, "BAAI/bge-reranker-v2-m3") == "rerank"
    assert detect_model_type(None, "mlx-community/gpt-oss-20b-MXFP4-Q8") == "llm"


@pytest.mark.parametrize(
    ("name", "causal", "pooling", "query", "document"),
    [
        ("mlx-community/bge-m3-mlx-fp16", False, "cls", "", ""),
        ("intfloat/multilingual-e5-large", False, "mean", "query: ", "passage: "),
        ("intfloat/multilingual-e5-large-instruct", False, "mean", f"Instruct: {SEARCH}\nQuery: ", ""),
        ("intfloat/e5-mistral-7b-instruct", True, "last", f"Instruct: {SEARCH}\nQuery: ", ""),
        ("Qwen/Qwen3-Embedding-0.6B", True, "last", f"Instruct: {SEARCH}\nQuery:", ""),
        ("cl-nagoya/ruri-v3-310m", False, "mean", "検索クエリ: ", "検索文書: "),
        ("cl-nagoya/ruri-large-v2", False, "mean", "クエリ: ", "文章: "),
        ("BAAI/bge-large-zh-v1.5", False, "cls", "为这个句子生成表示以用于检索相关文章：", ""),
        ("BAAI/bge-multilingual-gemma2", True, "last", "", ""),
        (
            "google/embeddinggemma-300m",
            False,
            "mean",
            "task: search result | query: ",
            "title: none | text: ",
        ),
        ("somebody/minilm", False, "mean", "", ""),
        ("somebody/llama", True, "last", "", ""),
    ],
)
def test_families_have_defaults_for_files_that_a_conversion_has_lost(
    name: str, causal: bool, pooling: str, query: str, document: str, tmp_path: Path
) -> None:
    found = config_of(tmp_path, name, causal=causal)
    assert (found.pooling, found.prefix("query"), found.prefix("document")) == (pooling, query, document)
    assert found.prefix(None) == ""


def test_files_override_the_family_and_settings_override_both(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path, config_sentence_transformers={"prompts": {"query": "Q: ", "passage": "P: ", "other": "O: "}}
    )
    write_modules(folder, "lasttoken")
    own = config_of(folder, "bge-m3")
    assert (own.pooling, own.query_prefix, own.document_prefix) == ("last", "Q: ", "P: ")
    chosen = config_of(
        folder, "bge-m3", pooling="mean", query_prefix="", document_prefix="D: ", matryoshka=True
    )
    assert (chosen.pooling, chosen.query_prefix, chosen.document_prefix) == ("mean", "", "D: ")
    assert chosen.matryoshka


def test_empty_prompts_do_not_override_the_family(tmp_path: Path) -> None:
    """sentence-transformers writes empty ones for models without prompts."""
    folder_of(tmp_path, config_sentence_transformers={"prompts": {"query": "", "document": ""}})
    assert config_of(tmp_path, "multilingual-e5-base").query_prefix == "query: "


def test_pooling_configs_may_have_the_old_or_the_new_form(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "1_Pooling", config={"pooling_mode": "lasttoken"}).parent
    assert config_of(folder).pooling == "last"
    folder_of(
        folder / "1_Pooling", config={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    )
    assert config_of(folder).pooling == "cls"


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode_max_tokens": True}, "pools by max_tokens; supported are cls, mean, last"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pools by cls and mean"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "excludes prompts from pooling"),
    ],
)
def test_unsupported_pooling_is_an_error(pooling: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "1_Pooling", config=pooling).parent
    with pytest.raises(EngineError, match=words):
        config_of(folder)


def test_unsupported_modules_and_paths_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    def step(kind: str, path: str) -> None:
        folder_of(tmp_path, modules=[{"type": f"sentence_transformers.models.{kind}", "path": path}])

    step("WordWeights", "1_WordWeights")
    with pytest.raises(EngineError, match="'WordWeights' module, which is not supported"):
        config_of(tmp_path)
    step("Dense", "../elsewhere")
    with pytest.raises(EngineError, match="leads out of its folder"):
        config_of(tmp_path)
    (tmp_path / "modules.json").write_text('{"idx": 0}')
    with pytest.raises(EngineError, match=r"modules\.json .* cannot be read"):
        config_of(tmp_path)


def test_the_smallest_limit_in_the_files_is_the_context_length(tmp_path: Path) -> None:
    config = {"model_type": "xlm-roberta", "max_position_embeddings": 514, "pad_token_id": 1}
    folder = folder_of(tmp_path, config=config)
    defaults = EmbeddingOptions()
    assert folder_context_length(folder, "m", defaults) == 512, (
        "RoBERTa's first positions are reserved for padding"
    )
    folder_of(folder, tokenizer_config={"model_max_length": 10**30})
    assert folder_context_length(folder, "m", defaults) == 512
    folder_of(folder, **{"sentence_xlm-roberta_config": {"max_seq_length": 256}})
    assert folder_context_length(folder, "m", defaults) == 256
    folder_of(folder, tokenizer_config={"model_max_length": 128})
    assert folder_context_length(folder, "m", defaults) == 128
    assert folder_context_length(folder, "m", EmbeddingOptions(context_length=400)) == 400
