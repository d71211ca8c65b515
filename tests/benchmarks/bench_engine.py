"""What our engine adds to the bare loop of mlx-lm, on the same model in the same run.

    python tests/benchmarks/bench_engine.py [--model FOLDER] [--rounds 5] [--tokens 200]

Without --model it is a tiny gpt_oss with random weights, whose steps are so short that every microsecond of ours shows.
Rounds alternate between the two, so that other load affects both alike; the table shows medians, and the ratio is what
counts. The last lines count steps, not seconds: they are the same on every machine.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import mlx_lm
from mlx_lm.generate import BatchGenerator

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_models import write_model

from mlx_backend.engine.base import GenerationRequest, Sampling, TokenDelta
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.threaded import Engine

WORDS = "the quick brown fox jumps over the lazy dog and counts one two three four five six seven eight "


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.model or write_model(Path(scratch) / "random", eos_token_id=[])
        compare(folder, arguments.rounds, arguments.tokens)


def compare(folder: Path, rounds: int, tokens: int) -> None:
    model, tokenizer = mlx_lm.load(str(folder))
    prompt: list[int] = tokenizer.encode(WORDS * 4, add_special_tokens=False)
    stops = [[token] for token in tokenizer.eos_token_ids]

    def bare(streams: int) -> int:
        generator = BatchGenerator(model, stop_tokens=stops, prefill_step_size=512)
        generator.insert([prompt[at:] for at in range(streams)], max_tokens=[tokens] * streams)
        count = 0
        while True:
            prompts, generated = generator.next()
            count += len(generated)
            if not prompts and not generated:
                generator.close()
                return count

    def ours(engine: Engine, streams: int, sampling: Sampling) -> int:
        counts = [0] * streams

        def consume(at: int) -> None:
            request = GenerationRequest(prompt=prompt[at:], max_tokens=tokens, sampling=sampling)
            counts[at] = sum(isinstance(item, TokenDelta) for item in engine.generate(request))

        threads = [threading.Thread(target=consume, args=(at,)) for at in range(streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    greedy, sampled = Sampling(), Sampling(temperature=0.7, top_p=0.95)
    print(f"{folder.name}: prompt {len(prompt)} tokens, {tokens} generated, median of {rounds} rounds")
    print("streams    bare loop   our engine  ratio  added/token      sampled")
    with load_engine(folder, cache_bytes=0) as engine:
        for streams in (1, 8):
            times: dict[str, list[float]] = {"bare": [], "ours": [], "sampled": []}
            runs = {
                "bare": partial(bare, streams),
                "ours": partial(ours, engine, streams, greedy),
                "sampled": partial(ours, engine, streams, sampled),
            }
            for round_number in range(rounds + 1):
                for name, run in runs.items():
                    started = time.perf_counter()
                    count = run()
                    if round_number:  # the first round is the warm-up
                        times[name].append((time.perf_counter() - started) / count)
            base, own, sampled_time = (statistics.median(times[name]) for name in runs)
            print(
                f"{streams:>7} {1 / base:>7.0f} tok/s {1 / own:>6.0f} tok/s {base / own:>6.2f}"
                f" {(own - base) * 1e6:>9.0f} us {1 / sampled_time:>6.0f} tok/s"
            )
    for chunk in (64, 512):
        with load_engine(folder, cache_bytes=0, prefill_chunk=chunk) as engine:
            steps = [steps_to_first_token(engine, prompt) for _ in range(5)]
        print(
            f"first token of a {len(prompt)}-token prompt while another decodes, chunk {chunk}: {steps} steps"
        )


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
