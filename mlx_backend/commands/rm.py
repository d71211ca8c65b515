"""`mlx-backend rm MODEL`: delete a model from this machine, after saying how much that frees."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from mlx_backend.commands.errors import CommandError
from mlx_backend.commands.local_models import LocalModel, LocalModels, add_folder_options
from mlx_backend.commands.terminal import add_json_option, confirmed, console, is_interactive, print_json
from mlx_backend.models.folders import format_size

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", nargs="+", help="a model's name, as `list` has it")
    parser.add_argument("-y", "--yes", action="store_true", help="delete without asking")
    add_folder_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask, and delete."""
    models = LocalModels(arguments)
    chosen = list(
        dict.fromkeys(_deletable(name, models) for name in arguments.model)
    )  # all before one is deleted
    deleted = []
    for model, path in chosen:
        size = _bytes_below(path)
        what = "a link" if path.is_symlink() else format_size(size)
        question = f"Delete {model.name} ({what}, {path})?"
        if not arguments.yes:
            if not is_interactive():
                raise CommandError(f"{question} Nobody is here to answer: say so with -y.")
            if not confirmed(question):
                continue
        try:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        except OSError as error:
            raise CommandError(f"{path} cannot be deleted: {error.strerror}.") from None
        deleted.append({"name": model.name, "bytes": size})
        if not arguments.json:
            console().print(f"Deleted {model.name}: {format_size(size)} are free again.")
    if arguments.json:
        print_json({"deleted": deleted})
    return 0 if len(deleted) == len(chosen) else 1


def _deletable(name: str, models: LocalModels) -> tuple[LocalModel, Path]:
    """Return a listed model, and what has to be deleted. Raises CommandError."""
    model = models.find(name)
    if models.without_effort(name)[1] is not None:
        raise CommandError(f"{name} is {model.name} at one of its efforts: name the model itself.")
    if model.is_ours:
        raise CommandError(f"{model.name} comes with this package, and goes with it.")
    if model not in models.all:
        raise CommandError(
            f"{name} is a folder of yours: delete it yourself. `mlx-backend list` shows what rm deletes."
        )
    return model, _entry_of(model, models)


def _entry_of(model: LocalModel, models: LocalModels) -> Path:
    """Return what makes a model be listed: its link, its folder, or all that a cache holds of its repository."""
    for root in models.roots:
        for name in (model.name, f"models--{model.name.replace('/', '--')}"):
            entry = root.expanduser() / name
            if entry.is_dir() and model.folder.resolve().is_relative_to(entry.resolve()):
                return entry
    snapshots = model.folder.parent
    is_cached = snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    return snapshots.parent if is_cached else model.folder


def _bytes_below(path: Path) -> int:
    """Return the size of what is deleted; links count as nothing."""
    if path.is_symlink():
        return 0
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
