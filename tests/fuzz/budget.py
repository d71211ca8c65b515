"""`make fuzz MINUTES=10`: these tests with new examples, again and again until the time is over or something fails.

What fell is kept in .hypothesis and tried first the next time. Cured, it is written down where examples.py says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST_ROUND, LARGEST_ROUND = 200, 5000
"""Examples of each test in a round: more each time, since a round begins with loading models."""


def main() -> int:
    """Fuzz; return the exit status."""
    parser = argparse.ArgumentParser(description="Fuzz the server's and the plugin's parsers for MINUTES.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("tests", nargs="*", default=[str(Path(__file__).parent)])
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    examples, rounds = FIRST_ROUND, 0
    while (remaining := end - time.monotonic()) > 0:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--timeout=0", *arguments.tests]
        environment = {**os.environ, "FUZZ_EXAMPLES": str(examples), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=remaining)
        except subprocess.TimeoutExpired:
            break
        if done.returncode:
            print(
                f"Something fell in round {rounds + 1}: the example is above, and tried first the next time."
            )
            return done.returncode
        rounds += 1
        examples = min(LARGEST_ROUND, 2 * examples)
    print(f"Nothing fell in {arguments.minutes:g} minutes ({rounds} whole rounds).")
    return 0


if __name__ == "__main__":
    sys.exit(main())
