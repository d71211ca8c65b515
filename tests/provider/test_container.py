"""The package in an empty folder, with nothing installed but its own requirements: what Dify's container has."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from daemon import PluginProcess
from dify_view import text_of, user

from mlx_backend import version_and_commit

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Stub


def test_the_package_runs_with_its_own_requirements_and_without_mlx(
    plugin_root: Path, container_python: str, stub: Stub
) -> None:
    probe = "import importlib.util as u; print([n for n in ('mlx', 'mlx_lm', 'waitress') if u.find_spec(n)])"
    found = subprocess.run([container_python, "-c", probe], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
    stub.will_stream({"reasoning_content": "why"}, {"content": "Hi"})
    with PluginProcess(plugin_root, python=container_python) as plugin:
        assert plugin.manifest["name"] == "dify_mlx_provider"
        chunks = list(plugin.invoke([user("hi")], credentials=stub.credentials))
    assert any(f"MLX plugin {version_and_commit()}" in line for line in plugin.logs)
    assert text_of(chunks) == "<think>\nwhy\n</think>\n\nHi"
