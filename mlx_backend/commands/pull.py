"""`mlx-backend pull MODEL`: download a model into Hugging Face's cache, or go on where a download stopped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mlx_backend.commands.errors import INTERRUPTED, CommandError
from mlx_backend.commands.local_models import LocalModels, add_folder_options
from mlx_backend.commands.stop_signals import raise_interrupts
from mlx_backend.commands.terminal import add_json_option, console, print_json
from mlx_backend.device.memory import too_large
from mlx_backend.errors import EngineError
from mlx_backend.models.spec import RECOMMENDED_MODELS, is_repository

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "model", metavar="MODEL", help="a repository on Hugging Face, or a name such as gpt-oss:20b"
    )
    add_folder_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Download it, and show how far that is."""
    models = LocalModels(arguments)
    source = models.source(models.without_effort(arguments.model)[0])
    if not is_repository(source):
        found = models.find(source)
        source, folder = found.name, found.folder
    else:
        folder = fetched(source, models)
    if arguments.json:
        print_json({"name": source, "folder": str(folder)})
    else:
        console().print(f"{source} is here: {folder}")
    return 0


def fetched(repository: str, models: LocalModels) -> Path:
    """Return a repository's folder, downloaded if need be. Raises CommandError, also for what would not fit."""
    from mlx_backend.models.download import download
    from mlx_backend.models.folders import repository_bytes

    known = {each.repository: each.weights for each in RECOMMENDED_MODELS}
    weights = repository_bytes(repository) or known.get(repository)
    if weights is not None and weights > models.room:
        smaller = [each[:2] for each in reversed(RECOMMENDED_MODELS) if each.weights < weights]
        raise CommandError(
            too_large(repository, weights, models.memory, is_given=models.is_memory_given, smaller=smaller)
        )
    raise_interrupts()
    with _DownloadBar(repository) as bar:
        try:
            return download(repository, bar.advance)
        except EngineError as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            bar.stop()
            console(stderr=True).print(f"Stopped. `mlx-backend pull {repository}` goes on where it was.")
            os._exit(INTERRUPTED)  # threads that wait for the network are not waited for


class _DownloadBar:
    """A bar with bytes, speed and the time left, on standard error; nothing where that is no terminal."""

    def __init__(self, name: str) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(compact=True),
            console=console(stderr=True),
            disable=not console(stderr=True).is_terminal,
        )
        self._task = self._progress.add_task(name.rpartition("/")[2], total=None, visible=False)
        self.stop = self._progress.stop

    def __enter__(self) -> _DownloadBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, done: int, total: int) -> None:
        """Show that so many bytes of all are there. From any thread."""
        self._progress.update(self._task, completed=done, total=total, visible=True)
