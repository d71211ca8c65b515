"""Write the plugin's package: `python -m dify_mlx_provider.package`.

A `.difypkg` is a zip of the plugin's files, without folder entries. It holds only what the plugin needs in Dify's
container: its own Python, the shared conversation core, the declarations, the icons (Dify reads them from `_assets/`
and nowhere else), the texts, and the plugin's dependencies as both `pyproject.toml` and `requirements.txt`, because
some daemons read the one and some the other. The server, MLX and the tests stay out.

The same sources always give the same bytes. The standard library and PyYAML do it; Dify's SDK is not imported.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 5 * 1024 * 1024  # a tenth of what Dify takes; a plugin without weights comes nowhere near
OLDEST = (1980, 1, 1, 0, 0, 0)  # zip knows no earlier time, and the time of packing must not show

# in the package | in the repository
RENAMED = {
    "README.md": "provider_assets/README.md",
    "readme/README_ja_JP.md": "provider_assets/README_ja_JP.md",
    "readme/README_zh_Hans.md": "provider_assets/README_zh_Hans.md",
}
KEPT = ("manifest.yaml", "LICENSE", "PRIVACY.md", "mlx_backend/__init__.py")
GLOBS = ("dify_mlx_provider/**/*.py", "mlx_backend/conversation/**/*.py", "provider_assets/**/*.yaml")
ICONS = "provider_assets/icons"
NOT_PACKED = "dify_mlx_provider/package.py"

# Dify's own rules for the two names it files a plugin under.
AUTHOR = re.compile(r"[a-z0-9_-]{1,64}")
NAME = re.compile(r"[a-z0-9_-]{1,128}")
VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){2}(-\w{1,16})?", re.ASCII)


class PackageError(Exception):
    """The sources do not make a package Dify would take. Holds one line per fault, for people."""


def collect(root: Path) -> dict[str, bytes]:
    """Return every file of the package, path to content, sorted by path."""
    sources = {path: root / path for path in KEPT}
    sources |= {packed: root / path for packed, path in RENAMED.items()}
    sources |= {
        path.relative_to(root).as_posix(): path for pattern in GLOBS for path in sorted(root.glob(pattern))
    }
    sources |= {f"_assets/{path.name}": path for path in sorted((root / ICONS).glob("*.svg"))}
    sources.pop(NOT_PACKED, None)
    missing = [path for path in sources.values() if not path.is_file()]
    if missing:
        raise PackageError("\n".join(f"{path.relative_to(root)} is missing" for path in missing))
    files = {path: source.read_bytes() for path, source in sources.items()}
    files |= _dependencies(_project(root))
    return dict(sorted(files.items()))


def check(root: Path, files: Mapping[str, bytes]) -> None:
    """Raise PackageError, with every fault at once, for what Dify would refuse or not find."""
    try:
        faults = list(_faults(_project(root), files))
    except KeyError as error:
        raise PackageError(f"a declaration lacks {error}") from error
    if faults:
        raise PackageError("\n".join(faults))


def identity(files: Mapping[str, bytes]) -> str:
    """Return what Dify will call this very package: `author/name:version@checksum`."""
    manifest = _load(files["manifest.yaml"])
    checksum = hashlib.sha256()
    for path in sorted(files):
        checksum.update(hashlib.sha256(path.encode()).digest())
        checksum.update(hashlib.sha256(files[path]).digest())
    return f"{manifest['author']}/{manifest['name']}:{manifest['version']}@{checksum.hexdigest()}"


def write(files: Mapping[str, bytes], output: Path) -> None:
    """Write the zip, the same bytes for the same files on every system."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as package:
        for path in sorted(files):
            entry = zipfile.ZipInfo(path, date_time=OLDEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, wherever it was packed; the mode below means nothing otherwise
            entry.external_attr = 0o100644 << 16
            package.writestr(entry, files[path])


def build(root: Path = ROOT, output: Path | None = None) -> tuple[Path, str]:
    """Collect, check and write; return where the package lies and its identity."""
    files = collect(root)
    check(root, files)
    manifest = _load(files["manifest.yaml"])
    output = output or root / "dist" / f"{manifest['name']}-{manifest['version']}.difypkg"
    write(files, output)
    return output, identity(files)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1, with the faults on standard error, when nothing was written."""
    parser = argparse.ArgumentParser(
        prog="python -m dify_mlx_provider.package",
        description="Write the Dify plugin's package (.difypkg).",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to (default: dist/NAME-VERSION.difypkg)"
    )
    output: Path | None = parser.parse_args(argv).output
    try:
        path, name = build(ROOT, output)
    except (PackageError, OSError) as error:
        print(f"not packed: {error}", file=sys.stderr)
        return 1
    print(f"{path}  {path.stat().st_size / 1024:.0f} KiB\n{name}")
    return 0


def _load(content: bytes) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise PackageError(f"a declaration is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise PackageError("a declaration is not a YAML mapping")
    return loaded


def _project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _dependencies(project: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the two files that say what to install, from the one list there is: the `plugin` extra.

    There is no build system in this pyproject: with one, the daemon would build and install us and need its backend.
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


def _faults(project: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[str]:
    manifest = _load(files["manifest.yaml"])
    for key, rule in (("author", AUTHOR), ("name", NAME), ("version", VERSION)):
        if not rule.fullmatch(str(manifest.get(key))):
            yield f"manifest.yaml: {key} is {manifest.get(key)!r}; Dify wants {rule.pattern}"
    if manifest.get("version") != project["version"]:
        yield f"manifest.yaml says version {manifest.get('version')}, pyproject.toml {project['version']}"
    entry = str(manifest["meta"]["runner"]["entrypoint"]).replace(".", "/")
    if not {f"{entry}.py", f"{entry}/__main__.py"} & files.keys():
        yield f"manifest.yaml: nothing to run for the entrypoint {entry}"

    icons = {manifest.get(key) for key in ("icon", "icon_dark")}
    for declaration in manifest["plugins"]["models"]:
        if declaration not in files:
            yield f"manifest.yaml: {declaration} is missing"
            continue
        provider = _load(files[declaration])
        for key in ("icon_small", "icon_small_dark", "icon_large", "icon_large_dark"):
            icons |= set(provider.get(key, {}).values())
        code = provider["extra"]["python"]
        for source in (code["provider_source"], *code["model_sources"]):
            if source not in files:
                yield f"{declaration}: {source} is missing"
    for icon in sorted(icon for icon in icons if icon and f"_assets/{icon}" not in files):
        yield f"{ICONS}/{icon} is missing"

    size = sum(map(len, files.values()))
    if size >= MAX_BYTES:
        yield f"{size} bytes unpacked are more than a plugin should hold ({MAX_BYTES})"


if __name__ == "__main__":
    sys.exit(main())
