"""`make soak MINUTES=60`: a server under mixed load, sampled and plotted, and whether what it holds stays the same.

Two language models (the demo model under two names) and an embedding model, ten clients of all kinds (load.py). What
is compared are the first and the last fifth of the time after a warm-up, in which caches fill and pools grow. More
than 2 % or two threads or files more, or an answer that should not have come, and the verdict is no.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

from embedding_models import write_roberta
from load import Client

from mlx_backend.demo import MODEL_PATH

if TYPE_CHECKING:
    from collections.abc import Sequence

CLIENTS = 10
MAX_GROWTH = 0.02
WARM_UP = 0.3
"""Share of the time in which caches may still fill."""
SAMPLE_SECONDS = 3.0
CACHE_GB, MEMORY_GB = "0.02", "0.5"
"""Small, so that all caches are full after the warm-up: one that fills is no leak, and looks like one."""

type Sample = dict[str, float]

SERIES = {
    "rss": ("resident memory", "MB"),
    "mlx_active": ("memory that MLX uses", "MB"),
    "mlx_cache": ("memory that MLX keeps", "MB"),
    "malloc_used": ("memory that malloc has given out", "MB"),
    "malloc_free": ("memory that malloc keeps though freed", "MB"),
    "threads": ("threads", ""),
    "files": ("open files", ""),
}
JUDGED = ("rss", "mlx_active", "threads", "files")
"""MLX's cache of freed buffers is bounded by itself, and part of the resident memory on a CPU."""


def models_file(folder: Path) -> Path:
    """Write the models and the file that names them."""
    write_roberta(folder / "embedder")
    path = folder / "models.toml"
    language = "".join(
        # With options of its own each is loaded by itself.
        f'[models.{name}]\nmodel = "{MODEL_PATH}"\npinned = true\nmax_concurrent = {rows}\n'
        for name, rows in (("first", 16), ("second", 17))
    )
    path.write_text(language + f'[models.embedder]\nmodel = "{folder / "embedder"}"\npinned = true\n')
    return path


def start(folder: Path, samples: Path) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    """Start the server; return it and its address once its models are loaded."""
    options = ["serve", "--config", str(models_file(folder)), "--port", "0", "--cache-gb", CACHE_GB]
    options += ["--memory-gb", MEMORY_GB]
    command = [sys.executable, str(Path(__file__).with_name("sampled_server.py")), str(samples)]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, str(SAMPLE_SECONDS), *options, "--log-level", "warning"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        )
    assert process.stdout is not None
    port = 0
    for line in process.stdout:
        if line.startswith("Listening on "):
            port = int(line.split()[-1].rpartition(":")[2])
        if line.startswith("  Try: "):
            return process, ("127.0.0.1", port)
    raise SystemExit(f"The server ended: {(folder / 'server.log').read_text()[-2000:]}")


def growth(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Return a series' medians in the first and the last fifth after the warm-up."""
    values = [sample[name] for sample in samples]
    values = values[int(len(values) * WARM_UP) :]
    fifth = max(1, len(values) // 5)
    return statistics.median(values[:fifth]), statistics.median(values[-fifth:])


def is_flat(name: str, before: float, after: float) -> bool:
    """Whether what the server holds stayed the same."""
    return after <= before * (1 + MAX_GROWTH) if name not in ("threads", "files") else after <= before + 2


def plot(samples: Sequence[Sample], path: Path, title: str) -> None:
    """Draw every series over the time, into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(SERIES), 1, sharex=True, figsize=(9, 13), layout="constrained")
    minutes = [sample["seconds"] / 60 for sample in samples]
    for axis, (name, (label, unit)) in zip(axes, SERIES.items(), strict=True):
        scale = 1e6 if unit else 1
        axis.plot(minutes, [sample[name] / scale for sample in samples], linewidth=1)
        axis.set_ylim(bottom=0)
        axis.set_title(f"{label}, {unit}" if unit else label, loc="left", fontsize=9)
        axis.axvspan(0, WARM_UP * minutes[-1], alpha=0.1)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("minutes (shaded: warm-up)")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=90)


def main() -> int:
    """Soak; return 0 if everything stayed the same and every answer was right."""
    parser = argparse.ArgumentParser(description="Serve a mixed load for MINUTES and watch what is held.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--plot", type=Path, default=ROOT / "build/soak.png")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with this process
    folder = arguments.plot.resolve().parent / "soak"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "samples.jsonl"
    process, address = start(folder, path)
    stop = threading.Event()
    clients = [Client(address, arguments.seed + number, stop) for number in range(CLIENTS)]
    end = time.monotonic() + 60 * arguments.minutes
    try:
        for client in clients:
            client.start()
        while time.monotonic() < end and process.poll() is None:
            time.sleep(min(5.0, max(0.0, end - time.monotonic())))
        has_ended = process.poll() is not None
    finally:
        stop.set()
        process.terminate()
        process.wait(120)
    for client in clients:
        client.join(130)
    return report([json.loads(line) for line in path.read_text().splitlines()], clients, arguments, has_ended)


def report(samples: Sequence[Sample], clients: Sequence[Client], arguments: Any, has_ended: bool) -> int:
    """Print what was done and how it ended, and plot it; return the exit status."""
    done: Counter[str] = sum((client.done for client in clients), Counter())
    wrong: Counter[str] = sum((client.wrong for client in clients), Counter())
    print(f"{done.total()} requests in {samples[-1]['seconds'] / 60:.1f} minutes: ", end="")
    print(", ".join(f"{name} {count}" for name, count in done.most_common()))
    verdict = not has_ended and not wrong
    for text, count in wrong.most_common(10):
        print(f"WRONG {count} x {text}")
    if has_ended:
        print("WRONG The server ended by itself; its log is next to the samples.")
    for name, (label, unit) in SERIES.items():
        before, after = growth(samples, name)
        scale = 1e6 if unit else 1
        change = (after - before) / before if before else 0.0
        words = "" if name not in JUDGED else " flat" if is_flat(name, before, after) else " GROWS"
        verdict = verdict and (name not in JUDGED or is_flat(name, before, after))
        print(f"{label:38} {before / scale:9.1f} -> {after / scale:9.1f} {unit:2} {change:+7.1%}{words}")
    kinds = f"{done.total():,} requests of {len(done)} kinds by {CLIENTS} clients"
    plot(samples, arguments.plot, f"{kinds} in {samples[-1]['seconds'] / 60:.0f} minutes")
    print(f"Plotted in {arguments.plot}. {'Flat.' if verdict else 'Not flat.'}")
    return 0 if verdict else 1


if __name__ == "__main__":
    sys.exit(main())
