"""What a server asks of its models, and the smallest answer: one model that is always there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from mlx_backend.registry.errors import ModelPinned, UnknownModel, WrongType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.chat.service import Service
    from mlx_backend.embedding.service import Embedder
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.models.model_type import ModelType


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """A model that can be served, and where it stands. `percent` is of loading."""

    name: str
    state: Literal["unloaded", "loading", "ready", "restarting", "unloading", "failed", "stopped"] = "ready"
    percent: int = 100
    in_use: int = 0
    running: int = 0  # requests, as its engine counts them
    waiting: int = 0
    pinned: bool = False
    detail: str = ""
    aliases: tuple[str, ...] = ()  # the other names it is listed by


class Lease[S](Protocol):
    """A model in use: it stays in memory until the lease is given back."""

    @property
    def service(self) -> S:
        """The loaded model."""
        ...

    def release(self) -> None:
        """Give it back. Idempotent, from any thread."""
        ...


class Models(Protocol):
    """The models of one server. Safe to use from several threads."""

    def acquire(self, name: str | None, wait: float) -> Lease[Service]:
        """Use a language model by one of its names (None: the default), loading it if need be.

        Raises UnknownModel, ModelNotAllowed, WrongType, ModelLoading after `wait` seconds, NoRoom, or the
        EngineError of a load that failed.
        """
        ...

    def embedder(self, name: str | None, wait: float, kind: ModelType) -> Lease[Embedder]:
        """Use a model that makes vectors, or one that ranks (None: the first there is). Raises as `acquire`."""
        ...

    def acquire_any(self, name: str | None, wait: float) -> Lease[Service | Embedder]:
        """Use a model whatever its type. Raises as `acquire`."""
        ...

    def states(self) -> Sequence[ModelStatus]:
        """Every model that can be served; the default first."""
        ...

    def state(self, name: str) -> ModelStatus:
        """One of them, by any of its names. Raises UnknownModel or ModelNotAllowed."""
        ...

    def describe(self, name: str) -> ModelDescription:
        """What one of them can do, in memory or not. Raises UnknownModel or ModelNotAllowed."""
        ...

    def unload(self, name: str) -> str:
        """Take a model out of memory once nobody uses it; say what happens, for people. Raises ModelPinned."""
        ...


class OneModel:
    """Implements `Models` for a single service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        name = service.engine.model_id
        self._names = {name, name.rpartition("/")[2], "default", "", None}

    def acquire(self, name: str | None, wait: float) -> _Kept:
        """Return the one model."""
        if name not in self._names:
            own = self._service.engine.model_id
            shown = (name or "")[:200]
            raise UnknownModel(
                f"The model {shown!r} is not served here; this server has {own!r} "
                "(or leave 'model' out, or say 'default')."
            )
        return _Kept(self._service)

    def embedder(self, name: str | None, wait: float, kind: ModelType) -> Lease[Embedder]:
        """There is none."""
        own = self._service.engine.model_id
        raise WrongType(f"There is no model for this here: {own!r} is a language model, and the only one.")

    def acquire_any(self, name: str | None, wait: float) -> _Kept:
        """Return the one model."""
        return self.acquire(name, wait)

    def states(self) -> Sequence[ModelStatus]:
        """Return the state of the one model."""
        return [state_of(self._service, pinned=True)]

    def state(self, name: str) -> ModelStatus:
        """Return it by its name."""
        self.acquire(name, 0)
        return state_of(self._service, pinned=True)

    def describe(self, name: str) -> ModelDescription:
        """Say what it can do."""
        self.acquire(name, 0)
        return self._service.description()

    def unload(self, name: str) -> str:
        """It stays."""
        self.acquire(name, 0)
        raise ModelPinned(f"The model {name!r} is the only one of this server, and stays in memory.")


def state_of(
    service: Service | Embedder,
    *,
    name: str | None = None,
    pinned: bool = False,
    in_use: int = 0,
    aliases: tuple[str, ...] = (),
) -> ModelStatus:
    """Describe a model that is in memory."""
    status = service.engine.status()
    return ModelStatus(
        name=name or service.engine.model_id,
        state=status.state,
        running=status.running,
        waiting=status.waiting,
        detail=status.detail,
        pinned=pinned,
        in_use=in_use,
        aliases=aliases,
    )


@dataclass(frozen=True, slots=True)
class _Kept:
    service: Service

    def release(self) -> None:
        """Nothing was taken."""
