"""The wall clock may jump: it is read where a date is wanted, and for nothing that waits, expires or is measured."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATES = {
    "mlx_backend/api/ollama/models.py": "`expires_at` of a model in memory",
    "mlx_backend/api/ollama/addresses.py": "`created_at` of a reply",
    "mlx_backend/api/ollama/stream.py": "`created_at` of a line",
    "mlx_backend/api/openai/stream.py": "`created` of a reply",
    "mlx_backend/commands/list.py": "how long ago a model was used",
    "mlx_backend/commands/ps.py": "how long a model stays, of the date that the server says",
    "mlx_backend/models/folders.py": "whether a file was changed just now, by its date",
    "mlx_backend/server/app.py": "`created` of the models",
    "mlx_backend/server/request_log.py": "`at` of a request that has ended",
    "mlx_backend/api/responses/compaction.py": "`created_at` of a compacted conversation",
    "mlx_backend/api/responses/stream.py": "`created_at` and `completed_at` of a response",
    "mlx_backend/models/template_program.py": "the date in a chat template",
    "mlx_backend/engine/mlx/disk_cache.py": "the age of a file, which the file system gives as a date",
}
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}


def wall_clocks(path: Path) -> list[int]:
    """The lines in which a module reads the wall clock."""
    lines = []
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)) if "time" in text else ():
        match node:
            case ast.Attribute(value=ast.Name(id=module) | ast.Attribute(attr=module), attr=name):
                if (module, name) in WALL_CLOCKS:
                    lines.append(node.lineno)
            case ast.ImportFrom(module="time", names=names) if {"time", "time_ns"} & {
                each.name for each in names
            }:
                lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("package", ["mlx_backend", "dify_mlx_provider"])
def test_only_dates_are_read_from_it(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in (ROOT / package).rglob("*.py")
        if "demo" not in path.parts and (lines := wall_clocks(path))
    }
    assert found.keys() == {path for path in DATES if path.startswith(package)}, found
