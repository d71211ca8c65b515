"""The engine on MLX. Importing this is free: mlx and mlx_lm are imported when an engine is loaded.

Apart from this package only `device/mlx.py`, `layers/` and `embedding/mlx/` import them, and a test holds that. What
breaks when mlx-lm is upgraded is in `mlx_lm_patches`.
"""

from __future__ import annotations

import atexit
import logging
import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_backend.device import this_device
from mlx_backend.device.importing import importing_mlx
from mlx_backend.engine.distributed import distributed_backend
from mlx_backend.engine.distributed.batch import LeaderBatch, follow
from mlx_backend.engine.distributed.transport import COLLECTIVE_GRACE
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.device.blas import BlasChoice
    from mlx_backend.engine.batch import Batch
    from mlx_backend.errors import EngineStopped

log = logging.getLogger(__name__)


def memory_by_tokens(folder: Path) -> tuple[dict[int | None, Callable[[int], int]], str]:
    """Return the bytes that the model in a folder takes with one sequence's caches, by its tokens. Raises EngineError.

    They are by the bits of `--kv-bits`, and None without. The other is a sentence on its MTP head, if it is said to
    have one. Reads no weights. Where there is a GPU, MLX is asked for nothing but shapes.
    """
    with importing_mlx("off"):
        from mlx_backend.engine.mlx import runtime

    return runtime.memory_by_tokens(folder)


def load_engine(
    model: str | Path,
    options: EngineOptions | None = None,
    *,
    device: Device | None = None,
    model_id: str | None = None,
    on_progress: Callable[[float], None] | None = None,
    **changes: Any,
) -> Engine:
    """Load a model folder or Hugging Face repository and start its engine thread.

    `device` is shared with the other models of the process; without one the engine has a device of its own.
    `model_id` is the name clients use (by default the repository's or the folder's name). `changes` replace single
    fields of `options`. `on_progress` is called on the engine's thread with the share that is loaded, from 0 to 1.
    Raises EngineError with a text for people. Where several processes share the model, this is for rank 0; the others
    call `follow_engine`.
    """
    chosen = replace(options or EngineOptions(), **changes)
    device = device or this_device(chosen.memory_bytes, chosen.wired, chosen.blas)
    with importing_mlx(device.blas):
        from mlx_backend.engine.mlx.batch import MLXBatch
        from mlx_backend.engine.mlx.collectives import join
        from mlx_backend.engine.mlx.plain import PlainBatch
        from mlx_backend.engine.mlx.vision.split_batch import SplitBatch
        from mlx_backend.engine.mlx.vision.vlm_batch import VLMBatch

    ranks = join()
    start = partial(
        Engine, max_concurrent=chosen.max_concurrent, max_waiting=chosen.max_waiting, on_progress=on_progress
    )
    if chosen.engine == "plain":
        if ranks is not None:
            raise EngineError("The plain engine runs in one process: leave out --engine plain, or start one.")
        return start(PlainBatch(model, chosen, device=device, model_id=model_id))
    batch = MLXBatch(model, chosen, device=device, model_id=model_id, ranks=ranks)
    if ranks is None:
        whole = VLMBatch(model, chosen, device=device, model_id=model_id)
        split = SplitBatch(batch, whole, chosen)
        return _start_one_process(start, batch, split, whole, str(model), chosen)
    leader = LeaderBatch(batch, ranks)
    engine = start(leader)
    leader.on_lost(partial(_terminate, engine))
    return engine


def _start_one_process(
    start: Callable[[Batch], Engine],
    batch: Batch,
    split: Batch,
    whole: Batch,
    model: str,
    options: EngineOptions,
) -> Engine:
    """Start an engine with the batch, for a model that sees with `split`, or with `whole`, mlx-vlm's own network."""
    from mlx_backend.engine.mlx.vision.families import WholeError, may_run_on_mlx_vlm, only_mlx_vlm_has
    from mlx_backend.models.download import find_folder
    from mlx_backend.models.files import read_json_or_empty
    from mlx_backend.models.tasks import sees

    try:
        config = read_json_or_empty(
            find_folder(model, allow_download=options.allow_download)[0] / "config.json"
        )
    except EngineError:
        config = {}  # loading it says what is wrong
    if only_mlx_vlm_has(config):
        return start(whole)
    if not (sees(config) and may_run_on_mlx_vlm(config)):
        return start(batch)
    try:
        return start(split)
    except EngineError as error:
        if error.__cause__ is None and not isinstance(error, WholeError):  # such as too little memory
            raise
        try:
            engine = start(whole)
        except EngineError as other:
            raise EngineError(f"{other} Nor does it run in the batch: {error}") from other
        log.warning(
            "%s runs on mlx-vlm's own network, one reply at a time, and not in the batch: %s", model, error
        )
        return engine


def _terminate(engine: Engine, error: EngineStopped) -> None:
    if not engine.terminate(error, timeout=COLLECTIVE_GRACE):
        # Its thread waits in MLX for a rank that is gone, and would abort the process when the interpreter exits.
        atexit.register(os._exit, 1)


def rank_and_count(blas: BlasChoice = "auto") -> tuple[int, int]:
    """Return this process's rank among those that share the model, and their number: 0 and 1 if it was started alone.

    Connects to the others first, for which MLX is imported. Raises EngineError if they cannot be found.
    """
    if distributed_backend() is None:
        return 0, 1
    with importing_mlx(blas):
        from mlx_backend.engine.mlx.collectives import group

    found = group()
    return (found.rank(), found.size()) if found is not None else (0, 1)


def follow_engine(model: str | Path, options: EngineOptions | None = None, **changes: Any) -> int:
    """Run this rank's part of the engine that rank 0 loads, until rank 0 ends; return the exit status.

    For ranks above 0, on the main thread, with the model and options of rank 0.
    """
    chosen = replace(options or EngineOptions(), **changes)
    device = this_device(chosen.memory_bytes, chosen.wired, chosen.blas)
    with importing_mlx(device.blas):
        from mlx_backend.engine.mlx.batch import MLXBatch
        from mlx_backend.engine.mlx.collectives import join

    ranks = join()
    if ranks is None or ranks.rank == 0:
        raise EngineError("Only a rank above 0 can follow.")
    return follow(MLXBatch(model, chosen, device=device, ranks=ranks), ranks)
