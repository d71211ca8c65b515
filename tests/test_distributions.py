"""The wheel and the source distribution hold what they should, and no more; both are built here, without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mlx_backend
from mlx_backend.demo import MODEL_PATH, VISION_MODEL_PATH

ROOT = Path(mlx_backend.__file__).parents[1]
PACKAGES = ("mlx_backend", "dify_mlx_provider")
BUILD_TIME = "dify_mlx_provider/packaging/"
WITH_THE_SOURCES = {
    *PACKAGES,
    *("provider_assets", "readme", "manifest.yaml", "pyproject.toml"),
    *("README.md", "CHANGELOG.md", "LICENSE", "PRIVACY.md", "SECURITY.md"),
    *("PKG-INFO", ".gitignore"),  # hatchling adds these
}


def build(root: Path, output: Path, target: str) -> Path:
    """The file that hatchling makes of a tree."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(output)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (built,) = output.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(build(ROOT, folder, "sdist")) as packed:
        packed.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as packed:
        return set(packed.namelist())


def test_the_wheel_holds_the_two_packages_without_what_packs_the_plugin(wheel: Path) -> None:
    held = {name for name in files(wheel) if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == {name for name in sources if not name.startswith(BUILD_TIME)}
    assert {f"{package}/py.typed" for package in PACKAGES} <= held


def test_the_wheel_holds_the_weights_byte_for_byte_and_nothing_that_made_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        held = {name for name in packed.namelist() if name.startswith("mlx_backend/demo/")}
        for folder in (MODEL_PATH, VISION_MODEL_PATH):
            for path in folder.iterdir():
                assert packed.read(path.relative_to(ROOT).as_posix()) == path.read_bytes()
    assert [name for name in held if name.endswith(".py")] == ["mlx_backend/demo/__init__.py"]


def test_what_is_installed_from_the_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path)
    show = "import mlx_backend, dify_mlx_provider; print(mlx_backend.__file__); import mlx_backend.commands.serve"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", show], env=environment, check=True, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_the_source_distribution_holds_what_the_wheel_and_the_plugin_are_made_from(sources: Path) -> None:
    assert {path.name for path in sources.iterdir()} == WITH_THE_SOURCES


def test_the_wheel_and_the_plugin_made_of_the_source_distribution_are_those_made_of_the_clone(
    sources: Path, wheel: Path, tmp_path: Path
) -> None:
    assert files(build(sources, tmp_path / "wheel", "wheel")) == files(wheel)
    plugins = []
    for number, root in enumerate((ROOT, sources)):
        plugin = tmp_path / f"{number}.difypkg"
        command = [sys.executable, "-m", "dify_mlx_provider.packaging.package", "--output", str(plugin)]
        subprocess.run(command, cwd=root, check=True, capture_output=True)
        plugins.append(plugin.read_bytes())
    assert plugins[0] == plugins[1]
