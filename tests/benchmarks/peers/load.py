"""Rows about load: clients that disconnect or keep arriving, many clients at once, and memory."""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.client import (
    NoAnswer,
    complete,
    content_of,
    has_output,
    stream_events,
    streamed_content,
    user_message,
)
from benchmarks.peers.report import Figure, Line
from benchmarks.peers.speed import PROMPT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.systems import Fleet, RunningServer

LONG = 600
LOADS = ((64, False), (64, True), (256, False), (256, True))  # clients, streamed
SHORT_REQUESTS = 500
ARRIVING = (0, 8, 40)
ARRIVING_SECONDS = 6.0
CHATS = (
    *("What is the capital of France?", "What is the capital of Japan?", "What is the capital of Italy?"),
    *("What is the capital of Spain?", "Who are you?", "hello"),
)


def steps_after_disconnect(fleet: Fleet) -> Iterator[Line]:
    """Count the model steps that are run after the client has gone."""
    for stream in (True, False):
        mode = "stream" if stream else "JSON"
        line = Line("leaving", f"steps run after the client of a {mode} of {LONG} tokens left")
        for server in fleet.servers("leaving", "slow"):
            try:
                steps = [_steps_after(server, stream=stream) for _ in range(3)]
            except NoAnswer as problem:
                line.add(server.name, Figure(f"failed: {problem}"))
                continue
            middle = statistics.median(steps)
            line.add(server.name, Figure(f"{middle:.0f} ({min(steps)}-{max(steps)})", middle))
        yield line


def _steps_after(server: RunningServer, *, stream: bool) -> int:
    if stream:
        reply = stream_events(server, user_message(PROMPT), max_tokens=LONG)
        for _ in range(40):
            while not has_output(next(reply)[1]):
                pass
        reply.close()  # type: ignore[attr-defined]  # a generator
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"model": server.model, "messages": user_message(PROMPT), "max_tokens": LONG, "temperature": 0}
        before = server.steps()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        while server.steps() < before + 40:
            time.sleep(0.005)
        connection.close()
    left = seen = server.steps()
    quiet = time.monotonic()
    while time.monotonic() < quiet + 1.5:
        time.sleep(0.05)
        if (now := server.steps()) != seen:
            seen, quiet = now, time.monotonic()
    return seen - left


def many_clients(fleet: Fleet) -> Iterator[Line]:
    """Send many requests at once; count those that get the answer they would get alone."""
    questions = [f"What is {at} + {at + 3}?" for at in range(16)]
    servers = fleet.servers("crowd", "real")
    replies = {
        server.name: [
            complete(server, user_message(text), max_tokens=100, **server.system.reasoning_fields)
            for text in questions
        ]
        for server in servers
    }
    alone = {name: [content_of(reply) for reply in each] for name, each in replies.items()}
    size = Line("crowd", "tokens in an answer, on average", compared=False)
    for name, each in replies.items():
        mean = statistics.mean(reply["usage"]["completion_tokens"] for reply in each)
        size.add(name, Figure(f"{mean:.0f}"))
    yield size
    for count, stream in LOADS:
        mode = f"{count} clients at once, {'SSE' if stream else 'JSON'}"
        right = Line("crowd", f"{mode}: answered right", better="more")
        seconds = Line("crowd", f"{mode}: seconds until the last is served or refused")
        for server in servers:
            answered, taken = _answered_at_once(server, questions, alone[server.name], count, stream=stream)
            right.add(server.name, Figure(f"{answered} of {count}", answered))
            all_answered = answered == count  # refusing is quicker, and no merit
            seconds.add(server.name, Figure(f"{taken:.1f} s", taken if all_answered else None))
        yield right
        yield seconds


def _answered_at_once(
    server: RunningServer, questions: list[str], alone: list[str], count: int, *, stream: bool
) -> tuple[int, float]:
    ready = threading.Barrier(count + 1)

    def one(at: int) -> bool:
        ready.wait()
        messages = user_message(questions[at % len(questions)])
        fields = {"max_tokens": 100, **server.system.reasoning_fields}
        try:
            if stream:
                answer = streamed_content(server, messages, **fields)
            else:
                answer = content_of(complete(server, messages, **fields))
            return answer == alone[at % len(questions)]
        except NoAnswer:
            return False

    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(one, at) for at in range(count)]
        ready.wait()
        started = time.perf_counter()
        right = sum(job.result() for job in jobs)
        return right, time.perf_counter() - started


def steady_arrivals(fleet: Fleet) -> Iterator[Line]:
    """Count the answers that six clients get while others keep sending new prompts, and leave at their first tokens."""
    lines = []
    for count in ARRIVING:
        beside = f"while {count} keep arriving" if count else "alone"
        lines.append(Line("arrivals", f"answers of six who chat, {beside}", better="more"))
        if count:
            share = "their share of what the six get alone"
            served = f"first tokens of those {count}"
            lines += [Line("arrivals", share, better="more"), Line("arrivals", served, compared=False)]
    for server in fleet.servers("arrivals", "real"):
        rest = iter(lines)
        alone = 0
        for count in ARRIVING:
            with _arriving(server, count) as counts:
                answers = _answers_of_six(server)
            next(rest).add(server.name, Figure(str(answers), answers))
            if count:
                next(rest).add(server.name, Figure(f"{answers / max(1, alone):.2f}", answers / max(1, alone)))
                next(rest).add(server.name, Figure(str(counts[0]), counts[0]))
            else:
                alone = answers
    yield from lines


def _answers_of_six(server: RunningServer) -> int:
    end = time.monotonic() + ARRIVING_SECONDS

    def chat(text: str) -> int:
        count = 0
        while time.monotonic() < end:
            try:
                complete(
                    server, user_message(text), timeout=60, max_tokens=100, **server.system.reasoning_fields
                )
            except NoAnswer:
                time.sleep(0.1)
            else:
                count += time.monotonic() < end
        return count

    with ThreadPoolExecutor(len(CHATS)) as pool:
        return sum(pool.map(chat, CHATS))


@contextmanager
def _arriving(server: RunningServer, count: int) -> Iterator[list[int]]:
    """Have so many clients send ever new prompts, from a process of their own; then count their first tokens."""
    counts = [0]
    if not count:
        yield counts
        return
    fields = {"model": server.model, "max_tokens": 200, **server.system.reasoning_fields}
    arguments = [str(server.port), str(count), json.dumps(fields)]
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("arriving.py")), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()  # all of them have begun
    try:
        yield counts
    finally:
        counts[0] = int(process.communicate(timeout=60)[0])


def memory(fleet: Fleet) -> Iterator[Line]:
    """Measure the process before and after many short requests."""
    before = Line("memory", "resident memory after 20 requests")
    growth = Line("memory", f"what {SHORT_REQUESTS} more add to it")
    speed = Line("memory", f"seconds for those {SHORT_REQUESTS}, 4 at a time")

    def short(server: RunningServer, at: int) -> None:
        complete(
            server, user_message(f"What is {at} + {at % 7}?"), max_tokens=8, **server.system.reasoning_fields
        )

    for server in fleet.servers("memory", "real"):
        try:
            for at in range(20):
                short(server, at)
            first = server.resident_mib()
            started = time.perf_counter()
            with ThreadPoolExecutor(4) as pool:
                for job in [pool.submit(short, server, at) for at in range(SHORT_REQUESTS)]:
                    job.result()
            taken = time.perf_counter() - started
        except NoAnswer as problem:
            before.add(server.name, Figure(f"failed: {problem}"))
            continue
        added = server.resident_mib() - first
        before.add(server.name, Figure(f"{first:.0f} MiB", first))
        growth.add(server.name, Figure(f"{added:+.0f} MiB", added))
        speed.add(server.name, Figure(f"{taken:.0f} s", taken))
    yield from (before, growth, speed)
