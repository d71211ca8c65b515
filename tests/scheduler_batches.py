"""What tests of the scheduler share: requests, scripted engines, and batches that break or are short of room."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from scripted_engine import ScriptedEngine, ScriptedTokenizer, Transcript

from mlx_backend.engine.base import EngineItem, Finished, GenerationRequest, TokenDelta
from mlx_backend.engine.batch import Ended, ModelInfo, Outcome
from mlx_backend.errors import EngineError, EngineRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mlx_backend.engine.jobs import Generation
    from mlx_backend.engine.scheduler import Scheduler

SOON = 60  # seconds after which a test that waits for another thread gives up
LONG = "all work and no play makes " * 20


def request(prompt: str = "hello", max_tokens: int = 1000) -> GenerationRequest:
    tokens = ScriptedTokenizer().encode(prompt, control_tokens=True)
    return GenerationRequest(prompt=tokens, max_tokens=max_tokens)


def text_of(items: Iterable[EngineItem]) -> str:
    return "".join(item.text for item in items if isinstance(item, TokenDelta))


def take(generation: Generation, count: int) -> list[EngineItem]:
    items = [generation.next(SOON) for _ in range(count)]
    assert None not in items, "the engine did not deliver in time"
    return [item for item in items if item is not None]


@contextmanager
def engine_of(*transcripts: str | Transcript, **options: Any) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(transcripts, **options) as engine:
        yield engine


class RecordingBatch:
    """Ends every request in its first step, and records what is called on which thread."""

    def __init__(self, load_error: EngineError | None = None) -> None:
        self.calls: list[tuple[str, int]] = []
        self._load_error = load_error
        self._keys: list[int] = []

    def _note(self, name: str) -> None:
        self.calls.append((name, threading.get_ident()))

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        self._note("load")
        if self._load_error is not None:
            raise self._load_error
        return ModelInfo(
            model_id="recording", context_length=10, tokenizer=ScriptedTokenizer(), is_ready=self.is_ready
        )

    def admits(self, request: GenerationRequest) -> bool:
        return True

    def insert(self, key: int, request: GenerationRequest) -> None:
        self._note("insert")
        self._keys.append(key)

    def is_ready(self) -> bool:
        return True

    def step(self) -> Iterable[tuple[int, Outcome]]:
        self._note("step")
        ended, self._keys = self._keys, []
        return [(key, Ended("stop")) for key in ended]

    def remove(self, key: int) -> None:
        self._note("remove")

    def unload(self) -> None:
        self._note("unload")
        raise RuntimeError("even this must not leave a caller waiting")

    def close(self) -> None:
        self._note("close")


class FailingBatch(RecordingBatch):
    """Fails its first steps once the gate is open, and some of the loads after that."""

    def __init__(self, failures: int, failed_loads: int = 0) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.reloaded = threading.Event()
        self.loads = 0
        self._failures = failures
        self._failed_loads = failed_loads

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        self.loads += 1
        if self.loads > 1 and self._failed_loads:
            self._failed_loads -= 1
            raise EngineError("the file is gone")
        if self.loads > 1:
            self.reloaded.set()
        return super().load(on_progress)

    def step(self) -> Iterable[tuple[int, Outcome]]:
        self.gate.wait(SOON)
        if self._failures:
            self._failures -= 1
            raise RuntimeError("the device is gone")
        return super().step()

    def unload(self) -> None:
        self._keys.clear()


class LimitedBatch(RecordingBatch):
    """Has room for this many tokens altogether, and ends one request for each release of `ending`."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.inserted: list[GenerationRequest] = []
        self._sizes: dict[int, int] = {}
        self.ending = threading.Semaphore(0)
        self.changed = threading.Condition()

    def admits(self, request: GenerationRequest) -> bool:
        if request.max_tokens > self.room:
            raise EngineRefused(f"{request.max_tokens} tokens can never fit into {self.room}.")
        return sum(self._sizes.values()) + request.max_tokens <= self.room

    def insert(self, key: int, request: GenerationRequest) -> None:
        self._sizes[key] = request.max_tokens
        with self.changed:
            self.inserted.append(request)
            self.changed.notify_all()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that comes with a request that is inserted."""
        with self.changed:
            assert self.changed.wait_for(is_so, SOON)

    def is_ready(self) -> bool:
        return self.ending.acquire(blocking=False)

    def step(self) -> Iterable[tuple[int, Outcome]]:
        key = next(iter(self._sizes))
        del self._sizes[key]
        return [(key, Ended("stop"))]

    def remove(self, key: int) -> None:
        del self._sizes[key]


class BatchThatFailsToRemove(LimitedBatch):
    """Fails the first time it is to remove a request."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.inserting = threading.Semaphore(0)
        self.failed = False

    def insert(self, key: int, request: GenerationRequest) -> None:
        super().insert(key, request)
        self.inserting.release()

    def remove(self, key: int) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the device is gone")
        super().remove(key)

    def unload(self) -> None:
        self._sizes.clear()


def finishes(scheduler: Scheduler, batch: LimitedBatch, generation: Generation) -> bool:
    batch.ending.release()
    scheduler.wake()
    return isinstance(generation.next(SOON), Finished)
