"""Write requirements.lock, or say whether it is stale.

The lock pins everything (all extras and the dev group, for macOS and Linux at once) with hashes and without
addresses. Its first line carries a digest of the requirements it was made from, so that staleness is seen
without a network.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
COMPILE = [
    "--all-extras",
    "--group",
    "dev",
    "--universal",
    "--generate-hashes",
    "--no-annotate",
    "--no-header",
]


def stamp() -> str:
    """Return the lock's first line for the requirements that pyproject.toml states now."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    stated = [
        project["requires-python"],
        project["dependencies"],
        project["optional-dependencies"],
        pyproject["dependency-groups"],
    ]
    digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
    return f"# Made by `make lock` from the requirements in pyproject.toml, sha256 {digest}\n"


def main() -> int:
    """Write the lock; with --check only compare its first line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="only say whether the lock is stale")
    if arguments.parse_args().check:
        with LOCK.open(encoding="utf-8") as lock:
            current = lock.readline() == stamp()
        if not current:
            print("requirements.lock is stale: pyproject.toml's requirements changed. Run `make lock`.")
        return 0 if current else 1
    compiled = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "pyproject.toml", *COMPILE],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    LOCK.write_text(stamp() + compiled.stdout, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
