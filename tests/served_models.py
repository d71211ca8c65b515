"""A server of one model of each type: a scripted one that chats, and small ones with random weights that read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from embedding_models import write_ranking_roberta, write_roberta
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER

from mlx_backend.embedding.mlx import load_worker
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.registry import config_file
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.server.app import App
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripted_engine import Script

    from mlx_backend.embedding.embedding_config import EmbeddingOptions
    from mlx_backend.embedding.worker import Worker
    from mlx_backend.engine.threaded import Engine
    from mlx_backend.models.files import ModelType
    from mlx_backend.models.spec import ModelSpec

MODELS = """
[models.chat]
model = "{folder}/chat"
aliases = ["other"]

[models.embedder]
model = "{folder}/embedder"

[models.ranker]
model = "{folder}/ranker"
"""


@contextmanager
def models_of_every_type(
    folder: Path, settings: Settings, scripts: Callable[[str], Script] = lambda _: ANSWER
) -> Iterator[MultiModelRegistry]:
    """These models, which are written into the folder."""

    def talk(spec: ModelSpec, _options: EngineOptions, _on_progress: Callable[[float], None]) -> Engine:
        return ScriptedEngine(scripts, model_id=spec.name)

    def read(
        spec: ModelSpec, kind: ModelType, options: EmbeddingOptions, on_progress: Callable[[float], None]
    ) -> Worker:
        return load_worker(spec.source, kind, options, model_id=spec.name, on_progress=on_progress)

    write_roberta(folder / "embedder")
    write_ranking_roberta(folder / "ranker")
    (folder / "chat").mkdir()
    (folder / "chat" / "config.json").write_text('{"model_type": "gpt_oss"}')
    (folder / "chat" / "model.safetensors").write_bytes(b"")
    found = config_file.parse(MODELS.format(folder=folder), folder=folder)
    models = MultiModelRegistry(
        Catalogue(found.models, others=found.others),
        talk,
        EngineOptions(),
        settings,
        default_name="chat",
        load_worker=read,
    )
    try:
        yield models
    finally:
        models.stop()


@contextmanager
def app_of_every_type(folder: Path, **chosen: Any) -> Iterator[App]:
    """The application over these models."""
    settings = Settings(**chosen)
    with models_of_every_type(folder, settings) as models:
        yield App(models, settings)
