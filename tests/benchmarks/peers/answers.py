"""Rows about the answers: whether other requests, batching, stop strings or logprobs change or break them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from benchmarks.peers.client import (
    NoAnswer,
    background_streams,
    complete,
    content_of,
    stream_events,
    streamed_content,
    text_of,
    user_message,
)
from benchmarks.peers.report import Figure, Line
from benchmarks.peers.speed import PROMPT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.systems import Fleet, RunningServer

COUNTING = "Count to 30."
STOP = "7,"
BEFORE_STOP = "1, 2, 3, 4, 5, 6, "
PROMPTS = [
    *(f"What is {at} + {20 - at}?" for at in range(12)),
    *(f"Count to {at}." for at in range(3, 15)),
    *(f"What is the capital of {land}?" for land in ("France", "Spain", "Italy", "Japan", "Norway", "Peru")),
    *(f"What does a {animal} say?" for animal in ("cow", "dog", "cat", "duck", "sheep")),
    *(f"What is the opposite of {word}?" for word in ("hot", "big", "old", "up", "wet")),
]


def beside_sampled_stream(fleet: Fleet) -> Iterator[Line]:
    """Send greedy requests while another client samples at temperature 2."""
    line = Line("beside", "greedy answers that change beside a stream at temperature 2, of 20")
    for server in fleet.servers("beside", "endless"):
        try:
            alone = [_greedy(server, at) for at in range(20)]
            with background_streams(server, user_message(PROMPT), 1, temperature=2):
                together = [_greedy(server, at) for at in range(20)]
        except NoAnswer as problem:
            line.add(server.name, Figure(f"failed: {problem}"))
            continue
        wrong = sum(a != b for a, b in zip(alone, together, strict=True))
        line.add(server.name, Figure(f"{wrong} of 20", wrong))
    yield line


def _greedy(server: RunningServer, at: int) -> str:
    return text_of(complete(server, user_message(PROMPTS[at * 2]), max_tokens=40))


def batched_replies(fleet: Fleet) -> Iterator[Line]:
    """Compare greedy replies alone and 8 at a time."""
    line = Line(
        "batched",
        f"greedy replies equal alone and 8 at a time, of {len(PROMPTS)}",
        better="more",
        compared=False,
    )
    for server in fleet.servers("batched", "real"):

        def one(text: str, server: RunningServer = server) -> str:
            return text_of(complete(server, user_message(text), max_tokens=200))

        try:
            alone = [one(text) for text in PROMPTS]
            with ThreadPoolExecutor(8) as pool:
                at_once = list(pool.map(one, PROMPTS))
        except NoAnswer as problem:
            line.add(server.name, Figure(f"failed: {problem}"))
            continue
        equal = sum(a == b for a, b in zip(alone, at_once, strict=True))
        line.add(server.name, Figure(f"{equal} of {len(PROMPTS)}", equal))
    yield line


def stop(fleet: Fleet) -> Iterator[Line]:
    """Stop at a string that ends inside an answer."""
    lines = [
        Line("stop", "stop string: the JSON answer ends right before it", better="more", compared=False),
        Line("stop", "stop string: the stream ends right before it", better="more", compared=False),
        Line("stop", "tokens generated, with the stop string and without", compared=False),
    ]
    for server in fleet.servers("stop", "real"):
        try:
            whole = complete(server, user_message(COUNTING), max_tokens=200)
            cut = complete(server, user_message(COUNTING), max_tokens=200, stop=[STOP])
            texts = (
                content_of(cut),
                streamed_content(server, user_message(COUNTING), max_tokens=200, stop=[STOP]),
            )
        except NoAnswer as problem:
            lines[0].add(server.name, Figure(f"failed: {problem}"))
            continue
        for line, text in zip(lines, texts, strict=False):
            line.add(server.name, _ends(text))
        short, long = (int(reply["usage"]["completion_tokens"]) for reply in (cut, whole))
        lines[2].add(server.name, Figure(f"{short}, {long}", short / long))
    yield from lines


def _ends(text: str) -> Figure:
    answer = text.rpartition("<|message|>")[2]  # a server that shows Harmony's markers has the answer last
    if answer == BEFORE_STOP:
        return Figure("yes", 1)
    return Figure(f"no: `…{answer[-18:]}`".replace("|", "\\|"), 0)


def logprobs(fleet: Fleet) -> Iterator[Line]:
    """Look at the shape of logprobs."""
    lines = [
        Line("stop", "logprobs as OpenAI shapes them, JSON", better="more", compared=False),
        Line("stop", "logprobs as OpenAI shapes them, stream", better="more", compared=False),
    ]
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "max_tokens": 60}
    for server in fleet.servers("stop", "real"):
        for line, entries_of in zip(lines, (_json_entries, _stream_entries), strict=True):
            try:
                line.add(server.name, _shape(entries_of(server, wanted)))
            except NoAnswer as problem:
                line.add(server.name, Figure(f"no: {str(problem)[:40]}", 0))
    yield from lines


def _json_entries(server: RunningServer, wanted: dict[str, Any]) -> list[Any]:
    return list(
        (complete(server, user_message(PROMPT), **wanted)["choices"][0].get("logprobs") or {}).get("content")
        or ()
    )


def _stream_entries(server: RunningServer, wanted: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for _, event in stream_events(server, user_message(PROMPT), **wanted):
        for choice in event.get("choices") or ():
            found += (choice.get("logprobs") or {}).get("content") or ()
    return found


def _shape(entries: list[Any]) -> Figure:
    if not entries:
        return Figure("no: none", 0)
    lacking = {name for entry in entries for name in ("token", "logprob", "bytes") if name not in entry}
    if any(len(entry.get("top_logprobs") or ()) != 2 for entry in entries):
        lacking.add("top_logprobs")
    for entry in entries:
        for top in entry.get("top_logprobs") or ():
            lacking |= {name for name in ("token", "logprob", "bytes") if name not in top}
    if lacking:
        return Figure(f"no: without {', '.join(sorted(lacking))}", 0)
    return Figure("yes", 1)


def stop_and_logprobs(fleet: Fleet) -> Iterator[Line]:
    """Stop strings and logprobs."""
    yield from stop(fleet)
    yield from logprobs(fleet)
