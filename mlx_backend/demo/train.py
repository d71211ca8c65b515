"""Train the demonstration model from nothing: `python -m mlx_backend.demo.train`.

Writes tokenizer.json, tokenizer_config.json, config.json, generation_config.json and model.safetensors beside the
chat template, which is written by hand. The same seed gives the same run on one machine; other machines round
differently, which is why the weights are kept in the repository.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from . import MODEL_PATH
from .blas import use_fast_blas

BLAS: Final = use_fast_blas()  # before MLX

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optim  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models.gpt_oss import Model, ModelArgs  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from . import corpus, encode, forward, tokens, wiring  # noqa: E402

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
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "vocab_size": tokens.VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
LONGEST: Final = 640  # tokens of a training sequence
STEP_TOKENS: Final = 1_024
RATE: Final = 3e-3
COPYING_UNTIL, DRILLS_UNTIL = 0.12, 0.8  # shares of the run


def texts(seed: int, count: int) -> Iterator[str]:
    """Yield the text that the tokenizer learns from: what dialogues say, and every number that is one token."""
    rng = random.Random(seed)
    for _ in range(count):
        dialogue = corpus.dialogue(rng)
        yield dialogue.instructions
        for tool in dialogue.tools:
            function = tool["function"]
            yield f"// {function['description']}\ntype {function['name']} = (_: {{\n}}) => any;\n\n"
            for name, schema in function["parameters"]["properties"].items():
                yield f"{name}?: {schema['type']}, // {schema.get('description', '')}\n{name}: string,\n"
        for exchange in dialogue.exchanges:
            yield from (exchange.ask, exchange.reply.thinking("high"), exchange.reply.answer, exchange.result)
            if exchange.reply.call:
                yield json.dumps(exchange.reply.call.arguments)
        yield from (f"{number:02} {number}\n" for number in range(100))


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """Yield ids [rows, length], flat places and the labels there, for each step; rows of a step are of like length."""
    rng = random.Random(seed)
    questions = corpus.questions(rng)
    window: int = CONFIG["sliding_window"]
    waiting: list[encode.Example] = []
    step = 0
    while step < steps:
        done = step / steps
        kind = rng.random()
        if done < COPYING_UNTIL and kind < 0.12:
            waiting.append(encode.copying(rng, tokens.VOCABULARY - len(tokens.SPECIAL) - tokens.RESERVED, 256))
        elif done < DRILLS_UNTIL and kind < 0.3:
            waiting.append(encode.drill(tokenizer, [next(questions) for _ in range(12)], rng))
        else:
            example = encode.encode(tokenizer, corpus.dialogue(rng), rng)
            if len(example.ids) <= LONGEST:
                waiting.append(example)
        if len(waiting) < 64:
            continue
        waiting.sort(key=lambda example: len(example.ids))
        groups: list[list[encode.Example]] = [[]]
        for example in waiting:
            rows = len(groups[-1]) + 1
            if groups[-1] and rows * _padded(len(example.ids), window) > STEP_TOKENS * 1.25:
                groups.append([])
            groups[-1].append(example)
        waiting = []
        rng.shuffle(groups)
        for group in groups[: steps - step]:
            step += 1
            yield _arrays(group, window)


def _padded(length: int, window: int) -> int:
    return -(-length // window) * window


def _arrays(group: list[encode.Example], window: int) -> tuple[mx.array, mx.array, mx.array]:
    length = _padded(max(len(example.ids) for example in group), window)
    ids = np.zeros((len(group), length), np.int32)
    labels = np.full((len(group), length), encode.IGNORED, np.int32)
    for row, example in enumerate(group):
        ids[row, : len(example.ids)] = example.ids
        labels[row, : len(example.ids) - 1] = example.labels[1:]
    places = np.flatnonzero(labels != encode.IGNORED)
    return mx.array(ids), mx.array(places), mx.array(labels.reshape(-1)[places])


def make_tokenizer(folder: Path, seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer, write it, and return it with the chat template."""
    tokens.save(tokens.train(texts(seed, 2_000)), folder, CONFIG["max_position_embeddings"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(name) for name in tokens.STOPS]
    CONFIG["eos_token_id"] = ids
    CONFIG["pad_token_id"] = tokenizer.pad_token_id
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    generation = {"eos_token_id": ids, "pad_token_id": tokenizer.pad_token_id, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    return tokenizer


def main() -> None:
    """Train and write the model folder."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=6_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--out", type=Path, default=MODEL_PATH)
    chosen = arguments.parse_args()
    folder: Path = chosen.out
    folder.mkdir(parents=True, exist_ok=True)
    template = (MODEL_PATH / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = make_tokenizer(folder, chosen.seed)
    mx.random.seed(chosen.seed)
    model = Model(ModelArgs.from_dict(CONFIG))
    wiring.wire(model, CONFIG["rope_theta"])
    mx.eval(model.parameters())
    size = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    off = forward.check(model, mx.random.randint(0, tokens.VOCABULARY, (2, 4 * CONFIG["sliding_window"])))
    print(f"{BLAS}; {size:,} parameters; the training forward differs from mlx-lm's by {off:.1e}", flush=True)

    warm = max(1, min(60, chosen.steps // 10))
    rate = optim.join_schedules(
        [optim.linear_schedule(RATE / 20, RATE, warm), optim.cosine_decay(RATE, chosen.steps - warm, RATE * 0.02)],
        [warm],
    )
    optimizer = optim.AdamW(learning_rate=rate, betas=[0.9, 0.98], weight_decay=0.02)
    step_of = nn.value_and_grad(model, forward.loss)
    started, losses, hits = time.monotonic(), [], []
    for step, (ids, places, labels) in enumerate(batches(tokenizer, chosen.seed + 1, chosen.steps), 1):
        (value, hit), gradients = step_of(model, ids, places, labels)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, value, hit)
        losses.append(value.item())
        hits.append(hit.item())
        if step % 50 == 0 or step == chosen.steps:
            print(
                f"step {step:5}  loss {np.mean(losses):.4f}  right {np.mean(hits):.4f}  "
                f"{(time.monotonic() - started) / step:.3f} s a step",
                flush=True,
            )
            losses, hits = [], []
        if step % 1_000 == 0 or step == chosen.steps:
            weights = dict(tree_flatten(model.parameters()))
            mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


if __name__ == "__main__":
    main()
