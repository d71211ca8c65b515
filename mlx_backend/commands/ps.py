"""`mlx-backend ps`: the models that a running server has in memory, and what they do."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.running_server import RunningServer, add_server_options
from mlx_backend.commands.terminal import add_json_option, console, print_json, print_table
from mlx_backend.device.memory import format_bytes

if TYPE_CHECKING:
    import argparse

NEVER_SECONDS = 10 * 365 * 86_400


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_server_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    with closing(RunningServer.of(arguments)) as server:
        health, listed = server.health(), server.get("/api/ps")["models"]
    in_memory = {each["name"].removesuffix(":latest"): each for each in listed}
    models = [{**entry, **_memory(in_memory.get(entry["model"]))} for entry in health.get("models", [])]
    if arguments.json:
        print_json({"url": server.url, "status": health["status"], "models": models})
        return 0
    if not models:
        console().print(f"The server at {server.url} has no model in memory.")
        return 0
    head = ("NAME", "STATE", "MEMORY", "RUNNING", "WAITING", "UNLOADED")
    print_table(head, map(_row, models))
    return 0


def _memory(entry: dict[str, Any] | None) -> dict[str, Any]:
    return {"bytes": entry["size"], "expires_at": entry["expires_at"]} if entry else {}


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    state = f"{model['state']} {model['percent']} %" if "percent" in model else model["state"]
    size = format_bytes(model["bytes"]) if "bytes" in model else ""
    return (
        model["model"],
        state,
        size,
        str(model["running"]),
        str(model["waiting"]),
        _when(model.get("expires_at")),
    )


def _when(expires_at: str | None) -> str:
    if not expires_at:
        return ""
    left = (datetime.fromisoformat(expires_at) - datetime.now(UTC)).total_seconds()
    return "stays" if left > NEVER_SECONDS else f"in {max(0, left):.0f} s, unless used"
