"""`mlx-backend load MODEL`: have a running server load a model, and wait for it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from mlx_backend.commands.running_server import RunningServer, add_server_options
from mlx_backend.commands.terminal import add_json_option, console, print_json

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="a name of a model that the server has")
    add_server_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace, what: str = "load") -> int:
    """Ask the server, and print what it says."""
    with closing(RunningServer.of(arguments)) as server:
        said = server.post_to_model(server.model_name(arguments.model), what)
    if arguments.json:
        print_json(said)
    else:
        console().print(f"{said['model']}: {said['message']}")
    return 0
