"""Write requirements.lock and those of tests/graphon, soak, page and clients/sdks, or say whether one is stale.

A lock pins everything (for macOS and Linux at once) with hashes and without addresses. Its first line carries a digest
of the requirements it was made from, so that staleness is seen without a network. Versions that are locked stay where
they fit what is required; with --upgrade the newest are taken.

requirements.lock has four parts: what the plugin needs, and packing it; what the server needs as well; what developing
needs as well; and the extra `vision`, of just what it names: mlx-vlm also requires 1.1 GB for training, audio, video
and a server of its own, none of which is imported to see an image. What runs Dify's workflow engine (`make test-dify`)
is an environment of its own, locked alike, and so is what `make soak` and `make test-page` add. The SDKs of `make
test-clients` are locked without hashes, which would be ten times as long: an environment for each set whose
requirements fit together.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from install import HEADING, part_of

ROOT = Path(__file__).resolve().parents[1]
COMPILE = ["--universal", "--no-annotate", "--no-header"]
BLOCK = re.compile(r"^([a-z0-9.-]+)==.*\n(?:[ ].*\n)*", re.MULTILINE)
"""A locked package: its name, then its version and hashes."""
VISION = "vision"
LOCK = ROOT / "requirements.lock"
GRAPHON = ROOT / "tests/graphon"
ADDED = [ROOT / "tests/soak/requirements.txt", ROOT / "tests/page/requirements.txt"]
SDKS = sorted((ROOT / "tests/clients/sdks").glob("*.in"))
MADE_FROM = {
    LOCK: "the requirements in pyproject.toml",
    GRAPHON / "requirements.txt": "requirements.in without excluded.txt",
    **dict.fromkeys(ADDED, "requirements.in"),
    **{path.with_suffix(".txt"): path.name for path in SDKS},
}


def project() -> dict[str, Any]:
    """Return what pyproject.toml states."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def stamps() -> dict[Path, str]:
    """Return the first line of each lock for what is required now."""
    stated = project()
    required = [
        stated["project"]["requires-python"],
        stated["project"]["dependencies"],
        stated["project"]["optional-dependencies"],
        stated["dependency-groups"],
    ]
    contents = {
        LOCK: json.dumps(required, sort_keys=True).encode(),
        GRAPHON / "requirements.txt": b"".join(
            (GRAPHON / name).read_bytes() for name in ("requirements.in", "excluded.txt")
        ),
        **{path: path.with_suffix(".in").read_bytes() for path in ADDED},
        **{path.with_suffix(".txt"): path.read_bytes() for path in SDKS},
    }
    return {
        path: f"# Made by `make lock` from {made_from}, sha256 {hashlib.sha256(contents[path]).hexdigest()}\n"
        for path, made_from in MADE_FROM.items()
    }


def compiled(*arguments: str, locked: str = "", typed: str | None = None, hashes: bool = True) -> str:
    """Return what uv makes of these requirements, in the form of a lock.

    `locked` holds the versions to keep where they fit, `typed` is what "-" among the requirements stands for.
    """
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "requirements.txt")
        kept.write_text(locked, encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *arguments, *COMPILE]
        command += ["--generate-hashes"] if hashes else []
        subprocess.run([*command, "--output-file", str(kept)], cwd=ROOT, input=typed, check=True, text=True)
        return kept.read_text(encoding="utf-8")


def main() -> int:
    """Write the locks; with --check only compare their first lines."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="only say whether a lock is stale")
    arguments.add_argument("--upgrade", action="store_true", help="take the newest versions")
    chosen = arguments.parse_args()
    first_lines = stamps()
    if chosen.check:
        stale = [path for path, first in first_lines.items() if first_line(path) != first]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: what it was made from changed. Run `make lock`.")
        return 1 if stale else 0
    for path, first in first_lines.items():
        locked = "" if chosen.upgrade or not path.exists() else path.read_text(encoding="utf-8")
        if path == LOCK:
            made = in_parts(locked)
        elif path.parent == GRAPHON:
            excluded = ("--excludes", "tests/graphon/excluded.txt", "--python-version", "3.12")
            made = compiled("tests/graphon/requirements.in", *excluded, locked=locked)
        elif path.with_suffix(".in") in SDKS:
            required = str(path.with_suffix(".in").relative_to(ROOT))
            made = compiled(required, "--python-version", "3.12", locked=locked, hashes=False)
        else:
            constrained = ("--constraints", "requirements.lock", "--python-version", "3.12")
            made = compiled(str(path.with_suffix(".in").relative_to(ROOT)), *constrained, locked=locked)
        path.write_text(first + made, encoding="utf-8")
    return 0


def in_parts(locked: str) -> str:
    """Return the contents of requirements.lock, each part under its heading."""
    extras = project()["project"]["optional-dependencies"]
    vision = compiled(
        *("-", "--no-deps", "--python-version", "3.12"),
        locked=part_of(locked, VISION),
        typed="\n".join(extras[VISION]),
    )
    whole = compiled("pyproject.toml", "--extra", "plugin", "--group", "dev", locked=locked)
    needed = compiled("pyproject.toml", "--extra", "plugin", locked=whole)
    plugin = compiled("-", locked=whole, typed="\n".join(extras["plugin"]))
    running = {found[1] for found in BLOCK.finditer(needed)}
    packing = {found[1] for found in BLOCK.finditer(plugin)}
    blocks = list(BLOCK.finditer(whole))
    parts = {
        "plugin": "".join(found[0] for found in blocks if found[1] in packing),
        "running": "".join(found[0] for found in blocks if found[1] in running - packing),
        "developing": "".join(found[0] for found in blocks if found[1] not in running),
        VISION: vision,
    }
    return "".join(HEADING.format(part=part) + text for part, text in parts.items())


def first_line(path: Path) -> str:
    """Return a lock's stamp."""
    with path.open(encoding="utf-8") as lock:
        return lock.readline()


if __name__ == "__main__":
    sys.exit(main())
