"""Rows about load: clients that leave, crowds, and memory."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from benchmarks.peers.client import NoAnswer, ask, content_of, events, question, said, streamed
from benchmarks.peers.report import Figure, Line
from benchmarks.peers.speed import STEADY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.systems import Fleet, Running

LONG = 600
CROWDS = ((64, False), (256, False), (256, True))  # clients, streamed
SHORT_REQUESTS = 500


def leaving(fleet: Fleet) -> Iterator[Line]:
    """Count the model steps that are run for nobody."""
    for stream in (True, False):
        way = "stream" if stream else "JSON"
        line = Line("leaving", f"steps run after the client of a {way} of {LONG} tokens left")
        for server in fleet.servers("leaving", "slow"):
            try:
                steps = [_steps_after(server, stream=stream) for _ in range(3)]
            except NoAnswer as problem:
                line.add(server.name, Figure(f"failed: {problem}"))
                continue
            middle = statistics.median(steps)
            line.add(server.name, Figure(f"{middle:.0f} ({min(steps)}-{max(steps)})", middle))
        yield line


def _steps_after(server: Running, *, stream: bool) -> int:
    if stream:
        reply = events(server, question(STEADY), max_tokens=LONG)
        for _ in range(40):
            while not said(next(reply)[1]):
                pass
        reply.close()  # type: ignore[attr-defined]
    else:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"model": server.model, "messages": question(STEADY), "max_tokens": LONG, "temperature": 0}
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


def crowd(fleet: Fleet) -> Iterator[Line]:
    """Let many clients ask at once, and count who gets the answer that he would get alone."""
    questions = [f"What is {at} + {at + 3}?" for at in range(16)]
    servers = fleet.servers("crowd", "real")
    replies = {
        server.name: [
            ask(server, question(text), max_tokens=100, **server.system.thinking) for text in questions
        ]
        for server in servers
    }
    alone = {name: [content_of(reply) for reply in each] for name, each in replies.items()}
    size = Line("crowd", "tokens in an answer, on average", compared=False)
    for name, each in replies.items():
        mean = statistics.mean(reply["usage"]["completion_tokens"] for reply in each)
        size.add(name, Figure(f"{mean:.0f}"))
    yield size
    for count, stream in CROWDS:
        way = f"{count} clients at once, {'SSE' if stream else 'JSON'}"
        right = Line("crowd", f"{way}: answered right", better="more")
        seconds = Line("crowd", f"{way}: seconds until the last is served or refused")
        for server in servers:
            answered, taken = _crowd(server, questions, alone[server.name], count, stream=stream)
            right.add(server.name, Figure(f"{answered} of {count}", answered))
            everybody = answered == count  # who refuses is done sooner: that is no lead
            seconds.add(server.name, Figure(f"{taken:.1f} s", taken if everybody else None))
        yield right
        yield seconds


def _crowd(
    server: Running, questions: list[str], alone: list[str], count: int, *, stream: bool
) -> tuple[int, float]:
    ready = threading.Barrier(count + 1)

    def one(at: int) -> bool:
        ready.wait()
        asked = question(questions[at % len(questions)])
        fields = {"max_tokens": 100, **server.system.thinking}
        try:
            if stream:
                answer = streamed(server, asked, **fields)
            else:
                answer = content_of(ask(server, asked, **fields))
            return answer == alone[at % len(questions)]
        except NoAnswer:
            return False

    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(one, at) for at in range(count)]
        ready.wait()
        begin = time.perf_counter()
        right = sum(job.result() for job in jobs)
        return right, time.perf_counter() - begin


def memory(fleet: Fleet) -> Iterator[Line]:
    """Weigh the process before and after many short requests."""
    before = Line("memory", "resident memory after 20 requests")
    growth = Line("memory", f"what {SHORT_REQUESTS} more add to it")
    speed = Line("memory", f"seconds for those {SHORT_REQUESTS}, 4 at a time")

    def short(server: Running, at: int) -> None:
        ask(server, question(f"What is {at} + {at % 7}?"), max_tokens=8, **server.system.thinking)

    for server in fleet.servers("memory", "real"):
        try:
            for at in range(20):
                short(server, at)
            first = server.resident_mib()
            begin = time.perf_counter()
            with ThreadPoolExecutor(4) as pool:
                for job in [pool.submit(short, server, at) for at in range(SHORT_REQUESTS)]:
                    job.result()
            taken = time.perf_counter() - begin
        except NoAnswer as problem:
            before.add(server.name, Figure(f"failed: {problem}"))
            continue
        added = server.resident_mib() - first
        before.add(server.name, Figure(f"{first:.0f} MiB", first))
        growth.add(server.name, Figure(f"{added:+.0f} MiB", added))
        speed.add(server.name, Figure(f"{taken:.0f} s", taken))
    yield from (before, growth, speed)
