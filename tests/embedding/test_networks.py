"""The networks, compared with plain numpy implementations: neither batching nor stages change a vector."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import embedding_reference as reference
import numpy as np
import pytest
from embedding_models import (
    quantise_bert,
    write_bert,
    write_gemma,
    write_modernbert,
    write_qwen_embedding,
    write_ranking_bert,
    write_ranking_modernbert,
    write_ranking_roberta,
    write_roberta,
)
from embedding_reference import Reference, pooled
from engine_models import write_qwen
from tolerances import VECTOR_ATOL

from mlx_backend.device import Device
from mlx_backend.embedding.embedding_config import EmbeddingOptions
from mlx_backend.embedding.mlx.network import MLXNetwork
from mlx_backend.embedding.text_encoder import EncodedText
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from mlx_backend.embedding.worker import NetworkInfo
    from mlx_backend.models.files import ModelType

ROOT = Path(__file__).resolve().parents[2]
ALL = 1 << 30
LENGTHS = (1, 2, 7, 30, 60)


class LoadedNetwork:
    """A network on this thread, without its worker."""

    def __init__(
        self, folder: Path, *, rerank: bool = False, device: Device | None = None, **options: Any
    ) -> None:
        model_type: ModelType = "rerank" if rerank else "embedding"
        self.network = MLXNetwork(
            str(folder), model_type, EmbeddingOptions(**options), device=device or Device(8 << 30)
        )
        self.info: NetworkInfo = self.network.load(lambda _: None)

    def run(
        self, texts: list[EncodedText], stage_tokens: int = ALL, dimensions: int | None = None
    ) -> list[array[float]]:
        return self.stages(texts, stage_tokens, dimensions)[1]

    def stages(
        self, texts: list[EncodedText], stage_tokens: int, dimensions: int | None = None
    ) -> tuple[int, list[array[float]]]:
        stages, count = self.network.run(texts, dimensions, stage_tokens), 1
        while True:
            try:
                next(stages)
                count += 1
            except StopIteration as end:
                vectors: list[array[float]] = end.value
                return count, vectors


def tokens(length: int, *, size: int = 100) -> list[int]:
    return [4 + (7 * i * i + 3 * i + length) % (size - 4) for i in range(length)]


def texts(*lengths: int) -> list[EncodedText]:
    return [EncodedText(tokens(length)) for length in lengths]


type Write = Callable[..., Path]
EMBEDDERS: dict[str, tuple[Write, Callable[[Reference, list[int]], reference.Array], str]] = {
    "bert": (write_bert, reference.bert, "mean"),
    "xlm-roberta": (write_roberta, reference.bert, "cls"),
    "modernbert": (write_modernbert, reference.modernbert, "mean"),
    "qwen3": (write_qwen_embedding, reference.qwen, "last"),
    "gemma3": (write_gemma, reference.gemma, "mean"),
}


@pytest.fixture(scope="module", params=EMBEDDERS)
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    write, states, pooling = EMBEDDERS[request.param]
    folder = write(tmp_path_factory.mktemp(request.param))
    loaded = LoadedNetwork(folder)
    known = Reference(folder)
    return loaded, lambda text: pooled(states(known, text), pooling)


def test_vectors_equal_those_of_the_numpy_implementation(embedder: Any) -> None:
    loaded, expected = embedder
    for length in LENGTHS:
        [vector] = loaded.run(texts(length))
        np.testing.assert_allclose(vector, expected(tokens(length)), atol=VECTOR_ATOL)


def test_a_vector_does_not_depend_on_its_batch(embedder: Any) -> None:
    loaded, expected = embedder
    for vector, length in zip(loaded.run(texts(*LENGTHS)), LENGTHS, strict=True):
        np.testing.assert_allclose(vector, expected(tokens(length)), atol=VECTOR_ATOL)


def test_a_vector_does_not_depend_on_the_stages(embedder: Any) -> None:
    loaded, expected = embedder
    counts = []
    for stage_tokens in (1, 10, 100, ALL):
        count, vectors = loaded.stages(texts(60, 7), stage_tokens)
        counts.append(count)
        np.testing.assert_allclose(vectors[0], expected(tokens(60)), atol=VECTOR_ATOL)
        np.testing.assert_allclose(vectors[1], expected(tokens(7)), atol=VECTOR_ATOL)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2
    assert counts[-1] == 1


def test_a_long_text_is_attended_in_blocks_and_windows(tmp_path: Path) -> None:
    """More than one block of queries, and windows that leave stage_tokens keys out."""
    folder = write_modernbert(tmp_path, max_position_embeddings=2048)
    loaded, known = LoadedNetwork(folder), Reference(folder)
    for vector, length in zip(loaded.run(texts(1200, 520)), (1200, 520), strict=True):
        expected = pooled(reference.modernbert(known, tokens(length)), "mean")
        np.testing.assert_allclose(vector, expected, atol=VECTOR_ATOL)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_each_pooling_pools_the_states_it_names(name: str, pooling: str, tmp_path: Path) -> None:
    write, states, _ = EMBEDDERS[name]
    folder = write(tmp_path)
    loaded, known = LoadedNetwork(folder, pooling=pooling), Reference(folder)
    for stage_tokens in (8, ALL):
        for vector, length in zip(loaded.run(texts(30, 7), stage_tokens), (30, 7), strict=True):
            np.testing.assert_allclose(
                vector, pooled(states(known, tokens(length)), pooling), atol=VECTOR_ATOL
            )


def test_a_shortened_vector_is_the_beginning_of_the_whole_one_normalised(tmp_path: Path) -> None:
    loaded = LoadedNetwork(write_bert(tmp_path))
    [whole], [short] = loaded.run(texts(9)), loaded.run(texts(9), dimensions=8)
    beginning = np.array(whole[:8])
    np.testing.assert_allclose(short, beginning / np.linalg.norm(beginning), atol=1e-6)


def test_dense_layers_after_pooling_are_applied(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    matrix, bias = add_dense(folder, "2_Dense", 12, "torch.nn.modules.activation.Tanh")
    vector = reference.bert(Reference(folder), tokens(9)).mean(0)
    expected = np.tanh(matrix @ vector + bias)
    [found] = LoadedNetwork(folder).run(texts(9))
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=VECTOR_ATOL)


@pytest.mark.parametrize("bits", [None, 8])
def test_dense_layers_are_found_where_a_conversion_has_moved_them(bits: int | None, tmp_path: Path) -> None:
    """To the model's weights, as dense.0 and dense.1, possibly quantised; modules.json may be lost."""
    import mlx.core as mx

    folder = write_gemma(tmp_path)
    (folder / "modules.json").unlink()
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    weights: dict[str, mx.array] = dict(loaded)
    matrices = []
    for at, shape in enumerate([(64, 32), (32, 64)]):
        matrix = mx.random.normal(shape, key=mx.random.key(at)) * 0.3
        if bits is None:
            weights[f"dense.{at}.weight"] = matrix
        else:
            parts: Any = mx.quantize(matrix, 32, bits)
            names = ("weight", "scales", "biases")
            weights |= {f"dense.{at}.{name}": part for name, part in zip(names, parts, strict=True)}
            matrix = mx.dequantize(parts[0], parts[1], parts[2], group_size=32, bits=bits)
        matrices.append(np.array(matrix, dtype=np.float64))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = json.loads((folder / "config.json").read_text())
    if bits is not None:
        config["quantization"] = {"group_size": 32, "bits": bits}
    (folder / "config.json").write_text(json.dumps(config))
    vector = reference.gemma(Reference(folder), tokens(9)).mean(0)
    expected = matrices[1] @ (matrices[0] @ vector)
    [found] = LoadedNetwork(folder, pooling="mean").run(texts(9))
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=VECTOR_ATOL)


def add_dense(folder: Path, name: str, out: int, activation: str) -> tuple[Any, Any]:
    import mlx.core as mx

    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps({"activation_function": activation}))
    matrix = mx.random.normal((out, 32), key=mx.random.key(3)) * 0.3
    bias = mx.random.normal((out,), key=mx.random.key(4))
    mx.save_safetensors(
        str(folder / name / "model.safetensors"), {"linear.weight": matrix, "linear.bias": bias}
    )
    listed = json.loads((folder / "modules.json").read_text())
    listed.insert(2, {"idx": 2, "name": "2", "path": name, "type": "sentence_transformers.models.Dense"})
    (folder / "modules.json").write_text(json.dumps(listed))
    return np.array(matrix, dtype=np.float64), np.array(bias, dtype=np.float64)


def test_weights_saved_without_their_prefix_are_loaded(tmp_path: Path) -> None:
    """Qwen3-Embedding was published like this."""
    bare = LoadedNetwork(write_qwen_embedding(tmp_path / "bare", bare=True))
    whole = LoadedNetwork(write_qwen(tmp_path / "whole"), pooling="last")
    assert bare.run(texts(9)) == whole.run(texts(9))


def test_quantised_weights_are_loaded(tmp_path: Path) -> None:
    plain = write_bert(tmp_path / "plain", hidden_size=64, intermediate_size=64)
    folder = quantise_bert(write_bert(tmp_path / "quantised", hidden_size=64, intermediate_size=64))
    [one], [other] = LoadedNetwork(plain).run(texts(9)), LoadedNetwork(folder).run(texts(9))
    assert one != other
    assert np.dot(one, other) > 0.999


# -- ranking ------------------------------------------------------------------------------------------------


def test_cross_encoders_score_as_the_numpy_implementation(tmp_path: Path) -> None:
    roberta, bert, modern = tmp_path / "roberta", tmp_path / "bert", tmp_path / "modern"
    write_ranking_roberta(roberta), write_ranking_bert(bert), write_ranking_modernbert(modern)
    types = [0] * 4 + [1] * 5
    for folder, text, expected in [
        (roberta, EncodedText(tokens(9)), reference.roberta_score(Reference(roberta), tokens(9))),
        (bert, EncodedText(tokens(9), types), reference.bert_score(Reference(bert), tokens(9), types)),
        (modern, EncodedText(tokens(9)), reference.modernbert_score(Reference(modern), tokens(9))),
    ]:
        loaded = LoadedNetwork(folder, rerank=True)
        for others in ([], texts(30, 2)):
            assert math.isclose(loaded.run([text, *others])[0][0], expected, abs_tol=5e-5)


def test_a_causal_reranker_scores_by_the_difference_of_the_logits_of_yes_and_no(tmp_path: Path) -> None:
    folder = write_ranking_qwen(tmp_path / "Qwen3-Reranker")
    loaded, known = LoadedNetwork(folder, rerank=True), Reference(folder)
    yes, no = loaded.info.encoder.yes_no_tokens()
    text, truncated = loaded.info.encoder.encode_pair("fox", "the quick brown fox", None, 1024)
    assert not truncated
    state = reference.qwen(known, list(text.tokens))[-1]
    logits = known.weights["lm_head.weight"] @ state
    for stage_tokens in (16, ALL):
        assert math.isclose(
            loaded.run([text, *texts(3)], stage_tokens)[0][0], logits[yes] - logits[no], abs_tol=1e-4
        )


def write_ranking_qwen(folder: Path) -> Path:
    """Write a Qwen3 whose vocabulary has one token each for "yes" and "no"."""
    from tokenizers import Tokenizer

    write_qwen(folder, architectures=["Qwen3ForCausalLM"])
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(file)
    return folder


# -- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "changes", "rerank", "words"),
    [
        (write_bert, {"model_type": "mpnet"}, False, "'mpnet', which is not supported"),
        (write_bert, {}, True, "no rerank head"),
        (write_ranking_roberta, {"id2label": {"0": "bad", "1": "good"}}, True, "2 classes"),
        (write_bert, {"hidden_act": "snake"}, False, "'snake' is not supported"),
        (write_bert, {"position_embedding_type": "relative_key"}, False, "'relative_key'"),
        (write_bert, {"num_hidden_layers": 4, "layers_written": 3}, False, "lack 16 weights"),
        (write_qwen, {"model_type": "qwen2"}, True, "whose rerank prompt is not known"),
        (
            write_qwen,
            {"architectures": ["Qwen3ForSequenceClassification"]},
            True,
            "with a classification head",
        ),
        (write_qwen, {"is_causal": False}, False, "with bidirectional attention"),
    ],
)
def test_what_cannot_be_run_correctly_is_an_error(
    write: Write, changes: dict[str, Any], rerank: bool, words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EngineError, match=words):
        LoadedNetwork(folder, rerank=rerank)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_pytorchs_own_files_are_refused_with_the_command_that_converts_them(
    tmp_path: Path, file: str
) -> None:
    """bge-m3 was published like this."""
    folder = write_roberta(tmp_path / "encoder")
    (folder / "model.safetensors").rename(folder / file)
    with pytest.raises(EngineError, match=r"is not run here.* python -c .*save_file\(") as caught:
        LoadedNetwork(folder)
    command = str(caught.value).rpartition('python -c "')[2].removesuffix('"')
    compile(command, "command", "exec")
    assert command in (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8")
    causal = write_qwen_embedding(tmp_path / "causal")
    (causal / "model.safetensors").rename(causal / file)
    with pytest.raises(EngineError, match="format only: choose the model's MLX version"):
        LoadedNetwork(causal)


def test_infinite_output_is_an_error_and_no_vector(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = write_bert(tmp_path)
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    loaded["embeddings.LayerNorm.bias"] = mx.full((32,), float("inf"))
    mx.save_safetensors(str(folder / "model.safetensors"), loaded)
    with pytest.raises(EngineError, match="contains infinity or NaN"):
        LoadedNetwork(folder)


def test_memory_is_reserved_while_it_runs_and_released_afterwards(tmp_path: Path) -> None:
    device = Device(8 << 30)
    loaded = LoadedNetwork(write_bert(tmp_path), device=device, memory_bytes=1 << 20)
    weights = device.memory.reserved
    assert weights > 0
    stages = loaded.network.run(texts(60, 60), None, 1)
    next(stages)
    assert device.memory.reserved > weights
    stages.close()
    assert device.memory.reserved == weights
    with pytest.raises(EngineRefused, match="Send shorter texts"):
        loaded.run(texts(*[60] * 100))
    late = loaded.network.run(texts(60, 60), None, 1)
    next(late)
    loaded.network.unload()
    late.close()
    assert device.memory.reserved == 0


def test_what_a_run_needs_of_others_it_needs_no_longer_when_it_has_ended(tmp_path: Path) -> None:
    device = Device(8 << 30)
    other = device.memory.reserve(0)
    loaded = LoadedNetwork(write_bert(tmp_path), device=device)
    other.set_working(8 << 30, cached=4 << 30)
    stages = loaded.network.run(texts(60, 60), None, 1)
    next(stages)
    assert other.needed_by_others > 0
    stages.close()
    assert other.needed_by_others == 0


def test_a_causal_model_needs_memory_for_a_chunk_and_for_its_cache(tmp_path: Path) -> None:
    network = LoadedNetwork(write_qwen_embedding(tmp_path)).network
    assert network._model is not None
    chunked = network._working_bytes(1, 1000, 64)
    whole = network._working_bytes(1, 1000, 1000)
    assert chunked < whole
    assert network._working_bytes(2, 1000, 64) - chunked == 1000 * network._model.cache_bytes_per_token


def test_a_model_that_is_too_large_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    size = (folder / "model.safetensors").stat().st_size
    with pytest.raises(EngineError, match=r"needs .* of memory for its weights alone"):
        LoadedNetwork(folder, device=Device(size // 2))
