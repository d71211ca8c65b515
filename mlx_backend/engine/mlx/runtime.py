"""A model that is ready to run: its networks, the kind of its caches, who drafts, and what memory is left.

Made on the engine thread, by loading and running the model once. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import maybe_set_recommended_wired_limit
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_backend.device.mlx import weight_bytes
from mlx_backend.engine.kv_cache_budget import KVCacheBudget
from mlx_backend.engine.mlx.cache_cost import CacheCost
from mlx_backend.engine.mlx.kv_cache import can_rewind
from mlx_backend.engine.mlx.loading import load_draft, load_model, with_adapter
from mlx_backend.engine.mlx.packed_forward import can_pack
from mlx_backend.engine.mlx.prefix_cache import PrefixCache
from mlx_backend.engine.mlx.sampling import text_token_mask
from mlx_backend.engine.mlx.speculative import ModelDrafter, TextDrafter, draft_layers
from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlx_backend.device.memory import MemoryBudget
    from mlx_backend.engine.mlx.collectives import Ranks
    from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints
    from mlx_backend.engine.mlx.kv_cache import LayerCaches
    from mlx_backend.engine.mlx.loading import LoadedNetwork
    from mlx_backend.engine.mlx.speculative import Drafter
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

PREFIX_CACHE_SHARE = 0.25  # of the memory that the model leaves
MAX_SPARE_LOGITS_BYTES = 64 << 20  # that may be computed in vain rather than run the network once more


class Runtime:
    """Loads when it is made; raises EngineError with a text for people.

    `networks` are by adapter, "" is the model as it is. `together` says whether replies can be batched, `packs` whether
    prompts and replies can be run without padding (packing.py).
    """

    def __init__(
        self,
        source: str | Path,
        options: EngineOptions,
        memory: MemoryBudget,
        ranks: Ranks | None,
        report: Callable[[float], None],
    ) -> None:
        self.options = options
        self.draft: Any = None
        self.disk: DiskCheckpoints | None = None
        if ranks is not None:
            ranks.refuse(options)
        model = self.model = load_model(source, options, report, ranks.group if ranks else None)
        limit = options.context_length
        if limit is not None and not 0 < limit <= model.context_length:
            raise EngineError(
                f"A context of {limit} tokens is not possible: this model's is {model.context_length}."
            )
        with ExitStack() as made:  # what would stay if this failed
            wired = maybe_set_recommended_wired_limit()
            if wired is not None:
                made.callback(_set_wired, wired)
            self.networks = {"": model.network}
            for name in options.adapters:
                self.networks[name] = with_adapter(model, options, name)
            if options.adapter is not None and options.adapter not in options.adapters:
                raise EngineError(f"There is no adapter {options.adapter!r}.")
            self.text = text_token_mask(
                model.tokenizer.vocabulary_size, model.tokenizer.special_tokens.keys()
            )
            layers = self.fresh_layers("")
            self.can_batch = all(_can_merge(layer) for layer in layers)
            self.can_rewind = all(can_rewind(layer) for layer in layers)
            self.max_spare_logits = MAX_SPARE_LOGITS_BYTES // (4 * model.tokenizer.vocabulary_size)
            if not self.can_batch:
                kinds = ", ".join(sorted({type(layer).__name__ for layer in layers if not _can_merge(layer)}))
                log.warning(
                    "Caches of this kind cannot be batched (%s): replies take turns, token by token.", kinds
                )
            self._set_up_drafts(model, layers)
            if ranks is not None:
                ranks.check_alike(model.folder, options)
            try:
                cost = CacheCost(*self._warm_up(layers))  # with the drafter's, which each reply has
                self.can_pack = self._can_pack(ranks)
            except Exception as error:
                raise EngineError(f"The model was loaded but cannot be run: {error}") from error
            weights = sum(
                weight_bytes(network, adapter_only=name != "") for name, network in self.networks.items()
            )
            weights += weight_bytes(self.draft) if self.draft is not None else 0
            limit, alike = options.memory_bytes or memory.limit, True
            if ranks is not None:
                limit, weights, cost, self.can_batch, alike = ranks.agree_on_memory(
                    limit, weights, cost, can_batch=self.can_batch
                )
                self.can_pack = all(ranks.all_gather(self.can_pack)) and self.can_batch
            reservation = memory.reserve(weights, limit=limit)
            made.callback(reservation.close)
            self.cache_budget = KVCacheBudget(reservation, cost, padded=self.can_batch)
            self.cache_budget.check(1, "A single token")
            cache_bytes = options.cache_bytes
            if cache_bytes is None:
                cache_bytes = int(max(0, self.cache_budget.room) * PREFIX_CACHE_SHARE)
            self.prefixes = PrefixCache(cache_bytes if alike else 0)
            made.callback(self.prefixes.clear)
            if options.cache_folder is not None:
                from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints, model_fingerprint

                extra = f"kv_bits={options.kv_bits}/{options.kv_group_size} max_kv_size={options.max_kv_size}"
                if options.adapter is not None:
                    extra += f" adapter={model_fingerprint(options.adapters[options.adapter])}"
                self.disk = DiskCheckpoints(
                    options.cache_folder,
                    max_bytes=options.cache_folder_bytes,
                    fingerprint=model_fingerprint(model.folder, extra),
                )
                self.disk.open()
                made.callback(self.disk.close)
            report(1.0)
            self._made = made.pop_all()

    def close(self) -> None:
        """Give back what would not go by itself."""
        self._made.close()

    def drafter(self) -> Drafter | None:
        """Make what drafts for one reply, if anything does."""
        if self.draft is not None:
            return ModelDrafter(self.draft, self._tokens_known)
        return TextDrafter() if self.options.draft_from_text else None

    def _warm_up(self, layers: LayerCaches) -> tuple[LayerCaches, int]:
        """Run the network once, which compiles its kernels and shows the shapes of its caches."""
        count = 8
        tokens = mx.array([[0] * count])
        self.networks[""](tokens, cache=layers)
        if self.draft is not None:
            drafts = draft_layers(self.draft)
            self.draft(tokens, cache=drafts)
            layers = [*layers, *drafts]
        mx.eval([layer.state for layer in layers])
        mx.clear_cache()
        return layers, count

    def _can_pack(self, ranks: Ranks | None) -> bool:
        """Whether prompts and replies can be run together without padding."""
        if not (self.can_batch and self.can_rewind):
            return False
        if ranks is not None and not hasattr(self.networks[""], "shard"):
            return False  # in a pipeline of ranks, one that failed here would leave the others waiting
        return all(
            can_pack(network, partial(self.fresh_layers, adapter))
            for adapter, network in self.networks.items()
        )

    def _set_up_drafts(self, model: LoadedNetwork, layers: LayerCaches) -> None:
        options = self.options
        if options.draft_model is None and not options.draft_from_text:
            return
        if options.draft_model is not None and options.draft_from_text:
            raise EngineError(
                "Drafts come from a draft model or from the text itself, not from both: name one."
            )
        stuck = sorted({type(layer).__name__ for layer in layers if not can_rewind(layer)})
        if stuck:
            raise EngineError(
                f"Drafts are not possible with this model: its {', '.join(stuck)} cannot be taken back."
            )
        if options.draft_model is not None:
            self.draft = load_draft(options.draft_model, options, model)
            # Tables are padded to different sizes: an id beyond the end of one must not get there.
            its_own = self.draft(mx.array([[0]])).shape[-1]
            self._tokens_known = min(its_own, model.tokenizer.vocabulary_size)
        log.info("Drafts are used while a reply runs alone; replies that run together are batched instead.")

    def fresh_layers(self, adapter: str) -> LayerCaches:
        """Make the caches of a prompt of which nothing is known."""
        options, network = self.options, self.networks[adapter]
        if options.max_kv_size is not None and hasattr(network, "make_cache"):
            raise EngineError(
                "--max-kv-size is not possible with this model, which makes its own caches; limit the context "
                "with --context-length instead."
            )
        layers: LayerCaches = make_prompt_cache(network, options.max_kv_size)
        if options.kv_bits is None:
            return layers
        if other := sorted({type(layer).__name__ for layer in layers if type(layer) is not KVCache}):
            raise EngineError(
                f"--kv-bits is not possible with this model: its {', '.join(other)} cannot be quantised."
            )
        return [
            layer.to_quantized(group_size=options.kv_group_size, bits=options.kv_bits) for layer in layers
        ]


def _set_wired(limit: int) -> None:
    mx.synchronize()
    mx.set_wired_limit(limit)


def _can_merge(layer: Any) -> bool:
    return hasattr(layer, "merge") and not getattr(layer, "keep", 0)
