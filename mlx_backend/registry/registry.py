"""Several models on MLX behind one server: how one is loaded, and how all of them are doing.

What can be served is `catalogue`, what is in memory `residency`; this joins them to engines and services.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from mlx_backend.chat.capabilities import Folders
from mlx_backend.chat.service import Service
from mlx_backend.embedding.recipe import EmbeddingOptions, tokens_read
from mlx_backend.embedding.service import Embedder
from mlx_backend.engine.distributed.transport import launched
from mlx_backend.errors import EngineError
from mlx_backend.models.description import ModelDescription
from mlx_backend.registry.base import ModelStatus, state_of
from mlx_backend.registry.errors import ModelPinned, UnknownModel, WrongType
from mlx_backend.registry.residency import Residency, Unloading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.conversation.effort import Effort
    from mlx_backend.embedding.worker import Worker
    from mlx_backend.engine.base import Engine
    from mlx_backend.models.engine_options import EngineOptions
    from mlx_backend.models.model_type import ModelType
    from mlx_backend.models.spec import ModelDefaults, ModelSpec
    from mlx_backend.registry.catalogue import Catalogue
    from mlx_backend.registry.residency import Hold
    from mlx_backend.registry.resident import ModelState
    from mlx_backend.settings import Settings

log = logging.getLogger(__name__)

type LoadEngine = Callable[[ModelSpec, EngineOptions, Callable[[float], None]], Engine]
type LoadWorker = Callable[[ModelSpec, ModelType, EmbeddingOptions, Callable[[float], None]], Worker]

_USES = {
    "llm": "is a language model (/v1/chat/completions)",
    "embedding": "makes vectors (/v1/embeddings)",
    "rerank": "ranks documents (/v1/rerank)",
}
_HOW_TO = {
    "llm": "There is none to talk to: name one with --model.",
    "embedding": 'Name one that makes vectors with --embedding-model, or set its type = "embedding".',
    "rerank": 'Name one that ranks with --rerank-model, or set its type = "rerank".',
}

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
        load_worker: LoadWorker | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._load_engine = load_engine
        self._load_worker = load_worker
        self._options = options
        self._settings = settings
        self._default_name = default_name
        self._folders = Folders()
        self._residency: Residency[Service | Embedder] = Residency(
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
        """Use a language model, loading it if need be."""
        self._refuse_other_than("llm", name)
        return cast("Hold[Service]", self._residency.acquire(name, wait))

    def embedder(self, name: str | None, wait: float, kind: ModelType) -> Hold[Embedder]:
        """Use a model that makes vectors or ranks, loading it if need be."""
        if name in (None, "", "default"):
            name = self._first_of(kind, name)
        self._refuse_other_than(kind, name)
        return cast("Hold[Embedder]", self._residency.acquire(name, wait))

    def acquire_any(self, name: str | None, wait: float) -> Hold[Service | Embedder]:
        """Use a model whatever its type."""
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
        if (kind := self._catalogue.type(spec)) != "llm":
            return self._describe_reader(spec, kind)
        options, defaults = spec.options(self._options), self._defaults(spec)
        service = self._residency.services().get(spec.name)
        if isinstance(service, Service):
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

    def _describe_reader(self, spec: ModelSpec, kind: ModelType) -> ModelDescription:
        """Describe a model that makes vectors or ranks."""
        service = self._residency.services().get(spec.name)
        if isinstance(service, Embedder):
            return service.description()
        folder = self._catalogue.folder(spec)
        length = tokens_read(folder, spec.source, self._reading(spec)) if folder is not None else None
        return ModelDescription(kind=kind, context_length=length, capabilities=(kind,))

    def type(self, name: str) -> ModelType:
        """What a model is made for."""
        return self._catalogue.type(self._find(name))

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

    def _refuse_other_than(self, wanted: ModelType, name: str | None) -> None:
        """Raise WrongType before a model is loaded for what it cannot do."""
        spec = self._find(name or "")
        kind = self._catalogue.type(spec)
        if kind != wanted:
            others = [each.name for each in self._catalogue.models() if self._catalogue.type(each) == wanted]
            there = f"For this there is {', '.join(map(repr, others[:20]))}." if others else _HOW_TO[wanted]
            raise WrongType(f"The model {spec.name!r} {_USES[kind]}. {there}")

    def _first_of(self, kind: ModelType, name: str | None) -> str:
        with suppress(UnknownModel):
            if name:
                return self._catalogue.find(name).name  # somebody may have called a model that
        for spec in self._catalogue.models():
            if self._catalogue.type(spec) == kind:
                return spec.name
        raise UnknownModel(f"There is no model for this here. {_HOW_TO[kind]}")

    def _find(self, name: str) -> ModelSpec:
        try:
            return self._catalogue.find(name)
        except UnknownModel:
            if name in ("", "default") and self._default_name is not None:
                return self._catalogue.find(self._default_name)
            raise

    def _reading(self, spec: ModelSpec) -> EmbeddingOptions:
        """What was said of a model that reads."""
        said = dict(spec.embedding)
        if "context_length" in spec.engine:
            said["context_length"] = spec.engine["context_length"]
        return EmbeddingOptions(
            allow_download=self._catalogue.may_download(spec),
            memory_bytes=self._options.memory_bytes,
            max_waiting=self._options.max_waiting,
            **said,
        )

    def _load(self, spec: ModelSpec, report: Callable[[float], None]) -> Service | Embedder:
        kind = self._catalogue.type(spec)
        if kind != "llm":
            if self._load_worker is None:
                raise EngineError("This server was put together without models that make vectors.")
            return Embedder(self._load_worker(spec, kind, self._reading(spec), report))
        options = spec.options(self._options)
        options = replace(options, allow_download=self._catalogue.may_download(spec))
        settings = self._settings
        engine = self._load_engine(spec, options, report)
        service = Service(
            engine,
            defaults=self._defaults(spec),
            effort=settings.reasoning_effort,
            max_tokens=settings.max_tokens,
            thinking_budget=settings.thinking_budget,
            answer_reserve=settings.answer_reserve,
            queue_seconds=settings.queue_seconds,
            prewarm=settings.prewarm,
        )
        service.prepare()
        return service

    def _defaults(self, spec: ModelSpec) -> ModelDefaults:
        """The model's own, and the server's where it has none."""
        defaults, temperature = spec.defaults, self._settings.temperature
        if defaults.temperature is None and temperature is not None:
            return replace(defaults, temperature=temperature)
        return defaults


def _told(state: ModelState, service: Service | Embedder | None, aliases: tuple[str, ...]) -> ModelStatus:
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
