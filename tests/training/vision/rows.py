"""Rows drawn and encoded by other processes, in memory that they share. Knows nothing of how rows are learned.

The processes are forked before anything with threads of its own is imported. Each fills slots of one anonymous mapping
and says which: nothing is pickled but a few numbers, and nothing depends on the size of /dev/shm.
"""

import gc
import mmap
import multiprocessing
import os
import queue
import random
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from training.vision import shape
from training.vision.encode import CLASSES, Row, encode
from training.vision.tokens import Reader

PICTURE_BYTES: Final = shape.MAX_PATCHES * shape.PATCH_BYTES
LAST: Final = 0.25  # share of the dialogues whose pictures come after the questions
_SHOWN_ERRORS: Final = 2  # errors of a process that are printed


@dataclass(frozen=True)
class Filled:
    """A slot with rows of one class; `held`: they are held-out ones."""

    slot: int
    row_class: int
    count: int
    held: bool
    lost: int


@dataclass(frozen=True)
class DrawingPlan:
    """What is drawn: `images` is the pictures of a slot, `held` the held-out dialogues of each skill; twice as many
    have several turns.

    Until `easy_until` of the run, `easy` of the dialogues are of the skills in `easy_skills`.
    """

    folder: Path
    seed: int
    workers: int
    images: int
    held: int
    easy_skills: tuple[str, ...]
    easy_until: float
    easy: float


class Rows:
    """The drawing processes, and the slots that they fill. To be made before torch is imported."""

    def __init__(self, plan: DrawingPlan) -> None:
        self.plan = plan
        self.slots = plan.workers * (len(CLASSES) + 1) + 16
        widest = max(plan.images // each.images * each.width for each in CLASSES)
        self.slot_bytes = -(-(plan.images * PICTURE_BYTES + 2 * widest) // 4096) * 4096
        self.memory = mmap.mmap(-1, self.slots * self.slot_bytes)
        context = multiprocessing.get_context("fork")
        self._free: Any = context.Queue()
        self._filled: Any = context.Queue()
        self.progress: Any = context.Value("d", 0.0, lock=False)
        self._processes = [
            context.Process(target=self._work, args=(number,), daemon=True) for number in range(plan.workers)
        ]
        gc.freeze()
        for process in self._processes:
            process.start()
        for slot in range(self.slots):  # only now, since a queue has a thread from its first item on
            self._free.put(slot)

    def filled(self, seconds: float = 0.0) -> Iterator[Filled]:
        """Yield the slots that are filled by now; wait for the first one that long."""
        while True:
            try:
                yield self._filled.get(timeout=seconds) if seconds else self._filled.get_nowait()
            except queue.Empty:
                return
            seconds = 0.0

    def free(self, slot: int) -> None:
        """Let a slot be filled again."""
        self._free.put(slot)

    @property
    def alive(self) -> int:
        """How many processes are at work."""
        return sum(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        self._free.cancel_join_thread()

    def arrays(self, slot: int, row_class: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a slot's patches ([rows, images, patches, bytes]) and numbers ([rows, width])."""
        made = CLASSES[row_class]
        rows = self.plan.images // made.images
        start = slot * self.slot_bytes
        patches = np.frombuffer(self.memory, np.uint8, rows * made.images * PICTURE_BYTES, start)
        numbers = np.frombuffer(
            self.memory, np.int16, rows * made.width, start + self.plan.images * PICTURE_BYTES
        )
        return (
            patches.reshape(rows, made.images, shape.MAX_PATCHES, shape.PATCH_BYTES),
            numbers.reshape(rows, made.width),
        )

    def _work(self, number: int) -> None:
        try:
            os.nice(5)
            _Worker(self, number, self._free, self._filled).run()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


class _Worker:
    def __init__(self, rows: Rows, number: int, free: Any, filled: Any) -> None:
        self.rows, self.plan, self.number = rows, rows.plan, number
        self._free, self._filled = free, filled
        self.rng = random.Random(f"{self.plan.seed}/{number}/{time.time_ns()}")
        self.reader = Reader(self.plan.folder)
        self.open: dict[int, tuple[int, int]] = {}  # the class's slot, and the rows in it
        self.lost = self.errors = 0
        self.parent = os.getppid()

    def run(self) -> None:
        for skill in self._held():
            self._add(self._row(skill, held=True), held=True)
        for row_class in list(self.open):
            self._send(row_class, held=True)
        while True:
            skill = None
            if self.rows.progress.value < self.plan.easy_until and self.rng.random() < self.plan.easy:
                skill = self.rng.choice(self.plan.easy_skills)
            self._add(self._row(skill, held=False), held=False)

    def _held(self) -> Iterator[str | None]:
        from training.vision.corpus import SKILLS

        self.rng.seed(f"held out {self.plan.seed}/{self.number}")
        wanted = [skill for skill in (*SKILLS, None, None) for _ in range(self.plan.held)]
        yield from wanted[self.number :: self.plan.workers]
        self.rng.seed(f"{self.plan.seed}/{self.number}/{time.time_ns()}")

    def _row(self, skill: str | None, *, held: bool) -> Row | None:
        from training.vision.corpus import dialogue

        try:
            drawn = dialogue(self.rng, held_out=held, skill=skill)
            row = encode(self.reader, drawn, pictures_last=self.rng.random() < LAST)
        except Exception:
            row = None
            self.errors += 1
            if self.errors <= _SHOWN_ERRORS:
                print(f"worker {self.number}: a dialogue is lost", file=sys.stderr)
                traceback.print_exc()
        self.lost += row is None
        return row

    def _add(self, row: Row | None, *, held: bool) -> None:
        if row is None:
            return
        if row.row_class not in self.open:
            self.open[row.row_class] = self._slot(), 0
        slot, count = self.open[row.row_class]
        patches, numbers = self.rows.arrays(slot, row.row_class)
        numbers[count] = row.numbers
        for index, each in enumerate(row.patches):
            patches[count, index, : len(each)] = each
        self.open[row.row_class] = slot, count + 1
        if count + 1 == len(numbers):
            self._send(row.row_class, held=held)

    def _slot(self) -> int:
        while True:
            try:
                return int(self._free.get(timeout=5))
            except queue.Empty:
                if os.getppid() != self.parent:
                    os._exit(0)

    def _send(self, row_class: int, *, held: bool) -> None:
        slot, count = self.open.pop(row_class)
        self._filled.put(Filled(slot, row_class, count, held, self.lost))
        self.lost = 0
        if os.getppid() != self.parent:
            os._exit(0)
