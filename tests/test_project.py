"""The project's files agree with each other."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlx_backend

ROOT = Path(mlx_backend.__file__).parents[1]


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_the_same_everywhere(pyproject: dict[str, Any]) -> None:
    version = pyproject["project"]["version"]
    manifest = yaml.safe_load((ROOT / "manifest.yaml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert mlx_backend.__version__ == version
    assert manifest["version"] == version
    assert newest is not None
    assert newest[1] == version


def test_the_lock_names_no_addresses() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in lock
    assert "--index-url" not in lock


def test_every_stated_requirement_is_locked(pyproject: dict[str, Any]) -> None:
    locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    stated = [
        *pyproject["project"]["dependencies"],
        *(r for extra in pyproject["project"]["optional-dependencies"].values() for r in extra),
        *pyproject["dependency-groups"]["dev"],
    ]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-") for requirement in stated}
    assert names <= locked


def test_a_stale_lock_is_noticed(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    for name in (".ci/lock.py", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    check = [sys.executable, str(tmp_path / ".ci/lock.py"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0
    changed = (tmp_path / "pyproject.toml").read_text().replace('"werkzeug>=3.1"', '"werkzeug>=3.0"')
    (tmp_path / "pyproject.toml").write_text(changed)
    stale = subprocess.run(check, check=False, capture_output=True, text=True)
    assert stale.returncode == 1
    assert "make lock" in stale.stdout
