"""A registry of one model that is already loaded: what most tests of the server need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.registry.base import ModelStatus, loaded_status
from mlx_backend.registry.errors import ModelPinned, UnknownModel, WrongType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.chat.service import Service
    from mlx_backend.embedding.embedder import Embedder
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.models.files import ModelType
    from mlx_backend.registry.base import Lease


class SingleModelRegistry:
    """Implements `ModelRegistry` for one service that is already loaded."""

    def __init__(self, service: Service) -> None:
        self._service = service
        name = service.engine.model_id
        self._names = {name, name.rpartition("/")[2], "default", "", None}

    def acquire(self, name: str | None, wait: float) -> _PermanentLease:
        """Lease the model; nothing is counted."""
        if name not in self._names:
            own = self._service.engine.model_id
            shown = (name or "")[:200]
            raise UnknownModel(
                f"The model {shown!r} is not served here; this server has {own!r} "
                "(or leave 'model' out, or send 'default')."
            )
        return _PermanentLease(self._service)

    def acquire_embedder(self, name: str | None, wait: float, model_type: ModelType) -> Lease[Embedder]:
        """Raise WrongType: the only model is a language model."""
        own = self._service.engine.model_id
        raise WrongType(f"No model here can do this: {own!r} is a language model, and the only one.")

    def acquire_any(self, name: str | None, wait: float) -> _PermanentLease:
        """Lease the model."""
        return self.acquire(name, wait)

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the model's status."""
        return [loaded_status(self._service, pinned=True)]

    def status(self, name: str) -> ModelStatus:
        """Return the model's status if this is its name."""
        self.acquire(name, 0)
        return loaded_status(self._service, pinned=True)

    def describe(self, name: str) -> ModelDescription:
        """Return what the model can do."""
        self.acquire(name, 0)
        return self._service.description()

    def unload(self, name: str) -> str:
        """Raise ModelPinned."""
        self.acquire(name, 0)
        raise ModelPinned(f"The model {name!r} is the only one of this server, and stays in memory.")


@dataclass(frozen=True, slots=True)
class _PermanentLease:
    service: Service

    def release(self) -> None:
        """Do nothing."""
