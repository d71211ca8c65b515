"""One batch over several processes: the same requests in the same order before the same step, on every rank.

Rank 0 has the scheduler and all that the world sees. Its `LeadingBatch` is a batch that tells the other ranks
what it is about to do, and does it; they `follow`. Nothing comes back: a result is the same everywhere, or the
ranks have come apart. So that this is noticed, every message carries a checksum of the last step's results. What
a step would measure for itself, how fast prompts are read, is rank 0's figure for all.

What only one rank knows of cannot be repaired by it: an exception, a lost rank, results that differ. Then all
end, and the requests are told which rank it was.

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

from mlx_backend.engine.base import GenerationRequest, Progress, Sampling, TokenDelta
from mlx_backend.engine.batch import Batch, Ended
from mlx_backend.errors import EngineError, EngineRefused, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mlx_backend.engine.batch import ModelFacts, Outcome
    from mlx_backend.engine.distributed.transport import Follower, Leader

log = logging.getLogger(__name__)


class SteppedBatch(Batch, Protocol):
    """A batch whose steps are the same wherever its requests and its rate are."""

    rate: float | None  # tokens of prompt a second, as measured


class Ranks(Protocol):
    """This process's place among those that share the model. The lines are there once they are open."""

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
        """Open the line. All ranks do this at the same time."""
        ...

    def close(self) -> None:
        """Leave the others."""
        ...


class LeadingBatch:
    """Rank 0's batch: implements the scheduler's `Batch` on top of one, for all ranks."""

    def __init__(self, batch: SteppedBatch, ranks: Ranks) -> None:
        self._batch = batch
        self._ranks = ranks
        self._news: list[Any] = []
        self._check = 0
        self._loaded = False
        self._ending: EngineStopped | None = None

    def when_lost(self, heard: Callable[[EngineStopped], object]) -> None:
        """Have somebody called, on another thread, when a rank is lost."""
        assert self._ranks.leader is not None
        self._ranks.leader.when_lost(heard)

    def load(self, report: Callable[[float], None]) -> ModelFacts:
        """Load together with the other ranks."""
        if self._loaded:  # the others have gone
            raise self._ending or EngineStopped(f"The engine broke. {_TOGETHER}")
        self._loaded = True
        try:
            self._ranks.open()
            return self._batch.load(report)
        except Exception as error:
            self._ending = self._why(error)
            if isinstance(error, EngineError) and not isinstance(error, EngineStopped):
                raise
            raise self._ending from error

    def admits(self, request: GenerationRequest) -> bool:
        """Whether there is room. Rank 0 decides."""
        as_plain(request)
        return self._batch.admits(request)

    def insert(self, key: int, request: GenerationRequest) -> None:
        """Begin a request, on all ranks before the next step."""
        plain = as_plain(request)
        try:
            self._batch.insert(key, request)
        except Exception as error:  # how much of it has happened, only this rank knows
            self._ending = self._why(error)
            raise
        self._news.append(["insert", key, plain])

    def ready(self) -> bool:
        """Whether a step would move anything."""
        return self._batch.ready()

    def step(self) -> Iterator[tuple[int, Outcome]]:
        """Tell the others what is new, and take a step with them. EngineStopped is the end."""
        if self._ending is not None:
            raise self._ending
        try:
            assert self._ranks.leader is not None
            self._ranks.leader.tell({"news": self._news, "rate": self._batch.rate, "check": self._check})
            self._news, self._check = [], 0
            for key, outcome in self._batch.step():
                self._check = checked(self._check, key, outcome)
                yield key, outcome
        except Exception as error:
            self._ending = self._why(error)
            raise self._ending from error

    def remove(self, key: int) -> None:
        """Drop a request, on all ranks before the next step."""
        self._batch.remove(key)
        self._news.append(["remove", key])

    def unload(self) -> None:
        """Send the others home, and give everything back."""
        reason = str(self._ending) if self._ending is not None else ""
        if self._ranks.leader is not None:
            self._ranks.leader.dismiss(reason)
        self._batch.unload()

    def close(self) -> None:
        """The last act of the thread."""
        try:
            self._batch.close()
        finally:
            if self._ranks.leader is not None:
                self._ranks.leader.wait_for_the_others()
            self._ranks.close()

    def _why(self, error: Exception) -> EngineStopped:
        if isinstance(error, EngineStopped):
            return error
        leader = self._ranks.leader
        if leader is not None and (lost := leader.ending(wait=1.0)) is not None:  # MLX may notice first
            return lost
        text = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        return EngineStopped(f"Rank 0 could not go on: {text} {_TOGETHER}")


def follow(batch: SteppedBatch, ranks: Ranks) -> int:
    """Do what rank 0 does until it stops; return the exit status. Runs on the main thread."""
    status, reason = 1, ""
    with _left_to_rank_0(signal.SIGINT):
        try:
            ranks.open()
            log.info("Rank %d of %d: loading; rank 0 serves.", ranks.rank, ranks.size)
            batch.load(lambda _part: None)
            log.info("Rank %d of %d: ready.", ranks.rank, ranks.size)
            reason = _keep_step(batch, ranks)
            status = 1 if reason else 0
        except EngineError as error:
            reason = str(error)
        except Exception as error:
            log.debug("Rank %d broke.", ranks.rank, exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        if status:
            log.error("Rank %d ends: %s", ranks.rank, reason)
            if ranks.follower is not None:
                ranks.follower.fail(reason)
        else:
            log.info("Rank %d ends: rank 0 has stopped.", ranks.rank)
        for give_back in (batch.unload, batch.close, ranks.close):
            try:
                give_back()
            except Exception as error:  # a collective under way when the others left
                log.debug("Rank %d was not left in order: %s", ranks.rank, error)
    return status


def _keep_step(batch: SteppedBatch, ranks: Ranks) -> str:
    """Step with rank 0; return why it ended, "" if it was told to."""
    assert ranks.follower is not None
    check = 0
    while (message := ranks.follower.receive()) is not None:
        if "stop" in message:
            return str(message["stop"])
        if message["check"] != check:
            raise EngineError("It came to another result than rank 0; the ranks have to be the same.")
        for piece in message["news"]:
            match piece:
                case ["insert", key, plain]:
                    batch.insert(key, from_plain(plain))
                case ["remove", key]:
                    batch.remove(key)
        batch.rate = message["rate"]
        check = 0
        for key, outcome in batch.step():
            check = checked(check, key, outcome)
    return "rank 0 was lost: its process ended or cannot be reached."


def checked(check: int, key: int, outcome: Outcome) -> int:
    """Take an outcome into a checksum of a step: all ranks must come to the same."""
    match outcome:
        case TokenDelta(token=token):
            said: object = token
        case Progress(processed=processed, cached=cached):
            said = processed, cached
        case Ended(reason):
            said = reason
        case _:
            said = "error"
    return crc32(f"{key} {said};".encode(), check)


def as_plain(request: GenerationRequest) -> dict[str, Any]:
    """Write a request for other processes. EngineRefused if something of it lives in this one."""
    if request.constraint is not None and not request.constraint.never_raises:
        raise EngineRefused(
            "A reply that must follow a grammar is not possible yet while several processes share the model."
        )
    plain: dict[str, Any] = {}
    for field in fields(request):
        value = getattr(request, field.name)
        match field.name:
            case "prompt" | "checkpoints":
                plain[field.name] = [int(each) for each in value]
            case "sampling":
                plain[field.name] = asdict(value)
            case "queue_timeout":  # is rank 0's to have
                pass
            case "constraint":  # rank 0's choice is everybody's; the others only have to take the same steps
                plain[field.name] = value is not None
            case name:
                if not (value is None or isinstance(value, bool | int | float | str)):
                    raise EngineRefused(
                        f"{name} is not possible yet while several processes share the model."
                    )
                plain[name] = value
    return plain


def from_plain(plain: Mapping[str, Any]) -> GenerationRequest:
    """Read a request that another process wrote."""
    sampling = dict(plain["sampling"])
    sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
    read = {
        "checkpoints": tuple(plain["checkpoints"]),
        "sampling": Sampling(**sampling),
        "constraint": HeldByRank0() if plain["constraint"] else None,
    }
    return GenerationRequest(**{**plain, **read})


class HeldByRank0:
    """A constraint as the other ranks have it."""

    never_raises = True

    def unconstrained_tokens(self) -> int:
        """Not to be known here."""
        return 0

    def allowed_mask(self) -> None:
        """Whatever rank 0 chooses."""

    def advance(self, token: int) -> None:
        """It was read there."""


_TOGETHER = "Processes that share a model cannot be restarted one by one: start them again."


@contextmanager
def _left_to_rank_0(number: signal.Signals) -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal; rank 0 ends what runs, and then the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
