"""What is asked of the registry of models in a request's body, and needs no model to answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mlx_backend.api.base import JsonAnswer
from mlx_backend.api.fields import Body, BodyCall
from mlx_backend.registry.base import Lease

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.api.base import OnDisconnect
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import ModelRegistry


@dataclass(frozen=True)
class RegistryCall(BodyCall[Body]):
    """Implements `JsonCall`. `find` asks the registry, and may wait for some seconds."""

    waits_for_engine: ClassVar[bool] = False

    find: Callable[[ModelRegistry, float], dict[str, Any]]

    @property
    def keep_alive(self) -> float | None:
        """The seconds that the model is to stay in memory, if the request is about that."""
        return getattr(self.body, "keep_alive", None)

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[dict[str, Any]]:
        """Ask the registry."""
        return Lease(self.model or "", self.find(models, wait), lambda: None)

    def answer(self, found: dict[str, Any], _client: QueueClient, _on_disconnect: OnDisconnect) -> JsonAnswer:
        """Return what was found."""
        return JsonAnswer(found)
