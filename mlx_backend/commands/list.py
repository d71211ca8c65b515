"""`mlx-backend list`: the models on this machine, what each can do, and whether it fits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlx_backend.commands.local_models import LocalModels, add_folder_options
from mlx_backend.commands.terminal import add_json_option, print_json, print_table
from mlx_backend.device.memory import leaves_room_for_caches
from mlx_backend.models.folders import format_size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from mlx_backend.commands.local_models import LocalModel
    from mlx_backend.models.description import ModelDescription

HEAD = ("NAME", "SIZE", "FAMILY", "EFFORT", "TOOLS", "SEES", "FITS", "LAST USED")
_UNITS = ((365 * 86_400, "year"), (30 * 86_400, "month"), (86_400, "day"), (3600, "hour"), (60, "minute"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_folder_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    models = LocalModels(arguments)
    if arguments.json:
        print_json({"models": [model.as_json(models.room) for model in models.all]})
        return 0
    print_models(models.all, models)
    return 0


def print_models(shown: Sequence[LocalModel], models: LocalModels, *, numbered: bool = False) -> None:
    """Print a table of models, with numbers to choose by if one is to be chosen."""
    rows = []
    for number, model in enumerate(shown, start=1):
        described, size = model.description, model.files.weight_bytes
        rows.append(
            (
                *([str(number)] if numbered else []),
                model.name,
                format_size(size),
                model.files.architecture,
                efforts(described),
                yes(described, "tools"),
                yes(described, "vision"),
                "yes" if leaves_room_for_caches(size, models.room) else "no",
                "included" if model.is_ours else ago(time.time() - model.last_used),
            )
        )
    print_table(("", *HEAD) if numbered else HEAD, rows)


def efforts(description: ModelDescription) -> str:
    """Write a model's effort levels, its default one marked; what it is instead, if it does not chat."""
    if description.kind != "llm":
        return description.kind
    return marked_levels(description.efforts, description.default_effort) or "-"


def marked_levels(levels: Iterable[str], default: str | None) -> str:
    """Write effort levels, the default one marked."""
    return " ".join(f"{each}*" if each == default else str(each) for each in levels)


def yes(description: ModelDescription, capability: str) -> str:
    """Return whether a model has a capability, in a word."""
    return "yes" if capability in description.capabilities else "-"


def ago(seconds: float) -> str:
    """Write how long ago something was, in its largest unit."""
    for unit, name in _UNITS:
        if count := int(seconds // unit):
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
