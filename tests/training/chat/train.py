"""Train the demonstration model from scratch: `python -m training.chat.train`.

Writes tokenizer.json, tokenizer_config.json, config.json, generation_config.json and model.safetensors next to the chat
template, which is written by hand. The same seed gives the same run on one machine; other machines round differently,
which is why the weights are kept in the repository. Several GPUs train one model together if they are started so
(`mlx.launch`): each takes a part of the rows of every batch.
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
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from mlx_backend.demo import MODEL_PATH
from mlx_backend.device.blas import use_fast_blas

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the sums are then in the same order in every run
BLAS: Final = use_fast_blas() or "MLX's own matrix products"  # before MLX
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # matrix products as exact on a GPU as on a CPU

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.gpt_oss import Model, ModelArgs
from transformers import PreTrainedTokenizerFast

from training.chat import corpus, encode, forward, json_answers, programs, tokens, wiring
from training.chat.exchange import Exchange

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "hidden_size": 192,
    "intermediate_size": 48,
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
MAX_TOKENS: Final = 1_536  # length of most training sequences
MAX_LONG_TOKENS: Final = 16_128  # length of the few long ones
CHARACTERS_A_TOKEN: Final = 2.6  # estimate for a long dialogue
CACHE_BYTES: Final = 90 << 30  # freed memory that MLX may cache on a GPU
CPU_CACHE_BYTES: Final = 2 << 30  # freed memory that MLX may cache on a CPU
MAX_PAIRS: Final = 4 << 26  # pairs of a query and a key in a batch: one of the longest sequences
BLOCK_STEPS: Final = 16  # steps whose examples are drawn together, sorted by length
# A device is slow with ever new shapes, so lengths are rounded up to multiples of these.
LONG_GRID: Final = 1_024  # tokens of a long sequence
LABEL_GRID: Final = 2_048  # entries of the list of labels
KEPT_EVERY: Final = 1_000  # steps between two savings of the weights


@dataclass(frozen=True)
class Plan:
    """A run: its steps, the learning rate that rises to `rate` and falls again, and what each part of it is trained on.

    `mix` are the shares of dialogues, programs and pasted texts; `drills` that of examples which are drills of short
    questions, and its value for the end; `copying` the part of the run with random copying. `long` has a line for each
    part of the run: where it begins, the longest sequence, and the share of the tokens in sequences of more than usual
    length. The programs that are `often` drawn are `often_part` of the examples, and the mix
    has some of them as well.
    """

    steps: int
    rate: float
    mix: tuple[float, float, float]
    drills: tuple[float, float]
    copying: float
    long: tuple[tuple[float, int, float], ...]
    often: tuple[str, ...] = ()
    often_part: float = 0.0


PLAN: Final = Plan(
    21_500, 5e-3, (0.28, 0.65, 0.07), (0.16, 0.06), 0.1,
    ((0.08, 5_000, 0.04), (0.45, MAX_LONG_TOKENS, 0.06), (0.8, MAX_LONG_TOKENS, 0.12)),
)  # fmt: skip
DRILLS_UNTIL: Final = 0.8  # part of the run
PROGRAMS: Final = {make.__name__: make for make, _ in (*json_answers.KINDS, *programs.KINDS)}
START_RATE: Final = 3e-4  # highest learning rate of a run that goes on from a model
Batch = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


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
    folder: Path, seed: int, number: int, plan: Plan, step_tokens: int, longest: int, part: tuple[int, int]
) -> list[Batch]:
    """Return the batches of `BLOCK_STEPS` steps: ids [batch, length], flat positions, their labels and barred tokens.

    Every block has its own random generator, so it does not matter which process makes it, or when. `part` is the rank
    and the number of processes that share each batch; one has up to `step_tokens` of its tokens.
    """
    rank, ranks = part
    tokenizer = _tokenizer(folder)
    rng = random.Random(f"{seed}/{number}")
    questions = corpus.questions(rng)
    progress = number * BLOCK_STEPS / plan.steps
    window: int = CONFIG["sliding_window"]
    examples: list[encode.Example] = []
    total, wanted = 0, step_tokens * BLOCK_STEPS * ranks
    long_size, long_share = next((part[1:] for part in reversed(plan.long) if progress >= part[0]), (0, 0.0))
    long_size = min(long_size, longest)
    while total < wanted:
        is_long = long_size > MAX_TOKENS and total < long_share * wanted
        example = (
            _long(tokenizer, rng, long_size)
            if is_long
            else _example(tokenizer, rng, questions, plan, progress)
        )
        if len(example.ids) <= (long_size if is_long else MAX_TOKENS):
            examples.append(example)
            total += _padded(len(example.ids), window)
    groups = _groups(examples, window, step_tokens, ranks)
    rng.shuffle(groups)
    return [_batch(groups[i % len(groups)][rank::ranks], window) for i in range(BLOCK_STEPS)]


def _groups(
    examples: list[encode.Example], window: int, step_tokens: int, ranks: int
) -> list[list[encode.Example]]:
    """Return examples of about one length in groups, each as large as its longest example lets it be.

    A group has at least as many as there are ranks.
    """
    left = sorted(examples, key=lambda example: -len(example.ids))
    groups: list[list[encode.Example]] = []
    while left:
        length = _padded(len(left[0].ids), window)
        rows = ranks * max(1, min(step_tokens // length, MAX_PAIRS // length**2))
        groups.append(left[:rows])
        left = left[rows:]
    return [group for group in groups if len(group) >= ranks]


def _example(
    tokenizer: PreTrainedTokenizerFast,
    rng: random.Random,
    questions: Iterator[Exchange],
    plan: Plan,
    progress: float,
) -> encode.Example:
    """Return an example of usual length."""
    draw = rng.random()
    if progress < plan.copying and draw < 0.12:
        return encode.copying(rng, tokens.VOCABULARY - len(tokens.SPECIAL) - tokens.RESERVED, 256)
    if draw < plan.drills[progress >= DRILLS_UNTIL]:
        return encode.drill(tokenizer, [next(questions) for _ in range(12)], rng)
    if plan.often and rng.random() < plan.often_part:
        dialogue = corpus.program(rng, make=PROGRAMS[rng.choice(plan.often)])
        return encode.encode(tokenizer, dialogue, rng)
    makers = (corpus.dialogue, corpus.program, corpus.paste)
    dialogue = rng.choices(makers, plan.mix)[0](rng)
    return encode.encode(tokenizer, dialogue, rng)


def _long(tokenizer: PreTrainedTokenizerFast, rng: random.Random, longest: int) -> encode.Example:
    """Return a long example; about as many are drawn of each order of length."""
    wanted = MAX_TOKENS * (longest / MAX_TOKENS) ** rng.random()
    return encode.encode(tokenizer, corpus.long_dialogue(rng, int(wanted * CHARACTERS_A_TOKEN)), rng)


@functools.cache
def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def batches(
    folder: Path,
    seed: int,
    plan: Plan,
    step_tokens: int,
    longest: int,
    workers: int,
    part: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yield the batch of every step, made ahead of time by `workers` other processes (0: made here)."""
    steps = plan.steps
    numbers = range(-(-steps // BLOCK_STEPS))
    make = functools.partial(
        block, folder, seed, plan=plan, step_tokens=step_tokens, longest=longest, part=part
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
    grid = window if length <= MAX_TOKENS else LONG_GRID
    return min(-(-length // grid) * grid, MAX_LONG_TOKENS)


def _batch(group: list[encode.Example], window: int) -> Batch:
    """Return the rows of a batch, padded to the longest."""
    length = _padded(max(len(example.ids) for example in group), window)
    ids = np.zeros((len(group), length), np.int32)
    labels = np.full((len(group), length), encode.IGNORED, np.int32)
    barred = np.full((len(group), length), encode.IGNORED, np.int32)
    for row, example in enumerate(group):
        ids[row, : len(example.ids)] = example.ids
        labels[row, : len(example.ids) - 1] = example.labels[1:]
        for position, token in example.barred.items():
            barred[row, position - 1] = token
    labelled = np.flatnonzero(labels != encode.IGNORED).astype(np.int32)
    padding = -len(labelled) % LABEL_GRID

    def filled(values: np.ndarray) -> np.ndarray:
        return np.pad(values.reshape(-1)[labelled], (0, padding), constant_values=encode.IGNORED)

    return ids, np.pad(labelled, (0, padding)), filled(labels), filled(barred)


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


def train(
    model: Any, stream: Iterator[Batch], steps: int, peak: float, folder: Path, group: mx.distributed.Group
) -> None:
    """Train on `steps` batches with a short warm-up to `peak` and a cosine decay; keep the weights in `folder`.

    `group` are the processes that train the model together.
    """
    warm_up = max(1, min(60, steps // 10))
    warm_up_schedule = optim.linear_schedule(peak / 20, peak, warm_up)
    decay_schedule = optim.cosine_decay(peak, steps - warm_up, peak * 0.02)
    rate = optim.join_schedules([warm_up_schedule, decay_schedule], [warm_up])
    optimizer = optim.AdamW(learning_rate=rate, betas=[0.9, 0.98], weight_decay=0.02)
    loss_and_gradients = nn.value_and_grad(model, forward.loss)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]

    @functools.partial(mx.compile, inputs=state, outputs=state)  # thousands of small operations become a few
    def update(gradients: Any) -> None:
        optimizer.update(model, optim.clip_grad_norm(gradients, 1.0)[0])

    started, pending = time.monotonic(), []
    for step, arrays in enumerate(stream, 1):
        (loss, accuracy), gradients = loss_and_gradients(model, *map(mx.array, arrays))
        update(nn.average_gradients(gradients, group))
        mx.async_eval(model.parameters(), optimizer.state, loss, accuracy)  # type: ignore[no-untyped-call]  # declared without
        pending.append((loss, accuracy))
        if len(pending) > 1:
            mx.eval(pending[-2])  # at most one step ahead of the device
        if group.rank() > 0:
            pending = pending[-1:]
        elif step % 50 == 0 or step == steps:
            figures = [(loss.item(), accuracy.item()) for loss, accuracy in pending]
            losses, accuracies = zip(*figures, strict=True)
            pending = []
            each = (time.monotonic() - started) / step
            line = f"step {step:5}  loss {np.mean(losses):.4f}  right {np.mean(accuracies):.4f}  {each:.3f} s a step"
            print(line, flush=True)
        if group.rank() == 0 and (step % KEPT_EVERY == 0 or step == steps):
            weights = dict(tree_flatten(model.parameters()))
            mx.save_safetensors(str(folder / "part.safetensors"), weights, metadata={"format": "mlx"})
            (folder / "part.safetensors").replace(folder / "model.safetensors")


def main() -> None:
    """Train and write the model folder."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--part", type=float, default=1.0, help="part of the steps, for a try")
    arguments.add_argument("--tokens", type=int, default=32_768, help="tokens per step and process")
    arguments.add_argument(
        "--longest", type=int, default=MAX_LONG_TOKENS, help="tokens of the longest sequence"
    )
    arguments.add_argument(
        "--workers", type=int, default=0, help="processes that prepare a process's batches"
    )
    arguments.add_argument("--start", type=Path, help="a model to go on from, with its tokenizer")
    arguments.add_argument(
        "--rate", type=float, help=f"the highest learning rate ({PLAN.rate}; with --start {START_RATE})"
    )
    arguments.add_argument(
        "--often", nargs="+", choices=PROGRAMS, default=[], help="kinds of programs to draw more often"
    )
    arguments.add_argument(
        "--often-part", type=float, default=0.35, help="part of the examples that are of those kinds"
    )
    arguments.add_argument(
        "--backend", default="any", help="how processes talk to each other (mx.distributed)"
    )
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--out", type=Path, default=MODEL_PATH)
    chosen = arguments.parse_args()
    group = mx.distributed.init(backend=chosen.backend)
    # Each process has files of its own, but only the first one's weights are kept.
    folder: Path = chosen.out / f"rank-{group.rank()}" if group.rank() else chosen.out
    folder.mkdir(parents=True, exist_ok=True)
    template = (MODEL_PATH / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if chosen.start:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
            (folder / name).write_bytes((chosen.start / name).read_bytes())
    else:
        make_tokenizer(folder, chosen.seed)
    mx.set_cache_limit(CACHE_BYTES if mx.default_device() == mx.gpu else CPU_CACHE_BYTES)
    model = initial_model(chosen.seed)
    if chosen.start:
        model.load_weights(str(chosen.start / "model.safetensors"))
    plan = replace(PLAN, steps=max(1, round(PLAN.steps * chosen.part)))
    if chosen.start:  # what the run from nothing learned first, it knows
        plan = replace(plan, rate=START_RATE, copying=0.0, drills=(plan.drills[1], plan.drills[1]))
    if chosen.rate is not None:
        plan = replace(plan, rate=chosen.rate)
    plan = replace(plan, often=tuple(chosen.often), often_part=chosen.often_part)
    part = group.rank(), group.size()
    stream = batches(folder, chosen.seed + 1, plan, chosen.tokens, chosen.longest, chosen.workers, part)
    train(model, stream, plan.steps, plan.rate, folder, group)


if __name__ == "__main__":
    main()
