"""Several MLX models behind one server: how each is loaded, described and reported.

`catalogue` knows what can be served, `model_pool` what is in memory; this joins both to engines and services. Models
with the same weights and engine options are loaded once: each has a view of that service, with its own settings. So has
a name that ends in an effort, `NAME:high`; a model whose own name is like that is found first.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from mlx_backend.chat.capabilities import FolderDescriber
from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.service import Service
from mlx_backend.conversation.effort import DIAL, EFFORT_OF, fold
from mlx_backend.device.host_memory import leave_out_loaded_objects
from mlx_backend.device.memory import room_for_weights, too_large
from mlx_backend.embedding.embedder import Embedder
from mlx_backend.embedding.embedding_config import EmbeddingOptions, folder_context_length
from mlx_backend.errors import EngineError
from mlx_backend.images.loader import ImageLimits, ImageLoader
from mlx_backend.models.description import ModelDescription
from mlx_backend.models.files import ModelFiles
from mlx_backend.models.folders import model_files
from mlx_backend.models.spec import RECOMMENDED_MODELS
from mlx_backend.registry.base import Lease, ModelStatus
from mlx_backend.registry.errors import ModelError, UnknownEffort, UnknownModel, WrongType
from mlx_backend.registry.model_pool import ModelMemory, ModelPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.conversation.effort import Effort
    from mlx_backend.device.memory import MemoryBudget
    from mlx_backend.embedding.worker import Worker
    from mlx_backend.engine.threaded import Engine
    from mlx_backend.models.engine_options import EngineOptions
    from mlx_backend.models.files import ModelType
    from mlx_backend.models.spec import ModelSpec
    from mlx_backend.registry.catalogue import Catalogue
    from mlx_backend.settings import Settings

log = logging.getLogger(__name__)

type LoadEngine = Callable[[ModelSpec, EngineOptions, Callable[[float], None]], Engine]
type Fetch = Callable[[str, Callable[[int, int], None]], object]
"""Downloads a source, and calls back with the bytes that it has and the bytes that there are."""
type LoadWorker = Callable[[ModelSpec, ModelType, EmbeddingOptions, Callable[[float], None]], Worker]

_PURPOSE = {
    "llm": "is a language model (/v1/chat/completions)",
    "embedding": "is an embedding model (/v1/embeddings)",
    "rerank": "is a rerank model (/v1/rerank)",
}
_NONE_SERVED = {
    "llm": "No language model is served: name one with --model.",
    "embedding": 'No embedding model is served: name one with --embedding-model, or set its type = "embedding".',
    "rerank": 'No rerank model is served: name one with --rerank-model, or set its type = "rerank".',
}

_STOP_TIMEOUT = 30
"""Seconds for a load that reports no progress."""


@dataclass(frozen=True, slots=True)
class _Called:
    """What a request's name means: a model by `name`, and the effort after it."""

    name: str
    spec: ModelSpec
    effort: Effort | None = None


class MultiModelRegistry:
    """Implements `ModelRegistry` for a catalogue. `load_engine` turns a model into an engine.

    With `memory`, a model that is too large for it is refused before anything is downloaded or loaded; `ranks` is how
    many processes share each model. `fetch` downloads what is not on this machine (None: loading does that, unseen);
    `on_status` hears of every step of a load.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        load_engine: LoadEngine,
        options: EngineOptions,
        settings: Settings,
        *,
        memory: MemoryBudget | None = None,
        ranks: int = 1,
        default_name: str | None = None,
        load_worker: LoadWorker | None = None,
        fetch: Fetch | None = None,
        on_status: Callable[[ModelStatus], object] = lambda _status: None,
    ) -> None:
        self.memory = memory
        self._catalogue = catalogue
        self._fetch = fetch
        self._load_engine = load_engine
        self._load_worker = load_worker
        self._options = options
        self._settings = settings
        self._default_name = default_name
        self._folder_describer = FolderDescriber()
        self._images = image_loader(settings)
        self._pool: ModelPool[Service | Embedder] = ModelPool(
            catalogue,
            self._load,
            memory=_model_memory(catalogue, memory, options, ranks) if memory is not None else None,
            default_name=default_name,
            fetch=self._fetch_sources if fetch is not None else None,
            on_status=on_status,
        )

    def preload(self) -> None:
        """Load the pinned models; raise the EngineError of the first that fails."""
        self._pool.preload()

    def acquire(self, name: str | None, wait: float, *, is_reported: bool = False) -> Lease[Service]:
        called = self._called(name)
        self._check_type("llm", called.spec)
        lease = cast("Lease[Service]", self._pool.acquire(called.name, wait, is_reported=is_reported))
        return Lease(called.spec.name, self._view(called, lease.service), lease.release)

    def acquire_embedder(self, name: str | None, wait: float, model_type: ModelType) -> Lease[Embedder]:
        if name in (None, "", "default"):
            name = self._first_of(model_type, name)
        self._check_type(model_type, self._pool.find(name))
        return cast("Lease[Embedder]", self._pool.acquire(name, wait))

    def acquire_any(self, name: str | None, wait: float) -> Lease[Service | Embedder]:
        return self._pool.acquire(self._called(name).name, wait)

    def statuses(self) -> Sequence[ModelStatus]:
        services = self._pool.services()
        statuses = [
            _with_service(
                status, services.get(status.shares or status.name), self._catalogue.aliases(status.name)
            )
            for status in self._pool.statuses()
        ]
        return sorted(statuses, key=lambda status: status.name != self._default_name)

    def status(self, name: str) -> ModelStatus:
        found = self._called(name).spec.name
        unloaded = ModelStatus(name=found, state="unloaded", percent=0)
        return next((status for status in self.statuses() if status.name == found), unloaded)

    def describe(self, name: str) -> ModelDescription:
        """Return what a model can do, from its folder if it is not in memory."""
        return self._describe(self._called(name))

    def _describe(self, called: _Called) -> ModelDescription:
        spec = called.spec
        if (model_type := self._catalogue.model_type(spec)) != "llm":
            return self._describe_embedder(spec, model_type)
        options, settings = spec.options(self._options), self._settings_of(called)
        service = self._service_of(spec)
        if isinstance(service, Service):
            engine = service.engine.status()
            return replace(
                self._view(called, service).description(),
                adapters=tuple(options.adapters),
                unbatched=engine.unbatched,
                available_context=engine.available_context,
            )
        folder = self._catalogue.folder(spec)
        if folder is None:
            return ModelDescription(
                capabilities=(),  # nothing is known before it is downloaded, and "completion" would read as all of it
                context_length=options.context_length,
                sampling=settings.sampling,
                default_max_tokens=settings.max_tokens,
                adapters=tuple(options.adapters),
            )
        return self._folder_describer.describe(folder, options, settings)

    def _describe_embedder(self, spec: ModelSpec, model_type: ModelType) -> ModelDescription:
        service = self._service_of(spec)
        if isinstance(service, Embedder):
            return service.description()
        folder = self._catalogue.folder(spec)
        length = None
        if folder is not None:
            length = folder_context_length(folder, spec.source, self._embedding_options(spec))
        return ModelDescription(kind=model_type, context_length=length, capabilities=(model_type,))

    def files(self, name: str) -> ModelFiles:
        folder = self._catalogue.folder(self._called(name).spec)
        return model_files(folder) if folder is not None else ModelFiles()

    def keep(self, name: str | None, seconds: float) -> bool:
        return self._pool.keep(self._called(name).name, seconds)

    def unload(self, name: str) -> str:
        """Unload a model once nothing uses it, with those that share its weights; return a sentence on what happens."""
        return self._pool.unload(self._called(name).name)

    def stop(self) -> None:
        """Stop every engine and thread."""
        self._pool.stop(timeout=_STOP_TIMEOUT)

    def _called(self, name: str | None) -> _Called:
        """Return what a name means. Raises UnknownModel or ModelNotAllowed."""
        try:
            return _Called(name or "", self._pool.find(name))
        except UnknownModel as error:
            base, colon, word = (name or "").rpartition(":")
            if not base or not colon:
                raise
            try:
                called = _Called(base, self._pool.find(base))
            except ModelError:
                raise error from None
        efforts, effort = self._efforts(called), EFFORT_OF.get(fold(word))
        if effort is None or effort not in efforts:
            raise UnknownEffort(called.spec.name, word, efforts)
        return replace(called, effort=effort)

    def _efforts(self, called: _Called) -> Sequence[Effort]:
        """Return the levels of a model: all there are of one that has yet to be downloaded, and is not known."""
        service = self._service_of(called.spec)
        if isinstance(service, Service):
            return self._view(called, service).efforts
        description = self._describe(called)
        if description.kind == "llm" and not description.capabilities:
            return DIAL
        return description.efforts

    def _service_of(self, spec: ModelSpec) -> Service | Embedder | None:
        """Return the loaded service that has a model's weights."""
        return self._pool.services().get(self._catalogue.loaded(spec).name)

    def _view(self, called: _Called, service: Service) -> Service:
        """Return a loaded service as a name means it."""
        if called.effort is None and called.spec.name == self._catalogue.loaded(called.spec).name:
            return service
        return service.named(called.spec.name, self._settings_of(called))

    def _check_type(self, wanted: ModelType, spec: ModelSpec) -> None:
        """Raise WrongType before a model is loaded for what it cannot do."""
        model_type = self._catalogue.model_type(spec)
        if model_type != wanted:
            models = self._catalogue.models()
            others = [each.name for each in models if self._catalogue.model_type(each) == wanted]
            hint = (
                f"For this there is {', '.join(map(repr, others[:20]))}." if others else _NONE_SERVED[wanted]
            )
            raise WrongType(f"The model {spec.name!r} {_PURPOSE[model_type]}. {hint}")

    def _first_of(self, wanted: ModelType, name: str | None) -> str:
        with suppress(UnknownModel):
            if name:
                return self._catalogue.find(name).name  # a model may really be called "default"
        for spec in self._catalogue.models():
            if self._catalogue.model_type(spec) == wanted:
                return spec.name
        raise UnknownModel(_NONE_SERVED[wanted])

    # -- loading ---------------------------------------------------------------------------------------------

    def _fetch_sources(self, spec: ModelSpec, on_progress: Callable[[int, int], None]) -> None:
        if self._fetch is not None and self._catalogue.may_download(spec):
            for source in spec.sources:
                self._fetch(source, on_progress)

    def _load(self, spec: ModelSpec, progress: Callable[[float], None]) -> Service | Embedder:
        may_download = self._fetch is None and self._catalogue.may_download(spec)  # else all of it is here
        log.info("Loading %s.", spec.name)
        model_type = self._catalogue.model_type(spec)
        if model_type != "llm":
            if self._load_worker is None:
                raise EngineError("This server was set up without embedding and rerank models.")
            embedding = replace(self._embedding_options(spec), allow_download=may_download)
            return Embedder(self._load_worker(spec, model_type, embedding, progress))
        options = replace(spec.options(self._options), allow_download=may_download)
        service = Service(
            self._load_engine(spec, options, progress),
            self._settings_of(_Called(spec.name, spec)),
            images=self._images,
            caches=self.memory.host_caches if self.memory is not None else None,
        )
        service.prepare()
        leave_out_loaded_objects()
        return service

    def _embedding_options(self, spec: ModelSpec) -> EmbeddingOptions:
        chosen = dict(spec.embedding)
        if "context_length" in spec.engine:
            chosen["context_length"] = spec.engine["context_length"]
        return EmbeddingOptions(
            allow_download=self._catalogue.may_download(spec),
            memory_bytes=self._options.memory_bytes,
            max_waiting=self._options.max_waiting,
            **chosen,
        )

    def _settings_of(self, called: _Called) -> ModelSettings:
        settings = ModelSettings.of(called.spec.defaults, self._settings)
        return settings if called.effort is None else replace(settings, name_effort=called.effort)


def image_loader(settings: Settings) -> ImageLoader:
    """Return what loads the images of a server's requests."""
    return ImageLoader(
        ImageLimits(
            allow_urls=settings.allow_image_urls,
            hosts=settings.image_hosts,
            max_images=settings.max_images,
            max_bytes=settings.max_image_bytes,
            max_pixels=settings.max_image_pixels,
            seconds=settings.image_seconds,
        )
    )


def _model_memory(
    catalogue: Catalogue, budget: MemoryBudget, options: EngineOptions, ranks: int
) -> ModelMemory:
    """Return what the catalogue measures, within the device's limit."""

    def explained(spec: ModelSpec, size: int) -> str:
        smaller = [each[:2] for each in RECOMMENDED_MODELS[::-1] if catalogue.model_type(spec) == "llm"]
        is_given = options.memory_bytes is not None
        return too_large(spec.name, size, budget.limit, is_given=is_given, smaller=smaller)

    return ModelMemory(
        limit=lambda: room_for_weights(budget.limit),
        measure=lambda spec: catalogue.weight_bytes(spec) // ranks,
        too_large=explained,
    )


def _with_service(
    status: ModelStatus, service: Service | Embedder | None, aliases: tuple[str, ...]
) -> ModelStatus:
    """Add the aliases to a status, and its engine's figures if it is loaded."""
    status = replace(status, aliases=aliases)
    if service is None:
        return status
    engine = service.engine.status()
    return replace(
        status,
        state=engine.state,
        running=engine.running,
        waiting=engine.waiting,
        prewarmed_tokens=engine.prewarmed_tokens,
        detail=engine.detail,
        drafts=engine.drafts,
    )
