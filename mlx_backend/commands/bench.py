"""`mlx-backend bench`: how fast a model answers here, by length of the prompt, effort and number of requests at once.

Measured as a client sees it, over HTTP: seconds to the first token, and tokens a second from then on. Every figure is a
median with its quartiles, next to the load of the machine. No prompt shares more than its first words with another,
so that no cache answers for the model. Where no server runs, this process is one too, and reading replies takes time
from it: little, next to that of a real model's step. Knows nothing of engines.
"""

from __future__ import annotations

import io
import os
import random
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend import __version__
from mlx_backend.commands.errors import CommandError, argument, several
from mlx_backend.commands.files import write_file
from mlx_backend.commands.local_models import LocalModels
from mlx_backend.commands.running_server import RunningServer, add_server_options, name_on_server
from mlx_backend.commands.serve import serving
from mlx_backend.commands.stop_signals import raise_interrupts
from mlx_backend.commands.terminal import add_json_option, console, print_json, table
from mlx_backend.declaration import text, whole
from mlx_backend.demo import MODEL_NAME

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

CONTEXTS = (256, 2048, 8192, 32_768)
"""Tokens of prompts; those that the model has room for."""
REQUESTS = (1, 2, 4, 8)
RUNS, TOKENS, EFFORT_TOKENS = 3, 128, 4096
SHORT = 256
"""Tokens of a prompt where its length is not what is varied."""
SVG_COLUMNS = 120
_COUNT = whole(1, 10_000_000)
BUSY = 0.25
"""Load for each processor from which on figures are said to be too low."""
_WORDS = (
    *("amber", "birch", "cedar", "delta", "fjord", "grove"),
    *("heron", "inlet", "kelp", "maple", "ocean", "pine"),
)
_QUESTION = "How many days are there in seven weeks and two days? Then write down the names of all months."


@dataclass(frozen=True, slots=True)
class Case:
    """One row: tokens of the prompt, the effort (None: the model's default) and requests at once."""

    context: int
    effort: str | None
    requests: int
    varies: str
    """Which of the three is varied here."""


@dataclass(frozen=True, slots=True)
class TimedReply:
    """One reply: seconds since the request to its first token, the first of its answer, and the end; and its tokens."""

    sent: float
    first: float
    answer: float | None
    end: float
    prompt_tokens: int
    tokens: int
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Figure:
    """The middle of several runs, and the range that half of them lie in."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure | None:
        """Summarise them; None if there are none."""
        if not values:
            return None
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def text(self, digits: int) -> str:
        """Write it."""
        spread = "" if self.low == self.high else f" ({self.low:.{digits}f}–{self.high:.{digits}f})"
        return f"{self.median:.{digits}f}{spread}"


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of a case. `rate` is of one reply, `total_rate` of all at once, in tokens a second."""

    case: Case
    prompt_tokens: int
    first: Figure | None
    answer: Figure | None
    rate: Figure | None
    total_rate: Figure | None
    tokens: int
    reasoning_tokens: int

    @property
    def shown_rate(self) -> Figure | None:
        """That of all, where requests at once are what varies."""
        return self.total_rate if self.case.varies == "requests" else self.rate

    @classmethod
    def of(cls, case: Case, runs: Sequence[Sequence[TimedReply]]) -> Row:
        """Summarise runs, each of as many replies as the case has requests."""
        replies = [reply for run in runs for reply in run]
        answers = [reply.answer - reply.sent for reply in replies if reply.answer is not None]
        totals = [total for run in runs if (total := _total_rate(run))]
        return cls(
            case,
            prompt_tokens=round(statistics.median(reply.prompt_tokens for reply in replies)),
            first=Figure.of([reply.first - reply.sent for reply in replies]),
            answer=Figure.of(answers) if len(answers) == len(replies) else None,
            rate=Figure.of([rate for reply in replies if (rate := _total_rate([reply]))]),
            total_rate=Figure.of(totals),
            tokens=round(statistics.median(reply.tokens for reply in replies)),
            reasoning_tokens=round(statistics.median(reply.reasoning_tokens for reply in replies)),
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "varies": self.case.varies,
            "prompt_tokens": self.prompt_tokens,
            "effort": self.case.effort,
            "requests": self.case.requests,
            "first_token_seconds": self.first and asdict(self.first),
            "first_answer_token_seconds": self.answer and asdict(self.answer),
            "tokens_per_second": self.rate and asdict(self.rate),
            "tokens_per_second_of_all": self.total_rate and asdict(self.total_rate),
            "completion_tokens": self.tokens,
            "reasoning_tokens": self.reasoning_tokens,
        }


def _total_rate(run: Sequence[TimedReply]) -> float | None:
    """Return tokens a second of replies at once, from the first token of any to the last; None for too few of them."""
    tokens = sum(reply.tokens for reply in run) - 1
    seconds = max(reply.end for reply in run) - min(reply.first for reply in run)
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Measure a running server, or one of its own: seconds to the first token and tokens a second, by length of the "
        "prompt, effort and number of requests at once. Run it on a quiet machine."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the model (default: the server's first)")
    lengths = f"{', '.join(map(str, CONTEXTS))}; what fits"
    parser.add_argument(
        "--context", type=several(_COUNT), metavar="N,…", help=f"tokens of prompts (default: {lengths})"
    )
    parser.add_argument(
        "--effort", type=several(text()), metavar="E,…", help="efforts (default: all that the model has)"
    )
    requests = ", ".join(map(str, REQUESTS))
    parser.add_argument(
        "--requests", type=several(_COUNT), metavar="N,…", help=f"requests at once (default: {requests})"
    )
    parser.add_argument(
        "--runs", type=argument(_COUNT), default=RUNS, metavar="N", help=f"runs of each (default: {RUNS})"
    )
    parser.add_argument(
        "--tokens",
        type=argument(_COUNT),
        default=TOKENS,
        metavar="N",
        help=f"tokens of a reply at most (default: {TOKENS})",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it too")
    add_server_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, and show it."""
    raise_interrupts()
    local = LocalModels()
    if arguments.model:
        arguments.model, effort = local.without_effort(arguments.model)
        arguments.effort = arguments.effort or (effort and [effort])
    with closing(RunningServer.of(arguments)) as running:
        if (name := name_on_server(running, arguments, local.source)) is not None:
            return _measure(running, name, arguments)
    source = local.source(arguments.model) if arguments.model else MODEL_NAME
    with serving(source, max_queue=max(arguments.requests or REQUESTS)) as (server, name):
        return _measure(server, name, arguments)


def _measure(server: RunningServer, name: str, arguments: argparse.Namespace) -> int:
    model = next(each for each in server.models() if each["id"] == name)
    bench = Bench(server, model["id"], arguments.tokens)
    cases = list(chosen_cases(model, arguments))
    load_before = os.getloadavg()[0]
    bench.reply(Case(SHORT, None, 1, ""))  # the first is slower: the model is loaded, kernels are compiled
    rows = []
    for number, case in enumerate(cases, start=1):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{number} of {len(cases)}: {case.varies}", end="", file=sys.stderr, flush=True)
        rows.append(Row.of(case, [bench.replies(case) for _ in range(arguments.runs)]))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    about = {
        "model": model["id"],
        "url": server.url,
        "version": __version__,
        "runs": arguments.runs,
        "processors": os.cpu_count() or 1,
        "load_before": round(load_before, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    if arguments.json:
        print_json({**about, "rows": [row.as_json() for row in rows]})
    else:
        _show(about, rows, console())
    if arguments.svg:
        write_file(arguments.svg, drawn(about, rows))
    return 0


def chosen_cases(model: dict[str, Any], arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield what is measured: one of the three is varied at a time."""
    room = (model.get("available_context") or model.get("context_length") or 1 << 30) - arguments.tokens
    for context in arguments.context or [each for each in CONTEXTS if each <= room]:
        if context > room:
            raise CommandError(
                f"--context {context}: {model['id']} has room for {room} tokens of a prompt and "
                f"{arguments.tokens} of a reply."
            )
        yield Case(context, None, 1, "context")
    for effort in arguments.effort or (model.get("reasoning") or {}).get("efforts", ()):
        yield Case(SHORT, effort, 1, "effort")
    for requests in arguments.requests or REQUESTS:
        yield Case(SHORT, None, requests, "requests")


class Bench:
    """Sends requests to a server and takes the time."""

    def __init__(
        self, server: RunningServer, model: str, tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._server = server
        self._model = model
        self._tokens = tokens
        self._clock = clock
        self._random = random.Random()
        sample = self._text(400)
        counted = server.post("/v1/tokenize", {"model": model, "prompt": sample}).get("count")
        self._words_per_token = 400 / counted if counted else 1.0

    def replies(self, case: Case) -> list[TimedReply]:
        """Send the requests of a case at once."""
        pool = ThreadPoolExecutor(case.requests)
        try:
            return list(pool.map(self.reply, [case] * case.requests))
        finally:  # after Ctrl-C their connections are closed, which ends them
            pool.shutdown(wait=False, cancel_futures=True)

    def reply(self, case: Case) -> TimedReply:
        """Send one, and read its reply to the end."""
        is_effort = case.varies == "effort"
        filler = self._text(0 if is_effort else int(case.context * self._words_per_token))
        question = _QUESTION if is_effort else "Describe what these words have in common, in detail."
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"{filler}\n\n{question}".strip()}],
            "max_tokens": max(EFFORT_TOKENS, self._tokens) if is_effort else self._tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if case.effort is not None:
            body["reasoning_effort"] = case.effort
        first = answer = None
        usage: dict[str, Any] = {}
        sent = self._clock()
        with self._server.stream("/v1/chat/completions", body) as events:
            for event in events:
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    now = self._clock()
                    if first is None and (delta.get("content") or delta.get("reasoning_content")):
                        first = now
                    if answer is None and delta.get("content"):
                        answer = now
                usage = event.get("usage") or usage
        end = self._clock()
        details = usage.get("completion_tokens_details") or {}
        return TimedReply(
            sent,
            end if first is None else first,
            answer,
            end,
            prompt_tokens=usage.get("prompt_tokens", 0),
            tokens=usage.get("completion_tokens", 0),
            reasoning_tokens=details.get("reasoning_tokens", 0),
        )

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=words))


_HEADS = {"context": "prompt, tokens", "effort": "effort", "requests": "at once"}


def label(row: Row) -> str:
    """Return what is varied of a row."""
    case = row.case
    return {"context": f"{row.prompt_tokens:,}", "effort": case.effort or "", "requests": str(case.requests)}[
        case.varies
    ]


def _show(about: dict[str, Any], rows: Sequence[Row], drawing: Console, *, has_bars: bool = False) -> None:
    from rich.bar import Bar

    largest = max((row.shown_rate.median for row in rows if row.shown_rate), default=1.0)
    for varies, head in _HEADS.items():
        columns: dict[str, Callable[[Row], RenderableType]] = {
            head: label,
            "first token, s": lambda row: row.first.text(2) if row.first else "",
            "tokens/s": lambda row: row.rate.text(1) if row.rate else "",
        }
        if varies == "effort":
            columns["first of the answer, s"] = lambda row: (
                row.answer.text(2) if row.answer else "not reached"
            )
            columns["reasoning tokens"] = lambda row: f"{row.reasoning_tokens:,}"
        if varies == "requests":
            columns["tokens/s of all"] = lambda row: row.total_rate.text(1) if row.total_rate else ""
        if has_bars:
            columns[""] = lambda row: Bar(
                largest, 0, row.shown_rate.median if row.shown_rate else 0, width=24
            )
        if chosen := [row for row in rows if row.case.varies == varies]:
            drawing.print(table(list(columns), [[cell(row) for cell in columns.values()] for row in chosen]))
            drawing.print()
    drawing.print("\n".join(remarks(about, rows)))


def remarks(about: dict[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return what has to be known to read the figures."""
    runs, processors = about["runs"], about["processors"]
    lines = [
        f"{about['model']} at {about['url']}, mlx-backend {about['version']}. Median of {runs} run{'s' * (runs != 1)} "
        "(in brackets the quartiles), after one that does not count; as a client sees it.",
        f"Load of this machine: {about['load_before']} before, {about['load_after']} after, on {processors} "
        f"processor{'s' * (processors != 1)}.",
    ]
    if about["load_before"] > BUSY * processors:
        lines.append("It was busy before: on a quiet machine figures are better.")
    if runs < RUNS:
        lines.append("So few runs say little of how much a figure varies.")
    if any(row.rate is None for row in rows):
        lines.append("Where there is no figure, the reply had a token or none.")
    return lines


def drawn(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return what is shown, with bars, as an SVG."""
    from rich.console import Console

    drawing = Console(record=True, width=SVG_COLUMNS, file=io.StringIO(), markup=False, highlight=False)
    _show(about, rows, drawing, has_bars=True)
    svg = drawing.export_svg(title=f"mlx-backend bench {about['model']}")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # which a browser would fetch elsewhere
