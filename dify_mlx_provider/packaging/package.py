"""Write the plugin's package: `python -m dify_mlx_provider.packaging.package`.

A `.difypkg` is a zip of the plugin's files, without folder entries. It holds only what the plugin needs in Dify's
container: its own Python, the shared conversation core, the declarations, the icons (Dify reads them from `_assets/`
only), the texts, and the plugin's dependencies as both `pyproject.toml` and `requirements.txt`, because some daemons
read one and some the other. The server, MLX and the tests stay out.

Where the source is published, `Source` of `[project.urls]`, is named in the manifest and linked to in the readmes.
Without it they name no address. The commit is written into a file, where it is known.

A package that Dify would refuse is not written: the SDK's own models read it (sdk_check.py); what Dify's daemon and its
marketplace also refuse, and what failed at a call, is checked here. The same sources always give the same bytes,
whatever the folder, clock, language or umask. Does not import Dify's SDK itself.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = "manifest.yaml"
INIT = "mlx_backend/__init__.py"

MAX_BYTES = 1_000_000
"""Bytes of all files, which keeps the zip below 1 MB; a plugin without weights comes nowhere near."""

ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time a zip can hold: the time of packing must not show."""

RENAMED = {"README.md": "readme/README.md"}
"""Files whose path in the package is not their path in the repository."""

SOURCE_FILES = (
    MANIFEST,
    "LICENSE",
    "PRIVACY.md",
    "readme/README_ja_JP.md",
    "readme/README_zh_Hans.md",
    INIT,
)
GLOBS = ("dify_mlx_provider/**/*.py", "mlx_backend/conversation/**/*.py", "provider_assets/**/*.yaml")
ICONS = "provider_assets/icons"
MODELS = "provider_assets/llm/"
EXCLUDED = "dify_mlx_provider/packaging/"
"""What is needed to make the package, and not in it."""

PROJECT = "`dify-mlx-provider`"
"""The project's name in every readme, first of all where it is introduced."""

REPOSITORY = re.compile(
    r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(:\d+)?(/[\w.~-]+){2,}/?", re.ASCII | re.IGNORECASE
)
PLACEHOLDER = "OWNER"
"""What docs/publishing.md has where the publisher's name belongs."""

AUTHOR = re.compile(r"(?!.*(?:dify|langgenius))[a-z0-9_-]{1,64}")
VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){2}(-\w{1,16})?", re.ASCII)
README = re.compile(r"readme/README_(zh_Hans|ja_JP|pt_BR)\.md")
CHINESE = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
BOUNDED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(>=[\d.]+,<|==|~=)[\d.]+")
TEMPLATE_ICON = b"DIFY_MARKETPLACE_TEMPLATE_ICON_DO_NOT_USE"
PORTABLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")


class PackageError(Exception):
    """The sources make no package that Dify accepts. The text has one line per fault, for people."""


def collect(root: Path, repository: str | None = None) -> dict[str, bytes]:
    """Return the package's files, path to content, sorted by path.

    `repository`: the address of its source, if it is not that of the project.
    """
    sources = {path: root / path for path in SOURCE_FILES}
    sources |= {packed: root / path for packed, path in RENAMED.items()}
    sources |= {
        path.relative_to(root).as_posix(): path for pattern in GLOBS for path in sorted(root.glob(pattern))
    }
    sources |= {f"_assets/{path.name}": path for path in sorted((root / ICONS).glob("*.svg"))}
    sources = {packed: path for packed, path in sources.items() if not packed.startswith(EXCLUDED)}
    missing = [path for path in sources.values() if not path.is_file()]
    if missing:
        raise PackageError("\n".join(f"{path.relative_to(root)} is missing" for path in missing))
    files = {path: source.read_bytes() for path, source in sources.items()}
    project = _project(root)
    files |= _dependencies(project)
    if commit := runpy.run_path(str(root / INIT))["commit"]():
        files["mlx_backend/COMMIT"] = f"{commit}\n".encode()
    repository = repository or project.get("urls", {}).get("Source")
    if repository is not None:
        files |= with_repository(files, repository)
    return dict(sorted(files.items()))


def with_repository(files: Mapping[str, bytes], address: str) -> dict[str, bytes]:
    """Return the manifest and the readmes with the address of the source. Raises PackageError if it is none."""
    if not REPOSITORY.fullmatch(address) or PLACEHOLDER in address:
        raise PackageError(
            f"the repository is {address!r}; say where the source is, as https://github.com/someone/dify-mlx-provider"
        )
    linked = f"[{PROJECT}]({address})"
    changed = {MANIFEST: files[MANIFEST] + f'repo: "{address}"\n'.encode()}
    for path in ("README.md", *(path for path in files if README.fullmatch(path))):
        text = files[path].decode()
        if PROJECT not in text:
            raise PackageError(
                f"{path} does not introduce the project as {PROJECT}, where its address belongs"
            )
        changed[path] = text.replace(PROJECT, linked, 1).encode()
    return changed


def check(root: Path, files: Mapping[str, bytes]) -> None:
    """Raise PackageError with every fault that Dify or its marketplace would find."""
    found = (
        [*package_faults(files)]
        or sdk_faults(files)
        or [*declaration_faults(files, version=_project(root)["version"])]
    )
    if found:
        raise PackageError("\n".join(found))


def sdk_faults(files: Mapping[str, bytes]) -> list[str]:
    """Return what Dify's SDK finds wrong with a package, a line a fault."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(files, Path(folder))
        done = subprocess.run(
            [sys.executable, "-P", Path(__file__).with_name("sdk_check.py")],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONUTF8": "1"},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line]
    return lines or ([done.stderr] if done.returncode else [])


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files as Dify would unpack them."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def identity(files: Mapping[str, bytes]) -> str:
    """Return Dify's identifier of the package: `author/name:version@checksum`."""
    manifest = _manifest(files)
    checksum = hashlib.sha256()
    for path in sorted(files):
        checksum.update(hashlib.sha256(path.encode()).digest())
        checksum.update(hashlib.sha256(files[path]).digest())
    return f"{manifest['author']}/{manifest['name']}:{manifest['version']}@{checksum.hexdigest()}"


def write(files: Mapping[str, bytes], output: Path) -> None:
    """Write the zip, the same bytes for the same files on every system.

    Nothing is compressed: zlib's versions differ in their output, and there is little to gain.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(output, "w", zipfile.ZIP_STORED) as package:
        for path in sorted(files):
            entry = zipfile.ZipInfo(path, date_time=ZIP_EPOCH)
            entry.create_system = 3  # Unix, on every system: the mode below depends on it
            entry.external_attr = 0o100644 << 16
            package.writestr(entry, files[path])


def build(root: Path = ROOT, output: Path | None = None) -> tuple[Path, str]:
    """Collect, check and write the package; return its path and its identity."""
    files = collect(root)
    check(root, files)
    manifest = _manifest(files)
    output = output or root / "dist" / f"{manifest['name']}-{manifest['version']}.difypkg"
    write(files, output)
    return output, identity(files)


def write_folder(root: Path, folder: Path) -> None:
    """Collect, check, and write the files as Dify would unpack them; for debugging, and for Dify's own tools."""
    files = collect(root)
    check(root, files)
    folder.mkdir(parents=True)
    write_files(files, folder)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. The exit status is 1, with the faults on standard error, if nothing was written."""
    parser = argparse.ArgumentParser(
        prog="python -m dify_mlx_provider.packaging.package",
        description="Write the Dify plugin's package (.difypkg).",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to (default: dist/NAME-VERSION.difypkg)"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="write the files into this new folder instead, not packed"
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.folder:
            write_folder(ROOT, arguments.folder)
            return 0
        path, name = build(ROOT, arguments.output)
    except (PackageError, OSError) as error:
        print(f"not packed: {error}", file=sys.stderr)
        return 1
    print(f"{path}  {path.stat().st_size / 1024:.0f} KiB\n{name}")
    return 0


def _manifest(files: Mapping[str, bytes]) -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load(files[MANIFEST])
    return manifest


def _project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {**project, "version": runpy.run_path(str(root / INIT))["__version__"]}


def _dependencies(project: Mapping[str, Any]) -> dict[str, bytes]:
    """Return pyproject.toml and requirements.txt, both from the `plugin` extra.

    This pyproject.toml has no build system: with one, the daemon would build and install the plugin.
    """
    wanted: list[str] = project["optional-dependencies"]["plugin"]
    lines = [
        "[project]",
        f'name = "{project["name"]}"',
        f'version = "{project["version"]}"',
        f'requires-python = "{project["requires-python"]}"',
        "dependencies = [",
        *(f'  "{requirement}",' for requirement in wanted),
        "]",
    ]
    return {
        "pyproject.toml": "\n".join([*lines, ""]).encode(),
        "requirements.txt": "\n".join([*wanted, ""]).encode(),
    }


def package_faults(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield what Dify's daemon or its marketplace would refuse in the package as a whole."""
    for path in files:
        if not PORTABLE.fullmatch(path) or ".." in path:
            yield f"{path!r} is not a path that every system can unpack"
        if path.startswith("readme/") and not README.fullmatch(path):
            yield f"{path}: Dify looks for README_zh_Hans.md, README_ja_JP.md and README_pt_BR.md"
    for path in ("README.md", "PRIVACY.md"):
        if CHINESE.search(files[path].decode()):
            yield f"{path} holds Chinese characters; the marketplace wants it in English (readme/ is for others)"
    requirements = files["requirements.txt"].decode().splitlines()
    if not any(line.startswith("dify-plugin") for line in requirements):
        yield "requirements.txt: dify-plugin is missing, and without it Dify cannot start the plugin"
    for line in requirements:
        if not BOUNDED.fullmatch(line):
            yield f"requirements.txt: {line!r} must be a package of the index with an upper bound, as name>=1.2,<2"
    for path, content in files.items():
        if path.startswith("_assets/") and TEMPLATE_ICON in content:
            yield f"{path} is the icon of Dify's plugin template"
    size = sum(map(len, files.values()))
    if size >= MAX_BYTES:
        yield f"{size} bytes unpacked are more than a plugin should hold ({MAX_BYTES})"


def declaration_faults(files: Mapping[str, bytes], *, version: str) -> Iterator[str]:
    """Yield what others would refuse in declarations that Dify's SDK accepts; `version` is the project's."""
    manifest = _manifest(files)
    if not AUTHOR.fullmatch(manifest["author"]):
        yield f"author is {manifest['author']!r}; Dify wants a-z, 0-9, _ and -, without dify and langgenius"
    if not VERSION.fullmatch(manifest["version"]):
        yield f"version is {manifest['version']!r}; Dify wants one such as 1.2.3 or 1.2.3-rc1"
    elif manifest["version"] != version:
        yield f"{MANIFEST} says version {manifest['version']}, {INIT} {version}"
    if manifest.get("privacy") not in files:
        yield f"privacy is {manifest.get('privacy')!r}, which is missing"
    (path,) = manifest["plugins"]["models"]
    provider = yaml.safe_load(files[path])
    by_language = [of.values() for key, of in provider.items() if key.startswith("icon_")]
    for icon in sorted({manifest["icon"], manifest["icon_dark"], *chain.from_iterable(by_language)}):
        if f"_assets/{icon}" not in files:
            yield f"_assets/{icon} is missing"
    for source in provider["extra"]["python"]["model_sources"]:
        if source.count("/") < 2:  # at an error in a call, the SDK takes the module's third last part
            yield f"{source} is not deep enough: the SDK needs a module name of three parts (a/b/c.py)"
    for path in (path for path in files if path.startswith(MODELS) and not path.endswith("_position.yaml")):
        model = yaml.safe_load(files[path])
        if model["model_properties"].get("mode") not in ("chat", "completion"):
            yield f"{path}: model_properties.mode must be chat or completion, or workflows fail"
        for rule in model["parameter_rules"]:
            if rule.get("required") and rule.get("default") is None:
                yield f"{path}: {rule['name']} is required without a default, and Dify's own requests send none"


if __name__ == "__main__":
    sys.exit(main())
