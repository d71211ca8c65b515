"""`mlx-backend recommend`: which models suit this machine's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.commands.local_models import LocalModels, add_folder_options
from mlx_backend.commands.terminal import add_json_option, console, print_json, print_table
from mlx_backend.device.memory import format_bytes, leaves_room_for_caches
from mlx_backend.models.folders import format_size
from mlx_backend.models.spec import RECOMMENDED_MODELS

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_folder_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table, and what to type for the largest that fits."""
    models = LocalModels(arguments)
    room, here = models.room, {model.name for model in models.all}
    fitting = [each.repository for each in RECOMMENDED_MODELS if leaves_room_for_caches(each.weights, room)]
    if arguments.json:
        listed = [
            {
                "name": name,
                "bytes": size,
                "memory": {str(32 << 10): size + at_32k, str(128 << 10): size + at_128k},
                "fits": name in fitting,
                "downloaded": name in here,
            }
            for name, size, at_32k, at_128k in RECOMMENDED_MODELS
        ]
        print_json({"room": room, "models": listed, "best": fitting[-1] if fitting else None})
        return 0
    print_table(
        ("NAME", "DOWNLOAD", "MEMORY", "AT 32K", "AT 128K", "FITS", "HERE"),
        [
            (
                name,
                format_size(size),
                format_bytes(size),
                format_bytes(size + at_32k),
                format_bytes(size + at_128k),
                "yes" if name in fitting else "no",
                "yes" if name in here else "-",
            )
            for name, size, at_32k, at_128k in RECOMMENDED_MODELS
        ],
    )
    console().print(
        f"\nWeights may take {format_bytes(room)} of memory here, with caches next to them.", end=" "
    )
    if fitting:
        console().print(f"Begin with: mlx-backend chat {fitting[-1]}")
    else:
        console().print("None of them fits; mlx-backend chat mlx-demo shows how it works.")
    return 0
