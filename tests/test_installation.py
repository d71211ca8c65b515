"""How the server was installed, what it was made from, and that nobody is told to install a name that is not ours."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_backend
from mlx_backend import installation

ROOT = Path(mlx_backend.__file__).resolve().parents[1]
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "Makefile",
    *(
        path
        for folder in (
            "mlx_backend",
            "dify_mlx_provider",
            "provider_assets",
            "docs",
            "readme",
            ".ci",
            "tests",
        )
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".yaml", ".html", ".js", ".rb"} and path != Path(__file__)
    ),
]
"""What a user may be shown, and what makes it."""

INSTALLERS = re.compile(
    r"\b(?:pip3? install|uv add|uv pip install|uv tool (?:install|run)|pipx (?:install|inject|run)|uvx|npx"
    r"|brew (?:install|tap)|docker (?:pull|run))((?: +[^\s`|&;)]+)+)"
)
ELSEWHERE = {"torch", "safetensors", "python", "haproxy", "chromium"}
"""Names that are others', and that no lock of ours has."""


def names_to_install(text: str) -> list[str]:
    """Return the names of packages that commands in a text install; a path, an option and a variable are none."""
    found = []
    for command in INSTALLERS.finditer(text):
        words = re.split(r",? #|, ", command[1])[0].split()
        if "--from" in words:  # what follows its value is a command
            words = words[words.index("--from") + 1 :][:1]
        for word in words:
            name = re.match(r"[A-Za-z0-9][\w.-]*", word.strip("'\""))
            if name and "/" not in word:
                found.append(name[0].rstrip("."))
        if "pipx inject" in command[0]:  # first comes what is installed already
            found = [name for name in found if name != installation.DISTRIBUTION]
    return found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("uv tool install .    # or: pipx install .", []),
        ("Run `uv tool install '.[vision]'` there.", []),
        ("`pip install 'dify-mlx-provider[vision]'`", ["dify-mlx-provider"]),
        ("uvx mlx-backend chat", ["mlx-backend", "chat"]),
        ("uvx --from . mlx-backend chat", []),
        ("uvx --from somebodys mlx-backend", ["somebodys"]),
        ("pipx inject dify-mlx-provider mlx-vlm==0.7.10 'pillow>=11'", ["mlx-vlm", "pillow"]),
        ("pip install --no-deps -r requirements.lock $< {wanted} ./dist/a.whl", ["requirements.lock"]),
    ],
)
def test_names_are_found_in_commands_that_install(text: str, names: list[str]) -> None:
    assert names_to_install(text) == names


def test_no_text_tells_anyone_to_install_a_name_that_is_not_ours() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE)) | ELSEWHERE
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in TEXTS
        for name in names_to_install(path.read_text(encoding="utf-8"))
        if name not in known
    }
    assert unknown == set()


def test_no_text_for_users_needs_a_command_of_a_dependency() -> None:
    """uv and pipx put only our own command on the PATH."""
    others = re.compile(
        r"`((?:hf|huggingface-cli|mlx_v?lm\.(?:convert|generate|chat|lora|fuse|manage))\b[^`]*)`"
    )
    found = [
        f"{path.relative_to(ROOT)}: {command}"
        for path in TEXTS
        if not path.is_relative_to(ROOT / "tests")
        for command in others.findall(path.read_text(encoding="utf-8"))
    ]
    assert found == []


METADATA = """Metadata-Version: 2.4
Name: dify-mlx-provider
Version: 0.2.0
Requires-Dist: mlx-lm
Requires-Dist: mlx-vlm==0.7.10; extra == 'vision'
Requires-Dist: pillow<14,>=11; extra == 'vision'
"""
FROM_FOLDER = {"url": "file:///home/me/clone", "dir_info": {}}
FROM_WHEEL = {"url": "https://example.com/a.whl", "archive_info": {}}
WANTED = "mlx-vlm==0.7.10 'pillow<14,>=11'"


@pytest.mark.parametrize(
    ("marker", "direct_url", "command"),
    [
        ("clone", None, "`make vision` in the server's clone"),
        (
            "uv-receipt.toml",
            FROM_FOLDER,
            "`uv tool install '.[vision]'` in the clone that the server was installed from",
        ),
        (
            "uv-receipt.toml",
            FROM_WHEEL,
            f'`uv pip install --python "$(uv tool dir)/dify-mlx-provider/bin/python" {WANTED}`',
        ),
        ("pipx_metadata.json", FROM_FOLDER, f"`pipx inject dify-mlx-provider {WANTED}`"),
        ("pyvenv.cfg", None, f"`python -m pip install {WANTED}` with the server's Python"),
    ],
)
def test_the_command_that_adds_vision_fits_how_the_server_was_installed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    marker: str,
    direct_url: dict[str, object] | None,
    command: str,
) -> None:
    installed = tmp_path / "dify_mlx_provider-0.2.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(METADATA)
    if direct_url:
        (installed / "direct_url.json").write_text(json.dumps(direct_url))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / marker).touch()
    package = ROOT / "mlx_backend" if marker == "clone" else tmp_path / "mlx_backend"
    assert installation.vision_command(package=package, prefix=tmp_path) == command


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def stated_in(clone: Path) -> str:
    """Return what the copy in a folder says that it is, where no git can be found."""
    (clone / "mlx_backend").mkdir(exist_ok=True)
    shutil.copy(ROOT / "mlx_backend/__init__.py", clone / "mlx_backend")
    code = "import mlx_backend; print(mlx_backend.version_and_commit())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=clone, env={"PATH": ""}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch", "some/branch")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "first")
    return folder


@pytest.mark.parametrize(
    "state",
    [(), ("pack-refs", "--all"), ("checkout", "--quiet", "--detach")],
    ids=["loose", "packed", "detached"],
)
def test_a_clone_says_its_commit_without_git(clone: Path, state: tuple[str, ...]) -> None:
    if state:
        git(clone, *state)
    head = git(clone, "rev-parse", "HEAD")
    assert stated_in(clone) == f"{mlx_backend.__version__} (commit {head[:10]})"


def test_a_worktree_says_the_commit_of_its_own_branch(clone: Path, tmp_path: Path) -> None:
    git(clone, "worktree", "add", "--quiet", "-b", "other", str(tmp_path / "worktree"))
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "second")
    head = git(tmp_path / "worktree", "rev-parse", "HEAD")
    assert stated_in(tmp_path / "worktree") == f"{mlx_backend.__version__} (commit {head[:10]})"


def test_what_is_no_clone_and_no_package_says_its_version_alone(tmp_path: Path) -> None:
    assert stated_in(tmp_path) == mlx_backend.__version__


def test_a_package_says_the_commit_that_it_was_built_from(clone: Path) -> None:
    (clone / "mlx_backend").mkdir()
    (clone / "mlx_backend/COMMIT").write_text("1a2b3c4d5e\n")
    assert stated_in(clone) == f"{mlx_backend.__version__} (commit 1a2b3c4d5e)"
