"""Prompts beside mlx-lm's own loop: first tokens, the gap in a running stream, and turns of which most is cached.

    python tests/benchmarks/bench_prefill.py [first | gap | turns] [--model FOLDER] [--lengths 512 2048] [--rounds 5]

Without an engine's name all three run. No HTTP: both systems are called in processes of this script, on token ids.

- *first*: the time to the first token of new random prompts. "The first prompt" is the first of its length in a fresh
  process; then rounds of both alternate in one process. The bare loop is mlx-lm's `generate_step`.
- *gap*: a reply is being decoded while a long prompt arrives, twice in a fresh process: the longest time between two
  tokens of the reply, and the prompt's first token beside the same prompt's time alone.
- *turns*: prompts of which all but some tokens are cached, as an agent's next turn: the first token and the time
  between tokens, alone and with four at once. What is cached is filled with random numbers, so that even 100,000 tokens
  need not be prefilled first. The bare loop gets a copy of the same caches, and mlx-lm's `BatchGenerator` four. What a
  checkpoint costs is the time of a step before which everything cached has to be copied, over that of the next one.

Without --model it is a gpt_oss with random weights, of which `--layers`, `--width`, `--vocabulary` and `--dtype` say
how large. With
--processor-time the times are this process's processor time, which other processes disturb less: only on a CPU.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import write_model

from mlx_backend.device.blas import use_fast_blas

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.threaded import Engine

PARTS: Final = ("first", "gap", "turns")
DECODED: Final = 24  # tokens after the first, over which the time between tokens is taken


def main() -> None:
    """Run the parts in processes of their own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="which parts; without any, all")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--warm-up-seconds", type=float, help="of the engine in which a prompt arrives")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048], help="of new prompts")
    parser.add_argument("--arriving", type=int, default=2048, help="the prompt that arrives beside a reply")
    parser.add_argument("--cached", type=int, nargs="+", default=[1_000, 32_000, 100_000])
    parser.add_argument("--new", type=int, default=100, help="tokens of a turn that are not cached")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blas", choices=["auto", "off"], default="auto", help="on a Linux CPU")
    parser.add_argument("--processor-time", action="store_true", help="in place of time (first and turns)")
    parser.add_argument(
        "--in-process", choices=["ours", "bare", "both", "gap", "turns"], help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.in_process:
        if options.processor_time:
            Clock.now = time.process_time
        print(use_fast_blas(options.blas) or "MLX's own matrix products", file=sys.stderr)
        importlib.import_module("mlx.core")  # which the engine takes as it is
        run_part(options.in_process, options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if options.model is None:
            options.model = _write_model(Path(scratch) / "random", options)
        for part in options.parts or PARTS:
            for process in {"first": ["ours", "bare", "both"]}.get(part, [part]):
                print(f"\n== {part}: {process}", flush=True)
                command = [sys.executable, __file__, "--in-process", process, "--model", str(options.model)]
                for name in ("lengths", "cached"):
                    command += [f"--{name}", *map(str, getattr(options, name))]
                for name in ("arriving", "new", "rounds"):
                    command += [f"--{name}", str(getattr(options, name))]
                command += ["--processor-time"] * options.processor_time + ["--blas", options.blas]
                if options.warm_up_seconds is not None:
                    command += ["--warm-up-seconds", str(options.warm_up_seconds)]
                subprocess.run(command, check=True)


def _write_model(folder: Path, options: argparse.Namespace) -> Path:
    layers, width = options.layers, options.width
    return write_model(
        folder,
        dtype=options.dtype,
        num_hidden_layers=layers,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        hidden_size=width,
        intermediate_size=width,
        num_attention_heads=4 * max(1, width // 256),
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        sliding_window=128,
        num_local_experts=8,
        vocab_size=options.vocabulary,
        max_position_embeddings=131_072,
        eos_token_id=[],
    )


class Clock:
    """What the times are measured by."""

    now = time.perf_counter


class Prompts:
    """Random prompts, never the same twice."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __call__(self, length: int) -> list[int]:
        return self._random.choices(range(300, 500), k=length)


class Bare:
    """mlx-lm's own loop."""

    def __init__(self, folder: Path) -> None:
        import mlx_lm

        self.model, _ = mlx_lm.load(str(folder))

    def first_token(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the first token."""
        return self.turn(prompt, None, 1)[0]

    def turn(self, prompt: Sequence[int], caches: Any, tokens: int) -> tuple[float, float]:
        """Return the seconds until the first token, and between tokens."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        started, times = Clock.now(), []
        for _ in generate_step(mx.array(list(prompt)), self.model, max_tokens=tokens, prompt_cache=caches):
            times.append(Clock.now())
        mx.clear_cache()
        return times[0] - started, (times[-1] - times[0]) / max(1, len(times) - 1)

    def batch(self, prompts: Sequence[list[int]], caches: Any, tokens: int) -> tuple[float, float]:
        """Return the seconds until every prompt has its first token, and between tokens of all together."""
        import mlx.core as mx
        from mlx_lm.generate import BatchGenerator

        started, times = Clock.now(), []
        generator = BatchGenerator(self.model, stop_tokens=[])
        generator.insert(list(prompts), max_tokens=[tokens] * len(prompts), caches=caches)
        left = len(prompts)
        while left:
            _, generated = generator.next()
            left -= sum(each.finish_reason is not None for each in generated)
            if len(generated) == len(prompts):
                times.append(Clock.now())
        generator.close()
        mx.clear_cache()
        return times[0] - started, (times[-1] - times[0]) / max(1, len(times) - 1)


class Ours:
    """This project's engine."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        from mlx_backend.engine.mlx import load_engine

        started = time.perf_counter()
        self.engine: Engine = load_engine(folder, **changes)
        print(f"  loaded in {time.perf_counter() - started:.1f} s", flush=True)

    def first_token(self, prompt: Sequence[int]) -> float:
        """Return the seconds until the first token."""
        return self.turn(prompt, 1)[0]

    def turn(self, prompt: Sequence[int], tokens: int, on_token: Any = None) -> tuple[float, float]:
        """Return the seconds until the first token, and between tokens."""
        from mlx_backend.engine.base import GenerationRequest, TokenDelta

        started, times = Clock.now(), []
        for item in self.engine.generate(GenerationRequest(prompt=list(prompt), max_tokens=tokens)):
            if isinstance(item, TokenDelta):
                times.append(Clock.now())
                if on_token is not None:
                    on_token(times[-1])
        return times[0] - started, (times[-1] - times[0]) / max(1, len(times) - 1)


def run_part(part: str, options: argparse.Namespace) -> None:
    """Run one part in this process."""
    match part:
        case "ours" | "bare":
            system: Ours | Bare = (Ours if part == "ours" else Bare)(options.model)
            prompts = Prompts(1)
            for length in options.lengths:
                times = [system.first_token(prompts(length)) for _ in range(2)]
                print(
                    f"  {length:>6} tokens: first prompt {times[0]:.3f} s, second {times[1]:.3f} s",
                    flush=True,
                )
        case "both":
            alternate(Bare(options.model), Ours(options.model), options)
        case "gap":
            warm_up = {} if options.warm_up_seconds is None else {"warm_up_seconds": options.warm_up_seconds}
            gap(Ours(options.model, **warm_up), options)
        case "turns":
            turns(options)


def alternate(bare: Bare, ours: Ours, options: argparse.Namespace) -> None:
    """Print the first token's times, and their ratio, over rounds in which each goes first in turn."""
    prompts = Prompts(2)
    systems: list[Bare | Ours] = [bare, ours]
    for length in options.lengths:
        times: dict[bool, list[float]] = {True: [], False: []}
        for round_number in range(options.rounds + 1):
            for system in systems if round_number % 2 else systems[::-1]:
                seconds = system.first_token(prompts(length))
                if round_number:
                    times[system is ours].append(seconds)
        ratios = [own / base for own, base in zip(times[True], times[False], strict=True)]
        print(
            f"  {length:>6} tokens: bare {statistics.median(times[False]):.4f} s, ours "
            f"{statistics.median(times[True]):.4f} s; ratio {statistics.median(ratios):.3f} "
            f"({min(ratios):.2f}-{max(ratios):.2f}), of the least {min(times[True]) / min(times[False]):.3f}",
            flush=True,
        )


def gap(ours: Ours, options: argparse.Namespace) -> None:
    """Print the longest gap of a stream beside which a prompt arrives, and that prompt's first token."""
    prompts = Prompts(3)
    for name in ("first time", "second time", "third time"):
        seen: list[float] = []
        enough = threading.Event()

        def on_token(at: float, seen: list[float] = seen, enough: threading.Event = enough) -> None:
            seen.append(at)
            if len(seen) == 10:
                enough.set()

        stream = threading.Thread(target=ours.turn, args=(prompts(64), 400, on_token))
        stream.start()
        enough.wait()
        arrived = time.perf_counter()
        first = ours.first_token(prompts(options.arriving))
        done = arrived + first
        while seen[-1] < done and stream.is_alive():
            time.sleep(0.01)
        during = [at for at in seen if at >= arrived]
        gaps = [after - before for before, after in itertools.pairwise(seen) if before < done]
        stream.join()
        alone = ours.first_token(prompts(options.arriving))
        print(
            f"  {options.arriving} tokens arrive, {name}: longest gap {max(gaps[9:]):.3f} s, first token {first:.2f} s "
            f"({first / alone:.2f} of {alone:.2f} s alone), tokens of the stream meanwhile "
            f"{sum(at <= done for at in during)}",
            flush=True,
        )


def turns(options: argparse.Namespace) -> None:
    """Print first tokens and the time between tokens of turns that are cached but for their last tokens."""
    from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache

    bare, ours = Bare(options.model), Ours(options.model, cache_bytes=1 << 36, memory_bytes=1 << 38)
    prompts = Prompts(4)
    runtime = ours.engine._scheduler._batch.runtime  # type: ignore[attr-defined]  # private: caches are put there
    for length in options.cached:
        context = prompts(length)
        made = filled_caches(bare.model, length)
        runtime.prefix_store.prefixes.insert(context, [GrowingKVCache.of(each) for each in copies(made)])
        nbytes = runtime.prefix_store.prefixes.nbytes
        copying = [checkpoint_seconds(bare.model, made) for _ in range(5)]
        print(
            f"  {length} tokens are cached: {nbytes / (1 << 20):.1f} MB, {nbytes / length:.0f} bytes a token; a "
            f"checkpoint costs {statistics.median(copying) * 1e3:.1f} ms",
            flush=True,
        )
        figures: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": [], "batch": [], "four": []}
        for _ in range(options.rounds):
            figures["bare"].append(bare.turn(prompts(options.new), copies(made), DECODED))
            figures["ours"].append(ours.turn([*context, *prompts(options.new)], DECODED))
            news = [prompts(options.new) for _ in range(4)]
            figures["batch"].append(bare.batch(news, [copies(made) for _ in news], DECODED))
            figures["four"] += at_once([partial(ours.turn, [*context, *new], DECODED) for new in news])
        for name, times in figures.items():
            firsts, steps = zip(*times, strict=True)
            print(
                f"    {name}: first token {statistics.median(firsts):.4f} s (least {min(firsts):.4f}), a step "
                f"{statistics.median(steps) * 1e3:.1f} ms (least {min(steps) * 1e3:.1f})",
                flush=True,
            )
        ours.turn(
            prompts(2), 1
        )  # a reply is cached after its last token was sent, but before the next request
        runtime.prefix_store.prefixes.clear()


def copies(caches: Sequence[Any]) -> list[Any]:
    """Return caches with the same contents."""
    return [copy.deepcopy(layer) for layer in caches]


def checkpoint_seconds(network: Any, made: Sequence[Any]) -> float:
    """Return by how much longer a step takes before which the caches have to be copied, as they are held twice."""
    import mlx.core as mx

    def step() -> float:
        started = Clock.now()
        mx.eval(network(mx.array([[1]]), cache=caches))
        return Clock.now() - started

    caches = copies(made)
    step()  # which makes room for more
    held = [(layer.keys, layer.values) for layer in caches]
    first = step()
    del held
    return first - step()


def filled_caches(network: Any, length: int) -> list[Any]:
    """Return caches that hold so many tokens, of random numbers, as prefill leaves them."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    caches: list[Any] = make_prompt_cache(network)
    mx.eval(network(mx.zeros((1, 2), mx.int32), cache=caches))
    for layer in caches:
        held = -(-length // 256) * 256 if type(layer) is KVCache else layer.max_size
        for name in ("keys", "values"):
            rows, heads, _, size = getattr(layer, name).shape
            dtype = getattr(layer, name).dtype
            setattr(layer, name, mx.random.normal((rows, heads, held, size)).astype(dtype))
        layer.offset = length
        if type(layer) is not KVCache:
            layer._idx = held
    mx.eval([layer.state for layer in caches])
    return caches


def at_once(calls: Sequence[Callable[[], tuple[float, float]]]) -> list[tuple[float, float]]:
    """Make calls at the same time and return their results."""
    results: list[tuple[float, float]] = []
    threads = [threading.Thread(target=lambda call=call: results.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


if __name__ == "__main__":
    main()
