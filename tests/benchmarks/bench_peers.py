"""Our server beside the other MLX servers: same model, same machine, same run.

    python tests/benchmarks/peer_environments.py      # once: installs the others, under .bench/
    python tests/benchmarks/bench_peers.py [--only ROW …] [--systems NAME …] [--rounds 5] [--write]
    python tests/benchmarks/bench_peers.py --plot     # measures nothing

A server that is not installed is skipped, and named; nothing is saved or written then. Every server runs the demo model
in a process of its own, on a fast BLAS, offline, on 127.0.0.1. The ratios are what counts: other load on the machine
changes everything else. `--write` puts the figures saved so far into the README beside this file, and draws the plot in
the project's README from them; `--plot` only draws it.
"""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.peers import answers, load, plot, report, reuse, speed, systems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peers.report import Line

ROWS: dict[str, tuple[str, str, Callable[[systems.Fleet], Iterator[Line]]]] = {
    "cost": ("What a server adds to each token", "{rounds} rounds", speed.per_token_cost),
    "first": ("First token of B, arriving at random, n = 20", "20 arrivals each", speed.first_tokens),
    "stall": ("A long prompt arrives while A decodes", "{rounds} runs", speed.token_gaps),
    "reuse": ("Prompt tokens computed again", "one run", reuse.prompt_reuse),
    "leaving": ("Steps run for clients that disconnected", "3 runs", load.steps_after_disconnect),
    "crowd": ("Many clients at once", "one run", load.many_clients),
    "arrivals": ("Six who chat while others keep arriving", "one run", load.steady_arrivals),
    "behind": ("A short stream behind long requests", "3 runs", speed.behind_long_requests),
    "beside": ("A greedy request beside a stream at temperature 2", "one run", answers.beside_sampled_stream),
    "stop": ("Stop strings and logprobs", "one run", answers.stop_and_logprobs),
    "memory": ("Memory", "one run", load.memory),
    "batched": ("Batched and single replies", "one run", answers.batched_replies),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [system.name for system in systems.SYSTEMS]
    parser.add_argument("--only", nargs="+", choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--systems", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the figures saved so far into the README")
    parser.add_argument("--plot", action="store_true", help="only draw the plot from the README's tables")
    options = parser.parse_args()
    if options.plot:
        plot.write()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # stops the servers on the way out
    missing = systems.missing()
    for name in missing:
        print(f"{name} is not installed: skipped (peer_environments.py installs it)")
    ours = systems.OURS.name
    with systems.fleet(options.systems or names, options.rounds) as fleet:
        for row in options.only or ROWS:
            lines = []
            runs = ROWS[row][1].format(rounds=options.rounds)
            about = f"{datetime.date.today()}, {report.machine()}, {runs}"
            for line in ROWS[row][2](fleet):
                report.print_line(line, ours)
                lines.append(line)
            # A row is saved whole, with all its systems measured side by side, or not at all.
            if not (options.systems or missing):
                report.save_row(row, lines, about)
    if options.write and missing:
        print("The tables and the plot are left as they are: not every server was measured.")
    elif options.write:
        report.write_tables({row: title for row, (title, _, _) in ROWS.items()}, ours, names)
        plot.write()


if __name__ == "__main__":
    main()
