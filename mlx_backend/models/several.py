"""Several models on MLX behind one server: how one is loaded, and how all of them are doing.

What can be served is `catalogue`, what is in memory `residency`; this joins them to engines and services.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_backend.engine.ranks import launched
from mlx_backend.service import Service

from .description import Folders, ModelDescription
from .errors import ModelPinned, UnknownModel
from .one import ModelStatus, state_of
from .residency import Residency, Unloading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.conversation.effort import Effort
    from mlx_backend.engine.base import Engine
    from mlx_backend.engine.options import EngineOptions
    from mlx_backend.settings import Settings

    from .catalogue import Catalogue
    from .residency import Hold
    from .resident import ModelState
    from .spec import ModelDefaults, ModelSpec

log = logging.getLogger(__name__)

type LoadEngine = Callable[[ModelSpec, EngineOptions, Callable[[float], None]], Engine]

_TOLD = {
    Unloading.UNLOADED: "It has been unloaded.",
    Unloading.WHEN_IDLE: "It is unloaded as soon as its replies have ended.",
    Unloading.NOT_LOADED: "It was not loaded.",
}


class SeveralModels:
    """Implements `Models` for a catalogue. `load_engine` is how a model becomes an engine."""

    def __init__(
        self,
        catalogue: Catalogue,
        load_engine: LoadEngine,
        options: EngineOptions,
        settings: Settings,
        *,
        memory_limit: int | None = None,
        default_name: str | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._load_engine = load_engine
        self._options = options
        self._settings = settings
        self._default_name = default_name
        self._folders = Folders()
        self._residency: Residency[Service] = Residency(
            catalogue,
            self._load,
            memory_limit=memory_limit,
            measure=catalogue.weight_bytes,
            default_name=default_name,
        )

    def preload(self) -> None:
        """Load the pinned models; raise the EngineError of the first that fails."""
        self._residency.preload()

    def acquire(self, name: str | None, wait: float) -> Hold[Service]:
        """Use a model, loading it if need be."""
        return self._residency.acquire(name, wait)

    def states(self) -> Sequence[ModelStatus]:
        """Every model that can be served; the default first."""
        services = self._residency.services()
        told = [
            _told(state, services.get(state.name), self._catalogue.aliases(state.name))
            for state in self._residency.states()
        ]
        return sorted(told, key=lambda status: status.name != self._default_name)

    def state(self, name: str) -> ModelStatus:
        """One of them, by any of its names. Raises UnknownModel or ModelNotAllowed."""
        found = self._find(name).name
        nothing_yet = ModelStatus(name=found, state="unloaded", percent=0)
        return next((status for status in self.states() if status.name == found), nothing_yet)

    def describe(self, name: str) -> ModelDescription:
        """What one of them can do, from its folder if it is not in memory."""
        spec = self._find(name)
        options, defaults = spec.options(self._options), self._defaults(spec)
        if (service := self._residency.services().get(spec.name)) is not None:
            return replace(service.description(), adapters=tuple(options.adapters))
        folder = self._catalogue.folder(spec)
        if folder is None:
            return ModelDescription(
                context_length=options.context_length,
                sampling=defaults.sampling,
                adapters=tuple(options.adapters),
            )
        return self._folders.describe(
            folder,
            options=options,
            defaults=defaults,
            server_effort=self._settings.reasoning_effort,
            one_process=launched() is None,
        )

    def effort(self, name: str) -> Effort | None:
        """The effort a model is set to, if it is."""
        return self._catalogue.find(name).defaults.effort

    def unload(self, name: str) -> str:
        """Take a model out of memory once nobody uses it; say what happens."""
        done = self._residency.unload(name)
        if done is Unloading.PINNED:
            raise ModelPinned(f"The model {name!r} is pinned, and stays in memory.")
        return _TOLD[done]

    def stop(self) -> None:
        """End everything."""
        self._residency.stop(patience=30)

    def _find(self, name: str) -> ModelSpec:
        try:
            return self._catalogue.find(name)
        except UnknownModel:
            if name in ("", "default") and self._default_name is not None:
                return self._catalogue.find(self._default_name)
            raise

    def _load(self, spec: ModelSpec, report: Callable[[float], None]) -> Service:
        options = spec.options(self._options)
        options = replace(options, allow_download=self._catalogue.may_download(spec))
        settings = self._settings
        engine = self._load_engine(spec, options, report)
        return Service(
            engine,
            defaults=self._defaults(spec),
            effort=settings.reasoning_effort,
            max_tokens=settings.max_tokens,
            queue_seconds=settings.queue_seconds,
            prewarm=settings.prewarm,
        )

    def _defaults(self, spec: ModelSpec) -> ModelDefaults:
        """The model's own, and the server's where it has none."""
        defaults, temperature = spec.defaults, self._settings.temperature
        if defaults.temperature is None and temperature is not None:
            return replace(defaults, temperature=temperature)
        return defaults


def _told(state: ModelState, service: Service | None, aliases: tuple[str, ...]) -> ModelStatus:
    if service is not None:
        return state_of(service, name=state.name, pinned=state.pinned, in_use=state.in_use, aliases=aliases)
    return ModelStatus(
        name=state.name,
        state=state.state,
        percent=state.percent,
        in_use=state.in_use,
        pinned=state.pinned,
        detail=state.error or "",
        aliases=aliases,
    )
