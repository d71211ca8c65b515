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
    """The caches of `sequences` could not be taken apart for the cause; the decoder has neither any more."""

    def __init__(self, sequences: Sequence[DecodingSequence]) -> None:
        super().__init__()
        self.sequences = sequences
