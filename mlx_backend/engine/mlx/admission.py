"""What a request needs to be admitted to a loaded model, and the sequence it becomes. Knows no queues and no steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.sampling import RequestSampler
from mlx_backend.engine.mlx.sequences import DecodingSequence, expected_tokens
from mlx_backend.engine.mlx.vision.prompt_images import check_images, images_of
from mlx_backend.errors import EngineRefused

if TYPE_CHECKING:
    from mlx_backend.engine.base import GenerationRequest
    from mlx_backend.engine.kv_cache_budget import ImageBytes
    from mlx_backend.engine.mlx.runtime import Runtime
    from mlx_backend.models.engine_options import EngineOptions


def check_window(request: GenerationRequest, options: EngineOptions) -> None:
    """Refuse a prompt that slides: what it leaves in its caches would depend on how it was cut into chunks."""
    window, length = options.max_kv_size, len(request.prompt)
    if window is not None and length > window:
        raise EngineRefused(
            f"The prompt has {length} tokens, and --max-kv-size keeps {window}: only a reply may go beyond them. "
            "Shorten the prompt, or start the server with a larger --max-kv-size."
        )


def needed_memory(request: GenerationRequest, runtime: Runtime) -> tuple[int, ImageBytes]:
    """Return for how many tokens, and for which images, a request needs memory. Raises EngineRefused for its images.

    Where a reply's length is only expected, and not asked for, it needs no more than this model leaves; at least one
    token. What other models' requests leave now is no measure: the reply would grow into their memory, since none is
    cut short for them.
    """
    images = check_images(request, runtime.vision)
    tokens = expected_tokens(request)
    if request.expected_tokens is not None:
        tokens = runtime.cache_budget.fitting_ever(tokens, len(request.prompt) + 1, images)
    return tokens, images


def new_sequence(key: int, request: GenerationRequest, runtime: Runtime, adapter: str) -> DecodingSequence:
    """Return a request's sequence, of which nothing is prefilled yet."""
    model = runtime.model
    sampler = RequestSampler(request, runtime.text_mask)
    sequence = DecodingSequence(
        key,
        request,
        sampler,
        model.tokenizer.detokenizer(),
        list(request.prompt),
        model.tokenizer.end_tokens,
        adapter,
    )
    sequence.images = images_of(request, runtime.vision)
    sequence.penalties = sampler.penalty_state(())
    sequence.drafter = runtime.drafter()
    return sequence
