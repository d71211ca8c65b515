"""One batch over several processes: the same requests in the same order before the same step, on every rank.

Rank 0 has the scheduler and everything that clients see. Its `LeaderBatch` tells the other ranks what it is about
to do, and does it; they `follow`. No results come back: a step's results are the same everywhere, or the ranks have
diverged. To notice that, every message carries a checksum of the previous step's results. What a step would measure
for itself, how fast prompts are prefilled, is rank 0's figure for all.

No rank can repair what only it knows of: an exception, a lost rank, different results. Then all of them end, and the
requests' errors name the rank.

Knows no model and no MLX.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Protocol
from zlib import crc32

from mlx_backend.engine.base import GenerationRequest, Progress, PromptLogprobs, Sampling, TokenDelta
from mlx_backend.engine.batch import Batch, Ended
from mlx_backend.engine.distributed.transport import RESTART_ALL
from mlx_backend.errors import EngineError, EngineRefused, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mlx_backend.engine.batch import ModelInfo, Outcome
    from mlx_backend.engine.distributed.transport import Follower, Leader

log = logging.getLogger(__name__)


class SteppedBatch(Batch, Protocol):
    """A batch whose steps depend on its requests and its pace alone."""

    pace: list[float]
    """What was measured of its speed, as plain numbers."""


class RankConnection(Protocol):
    """This process among those that share the model. Once it is open, either `leader` or `follower` is set."""

    rank: int
    size: int

    @property
    def leader(self) -> Leader | None:
        """Rank 0's end."""
        ...

    @property
    def follower(self) -> Follower | None:
        """Another rank's end."""
        ...

    def open(self) -> None:
        """Connect the ranks. All of them do this at the same time."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


class LeaderBatch:
    """Rank 0's batch: implements the scheduler's `Batch` for all ranks, on top of its own."""

    def __init__(self, batch: SteppedBatch, ranks: RankConnection) -> None:
        self._batch = batch
        self._ranks = ranks
        self._changes: list[Any] = []
        """Requests begun and dropped since the last step."""
        self._checksum = 0
        """The checksum of the last step's results."""
        self._loaded = False
        self._error: EngineStopped | None = None
        """Why it cannot go on."""

    def on_lost(self, callback: Callable[[EngineStopped], object]) -> None:
        """Have `callback` called, on another thread, when a rank is lost."""
        assert self._ranks.leader is not None
        self._ranks.leader.on_lost(callback)

    def load(self, on_progress: Callable[[float], None]) -> ModelInfo:
        """Load together with the other ranks."""
        if self._loaded:  # the other ranks are gone
            raise self._error or EngineStopped(f"The engine broke. {RESTART_ALL}")
        self._loaded = True
        try:
            self._ranks.open()
            return self._batch.load(on_progress)
        except Exception as error:
            self._error = self._cause_of(error)
            if isinstance(error, EngineError) and not isinstance(error, EngineStopped):
                raise
            raise self._error from error

    def admits(self, request: GenerationRequest) -> bool:
        """Whether there is room. Rank 0 decides for all."""
        to_wire(request)  # refuses what other processes cannot be given
        return self._batch.admits(request)

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a request, on all ranks before the next step."""
        written = to_wire(request)
        try:
            self._batch.insert(key, request)
        except Exception as error:  # only this rank knows how much of it has happened
            self._error = self._cause_of(error)
            raise
        self._changes.append(["insert", key, written])

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Send the others what has changed, and take a step with them. After EngineStopped there is no other."""
        if self._error is not None:
            raise self._error
        try:
            assert self._ranks.leader is not None
            self._ranks.leader.broadcast(
                {"changes": self._changes, "pace": self._batch.pace, "checksum": self._checksum}
            )
            self._changes, self._checksum = [], 0
            for key, outcome in self._batch.step():
                self._checksum = add_to_checksum(self._checksum, key, outcome)
                yield key, outcome
        except Exception as error:
            self._error = self._cause_of(error)
            raise self._error from error

    def remove(self, key: int) -> None:
        """Drop a request, on all ranks before the next step."""
        self._batch.remove(key)
        self._changes.append(["remove", key])

    def unload(self) -> None:
        """Stop the other ranks, and give everything back."""
        if self._ranks.leader is not None:
            self._ranks.leader.stop_followers(str(self._error or ""))
        self._batch.unload()

    def close(self) -> None:
        """The last act of the thread."""
        try:
            self._batch.close()
        finally:
            if self._ranks.leader is not None:
                self._ranks.leader.wait_for_exits()
            self._ranks.close()

    def _cause_of(self, error: Exception) -> EngineStopped:
        """Return the error that explains an exception: that of a lost rank, if one caused it."""
        if isinstance(error, EngineStopped):
            return error
        leader = self._ranks.leader
        if leader is not None and (lost := leader.lost_rank(timeout=1.0)) is not None:  # MLX may notice first
            return lost
        text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        return EngineStopped(f"Rank 0 could not go on: {text} {RESTART_ALL}")


def follow(batch: SteppedBatch, ranks: RankConnection) -> int:
    """Take the same steps as rank 0 until it stops; return the exit status. Runs on the main thread."""
    status, reason = 1, ""
    with _ignored(signal.SIGINT):
        try:
            ranks.open()
            log.info("Rank %d of %d: loading; rank 0 serves.", ranks.rank, ranks.size)
            batch.load(lambda _share: None)
            log.info("Rank %d of %d: ready.", ranks.rank, ranks.size)
            reason = _step_with_leader(batch, ranks)
            status = 1 if reason else 0
        except EngineError as error:
            reason = str(error)
        except Exception as error:
            log.debug("Rank %d broke.", ranks.rank, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        if status:
            log.error("Rank %d ends: %s", ranks.rank, reason)
            if ranks.follower is not None:
                ranks.follower.report_failure(reason)
        else:
            log.info("Rank %d ends: rank 0 has stopped.", ranks.rank)
        for give_back in (batch.unload, batch.close, ranks.close):
            try:
                give_back()
            except Exception as error:  # a collective was under way when the other ranks ended
                log.debug("Rank %d could not be closed cleanly: %s", ranks.rank, error)
    return status


def _step_with_leader(batch: SteppedBatch, ranks: RankConnection) -> str:
    """Take rank 0's steps; return why that ended, "" if rank 0 stopped cleanly."""
    assert ranks.follower is not None
    checksum = 0
    while (message := ranks.follower.receive()) is not None:
        if "stop" in message:
            return str(message["stop"])
        if message["checksum"] != checksum:
            raise EngineError(
                "Its results differ from those of rank 0; all ranks need the same model and software."
            )
        for change in message["changes"]:
            match change:
                case ["insert", key, written]:
                    batch.insert(key, from_wire(written))
                case ["remove", key]:
                    batch.remove(key)
        batch.pace = message["pace"]
        checksum = 0
        for key, outcome in batch.step():
            checksum = add_to_checksum(checksum, key, outcome)
    return "rank 0 was lost: its process ended or cannot be reached."


def add_to_checksum(checksum: int, key: int, outcome: Outcome) -> int:
    """Return a step's checksum with one more outcome; all ranks must come to the same."""
    match outcome:
        case TokenDelta(token=token):
            result: object = token
        case Progress(processed=processed, cached=cached):
            result = processed, cached
        case PromptLogprobs(start):
            result = start
        case Ended(reason):
            result = reason
        case _:
            result = "error"
    return crc32(f"{key} {result};".encode(), checksum)


def to_wire(request: GenerationRequest) -> dict[str, Any]:
    """Return a request as JSON for other processes. Raises EngineRefused for what only this one can have."""
    if request.constraint is not None and not request.constraint.never_raises:
        raise EngineRefused(
            "A reply that must follow a grammar is not possible yet while several processes share the model."
        )
    written: dict[str, Any] = {}
    for field in fields(request):
        value = getattr(request, field.name)
        match field.name:
            case "prompt" | "checkpoints":
                written[field.name] = [int(each) for each in value]
            case "sampling":
                written[field.name] = asdict(value)
            case "queue_timeout":  # only rank 0 has a queue
                pass
            case "images":
                if value:
                    raise EngineRefused(
                        "Images are not possible yet while several processes share the model."
                    )
            case "constraint":  # rank 0 chooses the tokens; the others only have to take the same steps
                written[field.name] = value is not None
            case name:
                if not (value is None or isinstance(value, bool | int | float | str)):
                    raise EngineRefused(
                        f"{name} is not possible yet while several processes share the model."
                    )
                written[name] = value
    return written


def from_wire(written: Mapping[str, Any]) -> GenerationRequest:
    """Return a request that rank 0 wrote with `to_wire`."""
    sampling = dict(written["sampling"])
    sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    parsed = {
        "checkpoints": tuple(written["checkpoints"]),
        "sampling": Sampling(**sampling),
        "constraint": LeaderConstraint() if written["constraint"] else None,
    }
    return GenerationRequest(**{**written, **parsed})


class LeaderConstraint:
    """Stands for a constraint that rank 0 applies: the other ranks take its tokens."""

    never_raises = True

    def unconstrained_tokens(self) -> int:
        """Return 0: every token is rank 0's to choose, and is waited for."""
        return 0

    def allowed_mask(self) -> None:
        """Nothing is masked here: rank 0 chooses."""

    def advance(self, token: int) -> None:
        """Rank 0's constraint has seen the token."""


@contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal: Ctrl-C reaches every process of a terminal, but it is rank 0 that stops the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
