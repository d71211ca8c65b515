"""`mlx-backend inspect parse|render|sanitise`: what the server makes of a text, a request or a history.

Each is understood without `inspect` too. What it does is in its module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.commands import parse, render, sanitise

if TYPE_CHECKING:
    import argparse

VIEWS = {
    "parse": (parse, "show what a model's raw output means"),
    "render": (render, "show the prompt that a model would get for a chat request"),
    "sanitise": (sanitise, "show what the chat template would get for a posted history"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the three, with their options."""
    parser.description = "Show what the server makes of a text, a request or a history. Reads standard input."
    views = parser.add_subparsers(metavar="|".join(VIEWS), required=True)
    for name, (module, summary) in VIEWS.items():
        view = views.add_parser(name, help=summary)
        view.set_defaults(run_view=module.run, refuse=view.error)
        module.configure(view)


def run(arguments: argparse.Namespace) -> int:
    """Run one of the three."""
    status: int = arguments.run_view(arguments)
    return status
