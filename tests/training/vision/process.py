"""The demonstration model that sees, in a process of its own: there a fast BLAS comes before MLX, where there is one.

Among other tests MLX is imported already, and on Linux its own BLAS makes every answer several times slower.
"""

from __future__ import annotations

import multiprocessing
import socket
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

from training.vision.evaluate import AnswerCounts, Model, draw, play

if TYPE_CHECKING:
    from collections.abc import Sequence


class SeeingProcess:
    """The process; ended by `close`."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def answer(self, messages: Sequence[dict[str, Any]], pictures: Sequence[Any]) -> str:
        return self._pool.submit(_answer, messages, pictures).result()

    def play(self, seed: int, count: int, skill: str | None = None) -> AnswerCounts:
        """Play held-out dialogues."""
        return self._pool.submit(_play, seed, count, skill).result()

    def close(self) -> None:
        self._pool.shutdown()


@cache
def _model() -> Model:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("loading uses the network")

    resolve = socket.getaddrinfo
    socket.getaddrinfo = refuse
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mlx-vlm's, about what it does not find
            return Model()
    finally:
        socket.getaddrinfo = resolve


def _answer(messages: Sequence[dict[str, Any]], pictures: Sequence[Any]) -> str:
    return _model().answer(messages, pictures)


def _play(seed: int, count: int, skill: str | None) -> AnswerCounts:
    return play(_model(), draw(seed, count, skill))
