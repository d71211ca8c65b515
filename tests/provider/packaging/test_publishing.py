"""A package to be published: it says where its source is, and what the pull request says of it is true."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dify_mlx_provider.packaging import package

if TYPE_CHECKING:
    from pathlib import Path

ROOT = package.ROOT
SOURCE = "https://github.com/someone/dify-mlx-provider"
PAGES = ("README.md", "readme/README_ja_JP.md", "readme/README_zh_Hans.md")

# langgenius/dify-plugins, .github/pull_request_template.md, November 2026
HEADINGS = [
    *("Plugin information", "Submission type", "What changed", "Risk level", "Required checks"),
    *("Security and privacy notes", "Local validation", "Reviewer notes"),
]
FIELDS = ["Author", "Plugin name", "Version", "Source repository", "Contact"]
FOR_THE_PUBLISHER = ["I have read and followed", "I have read and comply"]
BOXES = [
    *(
        "I have read and followed",
        "I have read and comply",
        "I tested this plugin",
        "The package contains only",
    ),
    *("The package does not contain secrets", "The package does not contain executables"),
    *("The plugin README includes", "The plugin includes `PRIVACY.md`", "All user-facing text"),
]


@pytest.fixture(scope="module")
def plain() -> dict[str, bytes]:
    return package.collect(ROOT)


@pytest.fixture(scope="module")
def published() -> dict[str, bytes]:
    return package.collect(ROOT, SOURCE)


def manifest(files: dict[str, bytes]) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(files["manifest.yaml"])
    return read


def links(text: bytes) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text.decode())


def test_a_published_package_names_its_source_in_the_manifest_and_in_every_readme(
    plain: dict[str, bytes], published: dict[str, bytes]
) -> None:
    package.check(ROOT, published)
    assert manifest(published) == {**manifest(plain), "repo": SOURCE}
    for page in PAGES:
        assert links(published[page]) == [SOURCE]
        assert (
            published[page].replace(f"[`dify-mlx-provider`]({SOURCE})".encode(), b"`dify-mlx-provider`")
            == plain[page]
        )
    changed = {path for path in plain if plain[path] != published[path]}
    assert changed == {"manifest.yaml", *PAGES}


def test_a_package_that_is_not_published_names_no_address_and_no_placeholder(plain: dict[str, bytes]) -> None:
    package.check(ROOT, plain)
    assert "repo" not in manifest(plain)
    for page in (*PAGES, "PRIVACY.md"):
        assert links(plain[page]) == []
        assert not re.search(r"OWNER|TODO|example\.(com|org)", plain[page].decode())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "someone/dify-mlx-provider",
        "github.com/someone/dify-mlx-provider",
        "http://github.com/someone/dify-mlx-provider",
        "https://github.com",
        "https://github.com/someone",
        "https://localhost/someone/dify-mlx-provider",
        "https://someone:token@github.com/someone/dify-mlx-provider",
        "https://github.com/OWNER/dify-mlx-provider",
        "https://github.com/someone/dify-mlx-provider?tab=readme",
        'https://github.com/someone/x"\nverified: true',
    ],
)
def test_an_address_that_leads_to_no_repository_is_refused(address: str, plain: dict[str, bytes]) -> None:
    with pytest.raises(package.PackageError, match=re.escape(f"the repository is {address!r}")):
        package.with_repository(plain, address)


def test_the_address_is_that_of_the_project(sources: Path) -> None:
    project = sources / "pyproject.toml"
    text = project.read_text(encoding="utf-8")
    project.write_text(
        text.replace("\n[project.optional", f'\n[project.urls]\nSource = "{SOURCE}"\n\n[project.optional', 1)
    )
    assert manifest(package.collect(sources))["repo"] == SOURCE


def test_a_readme_that_lost_the_place_for_the_link_is_reported(plain: dict[str, bytes]) -> None:
    files = {**plain, "README.md": b"# MLX for Dify"}
    with pytest.raises(package.PackageError, match=r"README\.md does not introduce the project"):
        package.with_repository(files, SOURCE)


def test_the_readme_says_what_the_marketplace_wants_to_read(published: dict[str, bytes]) -> None:
    text = published["README.md"].decode()
    headings = re.findall(r"^## (.*)", text, re.MULTILINE)
    assert headings[:3] == ["1. Start the server", "2. Set it up in Dify", "3. The model's settings"]
    assert headings[-2:] == ["Troubleshooting", "Network and data"]
    for words in ("Server URL", "API key", "Dify Cloud", "PRIVACY.md", SOURCE):
        assert words in text


def test_only_one_module_opens_connections_and_it_has_a_timeout_and_follows_no_redirects(
    plain: dict[str, bytes],
) -> None:
    opener = "dify_mlx_provider/upstream/client.py"
    openers = {"requests.", "session.", "socket.", "urllib.request.", "http.client.", "subprocess.", "httpx."}
    for path, content in plain.items():
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(content)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            if path != opener:
                assert not called.startswith(tuple(openers)), f"{path}: {called}"
            elif called == "session.request":
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                assert given["allow_redirects"] == "False"
                assert given["timeout"] == "timeout"


@pytest.fixture(scope="module")
def pull_request() -> str:
    """The prepared text."""
    page = (ROOT / "docs/publishing.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```markdown\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return str(text)


def test_the_pull_request_has_every_part_of_the_marketplaces_form(pull_request: str) -> None:
    assert re.findall(r"^## (.*)", pull_request, re.MULTILINE) == HEADINGS
    assert re.findall(r"^- \*\*(.+)\*\*: \S", pull_request, re.MULTILINE) == FIELDS
    _, _, checks = pull_request.partition("## Required checks\n")
    boxes = re.findall(r"^- \[([ x])\] (.*)", checks, re.MULTILINE)
    assert len(boxes) == len(BOXES)
    for (ticked, box), begins in zip(boxes, BOXES, strict=True):
        assert box.startswith(begins)
        assert (ticked == "x") == (begins not in FOR_THE_PUBLISHER)


def test_the_pull_request_names_exactly_one_risk_and_what_makes_it_one(pull_request: str) -> None:
    risks = re.findall(r"^- \[[xX]\] (Low|Medium|High) risk\s*$", pull_request, re.MULTILINE)
    assert risks == ["Medium"]
    notes = pull_request.partition("## Security and privacy notes")[2]
    assert "User-controlled network destination" in notes
    assert "Not tested on Dify Cloud" in notes


def test_the_pull_request_tells_of_this_package(pull_request: str, plain: dict[str, bytes]) -> None:
    declared = manifest(plain)
    told = dict(re.findall(r"^- \*\*(.+)\*\*: (.+)", pull_request, re.MULTILINE))
    assert told["Author"] == declared["author"]
    assert told["Plugin name"] == declared["name"]
    assert told["Version"] == declared["version"]
    assert declared["resource"]["permission"] == {}
    assert declared["meta"]["minimum_dify_version"] in pull_request
    assert len(plain["requirements.txt"].splitlines()) == 3, "the text says three packages"
    steps = (ROOT / "docs/publishing.md").read_text(encoding="utf-8")
    assert f"{declared['author']}/{declared['name']}/" in steps
    assert f"dist/{declared['name']}-{declared['version']}.difypkg" in steps
