"""`mlx-demo` in a process of its own: there a fast BLAS comes before MLX, where there is one.

Among other tests MLX is imported already, and on Linux its own BLAS makes every reply several times slower.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

from mlx_backend.demo import MODEL_PATH
from training.chat.evaluate import Figures, draw, draw_unreasoned, play, unseen_tools
from training.chat.replies import Generate, batched, foreseen, unreasoned


class ChattingProcess:
    """The process; ended by `close`."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        return self._pool.submit(_generate, prompts).result()

    def play(self, seed: int, count: int) -> Figures:
        """Play held-out dialogues; every reply is decoded."""
        return self._pool.submit(_play, seed, count).result()

    def play_foreseen(self, seed: int, count: int) -> tuple[Figures, int]:
        """Play the same dialogues, and say how many replies had to be decoded."""
        return self._pool.submit(_play_foreseen, seed, count).result()

    def foresee(self, prompts: list[list[int]], replies: list[list[int]]) -> list[bool]:
        return self._pool.submit(_foresee, prompts, replies).result()

    def play_unseen_tools(self, seed: int, count: int) -> Figures:
        return self._pool.submit(_play_unseen_tools, seed, count).result()

    def play_unreasoned(self, seed: int, count: int) -> Figures:
        return self._pool.submit(_play_unreasoned, seed, count).result()

    def close(self) -> None:
        self._pool.shutdown()


@cache
def _model() -> tuple[Any, Any, Generate]:
    from mlx_lm import load  # after what arranges for the BLAS

    model, tokenizer = load(str(MODEL_PATH))[:2]
    return model, tokenizer, batched(model, tokenizer)


def _generate(prompts: list[list[int]]) -> list[list[int]]:
    return _model()[2](prompts)


def _play(seed: int, count: int) -> Figures:
    _, tokenizer, generate = _model()
    return play(generate, tokenizer, draw(seed, count))


def _play_foreseen(seed: int, count: int) -> tuple[Figures, int]:
    _, tokenizer, generate = _model()
    decoded: list[int] = []

    def generate_some(prompts: list[list[int]]) -> list[list[int]]:
        decoded.append(len(prompts))
        return generate(prompts) if prompts else []

    return play(generate_some, tokenizer, draw(seed, count), _foresee), sum(decoded)


def _foresee(prompts: list[list[int]], replies: list[list[int]]) -> list[bool]:
    model = _model()[0]
    return foreseen(model, model.args.sliding_window)(prompts, replies)


def _play_unseen_tools(seed: int, count: int) -> Figures:
    _, tokenizer, generate = _model()
    return play(generate, tokenizer, unseen_tools(seed, count))


def _play_unreasoned(seed: int, count: int) -> Figures:
    model, tokenizer, generate = _model()
    return play(unreasoned(model, tokenizer, generate), tokenizer, draw_unreasoned(seed, count))
