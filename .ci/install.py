"""Install parts of requirements.lock into the environment whose Python runs this, and say how far it is.

`make plugin` installs what the plugin needs, `make setup` what the server needs as well, `make vision` what models need
to see images, and `make test` and the other commands for developers all of it and what they need. pip does the work; of
its own output, many lines for each package, only the names are shown.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("plugin", "running", "developing", "vision")
HEADING = "# For {part}:\n"
"""What stands above each part of the lock; .ci/lock.py writes it."""


def part_of(lock: str, part: str) -> str:
    """Return the requirements of one part of a lock, with their hashes."""
    return lock.partition(HEADING.format(part=part))[2].partition("\n# For ")[0]


def main() -> int:
    """Install the parts that are named; return pip's exit status."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("parts", choices=PARTS, nargs="+")
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    requirements = "".join(part_of(lock, part) for part in arguments.parse_args().parts)
    total = len(re.findall(r"^[a-z0-9]", requirements, re.MULTILINE))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requirements.txt")
        file.write_text(requirements, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
        ]
        # Not resolved: the lock names everything, and another part what this one does not; .ci/lock.py says what
        # of mlx-vlm's own requirements is left out.
        command += ["--no-deps", "--require-hashes", "-r", str(file)]
        return run(command, total)


def run(command: list[str], total: int) -> int:
    """Run pip and show which of `total` packages it is at; its warnings and errors are shown as they are."""
    at, is_terminal = 0, sys.stdout.isatty()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, encoding="utf-8", errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if found := re.match(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)", line):
                at += 1
                show(f"  {at} of {total}: {found[1]}", is_terminal)
            elif found := re.search(r"Downloading (\S+?)-\S+ \((.*[MG]B)\)", line):
                show(f"  {at} of {total}: {found[1]} ({found[2]})", is_terminal)
            elif line.startswith("Installing"):
                show(f"  writing {total} packages", is_terminal)
    if is_terminal:
        show("", is_terminal)
    return pip.returncode


def show(text: str, is_terminal: bool) -> None:
    """Print a line; on a terminal in place of the one before."""
    print(f"\r\x1b[K{text}" if is_terminal else text, end="" if is_terminal else "\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
