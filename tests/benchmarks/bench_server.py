"""What serving adds: time per token over HTTP against the bare engine, and mlx_lm's server beside it.

    python tests/benchmarks/bench_server.py [--tokens 256] [--rounds 3]

All continue the same prompt with the demo model, greedily, for the same number of tokens (end tokens are biased away),
with 1 and with 8 streams. Medians over the rounds, which alternate, so that other load affects all alike. Each server
is a process of its own; the client is this one.

The last table is without a model: a transcript goes through parser, protocol and real sockets, and this process's CPU
time is counted, which other load disturbs least.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from running_server import HELLO, running
from scripted_engine import ScriptedEngine

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.base import GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mlx_backend.engine.threaded import Engine

PROMPT = "<|start|>user<|message|>What is the capital of France?<|end|><|start|>assistant"
END_TOKENS = json.loads((MODEL_PATH / "generation_config.json").read_text())["eos_token_id"]
STREAMS = (1, 8)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=3)
    options = arguments.parse_args()

    engine = load_engine(MODEL_PATH)
    ours = [sys.executable, "-m", "mlx_backend", "--port", "{port}", "--log-level", "warning"]
    peer = [sys.executable, "-m", "mlx_lm", "server", "--model", str(MODEL_PATH), "--port", "{port}"]
    with (
        serving([*ours, "--model", str(MODEL_PATH)]) as port,
        serving([*peer, "--log-level", "ERROR"]) as other,
    ):
        runs: dict[str, Callable[[int], float]] = {"bare engine": lambda n: bare(engine, n, options.tokens)}
        for name, at in (("mlx-backend", port), ("mlx_lm server", other)):
            for kind, stream in (("JSON", False), ("SSE", True)):
                runs[f"{name} {kind}"] = partial(over_http, at, tokens=options.tokens, stream=stream)
        for streams in STREAMS:
            print(f"\n{streams} stream{'s' * (streams > 1)}, {options.tokens} tokens each")
            for run in runs.values():
                run(streams)  # warm
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(options.rounds):
                for name, run in runs.items():
                    times[name].append(run(streams))
            base = statistics.median(times["bare engine"])
            for name, seconds in times.items():
                median = statistics.median(seconds)
                per_token = median / (streams * options.tokens)
                added = (median - base) / (streams * options.tokens)
                print(
                    f"  {name:20} {per_token * 1e6:7.0f} us per token, {1 / per_token:6.0f} tokens/s, "
                    f"{median / base:5.2f} of the bare engine ({added * 1e6:+.0f} us)"
                )
    engine.stop()
    own_work(20_000)


def own_work(tokens: int) -> None:
    """Print the CPU time that parser, protocol and HTTP add to each token."""
    text = "<|channel|>final<|message|>" + "abc" * tokens + "<|return|>"
    print("\nwithout a model: CPU time added to each token")
    with ScriptedEngine(lambda _: text) as engine, running(engine) as server:
        start = time.process_time()
        for _ in engine.generate(GenerationRequest(prompt=[1], max_tokens=2 * tokens)):
            pass
        base = time.process_time() - start
        for kind, stream in (("JSON", False), ("SSE", True)):
            body = json.dumps({"messages": HELLO, "stream": stream})
            start = time.process_time()
            subprocess.run(
                ["curl", "-sN", f"{server.url}/v1/chat/completions", "-d", body],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            print(f"  {kind:20} {(time.process_time() - start - base) / tokens * 1e6:7.1f} us")


def bare(engine: Engine, streams: int, tokens: int) -> float:
    prompt = engine.tokenizer.encode(PROMPT, control_tokens=True)
    bias = tuple((token, -100.0) for token in END_TOKENS)
    request = GenerationRequest(prompt=prompt, max_tokens=tokens, sampling=Sampling(logit_bias=bias))

    def one(_: int) -> int:
        return sum(isinstance(item, TokenDelta) for item in engine.generate(request))

    return timed(one, streams, tokens)


def over_http(port: int, streams: int, tokens: int, stream: bool) -> float:
    body: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "logit_bias": {str(token): -100 for token in END_TOKENS},
        "stream": stream,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body if stream else {k: v for k, v in body.items() if k != "stream_options"})

    def one(_: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        reply = connection.getresponse().read()
        connection.close()
        if stream:
            reply = next(line for line in reversed(reply.split(b"\n")) if b'"usage"' in line)[6:]
        produced: int = json.loads(reply)["usage"]["completion_tokens"]
        return produced

    return timed(one, streams, tokens)


def timed(one: Callable[[int], int], streams: int, tokens: int) -> float:
    with ThreadPoolExecutor(streams) as pool:
        start = time.perf_counter()
        produced = list(pool.map(one, range(streams)))
        seconds = time.perf_counter() - start
    assert produced == [tokens] * streams, produced
    return seconds


@contextmanager
def serving(command: list[str]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    process = subprocess.Popen(
        [word.replace("{port}", str(port)) for word in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, f"{command[2]} did not start"
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
