"""The training loop: rows that came from other processes, drawn on again and again from the device's memory.

The device keeps as many rows as it has room for and takes every batch from them, so it never waits for the drawing
processes; newer rows replace the oldest. The run ends by the clock, and so does its schedule. Whatever may go wrong
that no one watches has an answer: a loss that is no number or jumps (back to the last good weights), a compiler that
fails or takes too long (as before, without it), a device that hangs (the process ends itself, to be started again).
"""

import faulthandler
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.vision import network as networks
from training.vision.corpus import SKILLS
from training.vision.encode import ANSWERS, CLASSES
from training.vision.rows import Rows
from training.vision.store import Store
from training.vision.tokens import Reader
from training.vision.weights import save

LOGGED_EVERY: Final = 5.0  # seconds between two lines
KEPT_EVERY: Final = 60.0
HUNG_AFTER: Final = 150.0  # seconds without a step
COMPILE_SECONDS: Final = 90
EXIT_HUNG: Final = 75
WRONG_TEXTS: Final = 600  # most wrong answers that the evaluation at the end prints


@dataclass(frozen=True)
class Settings:
    """How long and how it learns. `images` are those of a step; `gigabytes` is what the stored rows may take."""

    minutes: float
    images: int
    rate: float
    decay: float
    gigabytes: float
    compiled: bool
    seed: int
    out: Path
    started: float  # the run, by time.monotonic


class Learner:
    """The network, its optimizer and the clock."""

    def __init__(self, settings: Settings, rows: Rows, reader: Reader, start: dict[str, Any] | None) -> None:
        self.settings, self.rows, self.reader = settings, rows, reader
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
        else:
            torch.set_num_threads(os.cpu_count() or 1)
        self.rng = random.Random(settings.seed)
        self.network = networks.Network()
        networks.initialise(self.network, settings.seed)
        if start is not None:
            networks.restore(self.network, start)
        self.network.to(self.device)
        size = sum(each.numel() for each in self.network.parameters())
        print(f"{size:,} parameters, {4 * size / 1e6:.2f} MB", flush=True)
        gigabytes = settings.gigabytes
        if self.device.type == "cuda":
            gigabytes = min(gigabytes, torch.cuda.mem_get_info()[0] / 1e9 * 0.5)
        self.store = Store(rows, self.device, gigabytes)
        self.optimizer = self._optimizer()
        self.factor = 1.0  # of the learning rate, halved whenever the loss is out of bounds
        self.beat = time.monotonic()
        self.step = 0
        total = 60 * settings.minutes
        self.until = settings.started + total - max(8.0, min(20.0, 0.1 * total))
        self.since = time.monotonic()
        self.is_compiled = False

    def _optimizer(self) -> Any:
        decayed: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self.network.named_parameters():
            is_decayed = parameter.ndim > 1 and "embed_tokens" not in name and "pos_embed" not in name
            (decayed if is_decayed else others).append(parameter)
        groups = [
            {"params": decayed, "weight_decay": self.settings.decay},
            {"params": others, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        return torch.optim.AdamW(groups, lr=self.settings.rate, betas=(0.9, 0.98), eps=1e-8, fused=fused)

    @property
    def progress(self) -> float:
        """How much of the time for training is over."""
        return min(1.0, (time.monotonic() - self.since) / max(1.0, self.until - self.since))

    def _rate(self) -> float:
        progress = self.progress
        warm_up = min(1.0, (self.step + 1) / 300, max(progress, 1e-4) / 0.02)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.settings.rate * self.factor * warm_up * (0.01 + 0.99 * cosine)

    def _forward(self) -> tuple[Tensor, Tensor]:
        row_class, patches, numbers = self.store.batch(self.rng, self.settings.images)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits, target = self.network.logits(patches, numbers, CLASSES[row_class])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=-1)
        with torch.no_grad():
            right = ((logits.argmax(-1) == target) | (target < 0)).all(dim=1).float().mean()
        return loss, right

    def _step(self) -> tuple[Tensor, Tensor]:
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, right = self._forward()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach(), right

    def run(self) -> None:
        """Train until the time is over, and save; what was saved is then evaluated."""
        threading.Thread(target=self._watch, daemon=True).start()
        self._wait_for_rows()
        self.since = time.monotonic()
        logged = kept = compared = self.since
        first_step, snapshot = 0, self._snapshot()
        figures: list[tuple[Tensor, Tensor]] = []
        speed = eager_speed = 0.0
        best = math.inf  # loss
        may_compile = self.settings.compiled and self.device.type == "cuda" and self.settings.minutes >= 2.5
        while time.monotonic() < self.until:
            self.store.take_in()
            figures.append(self._step())
            self.rows.progress.value = self.progress
            if len(figures) % 16 == 0:
                figures[-8][0].item()  # at most so far ahead of the device
            self.beat = now = time.monotonic()
            if now - logged < LOGGED_EVERY:
                continue
            loss, right = (torch.stack(each).float().mean().item() for each in zip(*figures, strict=True))
            now = time.monotonic()
            speed = (self.step - first_step) * self.settings.images / (now - logged)
            self._log(loss, right, speed)
            if first_step == 0 and self.device.type == "cuda":
                print(f"memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)
            logged, first_step, figures = now, self.step, []
            if loss < 2 * best + 0.3:  # false for what is no number, too
                best = min(best, loss)
                snapshot = self._snapshot()
            else:
                self._go_back(snapshot)
            if may_compile and now - self.since > 3 * LOGGED_EVERY:
                may_compile, eager_speed = False, speed
                self._compile()
                logged = compared = time.monotonic()
                first_step = self.step
            elif self.is_compiled and eager_speed and now - compared > 2 * LOGGED_EVERY:
                if speed < eager_speed:
                    print("compiled is slower: going on without it", flush=True)
                    self._set_compiled(False)
                eager_speed = 0.0
            if now - kept > KEPT_EVERY:
                kept = now
                self._save()
                try:
                    self._report(self.evaluate()[0])
                except Exception as error:
                    print(f"not evaluated ({type(error).__name__}: {error})", flush=True)
                logged, first_step = time.monotonic(), self.step
        self._save()
        print(f"saved after {self.step} steps, {time.monotonic() - self.settings.started:.0f} s", flush=True)

    def _wait_for_rows(self) -> None:
        begun = time.monotonic()
        wanted = 4 if self.device.type == "cuda" else 1  # chunks
        while self.store.drawn.total() < wanted:
            self.store.take_in(1.0)
            self.beat = time.monotonic()
            if not self.rows.alive:
                raise RuntimeError("every drawing process has ended")
            if self.beat - begun > 90:
                if self.store.drawn.total():
                    break
                raise RuntimeError("no rows came within 90 seconds")
        print(f"first rows after {time.monotonic() - self.settings.started:.1f} s", flush=True)

    def _log(self, loss: float, right: float, speed: float) -> None:
        per_chunk = self.rows.plan.images
        drawn = self.store.drawn.total() * per_chunk
        classes = "/".join(str(self.store.drawn[index]) for index in range(len(CLASSES)))
        seconds = time.monotonic() - self.settings.started
        parts = (
            f"{seconds:5.0f} s  {100 * self.progress:5.1f} %  step {self.step:6}",
            f"loss {loss:.4f}  rows right {right:.4f}  {speed:6.0f} pictures/s learned,",
            f"{drawn / max(seconds, 1):5.0f}/s drawn ({classes}), lost {self.store.lost}",
            f"processes {self.rows.alive}  rate {self._rate():.1e}",
        )
        print("  ".join(parts), flush=True)

    def _snapshot(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.network.parameters()]

    def _go_back(self, snapshot: list[Tensor]) -> None:
        self.factor *= 0.5
        print(
            f"the loss is out of bounds: back to the last good weights, {self.factor:g} of the rate",
            flush=True,
        )
        with torch.no_grad():
            for parameter, good in zip(self.network.parameters(), snapshot, strict=True):
                parameter.copy_(good)
        self.optimizer = self._optimizer()

    def _blocks(self) -> list[nn.Module]:
        return [*self.network.tower.blocks, *self.network.layers]

    def _set_compiled(self, on: bool) -> None:
        self.is_compiled = on
        for block in self._blocks():
            if on:
                block.compile(dynamic=False)
            else:
                block._compiled_call_impl = None

    def _compile(self) -> None:
        begun = time.monotonic()

        def stop(*_: Any) -> None:
            raise TimeoutError(f"compiling took more than {COMPILE_SECONDS} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(COMPILE_SECONDS)
        try:
            self._set_compiled(True)
            tried: set[int] = set()
            for _ in range(40):  # every class that there is, once
                state = self.rng.getstate()
                row_class, patches, numbers = self.store.batch(self.rng, self.settings.images)
                if row_class not in tried:
                    tried.add(row_class)
                    self.rng.setstate(state)
                    self._forward()[0].backward()
                del patches, numbers
            torch.cuda.synchronize()
            print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
        except Exception as error:
            print(f"not compiled ({type(error).__name__}: {str(error)[:300]})", flush=True)
            self._set_compiled(False)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
            self.optimizer.zero_grad(set_to_none=True)
            self.beat = time.monotonic()

    def _save(self) -> None:
        save(dict(networks.exported(self.network)), self.settings.out / "model.safetensors")

    @torch.no_grad()
    def evaluate(
        self, until: float = math.inf, texts: int = 0
    ) -> tuple[dict[str, tuple[int, int]], list[str]]:
        """Return right and all answers of each skill among the held-out rows, in float32, and some wrong ones.

        An answer is right if every token of it is the first choice after those before it: what greedy decoding writes.
        """
        paused = [block._compiled_call_impl for block in self._blocks()]
        for block in self._blocks():
            block._compiled_call_impl = None  # for shapes of its own it would compile again
        total: Counter[int] = Counter()
        right: Counter[int] = Counter()
        wrong: list[str] = []
        torch.set_float32_matmul_precision("highest")
        for index, (patches, numbers) in self.store.held:
            self.beat = time.monotonic()
            if self.beat > until:
                break
            made = CLASSES[index]
            size = max(1, self.settings.images // made.images)
            for start in range(0, len(numbers), size):
                part = numbers[start : start + size]
                logits, target = self.network.logits(patches[start : start + size], part, made)
                found = logits.argmax(-1)
                answers = part[:, made.parts["answer"]].long()
                mistakes = torch.zeros(len(part), ANSWERS + 1, device=self.device)
                mistakes.scatter_add_(1, answers, ((found != target) & (target >= 0)).float())
                skills = part[:, made.parts["skill"]].tolist()
                for row, counts in enumerate(mistakes[:, 1:].tolist()):
                    for number, skill in enumerate(skills[row]):
                        if skill < 0:
                            continue
                        total[skill] += 1
                        right[skill] += counts[number] == 0
                        if counts[number] and len(wrong) < texts:
                            is_here = (answers[row] == number + 1) & (target[row] >= 0)
                            wrong.append(
                                self._mistake(skill, part[row], made, is_here, found[row], target[row])
                            )
        torch.set_float32_matmul_precision("high")
        for block, compiled in zip(self._blocks(), paused, strict=True):
            block._compiled_call_impl = compiled
        return {SKILLS[skill]: (right[skill], total[skill]) for skill in sorted(total)}, wrong

    def _mistake(
        self, skill: int, numbers: Tensor, made: Any, is_here: Tensor, found: Tensor, target: Tensor
    ) -> str:
        ids = numbers[made.parts["ids"]].tolist()
        first = int(numbers[made.parts["at"]][is_here][0])
        text = self.reader.text(ids[:first])[-200:]
        said, wanted = (self.reader.text(each[is_here].tolist()) for each in (found, target))
        return f"{SKILLS[skill]}: ...{text!r} -> {said!r}, expected {wanted!r}"

    def _report(self, found: dict[str, tuple[int, int]]) -> None:
        total = sum(count for _, count in found.values())
        right = sum(count for count, _ in found.values())
        each = "  ".join(f"{skill} {100 * good / count:.1f}" for skill, (good, count) in found.items())
        print(f"held out: {right} of {total} = {100 * right / max(1, total):.2f} %   {each}", flush=True)

    def finish(self) -> None:
        """Evaluate what was saved, within the time that is left."""
        found, wrong = self.evaluate(self.settings.started + 60 * self.settings.minutes, WRONG_TEXTS)
        lines = [
            f"{skill:24} {100 * good / count:6.2f} %  ({good} of {count})"
            for skill, (good, count) in found.items()
        ]
        (self.settings.out / "held_out.txt").write_text(
            "\n".join([*lines, "", *wrong]) + "\n", encoding="utf-8"
        )
        print("\n".join(lines), flush=True)
        self._report(found)

    def _watch(self) -> None:
        while True:
            time.sleep(5)
            if time.monotonic() - self.beat > HUNG_AFTER:
                print("no step for too long: ending", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                self.rows.stop()
                os._exit(EXIT_HUNG)


def learn(settings: Settings, rows: Rows, load: Callable[[], dict[str, Any] | None]) -> None:
    """Train, save and evaluate."""
    learner = Learner(settings, rows, Reader(rows.plan.folder), load())
    learner.run()
    learner.finish()
