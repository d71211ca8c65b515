"""The package in an empty folder, with nothing installed but its own requirements: what Dify's container has."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import ROOT, Stub
from daemon import PluginProcess
from dify_view import text_of, user

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def container_python(plugin_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has what the package's requirements.txt names, in the versions of our lock, and no more."""
    folder = tmp_path_factory.mktemp("container")
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(re.findall(r"^([\w.-]+==[^\s;\\]+)", lock, re.MULTILINE)))
    # With pip, as `make setup` does it: where that found the packages, this does.
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install += ["-r", str(plugin_root / "requirements.txt"), "-c", str(constraints)]
    done = subprocess.run(install, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"pip could not install what the plugin needs:\n{done.stderr}"
    return python


def test_the_package_runs_with_its_own_requirements_and_without_mlx(
    plugin_root: Path, container_python: str, stub: Stub
) -> None:
    probe = "import importlib.util as u; print([n for n in ('mlx', 'mlx_lm', 'cheroot') if u.find_spec(n)])"
    found = subprocess.run([container_python, "-c", probe], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
    stub.will_stream({"reasoning_content": "why"}, {"content": "Hi"})
    with PluginProcess(plugin_root, python=container_python) as plugin:
        assert plugin.manifest["name"] == "dify_mlx_provider"
        chunks = list(plugin.invoke([user("hi")], credentials=stub.credentials))
    assert text_of(chunks) == "<think>\nwhy\n</think>\n\nHi"
