"""Our server beside the other MLX servers: same model, same machine, same run.

    python tests/benchmarks/peer_environments.py      # once: installs the others, under .bench/
    python tests/benchmarks/bench_peers.py [--only ROW …] [--systems NAME …] [--rounds 5] [--write]

Whatever is not installed is skipped with a word. Every server runs the demo model in a process of its own, on
a fast BLAS, offline, on 127.0.0.1. Ratios are what to keep: another load on the machine changes the rest.
`--write` puts the figures kept so far into the README beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peers import answers, load, report, reuse, speed, systems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peers.report import Line

ROWS: dict[str, tuple[str, str, Callable[[systems.Fleet], Iterator[Line]]]] = {
    "cost": ("What a server adds to each token", "{rounds} rounds", speed.cost),
    "first": ("First token of B, arriving at random, n = 20", "20 arrivals each", speed.first),
    "stall": ("A long prompt arrives while A decodes", "{rounds} runs", speed.stall),
    "reuse": ("Prompt tokens read again", "one run", reuse.reuse),
    "leaving": ("Work done for clients who left", "3 runs", load.leaving),
    "crowd": ("Many clients at once", "one run", load.crowd),
    "behind": ("A short stream behind long requests", "3 runs", speed.behind),
    "beside": ("A greedy question beside a wild stream", "one run", answers.beside),
    "stop": ("Stop strings and logprobs", "one run", answers.shapes),
    "memory": ("Memory", "one run", load.memory),
    "batched": ("Batched and single replies", "one run", answers.batched),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [system.name for system in systems.SYSTEMS]
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--systems", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the figures kept so far into the README")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that no server stays behind
    for name in systems.missing():
        print(f"{name} is not installed: skipped (peer_environments.py installs it)")
    ours = systems.OURS.name
    with systems.fleet(chosen.systems or names, chosen.rounds) as fleet:
        for row in chosen.only or ROWS:
            lines = []
            runs = ROWS[row][1].format(rounds=chosen.rounds)
            about = f"{datetime.date.today()}, {report.machine()}, {runs}"
            for line in ROWS[row][2](fleet):
                report.show(line, ours)
                lines.append(line)
            if not chosen.systems:  # a row is kept whole: all its systems side by side, or not at all
                report.keep(row, lines, about)
    if chosen.write:
        report.write({row: title for row, (title, _, _) in ROWS.items()}, ours, names)


if __name__ == "__main__":
    main()
