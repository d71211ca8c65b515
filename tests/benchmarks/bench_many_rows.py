"""Our engine with and without dequantising weights, and grouping experts' rows, for long prompts.

    python tests/benchmarks/bench_many_rows.py [--layers 8] [--width 512] [--lengths 128 512 2048] [--rounds 3]

The same engine with and without it (layers/many_rows.py), in turn in one process, on models with random weights: a
dense one and a mixture of experts, in float32 and quantised. Prints the time to the first token of new prompts, and the
ratio of both: of processor time on a CPU, which other processes disturb less, of time on a GPU. At last the same for
an embedding model in 4 bits, and texts that are computed at once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlx_backend.device.importing import importing_mlx

if TYPE_CHECKING:
    from mlx_backend.engine.threaded import Engine

FORMATS: Final[dict[str, dict[str, Any] | None]] = {
    "float32": None,
    "4 bits": {"q_bits": 4, "q_group_size": 64},
    "8 bits": {"q_bits": 8, "q_group_size": 64},
    "mxfp4": {"q_mode": "mxfp4"},
}


def main() -> None:
    """Write each model and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with importing_mlx("auto"):
        import mlx.core as mx
    clock = time.process_time if mx.default_device() == mx.Device(mx.cpu) else time.perf_counter
    for name in ("dense", "experts"):
        for kind, settings in FORMATS.items():
            if (name, kind) == ("dense", "float32"):
                continue  # where nothing is replaced
            with tempfile.TemporaryDirectory() as scratch:
                folder = _write(Path(scratch), name, settings, options)
                _compare(f"{name}, {kind}", folder, options, clock)
    with tempfile.TemporaryDirectory() as scratch:
        folder = _write(Path(scratch), "dense", FORMATS["4 bits"], options, architectures=["Qwen3Model"])
        _compare_embeddings(folder, options, clock)


def _write(
    scratch: Path, name: str, settings: dict[str, Any] | None, options: argparse.Namespace, **changes: Any
) -> Path:
    import mlx_lm
    from engine_models import write_model, write_qwen

    width, layers = options.width, options.layers
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "max_position_embeddings": 16_384,
        "eos_token_id": [],
        "vocab_size": 600,
        **changes,
    }
    if name == "experts":
        windows = ["sliding_attention", "full_attention"] * (layers // 2)
        written = write_model(
            scratch / "model", intermediate_size=width, num_local_experts=8, layer_types=windows, **shape
        )
    else:
        heads = {
            "num_attention_heads": width // 64,
            "num_key_value_heads": max(1, width // 256),
            "head_dim": 64,
        }
        written = write_qwen(scratch / "model", intermediate_size=4 * width, **heads, **shape)
    if settings is None:
        return written
    mlx_lm.convert(str(written), mlx_path=str(scratch / "quantised"), quantize=True, **settings)
    return scratch / "quantised"


def _compare(name: str, folder: Path, options: argparse.Namespace, clock: Any) -> None:
    from mlx_backend.engine.mlx import load_engine
    from mlx_backend.layers import many_rows

    least = many_rows.MIN_WEIGHTS
    with ExitStack() as stack:
        ours = stack.enter_context(load_engine(folder))
        many_rows.MIN_WEIGHTS = sys.maxsize  # so no layer matters
        without = stack.enter_context(load_engine(folder))
        many_rows.MIN_WEIGHTS = least
        for length in options.lengths:
            _compare_length(f"{name:16} {length:>5} tokens", length, ours, without, options.rounds, clock)


def _compare_length(name: str, length: int, ours: Engine, without: Engine, rounds: int, clock: Any) -> None:
    rng = random.Random(length)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for engine in (ours, without) if number % 2 else (without, ours):
            seconds = _first_token(engine, rng.choices(range(20, 300), k=length), clock)
            if number:
                times[engine is ours].append(seconds)
    ratios = [new / old for new, old in zip(times[True], times[False], strict=True)]
    print(
        f"{name}: {statistics.median(times[False]):.3f} -> {statistics.median(times[True]):.3f} s, ratio "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
        flush=True,
    )


def _compare_embeddings(folder: Path, options: argparse.Namespace, clock: Any) -> None:
    from mlx_backend.device import Device
    from mlx_backend.embedding.embedding_config import EmbeddingOptions
    from mlx_backend.embedding.mlx.network import MLXNetwork
    from mlx_backend.embedding.text_encoder import EncodedText
    from mlx_backend.layers import many_rows

    least = many_rows.MIN_WEIGHTS
    networks = []
    for many_rows.MIN_WEIGHTS in (least, sys.maxsize):
        network = MLXNetwork(
            str(folder), "embedding", EmbeddingOptions(pooling="last"), device=Device(8 << 30)
        )
        network.load(lambda _: None)
        networks.append(network)
    many_rows.MIN_WEIGHTS = least
    for count, length in ((1, 16), (1, 128), (4, 128)):
        times: list[list[float]] = [[], []]
        rng = random.Random(length)
        for number in range(options.rounds + 1):
            texts = [EncodedText(rng.choices(range(20, 300), k=length)) for _ in range(count)]
            for which in (0, 1) if number % 2 else (1, 0):
                started = clock()
                for _ in networks[which].run(texts, None, 512):
                    pass
                if number:
                    times[which].append(clock() - started)
        ratios = [new / old for new, old in zip(*times, strict=True)]
        print(
            f"embedding, 4 bits {count} texts of {length}: {statistics.median(times[1]):.3f} -> "
            f"{statistics.median(times[0]):.3f} s, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}-{max(ratios):.2f})",
            flush=True,
        )


def _first_token(engine: Engine, prompt: list[int], clock: Any) -> float:
    from mlx_backend.engine.base import GenerationRequest

    started: float = clock()
    for _ in engine.generate(GenerationRequest(prompt=prompt, max_tokens=1)):
        pass
    seconds: float = clock() - started
    return seconds


if __name__ == "__main__":
    main()
