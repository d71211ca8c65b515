"""The wheel and the source distribution hold what they should, and no more; both are built here, without a network."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mlx_backend
from mlx_backend.demo import MODEL_PATH, VISION_MODEL_PATH

ROOT = Path(mlx_backend.__file__).parents[1]
with_absolute_links = runpy.run_path(str(ROOT / "hatch_build.py"))["with_absolute_links"]
PACKAGES = ("mlx_backend", "dify_mlx_provider")
BUILD_TIME = "dify_mlx_provider/packaging/"
WITH_THE_SOURCES = {
    *PACKAGES,
    *("provider_assets", "readme", "manifest.yaml", "pyproject.toml", "hatch_build.py"),
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
    written = {"mlx_backend/COMMIT"} if mlx_backend.commit() else set()
    assert held == {name for name in sources if not name.startswith(BUILD_TIME)} | written
    assert {f"{package}/py.typed" for package in PACKAGES} <= held


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (
            "[→](docs/reasoning.md#who-decides)",
            "[→](https://example.com/a/b/blob/v1.2.3/docs/reasoning.md#who-decides)",
        ),
        (
            "![A chart](docs/pictures/bench.svg)",
            "![A chart](https://example.com/a/b/raw/v1.2.3/docs/pictures/bench.svg)",
        ),
        (
            '<img src="docs/pictures/a.png" alt="">',
            '<img src="https://example.com/a/b/raw/v1.2.3/docs/pictures/a.png" alt="">',
        ),
        (
            "[here](#get-it) [there](https://example.com/c.md)",
            "[here](#get-it) [there](https://example.com/c.md)",
        ),
    ],
)
def test_links_of_the_long_description_lead_to_the_files_of_its_version(written: str, shown: str) -> None:
    assert with_absolute_links(written, "https://example.com/a/b/", "1.2.3") == shown


def test_every_link_of_the_readme_is_absolute_once_there_is_an_address() -> None:
    text = with_absolute_links(
        (ROOT / "README.md").read_text(encoding="utf-8"), "https://example.com/a/b", "1.2.3"
    )
    targets = re.findall(r'(?:\]\(|src="|href=")([^)"]+)', text)
    assert targets
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []


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
    show = "import mlx_backend, dify_mlx_provider; print(mlx_backend.__file__); import mlx_backend.commands.serve; "
    show += "print(mlx_backend.version_and_commit())"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", show], env=environment, check=True, capture_output=True, text=True
    )
    file, version = done.stdout.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert version == mlx_backend.version_and_commit()


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
