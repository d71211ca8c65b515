"""Compiles the kernels that a network needs for many rows, in other processes, while it runs without them.

MLX's CUDA build compiles most kernels when they are first used, and stores them in a folder. What is for many rows of
quantised matrices takes NVIDIA's compiler 15 to 35 seconds each: in the server's own process every request would wait
for that, since MLX compiles one after the other and looks none up meanwhile. So a process for each kind of layer and
number of rows makes a small layer like it and computes with it. Its kernels go into a folder of its own first, and are
moved from there: MLX, which writes in place, might otherwise load a half of one. What was found out goes there too, and
the next start has nothing to do.

    python -m mlx_backend.layers.kernel_compiler FOLDER JOB      the job as JSON

Knows the layers of networks; nothing of requests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_backend.layers.dequantize import dequantized, dequantized_by_kernel
from mlx_backend.layers.few_rows import ALIGNED_OUTPUTS, use_few_rows
from mlx_backend.layers.many_rows import inputs_of, kind_of, many_rows_candidates, right_dequantizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.layers.dequantize import Dequantizer

log = logging.getLogger(__name__)

ROW_COUNTS = (8, 32, 64)
"""Rows for which MLX has a kernel each, of 16, 32 and 64 rows."""
MAX_PROCESSES = 8
"""Each takes half a gigabyte of the GPU's memory while it runs."""
MAX_SECONDS = 300.0
"""Time of one process, beyond which it is ended: the kernel is compiled when it is needed then."""
ALIGNED_INPUTS = 64
"""As `ALIGNED_OUTPUTS`. Nothing else of a layer's size matters for a kernel."""
EXPERTS = 4
NICENESS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelJob:
    """What one process computes: a layer's product of so many rows, both implementations for many rows, or indexing.

    `quantization` has mode, bits and group size; it is None for experts that are not quantised. `experts` is 0 for a
    layer without.
    """

    operation: Literal["few", "many", "rows", "take", "add", "maximum"]
    inputs: int = 0
    outputs: int = 0
    experts: int = 0
    quantization: tuple[str, int, int] | None = None
    dtype: str = "float32"  # of weights that are not quantised, and of scales
    activations: str = "float32"
    rows: int = 0

    @property
    def name(self) -> str:
        """The name of the file in which is noted that it has been done."""
        return f"{hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:24]}.done"


INDEXING = tuple(KernelJob(operation=each) for each in ("rows", "take", "add", "maximum"))
"""What sampling and several replies at once need. Each takes 10 to 20 seconds."""


class KernelCompiler:
    """Does jobs, some at a time, and calls `on_done` when all are done, on a thread of its own.

    `jobs` are those that layers need (`jobs_for`). Until all are done products of many rows are computed a few rows at
    a time (few_rows.py). `found` maps jobs to what they found out, as far as that is known; None for one that failed.
    """

    def __init__(
        self,
        jobs: Mapping[KernelJob, Sequence[Any]],
        folder: Path,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self.on_done = on_done
        self.found: dict[KernelJob, dict[str, Any] | None] = {}
        self.jobs = jobs
        for job in self.jobs:
            with suppress(OSError, ValueError):
                self.found[job] = json.loads((folder / job.name).read_text())
        # From the end, what takes longest: kernels for whole blocks of outputs, and of more rows.
        self._waiting = sorted(
            (job for job in self.jobs if job not in self.found),
            key=lambda job: (job.outputs == ALIGNED_OUTPUTS, job.rows),
        )
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._began = perf_counter()
        self._stop_few_rows = use_few_rows() if self._waiting else lambda: None
        if self._waiting:
            log.info(
                "Kernels for %d operations are compiled in the background, since this machine has none yet. "
                "Until then long prompts take longer, and so do many replies at once.",
                len(self._waiting),
            )
        count = min(len(self._waiting), MAX_PROCESSES, max(1, (os.cpu_count() or 1) // 2))
        for _ in range(count):
            threading.Thread(target=self._work, name="kernels", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """Whether all jobs are done."""
        return len(self.found) == len(self.jobs)

    @property
    def progress(self) -> str:
        """How many have been compiled, for people."""
        return f"{len(self.found)} of {len(self.jobs)}"

    def find(self, layer: Any, _: mx.Dtype) -> Dequantizer | None:
        """Return what dequantises layers like this one; None if they are not to be."""
        kind = kind_of(layer)
        for job, layers in self.jobs.items():
            if job.operation == "many" and any(kind_of(each) == kind for each in layers):
                found = self.found.get(job)
                if found is None or not found["is_right"]:
                    return None
                return dequantized_by_kernel if found["by_kernel"] else dequantized
        return None

    def close(self) -> None:
        """End all processes, and go back to MLX's own functions."""
        stop, self._stop_few_rows = self._stop_few_rows, lambda: None
        stop()
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._is_closed or not self._waiting:
                    return
                job = self._waiting.pop()
            found = self._do(job)
            with self._lock:
                self.found[job] = found
                if self._is_closed or not self.is_done:
                    continue
            seconds = perf_counter() - self._began
            log.info("Kernels for %d operations were compiled, in %.0f s.", len(self.jobs), seconds)
            self.on_done()

    def _do(self, job: KernelJob) -> dict[str, Any] | None:
        folders = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        own = self._folder / f"{job.name}.{os.getpid()}"
        try:
            with self._lock:
                if self._is_closed:
                    return None
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(self._folder), json.dumps(asdict(job))],
                    stdin=subprocess.PIPE,  # stays open: its end is the process's too
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(folders), "MLX_PTX_CACHE_DIR": str(own)},
                    start_new_session=True,  # no signals of a terminal
                )
                self._running.add(process)
            with process:
                try:
                    process.wait(MAX_SECONDS)
                finally:
                    process.kill()
                    with self._lock:
                        self._running.discard(process)
            found: dict[str, Any] = json.loads((self._folder / job.name).read_text())
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            if not self._is_closed:
                log.warning("Kernels could not be compiled in the background: %r", error)
            return None
        finally:
            shutil.rmtree(own, ignore_errors=True)
        return found


def jobs_for(
    networks: Sequence[Any], activations: mx.Dtype, *, dequantize: bool
) -> dict[KernelJob, list[Any]]:
    """Return the jobs for networks' quantised layers, and for those that have an implementation for many rows.

    Each comes with its layers. With `dequantize` the weights of those are dequantised.
    """
    jobs: dict[KernelJob, list[Any]] = {job: [] for job in INDEXING}
    layers = [
        layer
        for network in networks
        for layer in network.modules()
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)
        or (type(layer) is QuantizedSwitchLinear and layer.output_dims % ALIGNED_OUTPUTS == 0)
    ]
    for layer in layers:
        is_mixture = layer["weight"].ndim == 3  # of which all rows are multiplied one by one, or few together
        for rows in ROW_COUNTS[:1] if is_mixture else ROW_COUNTS:
            jobs.setdefault(_job("few", layer, rows, activations), []).append(layer)
    for layer in many_rows_candidates(networks, dequantize=dequantize):
        jobs.setdefault(_job("many", layer, ROW_COUNTS[-1], activations), []).append(layer)
    return jobs


def _job(operation: Literal["few", "many"], layer: Any, rows: int, activations: mx.Dtype) -> KernelJob:
    weight, scales = layer["weight"], layer.get("scales")
    is_quantised = scales is not None
    inputs = scales.shape[-1] * layer.group_size if is_quantised else weight.shape[-1]
    # What is for many rows is multiplied by kernels that take any number.
    is_aligned = weight.shape[-2] % ALIGNED_OUTPUTS == 0 and operation == "few"
    dtype = (
        activations if is_quantised and layer.mode != "affine" else (scales if is_quantised else weight).dtype
    )
    return KernelJob(
        operation=operation,
        inputs=4 * ALIGNED_INPUTS + inputs % ALIGNED_INPUTS,
        outputs=ALIGNED_OUTPUTS if is_aligned else ALIGNED_OUTPUTS * 3 // 2,
        experts=EXPERTS if weight.ndim == 3 else 0,
        quantization=(layer.mode, layer.bits, layer.group_size) if is_quantised else None,
        dtype=str(dtype).rpartition(".")[2],
        activations=str(activations).rpartition(".")[2],
        rows=rows,
    )


def do(job: KernelJob) -> dict[str, Any]:
    """Do a job in this process, and return what was found out."""
    if job in INDEXING:
        values = mx.zeros((2, 64))
        for dtype in (mx.int32, mx.uint32):
            index = mx.zeros((2, 1), dtype)
            match job.operation:
                case "rows":
                    kinds = (mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.int32)
                    mx.eval([values.astype(kind)[index[:, 0]] for kind in kinds])
                case "take":
                    mx.eval(mx.take_along_axis(values, index, axis=-1))
                case "add":
                    mx.eval(values[0].at[index[0]].add(1.0))
                case _:
                    mx.eval(values[0].at[index[0]].maximum(1.0))
        return {}
    if job.experts:
        layer = SwitchLinear(job.inputs, job.outputs, job.experts)
    else:
        layer = nn.Linear(job.inputs, job.outputs)
    layer.set_dtype(getattr(mx, job.dtype))
    if job.quantization is not None:
        mode, bits, group_size = job.quantization
        layer = layer.to_quantized(group_size=group_size, bits=bits, mode=mode)
    activations = getattr(mx, job.activations)
    if job.operation == "few":
        mx.eval(layer(*inputs_of(layer, job.rows, activations)))
        return {}
    dequantizer = right_dequantizer(layer, activations)
    return {"is_right": dequantizer is not None, "by_kernel": dequantizer is dequantized_by_kernel}


def main() -> None:
    """Do the job that is named, and end as soon as standard input does."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.nice(NICENESS)
    folder, own = Path(sys.argv[1]), Path(os.environ["MLX_PTX_CACHE_DIR"])
    fields = json.loads(sys.argv[2])
    if fields["quantization"] is not None:
        fields["quantization"] = tuple(fields["quantization"])
    job = KernelJob(**fields)
    found = do(job)
    move_kernels(own, folder)
    note = own / job.name
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps(found))
    note.replace(folder / job.name)
    os._exit(0)  # MLX's streams need no end


def move_kernels(own: Path, folder: Path) -> None:
    """Move what MLX has stored in one folder to another, a kernel itself after what else there is of it."""
    for path in sorted(own.rglob("*"), key=lambda path: path.suffix == ".ptx"):
        if path.is_file():
            target = folder / path.relative_to(own)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
