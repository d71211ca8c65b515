"""Clients that keep asking, at an engine whose clock runs only when its network does: by so much for each token.

Scheduler, queues and batch are the real ones. Clients act on the engine's thread, as soon as an item is there for them,
so a run is the same on every machine.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, TokenDelta
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.prefill_pacer import PrefillPacer
from mlx_backend.engine.scheduler import Scheduler
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mlx_backend.engine.batch import ModelInfo, Outcome
    from mlx_backend.engine.jobs import Generation

RUN_SECONDS, TOKEN_SECONDS = 0.01, 0.002
"""What the network takes for a run, and more for each token."""


class TimedBatch(MLXBatch):
    """A batch with a clock of its own."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, EngineOptions(**options), device=Device(8 << 30))
        self.now = 0.0
        self._after: dict[int, Callable[[], None]] = {}

    def after_step(self, number: int, act: Callable[[], None]) -> None:
        """Have something done when so many more steps have been taken."""
        self._after[self.steps + number] = act

    def step(self) -> Iterator[tuple[int, Outcome]]:
        yield from super().step()
        self._after.pop(self.steps, lambda: None)()

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        info = super().load(on_progress)
        networks = self.runtime.networks.by_adapter
        networks.update({name: _Timed(network, self) for name, network in networks.items()})
        overhead = RUN_SECONDS / TOKEN_SECONDS
        self.prefill_queue.pacer = PrefillPacer(
            self.runtime.options.prefill_chunk,
            1 / TOKEN_SECONDS,
            lambda tokens: tokens + overhead,
            lambda: self.now,
        )
        self.prefill_queue.pacer.record = lambda tokens, seconds: None  # type: ignore[method-assign]
        return info


class _Timed:
    def __init__(self, network: Any, batch: TimedBatch) -> None:
        self._network, self._batch = network, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, inputs: Any, cache: Any = None) -> Any:
        self._batch.now += RUN_SECONDS + TOKEN_SECONDS * inputs.size
        return self._network(inputs, cache=cache)


class Load:
    """Clients of one engine, from the start of `run` until so many seconds have passed on the engine's clock."""

    def __init__(self, batch: TimedBatch) -> None:
        self.batch = batch
        self.answers: Counter[str] = Counter()
        """Replies that ended, by client."""
        self.left = 0
        """Replies that were left after some tokens."""
        self.gaps: dict[str, list[float]] = {}
        """Seconds before each token but the first, by client."""
        self.first_tokens: dict[str, list[float]] = {}
        """Seconds until the first token of each request, by client."""
        self._scheduler = Scheduler(batch)
        self._scheduler.start()
        self._end = 0.0
        self._open: set[int] = set()
        self._ended = threading.Event()
        self._lock = threading.RLock()
        self._random = random.Random(1)

    def close(self) -> None:
        self._scheduler.stop()

    def prompt(self, length: int) -> list[int]:
        """Return a prompt that nobody had before."""
        return self._random.choices(range(40, 1000), k=length)

    def run(self, seconds: float, *clients: Callable[[], None]) -> None:
        """Have clients begin; they go on until the time is over, and their last requests are cancelled then."""
        self.answers.clear()
        self.left = 0
        self.gaps.clear()
        self.first_tokens.clear()
        self._ended.clear()
        self._end = self.batch.now + seconds
        with self._lock:
            for client in clients:
                client()
        assert self._ended.wait(300)

    def ask(
        self,
        client: str,
        make: Callable[[], GenerationRequest],
        *,
        tokens: int | None = None,
        again: bool = True,
    ) -> None:
        """Send a request, leave after so many tokens if the reply has not ended then, and send the next."""
        began, last = self.batch.now, 0.0
        generation: Generation | None = None
        taken = 0

        def on_item() -> None:
            with self._lock:
                take()

        def take() -> None:
            nonlocal last, taken
            if generation is None or taken < 0:
                return
            while (item := generation.next(0.0)) is not None:
                now = self.batch.now
                if isinstance(item, TokenDelta):
                    taken += 1
                    if taken == 1:
                        self.first_tokens.setdefault(client, []).append(now - began)
                    else:
                        self.gaps.setdefault(client, []).append(now - last)
                    last = now
                is_over = now >= self._end
                if isinstance(item, Finished) or taken == tokens or is_over:
                    if not is_over and isinstance(item, Finished):
                        self.answers[client] += 1
                    self.left += taken == tokens
                    taken = -1
                    self._open.discard(id(on_item))
                    generation.close()
                    if again and not is_over:
                        self.ask(client, make, tokens=tokens)
                    elif not self._open:
                        self._ended.set()
                    return

        self._open.add(id(on_item))
        generation = self._scheduler.submit(make())
        generation.notify(on_item)

    def chats(self, client: str, length: int, reply: int) -> Callable[[], None]:
        """Return a client that repeats one prompt."""
        prompt = self.prompt(length)
        return partial(self.ask, client, lambda: self._request(client, prompt, reply))

    def newcomers(self, client: str, longest: int, tokens: int = 1) -> Callable[[], None]:
        """Return a client that sends ever new prompts, and leaves after some tokens."""
        return partial(
            self.ask,
            client,
            lambda: self._request(client, self.prompt(self._random.randint(60, longest)), 200),
            tokens=tokens,
        )

    def _request(self, client: str, prompt: list[int], reply: int) -> GenerationRequest:
        return GenerationRequest(prompt=prompt, max_tokens=reply, client=client)
