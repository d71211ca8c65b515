"""Replies about images at the size of a real model, Qwen2.5-VL-3B's with random weights, beside mlx-vlm's own.

    python tests/benchmarks/real_size_images.py [--layers 36] [--tokens 12]

Writes the model once (float32, 13 GB with all layers), asks ours for every prompt alone and then for all of them at
once, and mlx-vlm's modules for each, in a process of their own since two such models rarely fit. Fails where two of the
three replies differ. Needs the extra `vision`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from mlx_backend.device.blas import use_fast_blas

BLAS: Final = use_fast_blas() or "MLX's own matrix products"  # before MLX
os.environ.setdefault("MLX_ENABLE_TF32", "0")  # matrix products as exact on a GPU as on a CPU

import mlx.core as mx
from seeing import Seeing, noise
from vision_models import SeeingModel, write_qwen2_5_vl
from vision_reference import reference

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx import load_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT: Final = {
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
}
VISION: Final = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "out_hidden_size": 2048,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def prompts(seeing: Seeing, tokens: int) -> dict[str, GenerationRequest]:
    """Return what is asked: pictures of several sizes, and text."""
    text = list(range(20, 220))
    parts = {
        "a picture of 448 x 336": ((2, 10, 11), noise(1, 448, 336), text[:9]),
        "two pictures": ((2,), noise(2, 140, 280), text[:30], noise(3, 224, 112), text[:5]),
        "a picture behind 600 tokens": ([2, *text, *text, *text], noise(4, 200, 200), text[:9]),
        "600 tokens": ([2, *reversed(text), *text, *text],),
    }
    return {name: seeing.request(*each, tokens=tokens) for name, each in parts.items()}


def _ours(
    model: SeeingModel, tokens: int
) -> tuple[dict[str, GenerationRequest], list[list[int]], list[list[int]]]:
    """Return the prompts, and the replies alone and together."""
    engine = load_engine(model.folder, cache_bytes=0)
    seeing = Seeing(model, engine)
    asked = prompts(seeing, tokens)
    alone = [seeing.reply(request) for request in asked.values()]
    generations = [engine.generate(request) for request in asked.values()]
    together = [
        [item.token for item in generation if isinstance(item, TokenDelta)] for generation in generations
    ]
    engine.stop()
    return asked, alone, together


def _theirs(model: SeeingModel, asked: Sequence[GenerationRequest]) -> list[list[int]]:
    return [reference(model, request) for request in asked]


def main() -> int:
    """Compare the replies; return how many prompts have replies that differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=36, help="of the language model")
    parser.add_argument("--tokens", type=int, default=12, help="of each reply")
    options = parser.parse_args()
    alone_in_a_process = partial(ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))
    print(f"{BLAS}; {mx.default_device()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with alone_in_a_process() as process:
            model = process.submit(
                write_qwen2_5_vl,
                Path(folder),
                text_sizes=TEXT | {"num_hidden_layers": options.layers},
                vision_sizes=VISION,
                max_pixels=1 << 20,
            ).result()
        with alone_in_a_process() as process:
            asked, alone, together = process.submit(_ours, model, options.tokens).result()
        pictures = {name: request for name, request in asked.items() if request.images}
        with alone_in_a_process() as process:
            theirs = dict(
                zip(pictures, process.submit(_theirs, model, list(pictures.values())).result(), strict=True)
            )
    differing = 0
    for name, own, crowd in zip(asked, alone, together, strict=True):
        same = own == crowd == theirs.get(name, own)
        differing += not same
        print(f"{name}: {'the same' if same else 'DIFFERENT'} {len(own)} tokens of {len(set(own))} kinds")
        if not same:
            print(f"  alone {own}\n  together {crowd}\n  mlx-vlm {theirs.get(name)}")
    return differing


if __name__ == "__main__":
    sys.exit(main())
