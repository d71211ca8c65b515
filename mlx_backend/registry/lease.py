"""A lease on a loaded model. Knows the model's service and what to call when the lease ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.models.spec import ModelSpec


class ModelLease[S]:
    """A model in use. Release it when the reply is done: idempotent, from any thread; garbage collection does too."""

    def __init__(self, spec: ModelSpec, service: S, on_release: Callable[[], None]) -> None:
        self.spec = spec
        self._service: S | None = service
        self._on_release = on_release
        self._released = threading.Lock()

    @property
    def service(self) -> S:
        """The model's service. Raises RuntimeError after the release."""
        if self._service is None:
            raise RuntimeError(f"The model {self.spec.name!r} has been released.")
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
