"""What this machine does with a model, written into one file to send back: `make mac-report`.

    python tests/e2e/mac_report.py [--model FOLDER_OR_REPOSITORY] [--wired auto|on|off] [--rounds N] [--prompts N …]
        [--output FILE]

Each part runs by itself: if one fails, its error is in the report and the others still run. The report holds versions,
the machine's kind and memory, and figures; no names of users or machines, no paths, no prompts and no texts of replies
but those of this file. Runs on Linux too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.device.blas import use_fast_blas

BLAS = use_fast_blas()  # before MLX, as the server does it

import mlx.core as mx

from mlx_backend.demo import MODEL_NAME, MODEL_PATH
from mlx_backend.device import Device
from mlx_backend.device.machine import this_machine
from mlx_backend.device.memory import format_bytes
from mlx_backend.device.mlx import recommended_memory, set_wired_limit, working_set_limit
from mlx_backend.engine.base import Finished, GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_backend.engine.jobs import Generation
    from mlx_backend.engine.threaded import Engine

ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "build" / "mac-report.md"
PACKAGES = ("mlx", "mlx-metal", "mlx-lm", "transformers", "huggingface-hub", "llguidance", "numpy")
QUESTIONS = ("What is the capital of France?", "Count to 15.")
PROMPTS = (64, 512, 2048, 8192)  # tokens
REPLY_TOKENS = 128
CROWD = 8
"""Replies at once."""


class Report:
    """Lines of Markdown: a part for each thing that was tried, with a row for each figure."""

    def __init__(self) -> None:
        self.lines = ["# A report on mlx-backend", ""]
        self.failed: list[str] = []

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Run a part; an error becomes a line of it."""
        print(f"{title} …", flush=True)
        self.lines += [f"## {title}", "", "| | |", "|---|---|"]
        try:
            yield
        except (Exception, SystemExit) as error:
            self.failed.append(title)
            self.row("failed", f"{type(error).__name__}: {error}")
        self.lines.append("")

    def row(self, name: str, value: Any) -> None:
        """Add a figure; one that this system does not have is left out."""
        if value == "":
            return
        text = _without_names(str(value)).replace("|", "\\|").replace("\n", " ")
        self.lines.append(f"| {name} | {text} |")

    def text(self) -> str:
        """Return the report."""
        return "\n".join(self.lines)


def _without_names(text: str) -> str:
    """Take paths, and the names of the user and the machine, out of a text, which may be an error's."""
    text = text.replace(str(ROOT), "CLONE").replace(str(Path.home()), "HOME")
    if len(name := socket.gethostname()) > 3:
        text = text.replace(name, "HOST")
    return re.sub(r"(?<![\w.])(?:/[\w .@+-]+){2,}", "PATH", text)


def _output(*command: str) -> str:
    """Return what a command prints; empty if it fails, as those of macOS do on Linux."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _system_wired() -> str:
    """Return how much memory macOS has wired in all; empty elsewhere."""
    printed = _output("vm_stat")
    page, wired = re.search(r"page size of (\d+)", printed), re.search(r"Pages wired down:\s+(\d+)", printed)
    return format_bytes(int(page[1]) * int(wired[1])) if page and wired else ""


# -- the parts ------------------------------------------------------------------------------------------------


def versions(report: Report) -> None:
    """What runs here."""
    machine = this_machine()
    report.row("project", _output("git", "-C", str(ROOT), "describe", "--always", "--dirty") or "no git")
    report.row("Python", f"{platform.python_version()}, {platform.machine()}")
    report.row("system", f"{machine.system} {platform.mac_ver()[0] or platform.release()}")
    for package in PACKAGES:
        report.row(package, _version(package))
    report.row("model of the machine", _output("sysctl", "-n", "hw.model"))
    report.row("processor", _output("sysctl", "-n", "machdep.cpu.brand_string"))
    report.row("memory", format_bytes(machine.memory))
    report.row("iogpu.wired_limit_mb", _output("sysctl", "-n", "iogpu.wired_limit_mb"))
    report.row("MLX_ENABLE_TF32", os.environ.get("MLX_ENABLE_TF32", "not set, as for users"))
    report.row("device", str(mx.default_device()))
    report.row("CPU", BLAS or "")
    for name, value in mx.device_info().items():
        report.row(f"device_info: {name}", _with_unit(value))
    report.row("models and caches may take", format_bytes(recommended_memory()))
    report.row("Docker", _output("docker", "info", "--format", "{{.OperatingSystem}}, {{.MemTotal}} bytes"))


def _with_unit(value: str | int) -> str:
    return f"{value} ({format_bytes(value)})" if isinstance(value, int) and value >= 1 << 20 else str(value)


class Model:
    """The model in memory, and how that went."""

    def __init__(self, source: str, wired: Any, engine: Literal["full", "plain"] = "full") -> None:
        self.limits: list[int] = []
        self.active: list[tuple[float, int]] = []
        self.device = Device(
            recommended_memory, wired=wired, wired_limit=working_set_limit, set_wired_limit=self._wire
        )
        self.wired_before, started = _system_wired(), time.perf_counter()
        mx.reset_peak_memory()
        self.engine: Engine = load_engine(
            source,
            device=self.device,
            model_id=MODEL_NAME if source == str(MODEL_PATH) else None,
            cache_bytes=0,
            engine=engine,
            on_progress=self._on_progress,
        )
        self.seconds = time.perf_counter() - started

    def _wire(self, limit: int) -> None:
        self.limits.append(limit)
        set_wired_limit(limit)

    def _on_progress(self, share: float) -> None:
        self.active.append((share, mx.get_active_memory()))

    def tokens_of(self, question: str) -> list[int]:
        """Return the prompt of a question, as a chat client's would be."""
        tokenizer = self.engine.tokenizer
        text = tokenizer.render([{"role": "user", "content": question}], None)
        return tokenizer.encode(text, control_tokens=True)

    def filler(self, count: int, round_number: int) -> list[int]:
        """Return a prompt of this many tokens that no other round has."""
        words = " ".join(f"{round_number}:{number}" for number in range(count))
        return self.engine.tokenizer.encode(words, control_tokens=False)[:count]


def loading(report: Report, model: Model) -> None:
    """Time, active memory and wired memory while the model was loaded."""
    report.row("model", model.engine.model_id.rpartition("/")[2])
    report.row("context", model.engine.context_length)
    report.row("loaded in", f"{model.seconds:.1f} s")
    for share, active in _few(model.active):
        report.row(f"active memory at {share:.0%}", format_bytes(active))
    report.row("weights, as reserved", format_bytes(model.device.memory.reserved))
    report.row("peak memory", format_bytes(mx.get_peak_memory()))
    report.row("wired limits that were set", ", ".join(map(format_bytes, model.limits)) or "none")
    report.row("wired in all, before", model.wired_before)
    report.row("wired in all, after", _system_wired())


def _few(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    step = max(1, len(samples) // 5)
    return [*samples[:-1:step], samples[-1]]


def speed(report: Report, model: Model, lengths: Sequence[int], rounds: int) -> None:
    """Prefill by length, decoding alone, and replies at once; medians."""
    prompts = [length for length in lengths if length + REPLY_TOKENS < model.engine.context_length]
    for length in prompts:
        rates = []
        for number in range(rounds):
            request = GenerationRequest(prompt=model.filler(length, number), max_tokens=1)
            _, end = _run(model.engine.generate(request))
            rates.append(end.prompt_tokens / max(end.prefill_seconds, 1e-9))
        report.row(f"prefill of {length} tokens", f"{statistics.median(rates):.0f} tokens/s")
    rates, tokens = [], 0
    for _ in range(rounds):
        request = GenerationRequest(prompt=model.tokens_of(QUESTIONS[1]), max_tokens=REPLY_TOKENS)
        _, end = _run(model.engine.generate(request))
        tokens = end.completion_tokens
        rates.append((tokens - 1) / max(end.decode_seconds, 1e-9))
    report.row("decode alone", f"{statistics.median(rates):.1f} tokens/s, {tokens} tokens")
    rates = []
    for number in range(rounds):
        requests = [
            GenerationRequest(prompt=model.filler(lengths[0], 100 * number + each), max_tokens=REPLY_TOKENS)
            for each in range(CROWD)
        ]
        started = time.perf_counter()
        crowd = [model.engine.generate(request) for request in requests]
        tokens = sum(len(_run(generation)[0]) for generation in crowd)
        rates.append(tokens / (time.perf_counter() - started))
    report.row(f"{CROWD} replies at once", f"{statistics.median(rates):.0f} tokens/s, prefill included")
    report.row("peak memory", format_bytes(mx.get_peak_memory()))


def together(report: Report, model: Model) -> None:
    """Whether two replies at once are those that each question gets alone."""
    requests = [
        GenerationRequest(prompt=model.tokens_of(question), max_tokens=REPLY_TOKENS, logprobs=2)
        for question in QUESTIONS
    ]
    alone = [_run(model.engine.generate(request))[0] for request in requests]
    both = [_run(generation)[0] for generation in [model.engine.generate(request) for request in requests]]
    for question, one, other in zip(QUESTIONS, alone, both, strict=True):
        report.row(question, _difference(one, other))


def _difference(one: Sequence[TokenDelta], other: Sequence[TokenDelta]) -> str:
    """Say where two replies differ, and how near the choice was there."""
    pairs = enumerate(zip(one, other, strict=False))
    first = next((at for at, (left, right) in pairs if left.token != right.token), None)
    if first is None:
        return f"equal, {len(one)} tokens" if len(one) == len(other) else "one is the beginning of the other"
    logprobs = one[first].logprobs
    gap = logprobs.top[0][1] - logprobs.top[1][1] if logprobs and len(logprobs.top) > 1 else float("nan")
    return f"differ from token {first} on; alone, the two likeliest tokens were {gap:.4f} apart"


def _run(generation: Generation) -> tuple[list[TokenDelta], Finished]:
    items = list(generation)
    end = items[-1]
    assert isinstance(end, Finished)
    return [item for item in items if isinstance(item, TokenDelta)], end


def over_http(report: Report, source: str) -> None:
    """The server as a process: its start, an answer, a second one on its port, its end."""
    command = [sys.executable, "-m", "mlx_backend", "--model", source, "--log-level", "warning"]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = ""
        for line in process.stdout:
            if line.startswith("Listening on "):
                url = line.split()[2]
                report.row("listening after", f"{time.perf_counter() - started:.1f} s")
            if line.startswith("  Dify in Docker"):
                report.row("the line for Dify", line.strip())
            if line.startswith("  Try: "):
                break
        report.row("ready after", f"{time.perf_counter() - started:.1f} s")
        _ask(report, url)
        port = int(url.rpartition(":")[2])
        report.row("the system lets 0.0.0.0 listen at the same time", _can_bind_every_address(port))
        second = [*command, "--host", "0.0.0.0", "--no-auth", "--port", str(port)]
        done = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        refused = done.returncode == 1 and f"Port {port} is in use: an mlx-backend" in done.stderr
        report.row(
            "a second server on the port is refused", "yes" if refused else f"NO: {done.stderr[-300:]}"
        )
        stopped = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        report.row("stopped in", f"{time.perf_counter() - stopped:.1f} s, status {process.returncode}")
    finally:
        process.kill()
        process.communicate()


def _ask(report: Report, url: str) -> None:
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": REPLY_TOKENS}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    asked = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        reply = json.load(response)
    message = reply["choices"][0]["message"]
    report.row("question", QUESTIONS[0])
    report.row("answer", message["content"] or "(only reasoning)")
    report.row(
        "answered in", f"{time.perf_counter() - asked:.2f} s, {reply['usage']['completion_tokens']} tokens"
    )


def _can_bind_every_address(port: int) -> str:
    with socket.socket() as second:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            second.bind(("0.0.0.0", port))
            second.listen()
        except OSError:
            return "no"
    return "yes"


def main() -> int:
    """Write the report; 0 if every part could be run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="", help="folder or repository (default: the demonstration model)")
    parser.add_argument("--wired", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement; medians are reported")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=PROMPTS, help="tokens of prompts, shortest first"
    )
    parser.add_argument("--output", type=Path, default=REPORT)
    options = parser.parse_args()
    source, report = options.model or str(MODEL_PATH), Report()
    report.lines.append(
        f"Written by `make mac-report` on {time.strftime('%Y-%m-%d')}, with --wired {options.wired}.\n"
    )
    with report.part("Versions and machine"):
        versions(report)
    model: Model | None = None
    with report.part("Loading"):
        model = Model(source, options.wired)
        loading(report, model)
    if model is not None:
        with report.part("Speed"):
            speed(report, model, options.prompts, options.rounds)
        with report.part("Two requests at once"):
            together(report, model)
        with report.part("Unloading"):
            model.engine.stop()
            report.row("active memory", format_bytes(mx.get_active_memory()))
            report.row("wired limits that were set", ", ".join(map(format_bytes, model.limits)) or "none")
            report.row("wired in all", _system_wired())
        with report.part("Speed of mlx-lm's own batch generator (--engine plain)"):
            plain = Model(source, options.wired, "plain")
            speed(report, plain, options.prompts, options.rounds)
            plain.engine.stop()
    with report.part("Over HTTP"):
        over_http(report, source)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report.text(), encoding="utf-8")
    print(
        f"\nThe report is in {options.output}. It holds versions, the machine's kind and figures, and no names or"
    )
    print("paths; look through it, and send it back.")
    if report.failed:
        print(f"Failed, with the reason in the report: {', '.join(report.failed)}.")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
