"""How decoding several sequences together fails without failing any of them. Knows nothing of why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.mlx.sequences import DecodingSequence


class BatchError(Exception):
    """A batch could not be stepped for the cause, after a sequence joined it or became too long to stay merged.

    Its sequences are as they were: `Decoder.split`.
    """


class LostCachesError(Exception):
    """What the caches of `sequences` hold is not known any more, for the cause; the decoder has neither any more.

    They could not be taken apart, or a step of them failed half-way.
    """

    def __init__(self, sequences: Sequence[DecodingSequence]) -> None:
        super().__init__()
        self.sequences = sequences


def is_device_failure(error: BaseException) -> bool:
    """Whether a network failed because of the device rather than because of what it was given.

    MLX raises RuntimeError for what goes wrong in a computation, such as want of memory, and others, mostly ValueError,
    when it lays one out for arrays that do not fit each other.
    """
    return isinstance(error, RuntimeError | MemoryError | OSError) and not isinstance(
        error, NotImplementedError
    )
