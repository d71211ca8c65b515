"""A model that is ready to run: its networks, its caches' kind, what drafts for it, and the memory that is left.

Made on the engine thread, by loading the model and running it once. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.device.memory import format_bytes, room_for_weights
from mlx_backend.device.mlx import is_gpu, prepares_for_lengths, weight_bytes
from mlx_backend.device.too_large import too_large
from mlx_backend.engine.kv_cache_budget import MAX_TOKENS, KVCacheBudget
from mlx_backend.engine.mlx.batch_caches import MAX_MERGED_LENGTH
from mlx_backend.engine.mlx.batch_trial import BatchTrial, BatchTrialError
from mlx_backend.engine.mlx.cache_cost import CacheCost
from mlx_backend.engine.mlx.draft_loading import load_drafts, try_drafts, try_packing_drafts
from mlx_backend.engine.mlx.fresh_caches import fresh_caches, run_first
from mlx_backend.engine.mlx.kv_cache import can_merge, can_rewind
from mlx_backend.engine.mlx.loading import load_adapter, load_model
from mlx_backend.engine.mlx.many_rows_loading import load_many_rows
from mlx_backend.engine.mlx.prefix_cache import PrefixCache
from mlx_backend.engine.mlx.rewinding import has_to_replay, held_layers
from mlx_backend.engine.mlx.sampling import text_token_mask
from mlx_backend.engine.mlx.speculative import ModelDrafter, TextDrafter, draft_layers
from mlx_backend.engine.mlx.vision.image_memory import PreparedImages
from mlx_backend.engine.mlx.vision.tower import load_vision
from mlx_backend.engine.mlx.warm_up import WarmUp
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from mlx_backend.device import Device
    from mlx_backend.device.lock import FairLock
    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.engine.mlx.chunk_cost import ChunkCost
    from mlx_backend.engine.mlx.collectives import Ranks
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.loading import LoadedNetwork
    from mlx_backend.engine.mlx.speculative import Drafter
    from mlx_backend.engine.mlx.vision.tower import Vision
    from mlx_backend.layers.many_rows_state import ManyRows
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

# Of the memory that the model leaves. A cached prefix is in memory twice while its next turn runs.
PREFIX_CACHE_SHARE = 0.5
# Logits computed for nothing, and the last layer for their tokens, to save one more run of the network.
MAX_SPARE_LOGITS, MAX_SPARE_LOGITS_BYTES = 32, 64 << 20
WARM_UP_TOKENS = 8
FAR, FAR_ON_GPU, MIN_FAR = (
    2048,
    8192,
    512,
)  # position at which the memory of a chunk behind a long text is measured
MEASURED_SHARE = 1 / 8  # of the room, that its caches may take, and the chunk
MIN_COMFORTABLE_TOKENS = 4096  # of a conversation; a model that leaves memory for fewer is warned about


class Runtime:
    """Loads the model when it is made. Raises EngineError with a text for people.

    `networks` are by adapter; "" is the model without one. `can_rewind` says whether the caches can take back all
    tokens of a step but the first, and `can_pack` whether prompts and replies can run together without padding
    (packed_forward.py). With `replays_drafts`, the right tokens before a wrong draft have to run again (rewinding.py).
    `unbatched` says why replies cannot be decoded together (batch_trial.py); it is empty if they can. `pads_chunks`
    says whether chunks are filled up to a few lengths, and `chunk_cost` what one takes. `vision` is None
    for a model that cannot see images here.
    """

    def __init__(
        self,
        source: str | Path,
        options: EngineOptions,
        device: Device,
        ranks: Ranks | None,
        on_progress: Callable[[float], None],
    ) -> None:
        if ranks is not None:
            ranks.refuse_unsupported(options)
        self.options = options
        group = ranks.group if ranks else None
        with ExitStack() as cleanup:  # if a step fails, undoes those before it
            reservation = device.memory.reserve(0, limit=options.memory_bytes)
            cleanup.callback(reservation.close)
            sizes = _SizeCheck(reservation, is_given=options.memory_bytes is not None)
            model = self.model = load_model(
                source, options, on_progress, group, sizes.add, device.memory.host_caches
            )
            _check_context_length(options, model)
            self.networks = _load_networks(model, options, sizes)
            tokenizer = model.tokenizer
            self.text_mask = text_token_mask(tokenizer.vocabulary_size, tokenizer.special_tokens.keys())
            self.max_spare_logits = min(
                MAX_SPARE_LOGITS, MAX_SPARE_LOGITS_BYTES // (4 * tokenizer.vocabulary_size)
            )
            layers = self.fresh_layers("")
            self.can_rewind = all(can_rewind(layer) for layer in layers)
            self.pads_chunks = self.can_rewind and prepares_for_lengths()
            self.draft = load_drafts(model, options, layers, sizes.add)
            self.replays_drafts = has_to_replay(layers)
            if ranks is not None:
                ranks.check_alike(model.folder, options)
            try:
                # Processes that share a model would time layers differently, and have to do the same runs.
                self._many_rows = self._load_many_rows() if ranks is None else None
                cost = self._warm_up(layers)
                self.can_pack, self.unbatched = self._try_together(layers, ranks)
                self._can_draft = self._try_drafts(layers, ranks)
                self._can_pack_drafts = self.can_pack and try_packing_drafts(
                    self.draft, many_tokens=prepares_for_lengths()
                )
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"The model was loaded but cannot be run: {error}") from error
            load = partial(load_vision, model.folder, list(self.networks.values()), device.lock, sizes.add)
            can_pack = self.can_pack or (options.packing and not self.can_rewind)  # not tried then: alone
            self.vision = load(can_pack=can_pack, shared=ranks is not None)
            cost, are_alike = self._reserve_weights(reservation, cost, ranks)
            if self.unbatched:
                log.warning("Replies are decoded one after the other in each step: %s.", self.unbatched)
            self.chunk_cost = self._measure(device.lock, ranks, cost, int(reservation.room * MEASURED_SHARE))
            waiting = PreparedImages() if self.vision is None else self.vision.waiting
            waiting.room = lambda: reservation.max_room
            self.cache_budget = KVCacheBudget(
                reservation,
                cost,
                max_padded=self._max_padded,
                chunk_bytes=self.chunk_cost.working_bytes,
                # Processes that share a model have to prefill alike, however short of memory each one's machine is.
                pressure=device.memory.pressure if ranks is None else lambda: "none",
                waiting=lambda: waiting.nbytes,
                gives_up=ranks is None,
            )
            self._check_room(cost)
            prefix_bytes = _prefix_cache_bytes(options, self.cache_budget) if are_alike else 0
            self.prefixes = PrefixCache(prefix_bytes, shared=ranks is not None)
            cleanup.callback(self.prefixes.clear)
            self.disk = _open_disk_cache(options, model.folder, self.vision, cleanup)
            on_progress(1.0)
            self._cleanup = cleanup.pop_all()

    def close(self) -> None:
        """Give back what outlives this object: the memory, the prefixes and the disk's writer."""
        self._cleanup.close()

    @property
    def can_batch(self) -> bool:
        """Whether replies can be decoded together."""
        return not self.unbatched

    @property
    def _max_padded(self) -> int:
        """To how many tokens the caches of a reply may be padded when it is decoded together with others."""
        if not self.can_batch:
            return 0
        # What gets longer is separated before the next step.
        return MAX_MERGED_LENGTH + 1 if self.can_pack else MAX_TOKENS

    def drafter(self) -> Drafter | None:
        """Return what drafts for one reply, if anything does."""
        if self.draft is not None:
            return ModelDrafter(
                self.draft.network,
                self.draft.num_tokens,
                can_pack=self._can_pack_drafts,
                pads=prepares_for_lengths(),
            )
        return TextDrafter() if self._can_draft else None

    def filling_caches(self) -> AbstractContextManager[None]:
        """Return a context for runs whose logits nobody reads: layers that no cache depends on are left out."""
        return nullcontext() if self._many_rows is None else self._many_rows.without_unread()

    def fresh_layers(self, adapter: str) -> LayerCaches:
        """Return empty caches for a prompt of which nothing is cached."""
        return fresh_caches(self.networks[adapter], self.options)

    def _load_many_rows(self) -> ManyRows | None:
        drafting = [(self.draft.network, partial(draft_layers, self.draft.network))] if self.draft else []
        answering = [
            (network, partial(self.fresh_layers, adapter)) for adapter, network in self.networks.items()
        ]
        return load_many_rows(answering, drafting, self.options)

    def _warm_up(self, layers: LayerCaches) -> CacheCost:
        """Run the networks once, which compiles their kernels; return what the caches of one reply cost."""
        tokens = mx.array([[0] * WARM_UP_TOKENS])
        run_first(self.networks[""], tokens, layers, self.options)
        if self.draft is not None or self.options.draft_from_text:
            layers = [*layers, *held_layers(layers)]
        if self.draft is not None:  # each reply has caches of the draft network too
            drafts = draft_layers(self.draft.network)
            self.draft.network(tokens, cache=drafts)
            layers = [*layers, *drafts, *held_layers(drafts)]
        mx.eval([layer.state for layer in layers])
        mx.clear_cache()
        return CacheCost(layers, WARM_UP_TOKENS)

    def _measure(self, lock: FairLock, ranks: Ranks | None, cost: CacheCost, room: int) -> ChunkCost:
        """Run chunks of the lengths that prompts will have, and return what one takes."""
        warm_up = WarmUp(
            self.networks[""],
            partial(self.fresh_layers, ""),
            max_tokens=self.options.context_length or self.model.context_length,
            far=_far(cost, room),
            room=room,
            num_tokens=self.model.tokenizer.vocabulary_size,
            agree=(lambda value: max(ranks.all_gather(value)))
            if ranks is not None
            else (lambda value: value),
            prepares=prepares_for_lengths(),
            many_rows=self._many_rows,
        )
        if is_gpu():  # a CPU prepares nothing for a length
            # Half of the time is for rehearsed requests, which several ranks do not run.
            warm_up.run_lengths(self.options.warm_up_seconds / (2 if ranks is None else 1))
        with lock:  # MLX counts the memory of all models together
            return warm_up.measure()

    def _try_together(self, layers: LayerCaches, ranks: Ranks | None) -> tuple[bool, str]:
        """Try packed runs and batches; return whether prompts and replies can be packed, and why not even batched."""
        if other := sorted({type(layer).__name__ for layer in layers if not can_merge(layer)}):
            return False, f"its {', '.join(other)} cannot be merged{_option_behind(self.options)}"
        if ranks is not None and not hasattr(self.networks[""], "shard"):
            return False, ""  # in a pipeline of ranks, one that failed here would leave the others waiting
        trials = [
            BatchTrial(network, partial(self.fresh_layers, adapter))
            for adapter, network in self.networks.items()
        ]
        if self.options.packing and self.can_rewind:
            try:
                for trial in trials:
                    trial.try_packing(many_tokens=prepares_for_lengths())
            except BatchTrialError as error:
                log.debug("Prompts and replies cannot be packed: %s.", error)
            else:
                return True, ""
        try:
            for trial in trials:
                trial.try_batching()
        except BatchTrialError as error:
            return False, str(error)
        return False, ""

    def _try_drafts(self, layers: LayerCaches, ranks: Ranks | None) -> bool:
        """Try whether the networks can do what drafts need; return whether replies can get any."""
        is_pipeline = ranks is not None and not hasattr(self.networks[""], "shard")
        trials = (
            BatchTrial(network, partial(self.fresh_layers, adapter))
            for adapter, network in self.networks.items()
            if not is_pipeline  # there, a rank that fails would leave the others waiting
        )
        can_draft = try_drafts(self.options, layers, trials, self.draft)
        return can_draft if ranks is None else all(ranks.all_gather(can_draft))

    def _reserve_weights(
        self, reservation: MemoryReservation, cost: CacheCost, ranks: Ranks | None
    ) -> tuple[CacheCost, bool]:
        """Reserve memory for the weights as they are; ranks agree on how much they have and on how they run.

        Returns what the caches of one reply cost, and whether all ranks have the same caches.
        """
        limit, weights, are_alike = reservation.limit, self.weight_bytes(), True
        if ranks is not None:
            limit, weights, cost, self.unbatched, are_alike = ranks.agree_on_memory(
                limit, weights, cost, unbatched=self.unbatched
            )
            self.can_pack = all(ranks.all_gather(self.can_pack)) and self.can_batch
        reservation.limit = limit
        reservation.set_weights(weights)
        return cost, are_alike

    def _check_room(self, cost: CacheCost) -> None:
        """Refuse a model beside which nothing can be generated, and warn of one that leaves little."""
        room, limit = self.cache_budget.max_room, self.cache_budget.limit
        name, left = self.model.name, format_bytes(max(0, self.cache_budget.max_room))
        if cost(1) > room:
            raise EngineError(
                f"The model {name!r} leaves {left} of {format_bytes(limit)} for replies, and a single token needs "
                f"{format_bytes(cost(1))}. Unload other models, choose a smaller one, or raise --memory-gb."
            )
        self.cache_budget.check(1, "A single token")
        tokens = min(self.options.context_length or self.model.context_length, MIN_COMFORTABLE_TOKENS)
        if cost(tokens) > room:
            log.warning(
                "%s leaves %s of memory for requests, and one of %d tokens needs %s: such will be refused. A smaller "
                "model leaves more; --memory-gb raises the limit.",
                name,
                left,
                tokens,
                format_bytes(cost(tokens)),
            )

    def weight_bytes(self) -> int:
        """Return how many bytes the weights take here: of this process's part, with adapters and draft model."""
        networks = self.networks.items()
        weights = sum(weight_bytes(network, adapter_only=adapter != "") for adapter, network in networks)
        seen_with = self.vision.nbytes if self.vision is not None else 0
        return weights + seen_with + (weight_bytes(self.draft.network) if self.draft is not None else 0)


def _option_behind(options: EngineOptions) -> str:
    """Name the option that gives the model caches of another kind than its own; empty if there is none."""
    given = {"--kv-bits": options.kv_bits, "--max-kv-size": options.max_kv_size}
    return next(
        (f" (it has them because of {name})" for name, value in given.items() if value is not None), ""
    )


def _check_context_length(options: EngineOptions, model: LoadedNetwork) -> None:
    limit = options.context_length
    if limit is None or 0 < limit <= model.context_length:
        return
    if limit < 1 or model.states_context_length:
        raise EngineError(
            f"A context of {limit} tokens is not possible: this model's is {model.context_length}."
        )
    log.info("The context is %d tokens, as given: the model states none.", limit)


class _SizeCheck:
    """Refuses a model whose weights are too large, and reserves memory for them, before they are read."""

    def __init__(self, reservation: MemoryReservation, *, is_given: bool) -> None:
        self._reservation = reservation
        self._is_given = is_given  # whether the limit is this model's own

    def add(self, name: str, nbytes: int) -> None:
        """Count a network's weights. Raises EngineError if all of them together do not fit."""
        total, limit = self._reservation.weights + nbytes, self._reservation.limit
        if total > room_for_weights(limit):
            raise EngineError(too_large(name, total, limit, is_given=self._is_given))
        self._reservation.set_weights(total)


def _load_networks(model: LoadedNetwork, options: EngineOptions, sizes: _SizeCheck) -> dict[str, Any]:
    networks = {"": model.network}
    for adapter in options.adapters:
        networks[adapter] = load_adapter(model, options, adapter, sizes.add)
    if options.adapter is not None and options.adapter not in options.adapters:
        raise EngineError(f"There is no adapter {options.adapter!r}.")
    return networks


def _far(cost: CacheCost, room: int) -> int:
    """Return the position at which the memory of a chunk behind a long text is measured; 0 if no caches have room."""
    far = FAR
    while far >= MIN_FAR and cost(far) > room:
        far //= 2
    return far if far >= MIN_FAR else 0


def _prefix_cache_bytes(options: EngineOptions, budget: KVCacheBudget) -> int:
    if options.cache_bytes is not None:
        return options.cache_bytes
    return int(max(0, budget.room_beside_requests) * PREFIX_CACHE_SHARE)


def _open_disk_cache(
    options: EngineOptions, folder: Path, vision: Vision | None, cleanup: ExitStack
) -> DiskCheckpoints | None:
    if options.cache_folder is None:
        return None
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints, model_fingerprint

    extra = f"kv_bits={options.kv_bits}/{options.kv_group_size} max_kv_size={options.max_kv_size}"
    if options.adapter is not None:
        extra += f" adapter={model_fingerprint(options.adapters[options.adapter])}"
    if vision is not None:
        extra += f" {vision.version}"
    disk = DiskCheckpoints(
        options.cache_folder,
        max_bytes=options.cache_folder_bytes,
        fingerprint=model_fingerprint(folder, extra),
    )
    disk.open()
    cleanup.callback(disk.close)
    return disk
