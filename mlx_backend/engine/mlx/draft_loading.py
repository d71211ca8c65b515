"""Loading a draft model, and trying whether networks can take back drafts that are wrong.

Keys and values can always be trimmed. States cannot (rewinding.py), so networks that have them are tried. Knows nothing
of requests, or of what drafts cost and save.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.engine.mlx.batch_trial import BatchTrial, BatchTrialError
from mlx_backend.engine.mlx.kv_cache import can_rewind
from mlx_backend.engine.mlx.loading import load_draft
from mlx_backend.engine.mlx.rewinding import can_take_back
from mlx_backend.engine.mlx.speculative import draft_layers
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.loading import CheckSize, DraftNetwork, LoadedNetwork
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)


def load_drafts(
    model: LoadedNetwork, options: EngineOptions, layers: LayerCaches, check_size: CheckSize
) -> DraftNetwork | None:
    """Load the draft model, if one is named. Raises EngineError if that fails or drafts are not possible.

    `layers` are empty caches of the model.
    """
    if options.draft_model is not None and options.draft_from_text:
        raise EngineError("Drafts come from a draft model or from the text itself, not from both: name one.")
    if options.draft_model is None:
        return None
    if not all(map(can_take_back, layers)):
        raise EngineError(f"{_why_not(layers)}.")
    return load_draft(options.draft_model, options, model, check_size)


def try_drafts(
    options: EngineOptions, layers: LayerCaches, trials: Iterable[BatchTrial], draft: DraftNetwork | None
) -> bool:
    """Try whether the networks can do what drafts need; return whether replies can get any.

    `layers` are caches of the model, and `trials` run its networks; without trials, a model with states gets no drafts.
    Raises EngineError if a draft model is named and drafts are not possible.
    """
    if options.draft_model is None and not options.draft_from_text:
        return False
    if not _can_take_back(layers, trials):
        if options.draft_model is not None:
            raise EngineError(f"{_why_not(layers)}.")
        log.warning("%s. It runs without.", _why_not(layers))
        return False
    if draft is not None:
        network = draft.network
        own = draft_layers(network)
        if not _can_take_back(own, [BatchTrial(network, partial(draft_layers, network))]):
            raise EngineError(f"{options.draft_model!r} cannot draft: its {_names(own)} cannot be rewound.")
    return True


def try_packing_drafts(draft: DraftNetwork | None, *, many_tokens: bool) -> bool:
    """Return whether the draft model can be run packed, and so can draft for several replies at once."""
    if draft is None or not all(map(can_rewind, draft_layers(draft.network))):
        return False
    network = draft.network
    try:
        trial = BatchTrial(network, partial(draft_layers, network))
        trial.try_packing(many_tokens=many_tokens)
    except BatchTrialError as error:
        log.debug("The draft model cannot be run packed: %s.", error)
        return False
    return True


def _can_take_back(layers: LayerCaches, trials: Iterable[BatchTrial]) -> bool:
    if all(map(can_rewind, layers)):
        return True
    trials = list(trials)
    if not trials or not all(map(can_take_back, layers)):
        return False
    try:
        for trial in trials:
            trial.try_rewinding()
    except BatchTrialError as error:
        log.debug("Tokens cannot be taken back: %s.", error)
        return False
    return True


def _why_not(layers: LayerCaches) -> str:
    return f"Drafts are not possible with this model: its {_names(layers)} cannot be rewound"


def _names(layers: LayerCaches) -> str:
    """Return the kinds of caches that cannot be trimmed."""
    return ", ".join(sorted({type(layer).__name__ for layer in layers if not can_rewind(layer)}))
