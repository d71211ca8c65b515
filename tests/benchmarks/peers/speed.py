"""Rows about time: what a token costs, how soon the first one comes, and how long others wait."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.peers.client import (
    NoAnswer,
    background_streams,
    complete,
    first_token,
    has_output,
    stream_events,
    time_concurrent,
    user_message,
)
from benchmarks.peers.report import Figure, Line, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.peers.systems import Fleet, Message, ModelVariant, RunningServer

PROMPT = "What is the capital of France?"
TOKENS = 256
SHORT_REQUESTS, SHORT_PER_SECOND = 50, 5


def per_token_cost(fleet: Fleet) -> Iterator[Line]:
    """Time whole replies of 256 tokens, each against a run of the bare loop right before it."""
    servers = fleet.servers("cost", "endless")
    bare = fleet.bare(PROMPT)
    for streams in (1, 8):
        each = 1000 / (streams * TOKENS)
        for mode, stream in (("JSON", False), ("SSE", True)):
            seconds: dict[str, list[tuple[float, float]]] = {}
            worked: dict[str, list[tuple[float, float]]] = {}
            for round_number in range(fleet.rounds + 1):
                for server in servers:
                    base, base_worked = bare.seconds(streams, TOKENS)
                    before = server.processor_seconds()
                    try:
                        taken = time_concurrent(server, user_message(PROMPT), streams, TOKENS, stream)
                    except NoAnswer as problem:
                        print(f"({server.name}: {problem})")
                        continue
                    after = server.processor_seconds()
                    if round_number == 0:  # the first round warms everything up
                        continue
                    seconds.setdefault(server.name, []).append((taken * each, base * each))
                    if before is not None and after is not None:
                        worked.setdefault(server.name, []).append(
                            ((after - before) * each, base_worked * each)
                        )
            load = f"{streams} stream{'s' * (streams > 1)}, {mode}"
            yield _added(f"{load}: time", seconds)
            yield _added(f"{load}: processor time", worked)
    bare.stop()


def _added(what: str, pairs_of: dict[str, list[tuple[float, float]]]) -> Line:
    """Compare each run with the bare one before it: as a ratio, and as milliseconds added per token."""
    line = Line("cost", f"{what}, times the bare loop's (ms more a token)", compared=False)
    bases = [base for pairs in pairs_of.values() for _, base in pairs]
    if bases:
        line.note = f"bare: {statistics.median(bases):.2f} ms, {min(bases):.2f}-{max(bases):.2f}"
    for name, pairs in pairs_of.items():
        ratio = statistics.median(taken / base for taken, base in pairs)
        added = statistics.median(taken - base for taken, base in pairs)
        line.add(name, Figure(f"{ratio:.2f}× ({added:+.2f})", round(ratio, 2)))
    return line


def first_tokens(fleet: Fleet) -> Iterator[Line]:
    """Time the first token of B, arriving at random, while others decode."""
    variants: tuple[tuple[ModelVariant, str], ...] = (("slow", "10 ms a step"), ("endless", "plain model"))
    for variant, label in variants:
        servers = fleet.servers("first", variant)
        for streams in (0, 1, 8):
            line = Line("first", f"{label}, {('alone', 'A decodes')[streams > 0]}")
            if streams > 1:
                line.what = f"{label}, {streams} decode"
            for server in servers:
                try:
                    with background_streams(server, user_message(PROMPT), streams):
                        line.add(server.name, spread(list(_arrivals(server, streams))))
                except NoAnswer as problem:
                    line.add(server.name, Figure(f"failed: {problem}"))
            yield line


def _arrivals(server: RunningServer, seed: int, count: int = 20) -> Iterator[float]:
    rng = random.Random(seed)
    for at in range(count):
        time.sleep(rng.uniform(0.1, 0.5))
        yield first_token(server, user_message(f"What is {at} + {rng.randint(0, 20)}?"))


def token_gaps(fleet: Fleet) -> Iterator[Line]:
    """Find the gaps in A's stream while others arrive: one with a long prompt, and many with short ones."""
    line = Line("stall", "A's longest wait for a token when a prompt of 3,000 tokens arrives (10 ms a step)")
    second = Line("stall", "that prompt's own first token")
    usual = Line("stall", "A's wait for a token while short requests come and go: 99th percentile")
    longest = Line("stall", "the longest of those")
    for server in fleet.servers("stall", "slow"):
        try:
            runs = [_token_gaps(server, partial(_send_long_prompt, server, at)) for at in range(fleet.rounds)]
            line.add(server.name, spread([max(gaps) for gaps, _ in runs]))
            second.add(server.name, spread([own for _, own in runs]))
            alone, _ = _token_gaps(server, partial(time.sleep, 2))  # two seconds with nothing else running
            gaps, _ = _token_gaps(server, partial(_send_short_prompts, server))
            percentile, step = statistics.quantiles(gaps, n=100)[-1], statistics.median(alone)
            text = f"{percentile * 1000:.0f} ms, {percentile / step:.1f} of its steps alone"
            usual.add(server.name, Figure(text, percentile))
            longest.add(server.name, Figure(f"{max(gaps) * 1000:.0f} ms", max(gaps)))
        except NoAnswer as problem:
            line.add(server.name, Figure(f"failed: {problem}"))
    yield from (line, second, usual, longest)


def _send_long_prompt(server: RunningServer, at: int) -> float:
    own = first_token(server, long_question(at))
    time.sleep(0.3)
    return own


def _send_short_prompts(server: RunningServer) -> None:
    """Send requests at the same rate to every server, however soon it answers."""
    rng = random.Random(1)
    with ThreadPoolExecutor(SHORT_REQUESTS) as pool:
        jobs = []
        for at in range(SHORT_REQUESTS):
            time.sleep(rng.expovariate(SHORT_PER_SECOND))
            jobs.append(
                pool.submit(
                    complete, server, user_message(f"What is {at} + {rng.randint(0, 999)}?"), max_tokens=8
                )
            )
        for job in jobs:
            job.result()


def _token_gaps[T](server: RunningServer, meanwhile: Callable[[], T]) -> tuple[list[float], T]:
    """Return the gaps between A's tokens during something else, in seconds, and what that returns."""
    times: list[float] = []
    ready, done = threading.Event(), threading.Event()

    def consume() -> None:
        for when, event in stream_events(server, user_message(PROMPT), max_tokens=2000):
            if has_output(event):
                times.append(when)
                if len(times) == 60:
                    ready.set()
                if done.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(consume)
        try:
            if not ready.wait(60):
                raise NoAnswer("A did not start")
            started = time.perf_counter()
            result = meanwhile()
        finally:
            done.set()
        reader.result()
    during = [when for when in times if when > started - 0.1]
    return [b - a for a, b in itertools.pairwise(during)], result


def long_question(at: int) -> list[Message]:
    """Return a prompt of about 3,000 tokens that shares no beginning with another."""
    return user_message(f"{at} {at + 7} {at * 3}. " + "Say summer river bridge. " * 186)


def behind_long_requests(fleet: Fleet) -> Iterator[Line]:
    """Time a short stream that arrives after six long requests that are not streamed."""
    line = Line("behind", "a short stream's first token behind 6 long JSON requests (10 ms a step)")
    for server in fleet.servers("behind", "slow"):
        times = []
        try:
            for _ in range(3):
                with ThreadPoolExecutor(6) as pool:
                    jobs = [
                        pool.submit(complete, server, user_message(PROMPT), max_tokens=400) for _ in range(6)
                    ]
                    time.sleep(1)
                    times.append(first_token(server, user_message("Hello!")))
                    for job in jobs:
                        job.result()
            line.add(server.name, spread(times))
        except NoAnswer as problem:
            line.add(server.name, Figure(f"failed: {problem}"))
    yield line
