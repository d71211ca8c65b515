"""How much of the bare loop's speed is left over HTTP, on a model of real size: gpt-oss-20b's shapes, random weights.

    python tests/benchmarks/bench_gpu.py [--streams 1 8 32] [--rounds 3] [--prompt 64] [--tokens 192]

For a Mac's GPU or an NVIDIA one. Needs no network, 13 GB of disk, and the model's 12 GB of memory for each system,
since all stay loaded and rounds alternate between them. `--layers 2 --width 256` tries the script on any machine.
The bare loop is mlx-lm's `BatchGenerator` in this process; the servers are processes of their own, reached over HTTP.
Times are those of whole rounds, prompts included: from the first request sent to the last token read. Every prompt is
new, so that no cache helps.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.bench_server import serving

if TYPE_CHECKING:
    from collections.abc import Callable

OURS: Final = [sys.executable, "-m", "mlx_backend", "--port", "{port}", "--log-level", "warning"]
PEER: Final = [sys.executable, "-m", "mlx_lm", "server", "--port", "{port}", "--log-level", "ERROR"]


def main() -> None:
    """Write the model, start the servers, print the table."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    arguments.add_argument("--tokens", type=int, default=192, help="tokens of each reply")
    arguments.add_argument("--layers", type=int, default=24, help="layers of the model")
    arguments.add_argument("--width", type=int, default=2880, help="the model's hidden size")
    arguments.add_argument("--model", type=Path, help="the model's folder, written if it is not there")
    arguments.add_argument("--no-peer", action="store_true", help="leave mlx_lm.server out")
    options = arguments.parse_args()
    with ExitStack() as stack:
        folder = options.model or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "gpt-oss-20b"
        if not (folder / "config.json").exists():
            # In a process of its own, so that memory used for making the weights is not held here.
            script = Path(__file__).with_name("big_model.py")
            shape = ["--layers", str(options.layers), "--width", str(options.width)]
            subprocess.run([sys.executable, script, folder, *shape], check=True)
        port = stack.enter_context(serving([*OURS, "--model", str(folder)]))
        servers: list[tuple[str, int, bool]] = [
            ("mlx-backend, JSON", port, False),
            ("mlx-backend, SSE", port, True),
        ]
        if not options.no_peer:
            peer = stack.enter_context(serving([*PEER, "--model", str(folder)]))
            servers.append(("mlx_lm.server, SSE", peer, True))
        compare(folder, servers, options)


def compare(folder: Path, servers: list[tuple[str, int, bool]], options: argparse.Namespace) -> None:
    """Alternate between the bare loop and the servers; print medians and ratios."""
    model, tokenizer = mlx_lm.load(str(folder))
    rng = random.Random(1)

    def prompts(streams: int) -> list[str]:
        return ["".join(rng.choices(string.ascii_lowercase, k=options.prompt)) for _ in range(streams)]

    def bare(texts: list[str], tokens: int) -> None:
        generator = BatchGenerator(model)
        generator.insert(
            [tokenizer.encode(text, add_special_tokens=False) for text in texts],
            max_tokens=[tokens] * len(texts),
        )
        left = len(texts) * tokens
        while left:
            left -= len(generator.next()[1])
        generator.close()
        mx.clear_cache()

    def over_http(port: int, stream: bool) -> Callable[[list[str], int], None]:
        def run(texts: list[str], tokens: int) -> None:
            with ThreadPoolExecutor(len(texts)) as pool:
                counts = list(pool.map(lambda text: complete(port, text, tokens, stream), texts))
            assert counts == [(options.prompt, tokens)] * len(texts), counts

        return run

    runs = {"bare loop": bare} | {name: over_http(port, stream) for name, port, stream in servers}
    print(f"{mx.default_device()}, prompts of {options.prompt} tokens, replies of {options.tokens}, ", end="")
    print(f"{options.rounds} rounds; {options.layers} layers, width {options.width}", flush=True)
    for streams in options.streams:
        for run in runs.values():
            with contextlib.suppress(OSError, http.client.HTTPException):
                run(prompts(streams), 8)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for round_number in range(options.rounds):
            # Each goes first in some round: the one that runs after a pause is slower.
            first = round_number % len(runs)
            in_order = [*runs.items()]
            for name, run in in_order[first:] + in_order[:first]:
                texts = prompts(streams)
                started = time.perf_counter()
                try:
                    run(texts, options.tokens)
                except (OSError, http.client.HTTPException) as problem:
                    print(f"({name}, {streams} streams: {type(problem).__name__})", flush=True)
                    continue
                seconds[name].append(time.perf_counter() - started)
        print(f"\n{streams} stream{'s' * (streams > 1)}")
        for name, times in seconds.items():
            if not times:
                print(f"  {name:20} no answer")
                continue
            rates = [streams * options.tokens / taken for taken in times]
            ratios = [b / a for a, b in zip(times, seconds["bare loop"], strict=False)]
            print(
                f"  {name:20} {statistics.median(rates):7.1f} tokens/s ({min(rates):.1f}-{max(rates):.1f}), "
                f"{statistics.median(ratios):.3f} of the bare loop ({min(ratios):.2f}-{max(ratios):.2f})",
                flush=True,
            )


def complete(port: int, text: str, tokens: int, stream: bool) -> tuple[int, int]:
    """Continue a text; return how many tokens the server counted in the prompt and in the reply."""
    body: dict[str, Any] = {"prompt": text, "max_tokens": tokens, "temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse().read()
    connection.close()
    if stream:
        reply = next(line for line in reversed(reply.split(b"\n")) if b'"completion_tokens"' in line)[6:]
    usage = json.loads(reply)["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


if __name__ == "__main__":
    main()
