"""The sizes that chunks of a prompt have: few, so that what a device prepares for one serves the next.

MLX's CUDA backend takes 0.1 to 0.6 seconds for a length of a chunk that it has not seen, and 0.06 to 0.1 for a length
of what is attended to (H200). Knows no MLX.
"""

from __future__ import annotations

CHUNK_SIZES = (64, 128, 256, 512, 1024, 2048)  # tokens
PADDED_SIZES = (8, 16, 32, *CHUNK_SIZES)  # where a chunk is filled up, to have one of few lengths
RUN_OVERHEAD = 64  # tokens that take as long as what a run of the network takes beside its tokens


def padded_sizes(tokens: int) -> list[int]:
    """Return the sizes of the chunks that hold so many tokens, where each has to have one of `PADDED_SIZES`.

    The last one may be longer than what is left for it, by less than another run would cost.
    """
    sizes: list[int] = []
    while tokens > 0:
        allowed = [size for size in PADDED_SIZES if size <= tokens + RUN_OVERHEAD]
        sizes.append(next((size for size in allowed if size >= tokens), allowed[-1]))
        tokens -= sizes[-1]
    return sizes
