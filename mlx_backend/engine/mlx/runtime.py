"""A model that is ready to run: its networks, what they can do and cost, and the memory that is left for caches.

Made on the engine thread, in steps of which each returns what the later ones need:

    files ─▶ networks ─▶ abilities ─▶ vision ─▶ costs ─▶ faster layers ─▶ memory ─▶ prefix store

On a CPU the faster layers are the second step: a rule says where they are used, and all that follows gains.

Knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend.device.memory import format_bytes, room_for_weights, too_large
from mlx_backend.device.mlx import (
    KERNEL_FOLDER_VARIABLE,
    is_gpu,
    prepares_for_lengths,
    set_precision,
    weight_bytes,
)
from mlx_backend.engine.kv_cache_budget import MAX_TOKENS, KVCacheBudget
from mlx_backend.engine.mlx.arrays import coarsest_dtype
from mlx_backend.engine.mlx.batch_trial import try_networks
from mlx_backend.engine.mlx.chunk_cost import CacheCost
from mlx_backend.engine.mlx.kv_cache import fresh_caches, is_quantized, kind_of, parts_of, run_first
from mlx_backend.engine.mlx.loading import load_networks
from mlx_backend.engine.mlx.mtp import DRAFTING, attach, head_of, own_head
from mlx_backend.engine.mlx.prefix_cache import PrefixCache, PrefixStore
from mlx_backend.engine.mlx.rewinding import held_layers
from mlx_backend.engine.mlx.speculative import HeadDrafter, ModelDrafter, TextDrafter, draft_layers
from mlx_backend.engine.mlx.vision.image_memory import PreparedImages
from mlx_backend.engine.mlx.vision.image_trial import load_vision
from mlx_backend.engine.mlx.vision.whole import read_network
from mlx_backend.engine.mlx.warm_up import WarmUp
from mlx_backend.errors import EngineError
from mlx_backend.layers.kernel_compiler import KernelCompiler, jobs_for
from mlx_backend.layers.many_rows import use_many_rows_layers
from mlx_backend.models.download import find_folder
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.folders import explain_load_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlx_backend.device import Device
    from mlx_backend.device.memory import MemoryReservation
    from mlx_backend.engine.mlx.batch_trial import Abilities
    from mlx_backend.engine.mlx.chunk_cost import ChunkCost
    from mlx_backend.engine.mlx.collectives import MLXRanks
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.loading import LoadedNetwork, Networks
    from mlx_backend.engine.mlx.speculative import Drafter
    from mlx_backend.engine.mlx.vision.tower import Vision
    from mlx_backend.layers.dequantize import Dequantizer
    from mlx_backend.layers.many_rows import ManyRows

log = logging.getLogger(__name__)

PREFIX_CACHE_SHARE = 0.5
"""Share of the memory that the model leaves, for cached prefixes. One is in memory twice while its next turn runs."""
READ_SHARE_ON_CPU = 0.1
"""Of a load that is done when the weights are read; on a GPU nearly all is."""
TRIALS_ON_CPU = (0.4, 0.95)
"""Shares of a load that are done when the trials of several sequences begin and end."""
WARM_UP_TOKENS = 8
TRIED_TOKENS = 65
"""Tokens that layers for many rows are tried with: enough that mlx-lm sorts the rows of a mixture by expert.

No run before has this length, for which a network that is compiled would not call its layers again.
"""
FEW_TRIED_TOKENS = 5
"""The same on a CPU for layers without experts: there a larger model takes seconds for more."""
MEASURED_SHARE = 1 / 8
"""Share of the room that a chunk may take whose memory is measured."""
SHOWN_KV_BITS = (8, 4)
"""Bits of `--kv-bits` for which people are shown the memory that caches take."""
MIN_COMFORTABLE_TOKENS = 4096
"""Length of a conversation; a model that leaves memory for fewer tokens is warned about."""


@dataclass(slots=True, kw_only=True, weakref_slot=True)
class Runtime:
    """A loaded model. `vision` is None for one that cannot see images here.

    `many_rows` belongs to the layers with an implementation for many rows, if there are any; where its `kernels` are
    compiled first, Tuning sets it later. `chunk_cost` is what a chunk of a prompt takes. `weight_bytes` are those of
    this process's part, with adapters, draft model and vision.
    """

    options: EngineOptions
    networks: Networks
    kernels: KernelCompiler | None
    many_rows: ManyRows | None
    warm_up: WarmUp
    abilities: Abilities
    vision: Vision | None
    weight_bytes: int
    chunk_cost: ChunkCost
    cache_budget: KVCacheBudget
    prefix_store: PrefixStore
    close: Callable[[], None]
    """Gives back what outlives this object: the memory, the prefixes and the disk's writer."""

    def drafter(self, adapter: str) -> Drafter | None:
        """Return what drafts for one reply, if anything does."""
        draft, network = self.networks.draft, self.networks.by_adapter[adapter]
        if draft is not None:
            can_pack = self.abilities.can_pack_drafts
            return ModelDrafter(
                draft.network, draft.num_tokens, can_pack=can_pack, pads=prepares_for_lengths()
            )
        if not self.abilities.can_draft:
            return None
        return TextDrafter() if head_of(network) is None else HeadDrafter(network)


def load_runtime(
    source: str | Path,
    options: EngineOptions,
    device: Device,
    ranks: MLXRanks | None,
    on_progress: Callable[[float], None],
) -> Runtime:
    """Load a model, try and measure it. Raises EngineError with a text for people."""
    if ranks is not None:
        ranks.refuse_unsupported(options)
    with ExitStack() as cleanup:  # if a step fails, undoes those before it
        reservation = device.memory.reserve(0, limit=options.memory_bytes)
        cleanup.callback(reservation.close)
        reserve = partial(reserve_weights, reservation, options.memory_bytes is not None)
        networks = load_networks(
            source,
            options,
            on_progress=lambda share: on_progress(share if is_gpu() else READ_SHARE_ON_CPU * share),
            group=ranks.group if ranks else None,
            check_size=reserve,
            caches=device.memory.host_caches,
        )
        if ranks is not None:
            ranks.check_alike(networks.model.folder, options)
        # Processes that share a model have to do the same runs, and would find different layers right.
        kernels = _kernels(networks) if ranks is None else None
        if kernels is not None:
            cleanup.callback(kernels.close)
        # On a CPU nothing has to be measured before, and all that follows is faster with them.
        has_to_measure = is_gpu() or kernels is not None or ranks is not None
        many_rows = None if has_to_measure else many_rows_layers(networks)
        try:
            cost, dequantized_bytes = _first_run(networks)
            start, end = (0.97, 0.98) if is_gpu() else TRIALS_ON_CPU
            on_progress(start)
            abilities = try_networks(
                networks, ranks, lambda share: on_progress(start + (end - start) * share)
            )
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"The model was loaded but cannot be run: {error}") from error
        if abilities.unbatched:
            log.warning("Replies are decoded one after the other in each step: %s.", abilities.unbatched)
        if abilities.drafts:
            log.info("%s", abilities.drafts)
        vision = load_vision(
            networks,
            device.lock,
            reserve,
            can_pack=abilities.can_pack,
            shared=ranks is not None,
        )
        weight_bytes = networks.weight_bytes() + (vision.nbytes if vision is not None else 0)
        if vision is not None:
            cleanup.callback(vision.processor.close)
        limit, weights, are_alike = reservation.limit, weight_bytes, True
        if ranks is not None:
            limit, weights, cost, are_alike = ranks.agree_on_memory(limit, weights, cost)
        reservation.limit = limit
        reservation.set_weights(weights)
        warm_up = make_warm_up(networks, ranks, int(reservation.room * MEASURED_SHARE))
        with device.lock:  # MLX counts the memory of all models together
            chunk_cost = warm_up.measure(many_rows)
            chunk_cost.context_bytes = dequantized_bytes
            if is_gpu() and kernels is None:  # else Tuning does the rest, once they are compiled
                for _ in warm_up.measure_memory(chunk_cost):
                    pass
                many_rows = many_rows_layers(networks) if ranks is None else None
                for _ in warm_up.measure_many_rows(many_rows, chunk_cost) if many_rows is not None else ():
                    pass
        if is_gpu() and ranks is not None:  # see Tuning
            for _ in warm_up.run_lengths(options.warm_up_seconds):
                pass
        budget = make_budget(reservation, device, ranks, cost, chunk_cost, abilities, vision)
        check_room(budget, cost, networks)
        prefixes = PrefixCache(
            _prefix_cache_bytes(options, budget) if are_alike else 0, shared=ranks is not None
        )
        cleanup.callback(prefixes.clear)
        disk = _open_disk_cache(options, networks.model, vision)
        if disk is not None:
            cleanup.callback(disk.close)
        on_progress(1.0)
        return Runtime(
            options=options,
            networks=networks,
            kernels=kernels,
            many_rows=many_rows,
            warm_up=warm_up,
            abilities=abilities,
            vision=vision,
            weight_bytes=weight_bytes,
            chunk_cost=chunk_cost,
            cache_budget=budget,
            prefix_store=PrefixStore(prefixes, disk, budget, options.adapter or "", vision),
            close=cleanup.pop_all().close,
        )


def reserve_weights(reservation: MemoryReservation, has_own_limit: bool, name: str, nbytes: int) -> None:
    """Reserve memory for a network's weights before they are read. Raises EngineError if all together do not fit."""
    total, limit = reservation.weights + nbytes, reservation.limit
    if total > room_for_weights(limit):
        raise EngineError(too_large(name, total, limit, is_given=has_own_limit))
    reservation.set_weights(total)


def _kernels(networks: Networks) -> KernelCompiler | None:
    """Have the kernels for many rows compiled; None where MLX has no such, or no folder to store them in."""
    folder = os.environ.get(KERNEL_FOLDER_VARIABLE)
    if not (folder and prepares_for_lengths()):
        return None
    every = networks.every
    jobs = jobs_for(every, coarsest_dtype(every[0]), dequantize=networks.options.dequantize)
    return KernelCompiler(jobs, Path(folder))


def many_rows_layers(
    networks: Networks, find: Callable[[Any, mx.Dtype], Dequantizer | None] | None = None
) -> ManyRows | None:
    """Replace the layers that have an implementation for many rows (layers/many_rows.py), and try them.

    Returns None if there are none that can be used. `find` returns what dequantises a layer.
    """
    every = networks.every
    dtype = coarsest_dtype(every[0])
    many_rows = use_many_rows_layers(every, dtype, dequantize=networks.options.dequantize, find=find)
    if many_rows is None:
        return None
    tokens = mx.zeros((1, TRIED_TOKENS if is_gpu() or many_rows.has_experts else FEW_TRIED_TOKENS), mx.uint32)
    try:
        with many_rows.always():
            for network in networks.by_adapter.values():
                # On its usual caches: others may not be possible, which is said later, in words for people.
                mx.eval(network(tokens, cache=fresh_caches(network, EngineOptions())))
            if (draft := networks.draft) is not None:
                mx.eval(draft.network(tokens, cache=draft_layers(draft.network)))
    except Exception as error:  # such as a network that is compiled, and cannot wait for its layers
        log.warning("Weights are not dequantised for long prompts, and rows not grouped by expert: %r", error)
        many_rows.is_enabled = False
        return None
    return many_rows


def _first_run(networks: Networks) -> tuple[CacheCost, int]:
    """Run the networks once, which compiles their kernels.

    Returns what the caches of one reply cost, and the bytes of a token in the largest layer that attention dequantises.
    """
    tokens, layers = mx.zeros((1, WARM_UP_TOKENS), mx.uint32), networks.fresh_layers()
    run_first(networks.model.network, tokens, layers, networks.options)
    own = layers[:-2] if head_of(networks.model.network) is not None else layers
    quantized = [layer for layer in own if is_quantized(layer)]
    if quantized:
        others = sorted(
            {kind_of(part) for layer in own for part in parts_of(layer) if not is_quantized(part)}
        )
        log.info(
            "The KV caches of %d of %d layers are quantised to %d bits%s.",
            len(quantized),
            len(own),
            networks.options.kv_bits,
            f"; {', '.join(others)} stay as they are" if others else "",
        )
    if networks.draft is not None or networks.options.draft_from_text or head_of(networks.model.network):
        layers = [*layers, *held_layers(layers)]
    if networks.draft is not None:  # each reply has caches of the draft network too
        drafts = draft_layers(networks.draft.network)
        networks.draft.network(tokens, cache=drafts)
        layers = [*layers, *drafts, *held_layers(drafts)]
    mx.eval([layer.state for layer in layers])
    mx.clear_cache()
    dequantized = [
        sum(each.nbytes for part in parts_of(layer) if is_quantized(part) for each in part.keys_and_values())
        for layer in quantized
    ]
    return CacheCost.of(layers, WARM_UP_TOKENS), max(dequantized, default=0) // WARM_UP_TOKENS


def cache_costs(network: Any) -> dict[int | None, CacheCost]:
    """Return what one sequence's caches cost, by the bits that they are quantised to; None: not at all.

    Bits that are not possible are left out. Nothing is computed: arrays that are not evaluated have shapes too.
    """
    tokens, costs = mx.zeros((1, WARM_UP_TOKENS), mx.uint32), dict[int | None, CacheCost]()
    for bits in (None, *SHOWN_KV_BITS):
        try:
            layers = fresh_caches(network, EngineOptions(kv_bits=bits))
            network(tokens, cache=layers)
        except Exception:  # whatever the network raises
            if bits is None:
                raise
        else:
            costs[bits] = CacheCost.of(layers, WARM_UP_TOKENS)
    return costs


def memory_by_tokens(folder: Path) -> tuple[dict[int | None, Callable[[int], int]], str]:
    """Return the bytes that the model in a folder takes with one sequence's caches, by its tokens. Raises EngineError.

    They are by the bits of `--kv-bits`, and None without. The other is a sentence on its MTP head, if it is said to
    have one.
    """
    with explain_load_errors(folder.name):
        network, _ = read_network(folder)
        found = own_head(network, folder)
        if found.head is not None:
            attach(network, found.head)
        set_precision(network, folder.name)
        costs, weights = cache_costs(network), weight_bytes(network)
    drafts = found.reason if found.head is None else DRAFTING
    return {bits: partial(_with_weights, weights, cost) for bits, cost in costs.items()}, drafts


def _with_weights(weights: int, cost: CacheCost, tokens: int) -> int:
    return weights + cost(tokens)


def make_warm_up(networks: Networks, ranks: MLXRanks | None, room: int) -> WarmUp:
    """Return what runs a model's network on tokens that mean nothing, in chunks of up to `room` bytes."""
    options, model = networks.options, networks.model
    return WarmUp(
        model.network,
        networks.fresh_layers,
        max_tokens=options.context_length or model.context_length,
        room=room,
        num_tokens=model.tokenizer.vocabulary_size,
        agree=(lambda value: value) if ranks is None else (lambda value: max(ranks.all_gather(value))),
        prepares=prepares_for_lengths(),
    )


def make_budget(
    reservation: MemoryReservation,
    device: Device,
    ranks: MLXRanks | None,
    cost: CacheCost,
    chunk_cost: ChunkCost,
    abilities: Abilities,
    vision: Vision | None,
) -> KVCacheBudget:
    """Return the memory that the model leaves for caches and images."""
    waiting = PreparedImages() if vision is None else vision.processor.waiting
    waiting.room = lambda: reservation.max_room
    max_padded, merged = 0, abilities.max_merged_length
    if abilities.can_pack and merged != 0:
        # What gets longer than can be merged is separated before the next step.
        max_padded = MAX_TOKENS if merged is None else merged + 1
    return KVCacheBudget(
        reservation,
        cost,
        max_padded=max_padded,
        chunk_bytes=chunk_cost.working_bytes,
        # Processes that share a model have to prefill alike, however short of memory each one's machine is.
        pressure=device.memory.pressure if ranks is None else lambda: "none",
        waiting=lambda: waiting.nbytes,
        gives_up=ranks is None,
    )


def check_room(budget: KVCacheBudget, cost: CacheCost, networks: Networks) -> None:
    """Refuse a model that leaves no room for a single token, and warn of one that leaves little."""
    model, room = networks.model, budget.reservation.max_room
    left, limit = format_bytes(max(0, room)), format_bytes(budget.reservation.limit)
    if cost(1) > room:
        raise EngineError(
            f"The model {model.name!r} leaves {left} of {limit} for replies, and a single token "
            f"needs {format_bytes(cost(1))}. Unload other models, choose a smaller one, or raise --memory-gb."
        )
    budget.check(1, "A single token")
    tokens = min(networks.options.context_length or model.context_length, MIN_COMFORTABLE_TOKENS)
    if cost(tokens) > room:
        log.warning(
            "%s leaves %s of memory for requests, and one of %d tokens needs %s: such will be refused. A smaller "
            "model leaves more; --memory-gb raises the limit.",
            model.name,
            left,
            tokens,
            format_bytes(cost(tokens)),
        )


def _prefix_cache_bytes(options: EngineOptions, budget: KVCacheBudget) -> int:
    if options.cache_bytes is not None:
        return options.cache_bytes
    return int(max(0, budget.reservation.reclaimable_room) * PREFIX_CACHE_SHARE)


def _open_disk_cache(
    options: EngineOptions, model: LoadedNetwork, vision: Vision | None
) -> DiskCheckpoints | None:
    if options.cache_folder is None:
        return None
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints, model_fingerprint

    extra = f"kv_bits={options.kv_bits}/{options.kv_group_size}"
    if options.adapter is not None:
        extra += f" adapter={model_fingerprint(options.adapters[options.adapter])}"
    if vision is not None:
        extra += f" {vision.version}"
    if head_of(model.network) is not None:
        own = options.draft_model
        extra += f" mtp={own and model_fingerprint(find_folder(own, allow_download=False)[0])}"
    disk = DiskCheckpoints(
        options.cache_folder,
        max_bytes=options.cache_folder_bytes,
        fingerprint=model_fingerprint(model.folder, extra),
    )
    disk.open()
    return disk
