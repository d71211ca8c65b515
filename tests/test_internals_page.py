"""docs/internals.md names files and bounds that there are, and the figures that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_backend import child_process
from mlx_backend.commands.output import MAX_WAITING_LINES
from mlx_backend.constraints import json_schema
from mlx_backend.device.memory import HOST_CACHE_SHARE, MAX_HOST_CACHE_BYTES, WORKING_SET_SHARE
from mlx_backend.engine.kv_cache_budget import MAX_PRESSED_CHUNK, RESERVED_REPLY_TOKENS
from mlx_backend.engine.mlx.batch_caches import MAX_MERGED_LENGTH
from mlx_backend.engine.mlx.disk_cache import MAX_HEADER_BYTES, MAX_QUEUED, MAX_QUEUED_BYTES
from mlx_backend.engine.mlx.prefill_queue import MAX_SPARE_LOGITS, MAX_SPARE_LOGITS_BYTES
from mlx_backend.images.loader import DECODING_BYTES, MAX_FETCHED
from mlx_backend.models import templates
from mlx_backend.server.connection_limits import ConnectionLimits

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
FOLDERS = (ROOT, ROOT / "mlx_backend", ROOT / "mlx_backend" / "engine" / "mlx")
CODE = "\n".join(
    f"{path.name}\n{path.read_text(encoding='utf-8')}" for path in (ROOT / "mlx_backend").rglob("*.py")
)
LIMITS = ConnectionLimits(max_body_bytes=1)


def row(name: str) -> str:
    [found] = [line for line in PAGE.splitlines() if line.startswith(f"| {name}")]
    return found


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)", PAGE))))
def test_every_file_on_the_page_is_there(named: str) -> None:
    assert any((folder / named).is_file() for folder in FOLDERS)


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"[ `├└▶](_?[a-z]+(?:_[a-z]+)+)(?=[ `,.(]|$)", PAGE, re.MULTILINE)))
)
def test_every_function_on_the_page_is_one(name: str) -> None:
    assert re.search(rf"\b(def|for|class) {name}\b|\b{name}\b *[:=]|{name}\.py", CODE), name


@pytest.mark.parametrize(("file", "name"), sorted(set(re.findall(r"`([a-z_/]+\.py): (\w+)`", PAGE))))
def test_who_enforces_a_bound_is_in_the_file_that_is_named(file: str, name: str) -> None:
    assert re.search(rf"\b{name}\b", (ROOT / "mlx_backend" / file).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("connections", [f"{LIMITS.max_connections:,}", f"{LIMITS.max_connections_of_address:,}"]),
        ("a request's head", [f"{LIMITS.max_head_bytes >> 10} KB"]),
        ("bodies that have arrived", [f"{LIMITS.max_held_bytes >> 20} MB"]),
        ("images that are being decoded", [f"{DECODING_BYTES >> 30} GB", f"{MAX_FETCHED} are fetched"]),
        (
            "a chat template's rendering",
            [
                f"{child_process.MAX_MEMORY >> 30} GB",
                f"{templates.MAX_SECONDS:g} s",
                f"{templates.MAX_CHARACTERS:,}",
            ],
        ),
        ("a JSON schema that is hard", [f"{json_schema.MAX_LENGTH:,}"]),
        (
            "results that are cached on the host",
            [f"{HOST_CACHE_SHARE:.0%}".replace("%", " %"), f"{MAX_HOST_CACHE_BYTES >> 20} MB"],
        ),
        ("log lines", [f"{MAX_WAITING_LINES:,}"]),
        ("a reply that outgrows", [f"{RESERVED_REPLY_TOKENS:,} tokens"]),
        ("padding of merged caches", [f"{MAX_MERGED_LENGTH:,} tokens"]),
        ("macOS is short of memory", [str(tokens) for tokens in MAX_PRESSED_CHUNK.values()]),
        ("logits of a prompt's", [f"{MAX_SPARE_LOGITS} rows", f"{MAX_SPARE_LOGITS_BYTES >> 20} MB"]),
        ("checkpoints that wait", [f"{MAX_QUEUED}, or {MAX_QUEUED_BYTES >> 30} GB"]),
        ("header of a checkpoint's file", [f"{MAX_HEADER_BYTES >> 20} MB"]),
    ],
)
def test_a_bound_has_the_figure_on_the_page(name: str, figures: list[str]) -> None:
    assert [each for each in figures if each not in row(name)] == []


def test_the_limit_of_all_memory_is_the_one_on_the_page() -> None:
    assert f"{WORKING_SET_SHARE:.0%}".replace("%", " %") + " of what the device recommends" in PAGE
