"""Train `mlx-demo-embedding` from scratch: `python -m training.embedding.train CORPUS.jsonl.gz --out FOLDER`.

Contrastive: of a batch's second texts, each first one is to be nearest to its own (InfoNCE, both ways, with the batch
as negatives). A batch is of one task, so its negatives are of the same kind. In the last part of the run weights are
seen as they will be stored, with 4 bits.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import threading
import time
import zlib
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any, Final

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from tokenizers import Tokenizer

from mlx_backend.embedding.mlx.encoders import ModernBert
from training.embedding import pairs, synthetic
from training.embedding.tokens import learn_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VOCABULARY: Final = 20_480
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["ModernBertModel"],
    "model_type": "modernbert",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "hidden_activation": "gelu",
    "max_position_embeddings": 1024,
    "global_rope_theta": 10_000.0,
    "global_attn_every_n_layers": 1,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
GROUP_SIZE: Final = 64
BITS: Final = 4
TEMPERATURE: Final = 0.05
BATCHES: Final = {"words": 4096, "sentences": 4096, "passages": 1536, "synthetic": 1536}
SHARES: Final = {"words": 0.12, "sentences": 0.45, "passages": 0.25, "synthetic": 0.18}
LENGTHS: Final = {**pairs.LENGTHS, "synthetic": (48, 160)}
CHUNK: Final = 4_000  # rows that a process makes pairs of at a time

type Sides = tuple[np.ndarray, np.ndarray]

_shared: dict[str, Any] = {}


# -- examples ------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[pairs.Row]:
    """Return the corpus."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def is_held_out(row: pairs.Row) -> bool:
    """Whether a group is only for evaluation: of all that have the same English (or other first) text, or none."""
    if "texts" not in row or row["source"] in pairs.DICTIONARIES:
        return False
    texts = row["texts"].get("en") or next(iter(row["texts"].values()))
    part = 200 if row["source"] == "tatoeba" else 40
    return any(zlib.crc32(text.lower().encode()) % part == 0 for text in texts)


def all_texts(rows: Sequence[pairs.Row], count: int, seed: int) -> list[str]:
    """Return texts to learn a tokenizer from: all languages alike, entries of dictionaries more rarely."""
    draw = random.Random(seed)
    found: dict[str, list[str]] = {"en": [], "ja": [], "zh": []}
    for row in rows:
        if "texts" in row:
            if row["source"] not in pairs.DICTIONARIES or draw.random() < 0.3:
                for language, each in row["texts"].items():
                    found[language] += each
        else:
            found[row["language"]] += [text for section in row["sections"] for text in section]
    for kind in synthetic.examples(random.Random(seed), 6_000):
        found[kind[0]] += kind[1:]
    for each in found.values():
        draw.shuffle(each)
    texts = []
    for language, each in found.items():
        room = count * (2 if language == "en" else 1)
        for text in each:
            texts.append(text)
            room -= len(text)
            if room < 0:
                break
        while room > 0 and language == "zh":  # there is least of it
            text = draw.choice(each)
            texts.append(text)
            room -= len(text)
    return texts


def _make(job: tuple[str, int, int]) -> dict[str, Sides]:
    kind, start, seed = job
    draw = random.Random(seed * 1_000_003 + start)
    made: list[pairs.Pair] = []
    if kind == "synthetic":
        made = [("synthetic", first, second) for _, first, second in synthetic.examples(draw, CHUNK)]
    elif kind == "bags":
        made = list(pairs.bag_pairs(_shared["entries"][start::16], CHUNK, draw))
    else:
        for row in _shared["rows"][start : start + CHUNK]:
            made += (
                pairs.document_pairs(row, draw)
                if "sections" in row
                else pairs.group_pairs(row, _shared["words"], draw)
            )
    return {task: _encode(task, [pair[1:] for pair in made if pair[0] == task]) for task in LENGTHS}


def _encode(task: str, texts: Sequence[tuple[str, ...]]) -> Sides:
    sides = []
    for side, limit in enumerate(LENGTHS[task]):
        encoded = _shared["tokenizer"].encode_batch([each[side] for each in texts])
        table = np.zeros((len(texts), limit), np.uint16)
        for row, each in zip(table, encoded, strict=True):
            ids = each.ids[:limit]
            row[: len(ids)] = ids
        sides.append(table)
    return sides[0], sides[1]


def make_examples(
    rows: Sequence[pairs.Row], tokenizer: Tokenizer, seed: int, processes: int
) -> dict[str, Sides]:
    """Return the pairs of all tasks, as tokens."""
    order = list(rows)
    random.Random(seed).shuffle(order)
    _shared["rows"], _shared["tokenizer"], _shared["words"] = order, tokenizer, pairs.lexicon(rows)
    _shared["entries"] = [row for row in order if row["source"] in ("jmdict", "cc-cedict", "cldr")]
    jobs = [("rows", start, seed) for start in range(0, len(order), CHUNK)]
    jobs += [("bags", start, seed) for start in range(max(1, len(order) // (2 * CHUNK)))]
    jobs += [("synthetic", start, seed) for start in range(max(1, len(order) // (2 * CHUNK)))]
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        parts = list(pool.imap_unordered(_make, jobs, chunksize=1))
    return {
        task: tuple(np.concatenate([part[task][side] for part in parts]) for side in (0, 1))  # type: ignore[misc]
        for task in LENGTHS
    }


def batches(examples: dict[str, Sides], seed: int, scale: float) -> Iterator[tuple[str, Sides]]:
    """Yield batches forever, each of one task."""
    draw = np.random.default_rng(seed)
    tasks = [task for task in LENGTHS if len(examples[task][0]) > 8]
    shares = np.array([SHARES[task] for task in tasks])
    orders: dict[str, np.ndarray] = {}
    while True:
        task = tasks[draw.choice(len(tasks), p=shares / shares.sum())]
        first, second = examples[task]
        size = min(int(BATCHES[task] * scale), len(first))
        if len(orders.get(task, ())) < size:
            orders[task] = draw.permutation(len(first))
        chosen, orders[task] = orders[task][:size], orders[task][size:]
        yield task, (first[chosen], second[chosen])


# -- learning ------------------------------------------------------------------------------------------------


def as_stored(weight: mx.array) -> mx.array:
    """Return a matrix as it will be read from the file; its gradient is that of the matrix itself."""
    packed = mx.quantize(mx.stop_gradient(weight), group_size=GROUP_SIZE, bits=BITS)
    stored = mx.dequantize(*packed, group_size=GROUP_SIZE, bits=BITS)
    return weight + mx.stop_gradient(stored - weight)


def embed(network: ModernBert, tokens: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return the vectors of texts, of length 1."""
    lengths = (tokens != 0).sum(axis=1)
    hidden = network.embed(tokens, tokens).astype(dtype)
    for layer in network.layers:
        hidden = layer(hidden, lengths)
    hidden = network.normalise(hidden).astype(mx.float32)
    pooled = mx.where((tokens != 0)[..., None], hidden, 0).sum(axis=1) / lengths[:, None]
    return pooled / mx.linalg.norm(pooled, axis=1, keepdims=True)


def contrastive_loss(first: mx.array, second: mx.array, keys: tuple[mx.array, mx.array]) -> mx.array:
    """Return the mean loss both ways; a text that occurs twice in a batch is not its own negative."""
    scores = first @ second.T / TEMPERATURE
    same = (keys[0][:, None] == keys[0][None]) | (keys[1][:, None] == keys[1][None])
    same = same & ~mx.eye(len(first), dtype=mx.bool_)
    scores = mx.where(same, -1e4, scores)
    target = mx.diagonal(scores)
    return (mx.logsumexp(scores, axis=1) + mx.logsumexp(scores, axis=0)).mean() / 2 - target.mean()


def text_keys(tokens: np.ndarray) -> np.ndarray:
    """Return a number for each row that is the same for equal rows."""
    factors = np.random.default_rng(0).integers(1, 1 << 30, tokens.shape[1], dtype=np.int64) | 1
    return ((tokens.astype(np.int64) * factors).sum(axis=1) & 0x7FFFFFFF).astype(np.int32)


def learn(
    network: ModernBert,
    examples: dict[str, Sides],
    *,
    minutes: float,
    rate: float,
    scale: float,
    dtype: mx.Dtype,
    steps: int,
    seed: int,
) -> None:
    """Train until the time is over (or after `steps`)."""
    optimizer = optim.AdamW(learning_rate=rate, weight_decay=0.01, betas=[0.9, 0.98])
    state = [network.state, optimizer.state]

    def make_step(quantised: bool) -> Any:
        def loss(
            parameters: Any, first: mx.array, second: mx.array, keys: tuple[mx.array, mx.array]
        ) -> mx.array:
            def seen(path: str, weight: mx.array) -> mx.array:
                weight = as_stored(weight) if quantised and weight.ndim == 2 else weight
                # The gradients of a frequent piece are many: their sum needs full precision.
                return weight if path.startswith("embeddings") else weight.astype(dtype)

            network.update(tree_map_with_path(seen, parameters))
            vectors = embed(network, first, dtype), embed(network, second, dtype)
            return contrastive_loss(*vectors, keys)

        def step(first: mx.array, second: mx.array, keys: tuple[mx.array, mx.array]) -> mx.array:
            parameters = network.trainable_parameters()
            value, gradients = mx.value_and_grad(loss)(parameters, first, second, keys)
            network.update(parameters)
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            optimizer.update(network, gradients)
            return value

        return mx.compile(step, inputs=state, outputs=state)

    plain, stored = make_step(False), make_step(True)
    queue: Queue[tuple[str, Sides, Sides]] = Queue(8)

    def fill() -> None:
        for task, sides in batches(examples, seed, scale):
            queue.put((task, sides, (text_keys(sides[0]), text_keys(sides[1]))))

    threading.Thread(target=fill, daemon=True).start()
    sums: dict[str, list[float]] = {}
    begin, number = time.monotonic(), 0
    while True:
        done = max((time.monotonic() - begin) / (minutes * 60), number / steps if steps else 0)
        if done >= 1:
            break
        warm = min(1.0, (number + 1) / 200)
        optimizer.learning_rate = mx.array(rate * warm * (1 - 0.99 * done))
        task, sides, keys = queue.get()
        value = (stored if done > 0.75 else plain)(
            mx.array(sides[0].astype(np.int32)),
            mx.array(sides[1].astype(np.int32)),
            (mx.array(keys[0]), mx.array(keys[1])),
        )
        mx.eval(value, state)
        number += 1
        total = sums.setdefault(task, [0.0, 0])
        total[0], total[1] = total[0] + value.item(), total[1] + 1
        if number % (200 if steps == 0 else 10) == 0:
            losses = " ".join(f"{task} {total / count:.3f}" for task, (total, count) in sorted(sums.items()))
            print(f"step {number} {time.monotonic() - begin:.0f}s {losses}", flush=True)
            sums = {}


def save(network: ModernBert, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model's folder: matrices with 4 bits, norms in half precision."""
    out.mkdir(parents=True, exist_ok=True)
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(network.parameters()):
        if value.ndim == 2:
            packed, scales, biases = mx.quantize(value, group_size=GROUP_SIZE, bits=BITS)
            stem = name.removesuffix(".weight")
            weights |= {
                name: packed,
                f"{stem}.scales": scales.astype(mx.float16),
                f"{stem}.biases": biases.astype(mx.float16),
            }
        else:
            weights[name] = value.astype(mx.float16)
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    network.save_weights(str(out.with_name(out.name + "-weights.safetensors")))
    quantization = {"group_size": GROUP_SIZE, "bits": BITS, "mode": "affine"}
    config = {
        **CONFIG,
        "layer_types": ["full_attention"] * CONFIG["num_hidden_layers"],
        "dtype": "float16",
        "quantization": quantization,
    }
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    for name, value in {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "model_max_length": CONFIG["max_position_embeddings"],
        },
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": CONFIG["hidden_size"],
            "pooling_mode_mean_tokens": True,
        },
    }.items():
        path = out / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json made before")
    parser.add_argument("--float32", action="store_true", help="compute in full precision on a GPU too")
    parser.add_argument("--only-tokenizer", action="store_true")
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument(
        "--deadline", type=float, default=0, help="when to be done, in seconds since the epoch"
    )
    parser.add_argument("--start", type=Path, help="weights.safetensors to go on from")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--scale", type=float, default=1.0, help="size of batches, of what a GPU takes")
    parser.add_argument("--rows", type=int, default=0, help="only this many rows of the corpus, to try it")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    begin = time.monotonic()
    rows = read_rows(arguments.corpus)
    if arguments.rows:
        rows = random.Random(0).sample(rows, min(arguments.rows, len(rows)))
    held_out = [row for row in rows if is_held_out(row)]
    rows = [row for row in rows if not is_held_out(row)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with gzip.open(arguments.out.with_name("held-out.jsonl.gz"), "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in held_out)
    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    else:
        tokenizer = learn_tokenizer(all_texts(rows, 2_500_000, arguments.seed), VOCABULARY)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    print(
        f"{len(rows)} rows, {tokenizer.get_vocab_size()} pieces after {time.monotonic() - begin:.0f}s",
        flush=True,
    )
    if arguments.only_tokenizer:
        return
    examples = make_examples(rows, tokenizer, arguments.seed, arguments.processes)
    print(
        {task: len(first) for task, (first, _) in examples.items()},
        f"after {time.monotonic() - begin:.0f}s",
        flush=True,
    )
    mx.random.seed(arguments.seed)
    network = ModernBert(CONFIG, rerank=False)
    network.embeddings.tok_embeddings.weight = mx.random.normal((VOCABULARY, CONFIG["hidden_size"])) * 0.05
    if arguments.start:
        network.load_weights(str(arguments.start))
    minutes = (arguments.deadline - time.time()) / 60 if arguments.deadline else arguments.minutes
    is_gpu = mx.default_device() == mx.Device(mx.gpu)
    learn(
        network,
        examples,
        minutes=minutes,
        rate=arguments.rate,
        scale=arguments.scale,
        dtype=mx.bfloat16 if is_gpu and not arguments.float32 else mx.float32,
        steps=arguments.steps,
        seed=arguments.seed,
    )
    save(network, tokenizer, arguments.out)
    size = sum(path.stat().st_size for path in arguments.out.rglob("*") if path.is_file())
    print(f"{size} bytes, after {time.monotonic() - begin:.0f}s")


if __name__ == "__main__":
    main()
