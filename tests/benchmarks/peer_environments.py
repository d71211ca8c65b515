"""Install the servers that bench_peers.py compares with, each in an environment of its own under .bench/.

    python tests/benchmarks/peer_environments.py [NAME …]

Needs the network once and about 3 GB of disk. What is installed already is left alone; what cannot be installed is
reported, and the benchmark skips it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

HOME: Final = Path(__file__).resolve().parents[2] / ".bench"
PACKAGES: Final = {
    "mlx-lm": "mlx-lm==0.32.2",
    "mlx-vlm": "mlx-vlm==0.7.10",
    "rapid-mlx": "rapid-mlx==0.16.10",
}
# MLX on Linux needs a backend by name; NumPy brings the fast OpenBLAS that every server here is given.
EXTRA_PACKAGES: Final = ["mlx[cpu]" if sys.platform == "linux" else "mlx", "numpy"]


def python_of(name: str) -> Path:
    """Return the interpreter of this peer's environment, whether or not it exists yet."""
    return HOME / name / "bin" / "python"


def installed(name: str) -> bool:
    """Whether the environment is complete."""
    return (HOME / name / "finished").exists()


def install(name: str) -> None:
    """Make the environment, and mark it as complete."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", HOME / name], check=True)
    pip = [str(python_of(name)), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", PACKAGES[name], *EXTRA_PACKAGES], check=True)
    (HOME / name / "finished").write_text(PACKAGES[name] + "\n")


def main() -> None:
    """Install the named peers, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", choices=[[], *PACKAGES], metavar="NAME")
    failed = []
    for name in parser.parse_args().names or PACKAGES:
        if installed(name):
            print(f"{name}: installed already")
            continue
        print(f"{name}: installing {PACKAGES[name]} …", flush=True)
        try:
            install(name)
        except subprocess.CalledProcessError as problem:
            failed.append(name)
            print(f"{name}: not installed ({problem})")
    sys.exit(f"not installed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
