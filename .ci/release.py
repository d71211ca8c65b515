"""Build what a version is published as, try it as a stranger would, tag the commit, and say what to upload.

`make release` runs it. Nothing leaves this machine, and the tag is made last; `git tag -d` takes it back. With
--dry-run there is no tag, and what a release still lacks is printed and not refused.
"""

import argparse
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SCRIPT = "mlx-backend"


def run(*command: object, cwd: Path = ROOT) -> str:
    """Return what a command prints. Exits with that, if it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}\nNothing was released.")
    return done.stdout.strip()


def lacking(version: str, source: str | None) -> list[str]:
    """Return what a release needs and is not there."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)(?=^## )", changelog, re.MULTILINE | re.DOTALL)
    found = {
        "pyproject.toml has no address: set Source in [project.urls] to where this is published": not source,
        f"CHANGELOG.md has no section [{version}]": not re.search(
            rf"^## \[{re.escape(version)}\]", changelog, re.M
        ),
        f"CHANGELOG.md has lines under [Unreleased]: move them to [{version}]": unreleased
        and unreleased[1].strip(),
        f"manifest.yaml is not of version {version}": f"\nversion: {version}\n"
        not in (ROOT / "manifest.yaml").read_text(encoding="utf-8"),
        "there are changes that are not committed": run("git", "status", "--porcelain"),
        f"the tag v{version} is there already: raise __version__ in mlx_backend/__init__.py": run(
            "git", "tag", "--list", f"v{version}"
        ),
    }
    return [sentence for sentence, is_so in found.items() if is_so]


def build() -> list[Path]:
    """Write the source distribution, the wheel that is made of it, and the plugin's package; return them."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", DIST)
        [sources] = DIST.iterdir()
        with tarfile.open(sources) as packed:
            packed.extractall(folder, filter="data")
        [unpacked] = Path(folder).iterdir()
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", DIST, cwd=unpacked)
    run(sys.executable, "-m", "dify_mlx_provider.packaging.package")
    return sorted(DIST.iterdir())


def formula(version: str, source: str, sdist: Path) -> str:
    """Return Homebrew's formula for a source distribution that is attached to the release of this version."""
    text = (ROOT / ".ci/homebrew.rb").read_text(encoding="utf-8")
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    for name, value in {"source": source, "version": version, "sdist": sdist.name, "sha256": digest}.items():
        text = text.replace(f"{{{name}}}", value.rstrip("/"))
    return text


def chat(command: Path, folder: Path) -> str:
    """Return what the demonstration model answers, served by this command."""
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    with subprocess.Popen([command, "--port", "0"], cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(line.split()[-1] for line in server.stdout if line.startswith("Listening on "))
            request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=300) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        finally:
            server.terminate()


def try_wheel(wheel: Path, expected: str) -> None:
    """Install the wheel into an environment of its own, and run the command in a folder that knows nothing of ours."""
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder)
        run(sys.executable, "-m", "venv", elsewhere / "venv")
        command = elsewhere / "venv/bin" / SCRIPT
        run(
            elsewhere / "venv/bin/python",
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--quiet",
            wheel,
        )
        if (said := run(command, "--version", cwd=elsewhere)) != f"{SCRIPT} {expected}":
            sys.exit(
                f"What is installed from {wheel.name} says {said!r}, not {expected!r}. Nothing was released."
            )
        answer = chat(command, elsewhere)
        if "Paris" not in answer:
            sys.exit(f"What is installed from {wheel.name} answers {answer!r}. Nothing was released.")
        run(elsewhere / "venv/bin/python", "-m", "pip", "check", cwd=elsewhere)


def try_plugin(plugin: Path, expected: str) -> None:
    """Unpack the plugin, and have it say what it is where there is nothing else of ours."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(plugin) as packed:
            packed.extractall(folder)
        show = (
            "import sys; sys.path.insert(0, '.'); import mlx_backend; print(mlx_backend.version_and_commit())"
        )
        if (said := run(sys.executable, "-I", "-c", show, cwd=Path(folder))) != expected:
            sys.exit(f"{plugin.name} says {said!r}, not {expected!r}. Nothing was released.")


def main() -> int:
    """Release; with --dry-run do all but the tag."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dry-run", action="store_true", help="build and try everything, but make no tag")
    is_dry = arguments.parse_args().dry_run
    package = runpy.run_path(str(ROOT / "mlx_backend/__init__.py"))
    version, stated = package["__version__"], package["version_and_commit"]()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    source = project.get("urls", {}).get("Source")
    missing = lacking(version, source)
    for each in missing:
        print(f"Not ready: {each}.")
    if missing and not is_dry:
        return 1
    print(f"Building {stated} …", flush=True)
    files = build()
    by_suffix = {file.suffix: file for file in files}
    print("Trying the wheel in an environment of its own …", flush=True)
    try_wheel(by_suffix[".whl"], stated)
    try_plugin(by_suffix[".difypkg"], stated)
    if source:
        (DIST / "mlx-backend.rb").write_text(formula(version, source, by_suffix[".gz"]), encoding="utf-8")
    if is_dry:
        print("Everything was built and works. Without --dry-run, the commit would be tagged now.")
    else:
        run("git", "tag", "--annotate", f"v{version}", "--message", f"Version {version}")
    distributions = " ".join(f"dist/{file.name}" for file in files if file.suffix != ".difypkg")
    print(f"\n{version} is in dist/:")
    for file in files:
        print(f"  {file.name}  {file.stat().st_size / 1024:.0f} KiB")
    print("\nTo publish it:")
    print(f"  git push {source or 'ADDRESS'} v{version}")
    print(f"  gh release create v{version} dist/* --notes-from-tag")
    print(f"  uv publish {distributions}")
    print("  dist/mlx-backend.rb to Formula/ of a Homebrew tap (untried)")
    print(f"  dist/{by_suffix['.difypkg'].name} to Dify's marketplace: docs/publishing.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
