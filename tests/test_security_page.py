"""SECURITY.md names options that there are, and limits as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_backend.child_process import MAX_MEMORY
from mlx_backend.commands.options import options_by_group
from mlx_backend.commands.output import MAX_WAITING_LINES
from mlx_backend.constraints.json_schema import MAX_LENGTH
from mlx_backend.constraints.sandbox import MAX_SECONDS
from mlx_backend.conversation.json_values import MAX_DEPTH
from mlx_backend.images.loader import DECODING_BYTES
from mlx_backend.models import templates
from mlx_backend.models.templates import (
    MAX_CHARACTERS,
    MAX_PROCESSES,
    MAX_PROCESSES_OF_TEMPLATE,
    MAX_SOURCE,
    TRIAL_SECONDS,
)
from mlx_backend.registry.model_pool import MAX_QUEUED
from mlx_backend.server.connection_limits import ConnectionLimits
from mlx_backend.server.preparations import MAX_LARGE
from mlx_backend.server.wsgi_server import SPARE_THREADS
from mlx_backend.settings import Settings

PAGE = (Path(__file__).resolve().parents[1] / "SECURITY.md").read_text(encoding="utf-8")
S, R = Settings(), ConnectionLimits(max_body_bytes=1)
WORDS = {2: "two", 5 * 60: "5 minutes", 10 * 60: "ten minutes"}


def test_every_option_on_the_page_is_one() -> None:
    known = {option for options in options_by_group().values() for _, _, option, _ in options}
    assert set(re.findall(r"`(--[a-z-]+)`", PAGE)) <= known


@pytest.mark.parametrize(
    ("row", "limits"),
    [
        ("requests that are generated at the same time", [str(S.max_concurrent)]),
        ("requests that wait, and how long", [str(S.max_queue), WORDS[int(S.queue_seconds)]]),
        (
            "a request's body",
            [
                f"{S.max_body_bytes >> 20} MB and {S.max_images_bytes >> 20} MB of images",
                f"{MAX_DEPTH} levels",
                f"{R.max_held_bytes >> 20} MB",
            ],
        ),
        ("messages and tools of a request", [f"{S.max_messages:,}", f"{S.max_tools:,}"]),
        ("replies to a request", [str(S.max_choices)]),
        (
            "images of a request",
            [
                str(S.max_images),
                f"{S.max_image_bytes >> 20} MB",
                f"{S.max_image_pixels // 10**6} million",
                f"{S.image_seconds:g} seconds",
                f"{DECODING_BYTES >> 30} GB",
            ],
        ),
        ("preparing a request", [f"{S.prepare_seconds:g} seconds", f"{WORDS[MAX_LARGE]} at a time"]),
        (
            "a chat template",
            [
                f"{MAX_SOURCE:,} characters; {TRIAL_SECONDS:g} seconds",
                f"{templates.MAX_SECONDS:g} for a prompt",
                f"{MAX_CHARACTERS:,}",
                f"{MAX_MEMORY >> 30} GB",
                {3: "one model has three", 6: "all have six"}[MAX_PROCESSES_OF_TEMPLATE],
                {3: "one model has three", 6: "all have six"}[MAX_PROCESSES],
            ],
        ),
        ("a JSON schema or pattern", [f"{MAX_LENGTH:,}", f"{MAX_SECONDS} seconds", f"{MAX_MEMORY >> 30} GB"]),
        (
            "receiving a request",
            [
                f"{R.head_seconds:g} s for its head",
                f"{R.stalled_seconds:g} s",
                f"every {R.min_bytes_per_second >> 10} KB",
                f"{R.body_seconds / 60:g} minutes",
            ],
        ),
        (
            "a client that reads its answer slowly",
            [f"{R.unread_seconds:g} s", f"{R.min_bytes_read_per_second} bytes"],
        ),
        ("requests of one client", [f"those two together and {SPARE_THREADS // 4}"]),
        ("idle connections", [f"{R.idle_seconds:g} s"]),
        ("connections |", [f"{R.max_connections:,}", f"{R.max_connections_of_address:,}"]),
        ("waiting for a model to load", [WORDS[int(S.load_seconds)], f"{MAX_QUEUED} models"]),
        ("log lines that no one reads", [f"{MAX_WAITING_LINES:,}"]),
    ],
)
def test_every_limit_on_the_page_is_the_one_that_holds(row: str, limits: list[str]) -> None:
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    for limit in limits:
        assert limit in line
