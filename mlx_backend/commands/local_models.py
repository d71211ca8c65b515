"""The models on this machine: those in Hugging Face's cache and in --models-dir, and the demonstration models.

What commands say of a model that no server has to run for. Loads no weights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.errors import CommandError, argument
from mlx_backend.declaration import SettingError, declared, variable_of
from mlx_backend.demo import DEMOS, demo_path
from mlx_backend.device.memory import leaves_room_for_caches, room_for_weights
from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.names import matching, source_of, split_effort

if TYPE_CHECKING:
    import argparse

    from mlx_backend.models.description import ModelDescription
    from mlx_backend.models.files import ModelFiles


_MEMORY = declared(EngineOptions)["memory_bytes"].kind


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """Add --models-dir and --memory-gb, as `serve` has them."""
    parser.add_argument(
        "--models-dir",
        metavar="DIR",
        action="append",
        type=Path,
        help=f"folder of models next to Hugging Face's cache (${variable_of('--models-dir')}); repeatable",
    )
    parser.add_argument(
        "--memory-gb",
        metavar="GB",
        type=argument(_MEMORY),
        help=f"memory for models and caches (${variable_of('--memory-gb')}; default: what the system recommends)",
    )


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine. `source` is what `serve` loads it by: its repository, or its folder."""

    name: str
    folder: Path
    source: str

    @property
    def is_ours(self) -> bool:
        """Whether it is one of the demonstration models."""
        return self.folder == demo_path(self.name)

    @cached_property
    def files(self) -> ModelFiles:
        """What its files say of themselves."""
        from mlx_backend.models.folders import model_files

        return model_files(self.folder)

    @cached_property
    def description(self) -> ModelDescription:
        """What it can do."""
        from mlx_backend.chat.capabilities import FolderDescriber
        from mlx_backend.chat.model_settings import ModelSettings
        from mlx_backend.embedding.embedding_config import EmbeddingOptions, folder_context_length
        from mlx_backend.models.description import ModelDescription
        from mlx_backend.models.engine_options import EngineOptions
        from mlx_backend.models.files import detect_model_type

        kind = detect_model_type(self.folder, self.name)
        if kind != "llm":
            length = folder_context_length(self.folder, self.name, EmbeddingOptions())
            return ModelDescription(kind=kind, context_length=length, capabilities=(kind,))
        return FolderDescriber().describe(self.folder, EngineOptions(), ModelSettings())

    @cached_property
    def last_used(self) -> float:
        """When its weights were last read, in seconds since 1970, as the file system remembers it."""
        from mlx_backend.models.folders import weight_files

        return max((file.stat().st_atime for file in weight_files(self.folder)), default=0.0)

    def as_json(self, room: int) -> dict[str, Any]:
        """Return what is known of it, for programs; `room` is how many bytes weights may take."""
        description = self.description
        return {
            "name": self.name,
            "folder": str(self.folder),
            "bytes": self.files.weight_bytes,
            "family": self.files.architecture,
            "quantization": self.files.quantization,
            "type": description.kind,
            "context_length": description.context_length,
            "capabilities": list(description.capabilities),
            "efforts": [str(effort) for effort in description.efforts],
            "default_effort": description.default_effort,
            "fits": leaves_room_for_caches(self.files.weight_bytes, room),
            "last_used": self.last_used,
        }


class LocalModels:
    """The models on this machine, and the memory there is for them, as the options say."""

    def __init__(self, arguments: argparse.Namespace | None = None) -> None:
        """Without arguments the environment alone says where they are."""
        given = getattr(arguments, "models_dir", None)
        variable = os.environ.get(variable_of("--models-dir"), "")
        self.roots: list[Path] = given or [Path(each.strip()) for each in variable.split(",") if each.strip()]
        self._memory_bytes: int | None = getattr(arguments, "memory_gb", None)

    @cached_property
    def all(self) -> list[LocalModel]:
        """Every one that can be served, by name; the demonstration models come last."""
        from mlx_backend.registry.catalogue import Catalogue
        from mlx_backend.registry.errors import ConfigurationError

        try:
            catalogue = Catalogue([], models_dirs=self.roots, hugging_face_cache=True)
        except ConfigurationError as error:
            raise CommandError(str(error)) from None
        found = [
            LocalModel(spec.name, catalogue.folder(spec) or Path(spec.source), spec.source)
            for spec in catalogue.models()
        ]
        found.sort(key=lambda model: model.name.casefold())
        return found + [
            LocalModel(name, path, name) for name in DEMOS if (path := demo_path(name)) is not None
        ]

    def named(self, name: str) -> LocalModel | None:
        """Return the one that has this very name."""
        return next((model for model in self.all if model.name == name), None)

    def source(self, name: str) -> str:
        """Return the folder, repository or demonstration model that a name means, here or not."""
        try:
            return source_of(name, [model.name for model in self.all])
        except EngineError as error:
            raise CommandError(str(error)) from None

    def without_effort(self, name: str) -> tuple[str, str | None]:
        """Return a name without the effort that it ends with, and that effort; the whole name where a model has it."""
        if Path(name).exists() or matching(name, [model.name for model in self.all]):
            return name, None
        return split_effort(name)

    def find(self, name: str) -> LocalModel:
        """Return the model of that name, or in that folder. Raises CommandError if it is not on this machine.

        An effort that the name ends with says nothing of the model.
        """
        source = self.source(self.without_effort(name)[0])
        if (found := self.named(source)) is not None:
            return found
        folder = self.folder(source)
        from mlx_backend.models.folders import read_config

        try:
            read_config(folder, source)
        except EngineError as error:
            raise CommandError(str(error)) from None
        return LocalModel(folder.name, folder, str(folder))

    def folder(self, name: str) -> Path:
        """Return the folder of that name's model, or that folder itself, which need not hold a whole model."""
        source = self.source(self.without_effort(name)[0])
        if (found := self.named(source)) is not None:
            return found.folder
        folder = Path(source).expanduser().resolve()
        if not folder.is_dir():
            raise CommandError(f"{source} is not on this machine; `mlx-backend pull {source}` fetches it.")
        return folder

    @cached_property
    def memory(self) -> int:
        """How many bytes models and caches may take together."""
        if self._memory_bytes is not None:
            return self._memory_bytes
        variable = variable_of("--memory-gb")
        if written := os.environ.get(variable, "").strip():
            try:
                return int(_MEMORY.from_text(written))
            except SettingError as error:
                raise CommandError(f"{variable}: {error}.") from None
        from mlx_backend.device import this_device

        return this_device(blas="off").memory.limit

    @property
    def is_memory_given(self) -> bool:
        """Whether an option says how much memory there is."""
        return self._memory_bytes is not None or bool(os.environ.get(variable_of("--memory-gb")))

    @property
    def room(self) -> int:
        """How many bytes weights may take."""
        return room_for_weights(self.memory)
