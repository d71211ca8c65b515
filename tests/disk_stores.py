"""Disk caches for tests, their layers, and what their folders hold."""

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_backend.engine.mlx.disk_cache import Checkpoint, DiskCheckpoints, StoredCheckpoint

SOON = 60  # seconds; nothing takes that long
PROMPT = [(at * 7) % 300 + 9 for at in range(90)]


class Stores:
    """Opens stores on one folder; all of them are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[DiskCheckpoints] = []

    def __call__(self, *, max_bytes: int = 1 << 30, model: str = "ours") -> DiskCheckpoints:
        return self.of(DiskCheckpoints, max_bytes=max_bytes, model=model)

    def of[Kind: DiskCheckpoints](
        self, kind: type[Kind], *, max_bytes: int = 1 << 30, model: str = "ours"
    ) -> Kind:
        store = kind(self._folder, max_bytes=max_bytes, fingerprint=model)
        self._opened.append(store)
        store.open()
        return store

    def close(self) -> None:
        for store in self._opened:
            if isinstance(store, Gated):
                store.gate.set()
            store.close()


class Gated(DiskCheckpoints):
    """Its writer waits, in the middle of a file, until the gate is open."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def _save(self, key: bytes, checkpoint: Checkpoint) -> None:
        super()._save(key, Waiting(checkpoint.header, checkpoint.arrays, self))


@dataclass(frozen=True, slots=True)
class Waiting(Checkpoint):
    store: Gated

    def write_to(self, file: BinaryIO) -> None:
        self.store.begun.set()
        assert self.store.gate.wait(SOON)
        Checkpoint.write_to(self, file)


def small(tokens: list[int], value: float = 1.0, width: int = 64) -> list[Any]:
    """Return layers that hold the tokens, for tests that ask nothing of a model."""
    layer = KVCache()
    layer.update_and_fetch(
        mx.full((1, 2, len(tokens), width), value), mx.full((1, 2, len(tokens), width), -value)
    )
    mx.eval(layer.state)
    return [layer]


def files(store: DiskCheckpoints) -> list[Path]:
    return sorted(store.folder.iterdir())


def stored_in(store: DiskCheckpoints, tokens: list[int]) -> StoredCheckpoint:
    stored = store.find_longest(tokens)
    assert stored is not None
    assert stored.length == len(tokens)
    return stored


def put(store: DiskCheckpoints, tokens: list[int], layers: list[Any] | None = None) -> Path:
    store.write(tokens, layers or small(tokens))
    store.flush()
    return stored_in(store, tokens).path


def used(path: Path, when: int) -> None:
    os.utime(path, (when, when))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
