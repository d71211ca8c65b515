"""A registry of one model that is already loaded: what most tests of the server need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.models.files import ModelFiles
from mlx_backend.registry.base import Lease, ModelStatus
from mlx_backend.registry.errors import ModelPinned, UnknownModel, WrongType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.chat.service import Service
    from mlx_backend.embedding.embedder import Embedder
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.models.files import ModelType


class SingleModelRegistry:
    """Implements `ModelRegistry` for one service that is already loaded."""

    def __init__(self, service: Service) -> None:
        self._service = service
        name = service.engine.model_id
        self._names = {name, name.rpartition("/")[2], "default", "", None}

    def acquire(self, name: str | None, wait: float) -> Lease[Service]:
        """Lease the model; nothing is counted."""
        if name not in self._names and (name or "").removesuffix(":latest") not in self._names:
            own = self._service.engine.model_id
            shown = (name or "")[:200]
            raise UnknownModel(
                f"The model {shown!r} is not served here; this server has {own!r} "
                "(or leave 'model' out, or send 'default')."
            )
        return Lease(self._service.engine.model_id, self._service, lambda: None)

    def acquire_embedder(self, name: str | None, wait: float, model_type: ModelType) -> Lease[Embedder]:
        """Raise WrongType: the only model is a language model."""
        own = self._service.engine.model_id
        raise WrongType(f"No model here can do this: {own!r} is a language model, and the only one.")

    def acquire_any(self, name: str | None, wait: float) -> Lease[Service]:
        """Lease the model."""
        return self.acquire(name, wait)

    def statuses(self) -> Sequence[ModelStatus]:
        """Return the model's status."""
        return [self._status()]

    def status(self, name: str) -> ModelStatus:
        """Return the model's status if this is its name."""
        self.acquire(name, 0)
        return self._status()

    def describe(self, name: str) -> ModelDescription:
        """Return what the model can do."""
        self.acquire(name, 0)
        return self._service.description()

    def files(self, name: str) -> ModelFiles:
        """Return nothing: the model has no files here."""
        self.acquire(name, 0)
        return ModelFiles()

    def keep(self, name: str | None, seconds: float) -> bool:
        """Return False: the model stays in memory."""
        self.acquire(name, 0)
        return False

    def unload(self, name: str) -> str:
        """Raise ModelPinned."""
        self.acquire(name, 0)
        raise ModelPinned(f"The model {name!r} is the only one of this server, and stays in memory.")

    def _status(self) -> ModelStatus:
        engine = self._service.engine
        status = engine.status()
        return ModelStatus(
            name=engine.model_id,
            state=status.state,
            running=status.running,
            waiting=status.waiting,
            detail=status.detail,
            drafts=status.drafts,
            pinned=True,
        )
