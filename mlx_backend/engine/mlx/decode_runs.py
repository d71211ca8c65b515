"""The runs of one network while decoding: the replies' next tokens, and the last chunks of prompts beside them.

Tokens that were taken back from a reply's caches (rewinding.py) run again in the same run as its next token. Only when
other replies join this one do they have to run before that. Knows nothing of sampling, or of what follows a failure.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.engine.mlx.batch_caches import CacheError
from mlx_backend.engine.mlx.packed_forward import ForwardError, Segment, run_packed, run_rows, shift_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.engine.mlx.batch_caches import BatchCaches
    from mlx_backend.engine.mlx.sequences import DecodingSequence, PrefilledSequence


def reply_segments(
    caches: BatchCaches, sequences: Sequence[DecodingSequence], tokens: mx.array
) -> list[Segment]:
    """Return segments that run each sequence's last sampled token ([sequences]), in the order of `caches.segments`."""
    segments = caches.segments(tokens, [sequence.position_shift for sequence in sequences])
    if len(sequences) == 1 and (replayed := sequences[0].to_replay):
        return [segments[0].behind(replayed)]
    return segments


def run_replies(
    network: Any,
    caches: BatchCaches,
    sequences: Sequence[DecodingSequence],
    tokens: mx.array,
    *,
    can_pack: bool,
) -> mx.array:
    """Run each sequence's last sampled token ([sequences]); return the next logits ([sequences, vocabulary]).

    Anything may be raised; the caches are then in no defined state.
    """
    segments = reply_segments(caches, sequences, tokens)
    if can_pack or not caches.is_merged:
        logits = caches.by_row(run_packed(network, segments, restore=False))
    else:
        [replies] = segments
        logits = run_rows(network, replies)
    if sequences[0].num_to_replay:  # only a sequence that is alone has any
        logits = logits[-1:]
        sequences[0].num_to_replay = 0
    return logits


def run_with_prompts(
    network: Any,
    caches: BatchCaches,
    sequences: Sequence[DecodingSequence],
    tokens: mx.array | None,
    prefilled: Sequence[PrefilledSequence],
) -> mx.array:
    """Run the last chunks of prompts in one packed run with the replies' tokens.

    Returns the next logits of both ([sequences and prefilled, vocabulary]). Raises ForwardError, after which all caches
    are as they were.
    """
    segments = reply_segments(caches, sequences, tokens) if tokens is not None and sequences else []
    segments += [each.segment(network) for each in prefilled]
    every = run_packed(network, segments)
    ends = list(accumulate((len(each.last_chunk) for each in prefilled), initial=len(sequences) - 1))[1:]
    positions = caches.positions() if sequences else []
    return every[mx.array([*positions, *ends])]


def replay(network: Any, caches: BatchCaches, sequences: Sequence[DecodingSequence]) -> None:
    """Run the tokens that were taken back, so that the caches again hold all but the token sampled last.

    Raises CacheError, after which the caches are as they were.
    """
    for row, sequence in enumerate(sequences):
        if not sequence.num_to_replay:
            continue
        shift = shift_of([sequence.position_shift])
        segment = Segment(mx.array([sequence.to_replay]), caches.extract(row), shift=shift)
        try:
            run_packed(network, [segment])
        except ForwardError as error:
            raise CacheError from error.__cause__
        sequence.num_to_replay = 0
