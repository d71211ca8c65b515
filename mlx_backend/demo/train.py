"""Train the demonstration model from scratch: `python -m mlx_backend.demo.train`.

Writes tokenizer.json, tokenizer_config.json, config.json, generation_config.json and model.safetensors beside the chat
template, which is written by hand. The same seed gives the same run on one machine; other machines round differently,
which is why the weights are kept in the repository.
"""

import argparse
import collections
import functools
import itertools
import json
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

from mlx_backend.demo import MODEL_PATH
from mlx_backend.demo.blas import use_fast_blas

BLAS: Final = use_fast_blas()  # before MLX
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # matrix products as exact on a GPU as on a CPU

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.gpt_oss import Model, ModelArgs  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from mlx_backend.demo import corpus, encode, forward, tokens, wiring  # noqa: E402
from mlx_backend.demo.exchange import Exchange  # noqa: E402

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size": 192,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 64,
    "rope_theta": 10_000_000,
    "rope_scaling": {"rope_type": "default"},  # none; without it transformers takes gpt-oss's and warns
    "rms_norm_eps": 1e-5,
    "vocab_size": tokens.VOCABULARY,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MAX_TOKENS: Final = 1_536  # tokens of most training sequences
MAX_LONG_TOKENS: Final = 16_128  # and of the few long ones
CHARACTERS_A_TOKEN: Final = 2.6  # of a long dialogue, about
CACHE_BYTES: Final = 40 << 30  # freed memory that MLX may cache: batches have many shapes
BLOCK_STEPS: Final = 16  # steps whose examples are drawn together, sorted by length
LEARNING_RATE: Final = 3e-3
COPYING_UNTIL, DRILLS_UNTIL = 0.12, 0.8  # shares of the run
LONG_FROM, LONGEST_FROM = 0.08, 0.45  # shares of the run: the first long sequences, and those of any length
Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def texts(seed: int, count: int) -> Iterator[str]:
    """Yield the texts that the tokenizer is trained on: those of dialogues, and every two-digit number."""
    rng = random.Random(seed)
    for _ in range(count):
        dialogue = corpus.dialogue(rng) if rng.random() < 0.7 else corpus.program(rng)
        yield dialogue.instructions
        yield from (str(message.get("content", "")) for message in dialogue.history)
        for tool in dialogue.tools:
            function = tool["function"]
            yield f"// {function['description']}\ntype {function['name']} = (_: {{\n}}) => any;\n\n"
            for name, schema in function["parameters"]["properties"].items():
                yield f"{name}?: {schema['type']}, // {schema.get('description', '')}\n{name}: string,\n"
        for exchange in dialogue.exchanges:
            yield from (
                exchange.message,
                exchange.reply.analysis("high"),
                exchange.reply.answer,
                exchange.result[:1_000],
            )
            if exchange.reply.call:
                yield json.dumps(exchange.reply.call.arguments, ensure_ascii=False)
        yield from (f"{number:02} {number}\n" for number in range(100))


def block(
    folder: Path, seed: int, number: int, steps: int, step_tokens: int, longest: int, is_continued: bool
) -> list[Batch]:
    """Return the batches of `BLOCK_STEPS` steps: ids [batch, length], flat positions, and the labels there.

    Every block has its own random generator, so it does not matter which process makes it, or when.
    """
    tokenizer = _tokenizer(folder)
    rng = random.Random(f"{seed}/{number}")
    questions = corpus.questions(rng)
    progress = max(number * BLOCK_STEPS / steps, LONGEST_FROM if is_continued else 0.0)
    window: int = CONFIG["sliding_window"]
    examples: list[encode.Example] = []
    if progress >= LONG_FROM and longest > MAX_TOKENS:
        examples += _long(tokenizer, rng, longest if progress >= LONGEST_FROM else min(longest, 5_000))
    while sum(_padded(len(example.ids), window) for example in examples) < step_tokens * (BLOCK_STEPS + 1):
        example = _example(tokenizer, rng, questions, progress)
        if len(example.ids) <= MAX_TOKENS:
            examples.append(example)
    examples.sort(key=lambda example: len(example.ids))
    groups: list[list[encode.Example]] = [[]]
    for example in examples:
        if groups[-1] and (len(groups[-1]) + 1) * _padded(len(example.ids), window) > step_tokens * 1.25:
            groups.append([])
        groups[-1].append(example)
    rng.shuffle(groups)
    return [_batch(groups[i % len(groups)], window) for i in range(BLOCK_STEPS)]


def _example(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, questions: Iterator[Exchange], progress: float
) -> encode.Example:
    """Return an example of usual length."""
    draw = rng.random()
    if progress < COPYING_UNTIL and draw < 0.12:
        return encode.copying(rng, tokens.VOCABULARY - len(tokens.SPECIAL) - tokens.RESERVED, 256)
    if draw < (0.26 if progress < DRILLS_UNTIL else 0.08):
        return encode.drill(tokenizer, [next(questions) for _ in range(12)], rng)
    makers = (corpus.dialogue, corpus.program, corpus.paste)
    dialogue = rng.choices(makers, (0.52, 0.45, 0.03))[0](rng)
    return encode.encode(tokenizer, dialogue, rng)


def _long(tokenizer: PreTrainedTokenizerFast, rng: random.Random, longest: int) -> list[encode.Example]:
    """Return one or two long examples, about as many of each order of length."""
    wanted = MAX_TOKENS * (longest / MAX_TOKENS) ** rng.random()
    example = encode.encode(tokenizer, corpus.long_dialogue(rng, int(wanted * CHARACTERS_A_TOKEN)), rng)
    examples = [example] if len(example.ids) <= longest else []
    return examples if rng.random() < 0.6 else examples + _long(tokenizer, rng, min(longest, 4_000))


@functools.cache
def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def batches(
    folder: Path,
    seed: int,
    steps: int,
    step_tokens: int,
    longest: int,
    workers: int,
    is_continued: bool = False,
) -> Iterator[Batch]:
    """Yield the batch of every step, made ahead of time by `workers` other processes (0: made here)."""
    numbers = range(-(-steps // BLOCK_STEPS))
    make = functools.partial(
        block, folder, seed, steps=steps, step_tokens=step_tokens, longest=longest, is_continued=is_continued
    )
    if workers == 0:
        yield from itertools.islice(itertools.chain.from_iterable(map(make, numbers)), steps)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = collections.deque(pool.submit(make, number) for number in numbers[: 2 * workers])
        for number in numbers:
            if number + 2 * workers < len(numbers):
                waiting.append(pool.submit(make, number + 2 * workers))
            yield from waiting.popleft().result()[: steps - number * BLOCK_STEPS]


def _padded(length: int, window: int) -> int:
    return -(-length // window) * window


def _batch(group: list[encode.Example], window: int) -> Batch:
    length = _padded(max(len(example.ids) for example in group), window)
    ids = np.zeros((len(group), length), np.int32)
    labels = np.full((len(group), length), encode.IGNORED, np.int32)
    for row, example in enumerate(group):
        ids[row, : len(example.ids)] = example.ids
        labels[row, : len(example.ids) - 1] = example.labels[1:]
    positions = np.flatnonzero(labels != encode.IGNORED)
    return ids, positions.astype(np.int32), labels.reshape(-1)[positions]


def make_tokenizer(folder: Path, seed: int) -> None:
    """Train the tokenizer, and write it and the configuration files that name its tokens."""
    tokens.save(tokens.train(texts(seed, 3_000)), folder, CONFIG["max_position_embeddings"])
    tokenizer = _tokenizer(folder)
    ids = [tokenizer.convert_tokens_to_ids(name) for name in tokens.STOPS]
    CONFIG["eos_token_id"] = ids
    CONFIG["pad_token_id"] = tokenizer.pad_token_id
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    generation = {"eos_token_id": ids, "pad_token_id": tokenizer.pad_token_id, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(start: Path, folder: Path) -> None:
    """Copy the tokenizer and the configuration files that name its tokens."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        (folder / name).write_text((start / name).read_text(encoding="utf-8"), encoding="utf-8")
    CONFIG.update(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def initial_model(seed: int) -> Any:
    """Return a wired model, after checking the training forward pass on it."""
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(CONFIG))
    wiring.wire(model, CONFIG["rope_theta"])
    mx.eval(model.parameters())
    size = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    difference = forward.check(
        model, mx.random.randint(0, tokens.VOCABULARY, (2, 4 * CONFIG["sliding_window"]))
    )
    print(
        f"{BLAS}; {size:,} parameters; the forward pass differs from mlx-lm's by {difference:.1e}",
        flush=True,
    )
    return model


def train(model: Any, stream: Iterator[Batch], steps: int, peak: float, save: Callable[[], None]) -> None:
    """Train on `steps` batches with a short warm-up to `peak` and a cosine decay; call `save` every 1,000 steps."""
    warm_up = max(1, min(60, steps // 10))
    warm_up_schedule = optim.linear_schedule(peak / 20, peak, warm_up)
    decay_schedule = optim.cosine_decay(peak, steps - warm_up, peak * 0.02)
    rate = optim.join_schedules([warm_up_schedule, decay_schedule], [warm_up])
    optimizer = optim.AdamW(learning_rate=rate, betas=[0.9, 0.98], weight_decay=0.02)
    loss_and_gradients = nn.value_and_grad(model, forward.loss)
    started, pending = time.monotonic(), []
    for step, arrays in enumerate(stream, 1):
        (loss, accuracy), gradients = loss_and_gradients(model, *map(mx.array, arrays))
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.async_eval(model.parameters(), optimizer.state, loss, accuracy)  # type: ignore[no-untyped-call]
        pending.append((loss, accuracy))
        if len(pending) > 1:
            mx.eval(pending[-2])  # at most one step ahead of the device
        if step % 50 == 0 or step == steps:
            figures = [(loss.item(), accuracy.item()) for loss, accuracy in pending]
            losses, accuracies = zip(*figures, strict=True)
            pending = []
            each = (time.monotonic() - started) / step
            line = f"step {step:5}  loss {np.mean(losses):.4f}  right {np.mean(accuracies):.4f}  {each:.3f} s a step"
            print(line, flush=True)
        if step % 1_000 == 0 or step == steps:
            save()


def main() -> None:
    """Train and write the model folder."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=12_000)
    arguments.add_argument("--tokens", type=int, default=16_384, help="tokens per step")
    arguments.add_argument(
        "--longest", type=int, default=MAX_LONG_TOKENS, help="tokens of the longest sequence"
    )
    arguments.add_argument("--workers", type=int, default=0, help="processes that prepare batches")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--rate", type=float, default=LEARNING_RATE, help="highest learning rate")
    arguments.add_argument("--start", type=Path, help="go on from this folder's tokenizer and weights")
    arguments.add_argument("--out", type=Path, default=MODEL_PATH)
    chosen = arguments.parse_args()
    folder: Path = chosen.out
    folder.mkdir(parents=True, exist_ok=True)
    template = (MODEL_PATH / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if chosen.start:
        copy_tokenizer(chosen.start, folder)
    else:
        make_tokenizer(folder, chosen.seed)
    mx.set_cache_limit(CACHE_BYTES)
    model = initial_model(chosen.seed)
    if chosen.start:
        model.load_weights(str(chosen.start / "model.safetensors"))

    def save() -> None:
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})

    stream = batches(
        folder,
        chosen.seed + 1,
        chosen.steps,
        chosen.tokens,
        chosen.longest,
        chosen.workers,
        is_continued=chosen.start is not None,
    )
    train(model, stream, chosen.steps, chosen.rate, save)


if __name__ == "__main__":
    main()
