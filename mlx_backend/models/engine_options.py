"""What the person who starts an engine may choose: plain data, read by command lines and configuration files.

Knows no MLX, so that reading it is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How one model is loaded and run. None leaves the choice to the engine."""

    # the model
    context_length: int | None = None  # a limit below the model's own
    chat_template: str | None = None  # Jinja source, in place of the model's own
    trust_remote_code: bool = False  # run Python code that comes with the model
    allow_download: bool = True
    adapters: Mapping[str, Path] = field(default_factory=dict)  # LoRA, by the names requests use
    adapter: str | None = None  # the one for requests that name none

    # how many at once
    max_concurrent: int = 32
    max_waiting: int = 128
    prefill_chunk: int | None = None  # tokens of prompt between two steps; None adapts it to the machine
    packing: bool = True  # run prompts and replies together without padding, where the model allows it

    # memory, in bytes
    memory_bytes: int | None = None  # model, caches and kept prefixes together
    cache_bytes: int | None = None  # kept prefixes; 0 keeps none
    cache_folder: Path | None = None  # keeps prefixes across restarts
    cache_folder_bytes: int = 20 << 30

    # caches and drafts
    kv_bits: int | None = None
    kv_group_size: int = 64
    max_kv_size: int | None = None
    draft_model: str | None = None
    draft_from_text: bool = False
    draft_tokens: int = 4
