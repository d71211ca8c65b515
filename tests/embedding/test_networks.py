"""The networks that read, held to the same written down in numpy. Neither company nor stages change a vector."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import embedding_reference as reference
import numpy as np
import pytest
from embedding_models import (
    as_pytorch_had_it,
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

from mlx_backend.device import Device
from mlx_backend.embedding.base import Row
from mlx_backend.embedding.mlx.network import MLXNetwork
from mlx_backend.embedding.recipe import EmbeddingOptions
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable
    from pathlib import Path

    from mlx_backend.embedding.base import NetworkFacts
    from mlx_backend.models.model_type import ModelType

ALL = 1 << 30
LENGTHS = (1, 2, 7, 30, 60)


class Loaded:
    """A network on this thread, without its worker."""

    def __init__(
        self, folder: Path, *, ranks: bool = False, device: Device | None = None, **options: Any
    ) -> None:
        memory = (device or Device(8 << 30)).memory
        kind: ModelType = "rerank" if ranks else "embedding"
        self.network = MLXNetwork(str(folder), kind, EmbeddingOptions(**options), memory=memory)
        self.facts: NetworkFacts = self.network.load(lambda _: None)

    def run(self, rows: list[Row], most: int = ALL, dimensions: int | None = None) -> list[array[float]]:
        return self.stages(rows, most, dimensions)[1]

    def stages(
        self, rows: list[Row], most: int, dimensions: int | None = None
    ) -> tuple[int, list[array[float]]]:
        running, count = self.network.run(rows, dimensions, most), 1
        while True:
            try:
                next(running)
                count += 1
            except StopIteration as end:
                vectors: list[array[float]] = end.value
                return count, vectors


def tokens(length: int, *, size: int = 100) -> list[int]:
    return [4 + (7 * at * at + 3 * at + length) % (size - 4) for at in range(length)]


def rows(*lengths: int) -> list[Row]:
    return [Row(tokens(length)) for length in lengths]


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
    loaded = Loaded(folder)
    known = Reference(folder)
    return loaded, lambda row: pooled(states(known, row), pooling)


def test_vectors_are_those_of_the_network_written_down_in_numpy(embedder: Any) -> None:
    loaded, expected = embedder
    for length in LENGTHS:
        [vector] = loaded.run(rows(length))
        np.testing.assert_allclose(vector, expected(tokens(length)), atol=2e-5)


def test_a_vector_does_not_depend_on_who_is_in_the_piece(embedder: Any) -> None:
    loaded, expected = embedder
    for vector, length in zip(loaded.run(rows(*LENGTHS)), LENGTHS, strict=True):
        np.testing.assert_allclose(vector, expected(tokens(length)), atol=2e-5)


def test_a_vector_does_not_depend_on_the_stages(embedder: Any) -> None:
    loaded, expected = embedder
    counts = []
    for most in (1, 10, 100, ALL):
        count, vectors = loaded.stages(rows(60, 7), most)
        counts.append(count)
        np.testing.assert_allclose(vectors[0], expected(tokens(60)), atol=2e-5)
        np.testing.assert_allclose(vectors[1], expected(tokens(7)), atol=2e-5)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 2
    assert counts[-1] == 1


def test_a_long_text_is_read_in_blocks_and_windows(tmp_path: Path) -> None:
    """More than one block of queries, and windows that leave most keys out."""
    folder = write_modernbert(tmp_path, max_position_embeddings=2048)
    loaded, known = Loaded(folder), Reference(folder)
    for vector, length in zip(loaded.run(rows(1200, 520)), (1200, 520), strict=True):
        expected = pooled(reference.modernbert(known, tokens(length)), "mean")
        np.testing.assert_allclose(vector, expected, atol=2e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("name", ["bert", "qwen3"])
def test_each_pooling_takes_what_it_says(name: str, pooling: str, tmp_path: Path) -> None:
    write, states, _ = EMBEDDERS[name]
    folder = write(tmp_path)
    loaded, known = Loaded(folder, pooling=pooling), Reference(folder)
    for most in (8, ALL):
        for vector, length in zip(loaded.run(rows(30, 7), most), (30, 7), strict=True):
            np.testing.assert_allclose(vector, pooled(states(known, tokens(length)), pooling), atol=2e-5)


def test_a_shorter_vector_is_the_beginning_of_the_whole_one_made_long_again(tmp_path: Path) -> None:
    loaded = Loaded(write_bert(tmp_path))
    [whole], [short] = loaded.run(rows(9)), loaded.run(rows(9), dimensions=8)
    beginning = np.array(whole[:8])
    np.testing.assert_allclose(short, beginning / np.linalg.norm(beginning), atol=1e-6)


def test_layers_after_pooling_are_applied(tmp_path: Path) -> None:
    folder = write_bert(tmp_path)
    matrix, bias = add_dense(folder, "2_Dense", 12, "torch.nn.modules.activation.Tanh")
    vector = reference.bert(Reference(folder), tokens(9)).mean(0)
    expected = np.tanh(matrix @ vector + bias)
    [found] = Loaded(folder).run(rows(9))
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=2e-5)


@pytest.mark.parametrize("bits", [None, 8])
def test_layers_after_pooling_are_found_where_a_conversion_has_put_them(
    bits: int | None, tmp_path: Path
) -> None:
    """Among the weights, as dense.0 and dense.1, quantised perhaps; the list of modules may be lost."""
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
    [found] = Loaded(folder, pooling="mean").run(rows(9))
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=2e-5)


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


def test_weights_saved_without_their_prefix_are_found(tmp_path: Path) -> None:
    """As Qwen3-Embedding was published."""
    bare = Loaded(write_qwen_embedding(tmp_path / "bare", bare=True))
    whole = Loaded(write_qwen(tmp_path / "whole"), pooling="last")
    assert bare.run(rows(9)) == whole.run(rows(9))


def test_quantised_weights_are_read(tmp_path: Path) -> None:
    import mlx.core as mx

    plain = write_bert(tmp_path / "plain", hidden_size=64, intermediate_size=64)
    folder = write_bert(tmp_path / "quantised", hidden_size=64, intermediate_size=64)
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
    [one], [other] = Loaded(plain).run(rows(9)), Loaded(folder).run(rows(9))
    assert one != other
    assert np.dot(one, other) > 0.999


# -- ranking ------------------------------------------------------------------------------------------------


def test_cross_encoders_score_as_written_down_in_numpy(tmp_path: Path) -> None:
    roberta, bert, modern = tmp_path / "roberta", tmp_path / "bert", tmp_path / "modern"
    write_ranking_roberta(roberta), write_ranking_bert(bert), write_ranking_modernbert(modern)
    types = [0] * 4 + [1] * 5
    for folder, row, expected in [
        (roberta, Row(tokens(9)), reference.roberta_score(Reference(roberta), tokens(9))),
        (bert, Row(tokens(9), types), reference.bert_score(Reference(bert), tokens(9), types)),
        (modern, Row(tokens(9)), reference.modernbert_score(Reference(modern), tokens(9))),
    ]:
        loaded = Loaded(folder, ranks=True)
        for company in ([], rows(30, 2)):
            assert math.isclose(loaded.run([row, *company])[0][0], expected, abs_tol=5e-5)


def test_a_causal_model_ranks_by_how_much_rather_it_says_yes_than_no(tmp_path: Path) -> None:
    folder = write_ranking_qwen(tmp_path / "Qwen3-Reranker")
    loaded, known = Loaded(folder, ranks=True), Reference(folder)
    yes, no = loaded.facts.encoder.answers()  # type: ignore[attr-defined]
    row, cut = loaded.facts.encoder.pair("fox", "the quick brown fox", None, 1024)
    assert not cut
    state = reference.qwen(known, list(row.tokens))[-1]
    logits = known.weights["lm_head.weight"] @ state
    for most in (16, ALL):
        assert math.isclose(loaded.run([row, *rows(3)], most)[0][0], logits[yes] - logits[no], abs_tol=1e-4)


def write_ranking_qwen(folder: Path) -> Path:
    """Write a Qwen3 whose vocabulary has a token for yes, and one for no."""
    from tokenizers import Tokenizer

    write_qwen(folder, architectures=["Qwen3ForCausalLM"])
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(file)
    return folder


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "changes", "ranks", "words"),
    [
        (write_bert, {"model_type": "mpnet"}, False, "'mpnet', which is not known here"),
        (write_bert, {}, True, "no head that scores"),
        (write_ranking_roberta, {"id2label": {"0": "bad", "1": "good"}}, True, "2 classes"),
        (write_bert, {"hidden_act": "snake"}, False, "'snake' is not known"),
        (write_bert, {"position_embedding_type": "relative_key"}, False, "'relative_key'"),
        (write_bert, {"num_hidden_layers": 4, "layers_written": 3}, False, "lack 16 weights"),
        (write_qwen, {"model_type": "qwen2"}, True, "How it was taught to rank"),
        (write_qwen, {"architectures": ["Qwen3ForSequenceClassification"]}, True, "a head of its own"),
        (write_qwen, {"is_causal": False}, False, "looks in both directions"),
    ],
)
def test_what_cannot_be_run_rightly_is_a_sentence(
    write: Write, changes: dict[str, Any], ranks: bool, words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(EngineError, match=words):
        Loaded(folder, ranks=ranks)


def test_pytorchs_own_files_are_read_where_there_are_no_others(tmp_path: Path) -> None:
    """As bge-m3 was published."""
    plain = Loaded(write_roberta(tmp_path / "plain"))
    pickled = Loaded(as_pytorch_had_it(write_roberta(tmp_path / "pickled")))
    assert pickled.run(rows(9, 30)) == plain.run(rows(9, 30))


def test_what_is_no_file_of_weights_is_a_sentence(tmp_path: Path) -> None:
    folder = write_bert(tmp_path / "broken")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EngineError, match=r"pytorch_model\.bin is not a file of tensors"):
        Loaded(folder)
    causal = as_pytorch_had_it(write_qwen_embedding(tmp_path / "causal"))
    with pytest.raises(EngineError, match="no weights in safetensors"):
        Loaded(causal)


def test_numbers_that_are_none_are_an_error_and_no_vector(tmp_path: Path) -> None:
    import mlx.core as mx

    folder = write_bert(tmp_path)
    loaded: Any = mx.load(str(folder / "model.safetensors"))
    loaded["embeddings.LayerNorm.bias"] = mx.full((32,), float("inf"))
    mx.save_safetensors(str(folder / "model.safetensors"), loaded)
    with pytest.raises(EngineError, match="something that is no number"):
        Loaded(folder)


def test_memory_is_held_while_it_works_and_given_back(tmp_path: Path) -> None:
    device = Device(8 << 30)
    loaded = Loaded(write_bert(tmp_path), device=device, memory_bytes=1 << 20)
    weights = device.memory.reserved
    assert weights > 0
    running = loaded.network.run(rows(60, 60), None, 1)
    next(running)
    assert device.memory.reserved > weights
    running.close()
    assert device.memory.reserved == weights
    with pytest.raises(EngineRefused, match="Send shorter texts"):
        loaded.run(rows(*[60] * 100))
    late = loaded.network.run(rows(60, 60), None, 1)
    next(late)
    loaded.network.unload()
    late.close()
    assert device.memory.reserved == 0


def test_a_causal_model_needs_memory_for_a_chunk_and_for_what_it_keeps(tmp_path: Path) -> None:
    loaded = Loaded(write_qwen_embedding(tmp_path))
    chunked = loaded.network._bytes(1, 1000, 64)
    whole = loaded.network._bytes(1, 1000, 1000)
    assert chunked < whole
    assert loaded.network._bytes(2, 1000, 64) - chunked == 1000 * loaded.network._model.kept_per_token  # type: ignore[union-attr]
