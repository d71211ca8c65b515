"""Requests to an engine and their replies as tokens, as tests of the engine on MLX make them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.threaded import Engine
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


TEXT = "the quick brown fox jumps over the lazy dog "


def request_for(engine: Engine, text: str = TEXT, count: int = 30, **fields: Any) -> GenerationRequest:
    prompt = engine.tokenizer.encode(text, control_tokens=True)
    return GenerationRequest(prompt=prompt, max_tokens=count, **fields)


def reply_tokens(engine: Engine, request: GenerationRequest) -> list[int]:
    return [item.token for item in engine.generate(request) if isinstance(item, TokenDelta)]


def together(engine: Engine, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    generations = [engine.generate(each) for each in requests]
    return [[item.token for item in generation if isinstance(item, TokenDelta)] for generation in generations]


def room_beside(model: Path, caches: int) -> int:
    """Return a limit that leaves this many bytes for caches next to the model."""
    return int(((model / "model.safetensors").stat().st_size + caches) / 0.95) + 1000


@contextmanager
def engine_and_batch(model: Path, **options: Any) -> Iterator[tuple[Engine, MLXBatch]]:
    """Start an engine; return its batch too, of which only what its thread has finished may be looked at."""
    batch = MLXBatch(model, EngineOptions(**options), device=Device(8 << 30))
    with Engine(batch) as engine:
        yield engine, batch
