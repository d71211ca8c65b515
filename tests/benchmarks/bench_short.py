"""Many short requests over HTTP: our server and mlx_lm's, in rounds in turn.

    python tests/benchmarks/bench_short.py [--rounds 8] [--requests 100] [--clients 4] [--tokens 8] [--bare]

Titles, tags, follow-up questions, classifiers and the small calls of agents are such requests: a new question each, a
few tokens of reply. Both servers serve the demo model, with the same fast BLAS and their own defaults, each in a
process of its own; prompts are cached in both. --bare adds ours without cached prompts, and --against FOLDER ours as
another folder has it (what `git archive COMMIT mlx_backend` writes). --apart has the servers on the first of the
machine's cores and the clients on the others, which scatters less (Linux).

Per request there are the time by the clock and the server's processor time (Linux, in ticks of 10 ms), which other
processes on the machine disturb less. Ratios are of rounds that stand side by side, over the first server's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.timed_server import Figures, TimedServer

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.timed_server import Messages

OURS: Final = ("mlx_backend", "--log-level", "error")
PEER: Final = ("mlx_lm.server", "--log-level", "ERROR")
WARM_UP_REQUESTS: Final = 40


def main() -> None:
    """Start the servers and print what a request takes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=100, help="of a round")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0) if options.apart else set[int]()
    if options.apart:
        os.sched_setaffinity(0, {min(cores)})  # what is started now inherits it
    with ExitStack() as stack:
        servers = [_server("mlx-backend", OURS), _server("mlx_lm.server", PEER, "default_model")]
        if options.bare:
            servers.append(_server("without a cache", (*OURS, "--cache-gb", "0")))
        if options.against is not None:
            servers.append(_server("before", OURS, folder=options.against))
        for server in servers:
            stack.callback(server.stop)
        if options.apart:
            os.sched_setaffinity(0, cores - {min(cores)})
        for server in servers:
            server.wait()
        compare(servers, options.rounds, options.requests, options.clients, options.tokens)


def _server(
    name: str, command: Sequence[str], model: str | None = None, folder: Path | None = None
) -> TimedServer:
    arguments = [*command, "--model", str(MODEL_PATH), "--port", "{port}"]
    return TimedServer(name, sys.executable, arguments, model, (), folder=folder)


def compare(servers: Sequence[TimedServer], rounds: int, requests: int, clients: int, tokens: int) -> None:
    """Print the figures of all servers."""
    figures = {server.name: Figures() for server in servers}
    asked = 0
    for number in range(-1, rounds):  # the first is not counted
        count = WARM_UP_REQUESTS if number < 0 else requests
        for server in servers if number % 2 else servers[::-1]:
            seconds, processor = server.many(partial(_question, asked), count, clients, tokens)
            if number >= 0:
                figures[server.name].wall.append(seconds / count)
                figures[server.name].processor.append(processor / count)
        asked += count
    first = figures[servers[0].name]
    for name, each in figures.items():
        ratios = _ratios(each.wall, first.wall), _ratios(each.processor, first.processor)
        print(f"  {name:16}{each}; over the first: {ratios[0]}, of processor time {ratios[1]}", flush=True)


def _question(asked: int, at: int) -> Messages:
    number = asked + at
    return [{"role": "user", "content": f"What is {number} + {number % 7}?"}]


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> str:
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    main()
