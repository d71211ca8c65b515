"""What our engine adds to the bare loop of mlx-lm, and gains over the plain engine, on the same model in the same run.

    python tests/benchmarks/bench_engine.py [--model FOLDER] [--rounds 5] [--tokens 200] [--streams 1 8 32]

Without --model it is a tiny gpt_oss with random weights, whose steps are so short that every microsecond of ours shows.
Rounds alternate between all, so that other load affects them alike; the table shows medians, and the ratios are what
counts. The plain engine (`serve --engine plain`) is all that is left without what makes ours faster; rows in which ours
gains less than 15 % over it are marked. In *prompts arrive* replies run, and long prompts arrive one after the other;
the rate is that of all tokens that are generated. --processor-time measures that of this process (only on a CPU). The
last lines count steps, not seconds: they are the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import mlx_lm
from mlx_lm.generate import BatchGenerator

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import write_model

from mlx_backend.engine.base import GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mlx_backend.engine.threaded import Engine

WORDS: Final = (
    "the quick brown fox jumps over the lazy dog and counts one two three four five six seven eight "
)
MIN_GAIN: Final = 1.15
ARRIVING: Final = 4
"""Number of prompts that arrive, and of replies that run meanwhile."""


def main() -> None:
    """Write a model, if none is named, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--arriving", type=int, default=600, help="tokens of the prompts that arrive")
    parser.add_argument("--processor-time", action="store_true", help="in place of time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or write_model(Path(scratch) / "random", eos_token_id=[])
        compare(folder, options)


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Print the table."""
    model, tokenizer = mlx_lm.load(str(folder))
    text: list[int] = tokenizer.encode(WORDS * 4, add_special_tokens=False)
    stops = [[token] for token in tokenizer.eos_token_ids]
    tokens, now = options.tokens, time.process_time if options.processor_time else time.perf_counter
    long = (text * (options.arriving // len(text) + 1))[: options.arriving]

    def bare(prompts: Sequence[list[int]]) -> int:
        generator = BatchGenerator(model, stop_tokens=stops, prefill_step_size=512)
        generator.insert(list(prompts), max_tokens=[tokens] * len(prompts))
        count = 0
        while True:
            started, generated = generator.next()
            count += len(generated)
            if not started and not generated:
                generator.close()
                return count

    def replies(engine: Engine, prompts: Sequence[list[int]], sampling: Sampling) -> int:
        counts = [0] * len(prompts)

        def consume(at: int) -> None:
            request = GenerationRequest(prompt=prompts[at], max_tokens=tokens, sampling=sampling)
            counts[at] = _count(engine, request)

        _at_once([partial(consume, at) for at in range(len(prompts))])
        return sum(counts)

    def arriving(engine: Engine) -> int:
        running = text[: len(text) // 2]
        counts = [0] * (ARRIVING + 1)

        def run(at: int) -> None:
            counts[at] = _count(engine, GenerationRequest(prompt=running[at:], max_tokens=tokens))

        def arrive() -> None:
            for at in range(ARRIVING):
                counts[-1] += _count(engine, GenerationRequest(prompt=long[at:], max_tokens=8))

        _at_once([*(partial(run, at) for at in range(ARRIVING)), arrive])
        return sum(counts)

    greedy, sampled = Sampling(), Sampling(temperature=0.7, top_p=0.95)
    print(
        f"{folder.name}: prompts of {len(text)} tokens, {tokens} generated, medians of {options.rounds} rounds"
    )
    print(
        "                  tokens a second               ours over          added to    sampled\n"
        "                 bare   plain    ours        bare       plain     bare, us    tokens/s"
    )
    with (
        load_engine(folder, cache_bytes=0) as ours,
        load_engine(folder, engine="plain") as plain,
    ):
        while ours.status().detail:  # on a GPU kernels are compiled and lengths run in the background
            time.sleep(0.5)
        for streams in options.streams:
            prompts = [text[at:] for at in range(streams)]
            rates = _rates(
                {
                    "bare": partial(bare, prompts),
                    "plain": partial(replies, plain, prompts, greedy),
                    "ours": partial(replies, ours, prompts, greedy),
                    "sampled": partial(replies, ours, prompts, sampled),
                },
                options.rounds,
                now,
            )
            _print_row(f"{streams} streams", rates)
        rates = _rates(
            {"plain": partial(arriving, plain), "ours": partial(arriving, ours)}, options.rounds, now
        )
        _print_row("prompts arrive", rates)
    for chunk in (64, 512):
        with load_engine(folder, cache_bytes=0, prefill_chunk=chunk) as engine:
            steps = [steps_to_first_token(engine, text) for _ in range(5)]
        print(
            f"first token of a {len(text)}-token prompt while another decodes, chunk {chunk}: {steps} steps"
        )


def _rates(
    runs: dict[str, Callable[[], int]], rounds: int, now: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the tokens a second of each round; each goes first in some round, after one to warm up."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        in_order = [*runs.items()]
        first = number % len(in_order)
        for name, run in in_order[first:] + in_order[:first]:
            started = now()
            count = run()
            if number:
                rates[name].append(count / (now() - started))
    return rates


def _print_row(name: str, rates: dict[str, list[float]]) -> None:
    medians = {each: statistics.median(values) for each, values in rates.items()}
    gains = {
        each: statistics.median(ours / other for ours, other in zip(rates["ours"], rates[each], strict=True))
        for each in ("bare", "plain")
        if each in rates
    }
    line = f"{name:14}" + "".join(
        f" {medians[each]:7.0f}" if each in medians else f"{'':8}" for each in ("bare", "plain", "ours")
    )
    line += "".join(f"  {gains[each]:10.2f}" if each in gains else f"{'':12}" for each in ("bare", "plain"))
    if "bare" in medians:
        line += f"  {(1 / medians['ours'] - 1 / medians['bare']) * 1e6:10.0f}  {medians['sampled']:10.0f}"
    print(line + ("   less than 15 % over plain" if gains["plain"] < MIN_GAIN else ""), flush=True)


def _count(engine: Engine, request: GenerationRequest) -> int:
    return sum(isinstance(item, TokenDelta) for item in engine.generate(request))


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def steps_to_first_token(engine: Engine, prompt: list[int]) -> int:
    """Count the tokens that a running stream gets between another request's arrival and its first token."""
    running = engine.generate(GenerationRequest(prompt=prompt[:10], max_tokens=800))
    while not isinstance(running.next(), TokenDelta):
        pass
    while running.next(0) is not None:
        pass
    second = engine.generate(GenerationRequest(prompt=prompt, max_tokens=1))
    while not isinstance(second.next(), TokenDelta):
        pass
    steps = 0
    while running.next(0) is not None:
        steps += 1
    running.close()
    return steps


if __name__ == "__main__":
    main()
