"""Write requirements.lock, requirements-vision.lock and those of tests/graphon and tests/soak, or say if one is stale.

The lock pins everything (for macOS and Linux at once) with hashes and without addresses: first what running needs, the
server and the plugin, then what developing needs besides. Its first line carries a digest of the requirements it was
made from, so that staleness is seen without a network. What runs Dify's workflow engine (`make test-dify`) is an
environment of its own, locked alike, and so is what `make soak` adds.

The extra `vision` has a lock of its own, of just what it names: mlx-vlm also requires 1.1 GB for training, audio, video
and a server of its own, none of which is imported to see an image.
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

from install import HEADING, PARTS

ROOT = Path(__file__).resolve().parents[1]
COMPILE = ["--universal", "--generate-hashes", "--no-annotate", "--no-header"]
NAME = re.compile(r"^([a-z0-9.-]+)==", re.MULTILINE)
LOCK = ROOT / "requirements.lock"
VISION_LOCK = ROOT / "requirements-vision.lock"
VISION = "vision"
GRAPHON = ROOT / "tests/graphon"
SOAK = ROOT / "tests/soak"


def stamp() -> str:
    """Return the lock's first line for the requirements that pyproject.toml states now."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    stated = [
        project["requires-python"],
        project["dependencies"],
        {name: extra for name, extra in project["optional-dependencies"].items() if name != VISION},
        pyproject["dependency-groups"],
    ]
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
    return f"# Made by `make lock` from the requirements in pyproject.toml, sha256 {digest}\n"


def vision_extra() -> list[str]:
    """Return what the extra `vision` names."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named: list[str] = pyproject["project"]["optional-dependencies"][VISION]
    return named


def vision_stamp() -> str:
    """Return the first line for what the extra `vision` names."""
    digest = hashlib.sha256(json.dumps(vision_extra()).encode()).hexdigest()
    return f"# Made by `make lock` from the extra vision in pyproject.toml, sha256 {digest}\n"


def graphon_stamp() -> str:
    """Return the first line for what tests/graphon states."""
    stated = b"".join((GRAPHON / name).read_bytes() for name in ("requirements.in", "excluded.txt"))
    digest = hashlib.sha256(stated).hexdigest()
    return f"# Made by `make lock` from requirements.in without excluded.txt, sha256 {digest}\n"


def soak_stamp() -> str:
    """Return the first line for what tests/soak states."""
    digest = hashlib.sha256((SOAK / "requirements.in").read_bytes()).hexdigest()
    return f"# Made by `make lock` from requirements.in, sha256 {digest}\n"


def compiled(*arguments: str, typed: str | None = None) -> str:
    """Return what uv makes of these requirements, in the form of a lock; `typed` is what "-" among them stands for."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *arguments, *COMPILE]
    return subprocess.run(command, cwd=ROOT, input=typed, check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Write the lock; with --check only compare its first line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="only say whether a lock is stale")
    locks = {
        LOCK: (stamp(), ["pyproject.toml", "--extra", "plugin", "--group", "dev"]),
        VISION_LOCK: (vision_stamp(), ["-", "--no-deps", "--python-version", "3.12"]),
        GRAPHON / "requirements.txt": (
            graphon_stamp(),
            [
                *("tests/graphon/requirements.in", "--excludes", "tests/graphon/excluded.txt"),
                *("--python-version", "3.12"),
            ],
        ),
        SOAK / "requirements.txt": (
            soak_stamp(),
            [
                *("tests/soak/requirements.in", "--constraints", "requirements.lock"),
                *("--python-version", "3.12"),
            ],
        ),
    }
    if arguments.parse_args().check:
        stale = [path for path, (first, _) in locks.items() if first_line(path) != first]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: what it was made from changed. Run `make lock`.")
        return 1 if stale else 0
    for path, (first, wanted) in locks.items():
        made = compiled(*wanted, typed="\n".join(vision_extra()) if path == VISION_LOCK else None)
        path.write_text(first + (in_parts(made) if path == LOCK else made), encoding="utf-8")
    return 0


def in_parts(lock: str) -> str:
    """Return a lock with what running needs first, each part under its heading."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as whole:
        whole.write(lock)
        whole.flush()
        needed = set(
            NAME.findall(compiled("pyproject.toml", "--extra", "plugin", "--constraint", whole.name))
        )
    blocks = re.findall(r"^[a-z0-9].*\n(?:[ ].*\n)*", lock, re.MULTILINE)
    running = [block for block in blocks if NAME.findall(block)[0] in needed]
    developing = [block for block in blocks if NAME.findall(block)[0] not in needed]
    first, second = (HEADING.format(part=part) for part in PARTS)
    return "".join([first, *running, second, *developing])


def first_line(path: Path) -> str:
    """Return a lock's stamp."""
    with path.open(encoding="utf-8") as lock:
        return lock.readline()


if __name__ == "__main__":
    sys.exit(main())
