"""The project's files agree with each other."""

import hashlib
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlx_backend
from mlx_backend.device.memory import (
    MIN_FOR_CACHES,
    MIN_FOR_THE_REST,
    WORKING_SET_SHARE,
    leaves_room_for_caches,
    room_for_weights,
)
from mlx_backend.models.spec import RECOMMENDED_MODELS

ROOT = Path(mlx_backend.__file__).parents[1]
HOLDING_CODE = ("mlx_backend", "dify_mlx_provider", "tests", ".ci")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_raised_in_one_place_and_dify_and_the_changelog_have_it_too(
    pyproject: dict[str, Any],
) -> None:
    version = mlx_backend.__version__
    assert "version" in pyproject["project"]["dynamic"]
    assert pyproject["tool"]["hatch"]["version"]["path"] == "mlx_backend/__init__.py"
    manifest = yaml.safe_load((ROOT / "manifest.yaml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    assert manifest["version"] == version
    assert newest is not None
    assert newest[1] == version


LOCKS = (
    "requirements.lock",
    *(f"tests/{folder}/requirements.txt" for folder in ("graphon", "soak", "page")),
)


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_names_versions_and_hashes_and_no_addresses(lock: str) -> None:
    text = (ROOT / lock).read_text(encoding="utf-8")
    assert "==" in text
    assert "--hash=sha256:" in text
    assert "://" not in text
    assert "--index-url" not in text


def test_every_stated_requirement_is_locked(pyproject: dict[str, Any]) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    locked = set(re.findall(r"^([a-z0-9-]+)==", lock, re.MULTILINE))
    stated = [
        *pyproject["project"]["dependencies"],
        *(r for extra in pyproject["project"]["optional-dependencies"].values() for r in extra),
        *pyproject["dependency-groups"]["dev"],
    ]
    names = {re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-") for requirement in stated}
    assert names <= locked


def test_what_users_install_is_bounded_below_and_above(pyproject: dict[str, Any]) -> None:
    """pip takes the newest versions that fit, years after a release; only developers' tools come by the lock alone."""
    project = pyproject["project"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    for requirement in [*project["dependencies"], *extras]:
        versions = requirement.partition(";")[0]
        assert "==" in versions or (">=" in versions and ",<" in versions), requirement


@pytest.mark.parametrize(
    ("made_from", "old", "new"),
    [
        ("pyproject.toml", '"werkzeug>=3.1,', '"werkzeug>=3.0,'),
        ("pyproject.toml", '"pillow>=11,', '"pillow>=10,'),
        ("tests/graphon/requirements.in", "graphon==", "graphon>="),
        ("tests/graphon/excluded.txt", "pandas", "polars"),
    ],
)
def test_a_stale_lock_is_noticed(tmp_path: Path, made_from: str, old: str, new: str) -> None:
    for name in (
        ".ci/lock.py",
        ".ci/install.py",
        "pyproject.toml",
        *LOCKS,
        "tests/graphon/requirements.in",
        "tests/graphon/excluded.txt",
        "tests/soak/requirements.in",
        "tests/page/requirements.in",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    check = [sys.executable, str(tmp_path / ".ci/lock.py"), "--check"]
    assert subprocess.run(check, check=False).returncode == 0
    changed = (tmp_path / made_from).read_text()
    assert old in changed
    (tmp_path / made_from).write_text(changed.replace(old, new))
    stale = subprocess.run(check, check=False, capture_output=True, text=True)
    assert stale.returncode == 1
    assert "make lock" in stale.stdout


def test_the_files_of_ours_that_pages_name_are_there() -> None:
    files = {path.relative_to(ROOT) for root in HOLDING_CODE for path in (ROOT / root).rglob("*.py")}
    folders = ("docs", "readme", "mlx_backend", "tests")
    pages = [*ROOT.glob("*.md"), *(page for folder in folders for page in (ROOT / folder).rglob("*.md"))]
    pages.remove(ROOT / "CHANGELOG.md")  # says what was
    assert len(pages) > 20
    missing = [
        f"{page.relative_to(ROOT)}: {named}"
        for page in pages
        for named in re.findall(r"`([\w./-]*\w\.py)\b", page.read_text(encoding="utf-8"))
        if not any(file.parts[-len(Path(named).parts) :] == Path(named).parts for file in files)
    ]
    assert missing == []


def test_the_homebrew_formula_names_the_release_that_it_installs(tmp_path: Path) -> None:
    (sdist := tmp_path / "a-1.2.3.tar.gz").write_bytes(b"sources")
    text = runpy.run_path(str(ROOT / ".ci/release.py"))["formula"]("1.2.3", "https://example.com/a/b/", sdist)
    assert 'url "https://example.com/a/b/releases/download/v1.2.3/a-1.2.3.tar.gz"' in text
    assert f'sha256 "{hashlib.sha256(b"sources").hexdigest()}"' in text
    assert 'homepage "https://example.com/a/b"' in text
    assert re.findall(r"(?<!#)\{\w+\}", text) == []


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ({}, "pyproject.toml has no address"),
        ({"version": "9.9.9"}, "CHANGELOG.md has no section [9.9.9]"),
        ({"version": "9.9.9"}, "manifest.yaml is not of version 9.9.9"),
    ],
)
def test_a_release_says_what_it_lacks(lacks: dict[str, str], sentence: str) -> None:
    lacking = runpy.run_path(str(ROOT / ".ci/release.py"))["lacking"]
    stated = {"version": mlx_backend.__version__, "source": None, **lacks}
    assert any(each.startswith(sentence) for each in lacking(**stated))


def test_the_site_has_every_page_and_no_link_that_leads_out_of_it() -> None:
    site = runpy.run_path(str(ROOT / ".ci/site/build.py"))
    listed = set(
        re.findall(r'"([\w/-]+\.md)"', (ROOT / ".ci/site/zensical.toml").read_text(encoding="utf-8"))
    )
    assert listed == set(site["PAGES"].values())
    for source, page in site["PAGES"].items():
        text = re.sub(
            r"^( *)```.*?^\1```", "", site["staged"](source, page, None), flags=re.MULTILINE | re.DOTALL
        )
        linked = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        known = {f"{'../' * page.count('/')}{each}" for each in site["PAGES"].values()}
        assert [each for each in linked if each not in known and "pictures/" not in each] == [], source


def test_the_models_that_a_refusal_names_are_those_of_the_readme_and_fit_the_macs_it_says() -> None:
    rows = re.findall(
        r"^\| (\d+) GB \| `([^`]+)`[^|]*\| ([\d.]+) GB \|", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    for (mac, repository, gigabytes), model in zip(rows, RECOMMENDED_MODELS, strict=True):
        assert repository == model.repository
        assert float(gigabytes) == pytest.approx(model.weights / 1e9, rel=0.05)
        share = 2 / 3 if int(mac) <= 36 else 3 / 4  # what macOS recommends for the GPU
        limit = int(int(mac) * share * WORKING_SET_SHARE * (1 << 30))
        assert leaves_room_for_caches(model.weights, room_for_weights(limit)), repository


def test_what_the_page_for_macs_advises_beside_docker_holds_the_model_and_leaves_the_rest() -> None:
    page = (ROOT / "docs/mac.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) GB \| `--memory-gb (\d+)`[^|]* \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(rows) == 3
    weights = {each.repository: each.weights for each in RECOMMENDED_MODELS}
    for mac, limit, repository in rows:
        assert weights[repository] + MIN_FOR_CACHES <= room_for_weights(int(limit) << 30), repository
        assert int(mac) - int(limit) >= 8 + (MIN_FOR_THE_REST >> 30), "for Docker and macOS"


@pytest.mark.parametrize("ci", ["true", None])
@pytest.mark.parametrize(("examples", "drawn"), [("9", "False True 9"), (None, "True False 15")])
def test_make_fuzz_draws_anew_and_keeps_what_fell_in_ci_too_and_the_tests_draw_the_same(
    ci: str | None, examples: str | None, drawn: str
) -> None:
    said = {"CI": ci, "FUZZ_EXAMPLES": examples, "PYTHONPATH": str(ROOT / "tests/fuzz")}
    environment = {name: value for name, value in {**os.environ, **said}.items() if value is not None}
    show = "import examples, hypothesis as h; s = h.settings(); print(s.derandomize, bool(s.database), s.max_examples)"
    done = subprocess.run(
        [sys.executable, "-c", show], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == drawn
