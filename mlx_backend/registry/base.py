"""What the server needs of its models: the registry protocol, a lease, and a model's status."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.chat.service import Service
    from mlx_backend.embedding.embedder import Embedder
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.models.files import ModelFiles, ModelType


type ModelState = Literal[
    "unloaded", "downloading", "loading", "ready", "restarting", "unloading", "failed", "stopped"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A servable model's current state. `percent` is how far it is downloaded, in bytes `done` of `total`, or loaded.

    `total` is 0 where the size is not known, and for a load, most of which may be trials. `in_use` counts leases;
    `running` and `waiting` are requests, as the engine counts them, and `prewarmed_tokens` what it has prefilled before
    a request asked for it. `aliases` are the other names it is listed under. `drafts` says what its MTP head does, or
    why it has none here. With `shares`, its weights are those of the model of that name, and so are its state and what
    it counts. It is unloaded in `unloads_in` seconds, or that long after its use; None: not by itself.
    """

    name: str
    state: ModelState = "ready"
    percent: int = 100
    done: int = 0
    total: int = 0
    in_use: int = 0
    running: int = 0
    waiting: int = 0
    prewarmed_tokens: int = 0
    pinned: bool = False
    detail: str = ""
    drafts: str = ""
    aliases: tuple[str, ...] = ()
    shares: str = ""
    unloads_in: float | None = None


class Lease[S]:
    """A model in use. Release it when the reply is done: idempotent, from any thread; garbage collection does too."""

    def __init__(self, name: str, service: S, on_release: Callable[[], None]) -> None:
        self.name = name
        self._service: S | None = service
        self._on_release = on_release
        self._released = threading.Lock()

    @property
    def service(self) -> S:
        """The model's service. Raises RuntimeError after the release."""
        if self._service is None:
            raise RuntimeError(f"The model {self.name!r} has been released.")
        return self._service

    def release(self) -> None:
        """End the lease."""
        if self._released.acquire(blocking=False):
            self._service = None
            self._on_release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class ModelRegistry(Protocol):
    """The models of one server. Thread-safe."""

    def acquire(self, name: str | None, wait: float) -> Lease[Service]:
        """Lease a language model by one of its names (None: the default), loading it if necessary.

        Raises UnknownModel, ModelNotAllowed, WrongType, ModelLoading after `wait` seconds, InsufficientMemory,
        or the EngineError of a failed load.
        """
        ...

    def acquire_embedder(self, name: str | None, wait: float, model_type: ModelType) -> Lease[Embedder]:
        """Lease an embedding or rerank model (None: the first of that type). Raises as `acquire` does."""
        ...

    def acquire_any(self, name: str | None, wait: float) -> Lease[Service | Embedder]:
        """Lease a model of any type. Raises as `acquire` does."""
        ...

    def statuses(self) -> Sequence[ModelStatus]:
        """Return every servable model, the default first."""
        ...

    def status(self, name: str) -> ModelStatus:
        """Return one model by any of its names. Raises UnknownModel or ModelNotAllowed."""
        ...

    def describe(self, name: str) -> ModelDescription:
        """Return what a model can do, loaded or not. Raises UnknownModel or ModelNotAllowed."""
        ...

    def files(self, name: str) -> ModelFiles:
        """Return what a model's files say of themselves. Raises UnknownModel or ModelNotAllowed."""
        ...

    def unload(self, name: str) -> str:
        """Unload a model once nothing uses it; return a sentence on what happens. Raises ModelPinned."""
        ...

    def keep(self, name: str | None, seconds: float) -> bool:
        """Have a model stay in memory for so long after each use (infinity: always), until it is unloaded.

        Does nothing to one that is not in memory, or that is pinned: then it returns False. Raises as `acquire` does
        for a name.
        """
        ...
