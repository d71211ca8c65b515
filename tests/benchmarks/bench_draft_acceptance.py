"""How many drafted tokens are accepted, and how many runs of the model a reply takes: counts, not times.

    python tests/benchmarks/bench_draft_acceptance.py [--replies 8] [--tokens 60] [--temperatures 0 0.7] [--lessons 300]

Four tokens are drafted in every step, whether that pays or not: by the model itself (*twin*), by the model with noise
on its weights or rounded to 4 bits, from the text, and by an MTP head, which learns from the demo model's corpus first,
a minute or two. The models are the demo model, with questions that it was trained on and is sure of at any temperature,
and a gpt_oss with random weights. Its logits are scaled, so that the next token is about as sure as in a text.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from dataclasses import replace
from itertools import batched, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlx_backend.device.blas import use_fast_blas

use_fast_blas()  # before MLX
import mlx.core as mx
from drafting import alone, generate, loaded_batch
from engine_models import write_model
from mlx_lm import convert
from mtp_heads import Lesson, random_head, teach, weights_of
from training.chat.corpus import dialogue
from training.chat.encode import IGNORED, encode
from transformers import AutoTokenizer

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.layers.architecture import load_network

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from drafting import FoundReply

    from mlx_backend.engine.mlx.batch import MLXBatch

QUESTIONS = (
    "What is the capital of France?",
    "Count to 15.",
    "Repeat: apple river stone, apple river stone, apple river stone.",
    "Tell me a story.",
    "What is 12 + 7?",
    "Write a poem about the sea.",
    "What's the weather like in Oslo?",
    "Summarise: the quick brown fox jumps over the lazy dog, and the quick brown fox sleeps.",
)
NOISE = 0.05  # of each weight's own size
SHARPENED = 18.0  # times the random logits
DRAFTS = 4
TEXTS, MAX_LESSON = 4, 700  # of a lesson, and the most tokens of one


def main() -> None:
    """Write the models, and print a line for each kind of drafts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replies", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=60, help="of each reply, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--lessons", type=int, default=300, help="of the head; 0: none is made")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        unsure = write_model(Path(scratch) / "random", eos_token_id=[])
        _change(unsure, lambda name, value: value * SHARPENED if name.startswith("lm_head") else value)
        for name, model in (("demo", MODEL_PATH), ("random", unsure)):
            _compare(name, model, Path(scratch) / f"{name}-drafts", options)


def _compare(name: str, model: Path, folder: Path, options: argparse.Namespace) -> None:
    folder.mkdir()
    kinds: dict[str, dict[str, Any]] = {
        "twin": {"draft_model": str(model)},
        "text": {"draft_from_text": True},
    }
    if name == "demo" and options.lessons:
        kinds["head"] = {"draft_model": str(_head(model, folder / "head", options.lessons))}
    if name != "demo":
        convert(str(model), str(folder / "4-bit"), quantize=True, q_bits=4, q_group_size=32)
        kinds["noisy"] = {"draft_model": str(_with_noise(model, folder / "noisy"))}
        kinds["4-bit"] = {"draft_model": str(folder / "4-bit")}
    with loaded_batch(model) as plain:
        asked = [_requests(plain, temperature, options) for temperature in options.temperatures]
        expected = [alone(plain, each) for each in asked]
    for kind, drafts in kinds.items():
        with loaded_batch(model, draft_tokens=DRAFTS, **drafts) as batch:
            for temperature, own, wanted in zip(options.temperatures, asked, expected, strict=True):
                steps = batch.steps
                found = alone(batch, own)
                steps = batch.steps - steps
                crowd = [each for at in range(0, len(own), 4) for each in generate(batch, own[at : at + 4])]
                print(
                    f"{name:7} {kind:6} temperature {temperature}: {_accepted(found)}, "
                    f"{sum(len(each.tokens) for each in found) / steps:.2f} tokens a step, the same replies alone "
                    f"{_same(found, wanted)} and four at once {_same(crowd, wanted)} of {len(wanted)}",
                    flush=True,
                )


def _requests(batch: MLXBatch, temperature: float, options: argparse.Namespace) -> list[GenerationRequest]:
    tokenizer = batch.runtime.networks.model.tokenizer
    asked = []
    for at in range(options.replies):
        text = tokenizer.render([{"role": "user", "content": QUESTIONS[at % len(QUESTIONS)]}], None)
        prompt = tokenizer.encode(text, control_tokens=True)
        request = GenerationRequest(prompt=prompt, max_tokens=options.tokens)
        asked.append(replace(request, sampling=Sampling(temperature=temperature, seed=at)))
    return asked


def _head(model: Path, folder: Path, lessons: int) -> Path:
    """Write a head that has learnt from dialogues of the corpus that the demo model was trained on."""
    network, _ = load_network(model)
    tokenizer, rng = AutoTokenizer.from_pretrained(str(model)), random.Random(1)

    def texts() -> Iterator[tuple[mx.array, mx.array]]:
        while True:
            example = encode(tokenizer, dialogue(rng), rng)
            if len(example.ids) <= MAX_LESSON:
                labels = mx.array(example.labels)
                yield mx.array(example.ids), (labels != IGNORED).astype(mx.float32)

    batches = islice(batched(texts(), TEXTS), lessons)
    head = teach(network, random_head(model), (Lesson.of(network, batch) for batch in batches), rate=0.002)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights_of(head), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp"}))
    return folder


def _with_noise(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    keys = map(mx.random.key, count())
    _change(
        folder, lambda _, each: each + NOISE * mx.std(each) * mx.random.normal(each.shape, key=next(keys))
    )
    return folder


def _change(model: Path, change: Callable[[str, mx.array], mx.array]) -> None:
    """Change a model's weights, by their names."""
    [file] = model.glob("*.safetensors")
    weights: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]  # of this format, a dict
    changed = {name: change(name, weights[name]) for name in sorted(weights)}
    mx.eval(changed)
    mx.save_safetensors(str(file), changed, {"format": "mlx"})


def _accepted(replies: Sequence[FoundReply]) -> str:
    ended = [each.ended for each in replies if each.ended is not None]
    drafted, accepted = (
        sum(each.drafted_tokens for each in ended),
        sum(each.accepted_tokens for each in ended),
    )
    return f"accepted {accepted} of {drafted} ({100 * accepted / max(1, drafted):.0f} %)"


def _same(found: Sequence[FoundReply], wanted: Sequence[FoundReply]) -> int:
    return sum(own.tokens == plain.tokens for own, plain in zip(found, wanted, strict=True))


if __name__ == "__main__":
    main()
