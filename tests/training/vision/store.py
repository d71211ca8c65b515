"""Rows on the device: chunks as other processes filled them, and batches taken from them. Knows nothing of learning."""

import random
from collections import Counter, deque
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from training.vision.encode import CLASSES
from training.vision.rows import Filled, Rows

SLICES: Final = 8  # stored chunks that a batch is taken from
Chunk = tuple[Tensor, Tensor]  # patches and numbers


class Store:
    """Rows on the device, in chunks as they came, and the held-out ones apart."""

    def __init__(self, rows: Rows, device: torch.device, gigabytes: float) -> None:
        self.rows, self.device = rows, device
        self.chunks: list[list[Chunk]] = [[] for _ in CLASSES]
        self.held: list[tuple[int, Chunk]] = []
        self.drawn: Counter[int] = Counter()  # chunks of a class
        self.lost = 0
        self._replaced: Counter[int] = Counter()
        self._room = gigabytes * 1e9 / rows.slot_bytes  # chunks
        self._used: deque[tuple[Any, int]] = deque()
        self._pin()

    def _pin(self) -> None:
        """Register the shared memory with the device, which then reads it without the processor's help."""
        if self.device.type != "cuda":
            return
        try:
            address = np.frombuffer(self.rows.memory, np.uint8).ctypes.data
            code = torch.cuda.cudart().cudaHostRegister(address, len(self.rows.memory), 0)
            print(f"shared memory registered: {code}", flush=True)
        except Exception as error:
            print(f"shared memory is not registered ({error}); copies are slower", flush=True)
        try:
            torch.ones(
                1, device=self.device
            ).sum().item()  # meets an error that an earlier step left, and clears it
        except Exception as error:
            print(f"the error was {error}", flush=True)

    def take_in(self, seconds: float = 0.0) -> None:
        """Store what was drawn by now."""
        while self._used and (self._used[0][0] is None or self._used[0][0].query()):
            self.rows.free(self._used.popleft()[1])
        for number, filled in enumerate(self.rows.filled(seconds)):
            self._add(filled)
            if number >= 7:
                return

    def _add(self, filled: Filled) -> None:
        patches, numbers = (
            torch.from_numpy(each) for each in self.rows.arrays(filled.slot, filled.row_class)
        )
        self.lost += filled.lost
        chunks = self.chunks[filled.row_class]
        if filled.held:
            made = tuple(each[: filled.count].to(self.device, copy=True) for each in (patches, numbers))
            self.held.append((filled.row_class, (made[0], made[1])))
        else:
            self.drawn[filled.row_class] += 1
            share = self.drawn[filled.row_class] / self.drawn.total()
            if len(chunks) < max(2.0, share * self._room):
                new = tuple(torch.empty_like(each, device=self.device) for each in (patches, numbers))
                chunks.append((new[0], new[1]))
                place = chunks[-1]
            else:
                place = chunks[self._replaced[filled.row_class] % len(chunks)]
                self._replaced[filled.row_class] += 1
            for old, new_values in zip(place, (patches, numbers), strict=True):
                old.copy_(new_values, non_blocking=True)
        event = None
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._used.append((event, filled.slot))

    def batch(self, rng: random.Random, images: int) -> tuple[int, Tensor, Tensor]:
        """Return a class, and patches and numbers of a batch of its rows."""
        known = [index for index, chunks in enumerate(self.chunks) if chunks]
        row_class = rng.choices(known, [self.drawn[index] for index in known])[0]
        count = images // CLASSES[row_class].images // SLICES
        parts = []
        for _ in range(SLICES):
            chunk = rng.choice(self.chunks[row_class])
            start = rng.randrange(len(chunk[1]) - count + 1)
            parts.append([each[start : start + count] for each in chunk])
        patches, numbers = zip(*parts, strict=True)
        return row_class, torch.cat(patches), torch.cat(numbers)
