"""Caches and networks that refuse what is asked of them, once or always: no reply is changed, no memory is lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import architectures
import pytest
from drafting import generate, loaded_batch
from engine_models import WrappedNetwork, write_model, write_qwen
from mlx_lm.models import cache as mlx_lm_caches

from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.kv_cache_budget import KVCacheBudget
from mlx_backend.engine.mlx import kv_cache, prefix_cache
from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import PackedLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import mlx.core as mx
    from drafting import FoundReply

    from mlx_backend.engine.mlx.batch import MLXBatch

LONG = 30  # tokens, from which rows are not merged here
CACHE_BYTES = 200_000
CANCELLED = 3  # of the requests, after some tokens
CACHES = ("ArraysCache", "CacheList", "BatchKVCache", "BatchRotatingKVCache")
OPERATIONS = ("merge", "extend", "filter", "extract")


class Faults:
    """Has one operation raise, after it has done what it was asked to: in its `at`-th call, or in all."""

    def __init__(self, patched: pytest.MonkeyPatch, batch: MLXBatch) -> None:
        self.calls: Counter[str] = Counter()
        self._refused = ""
        self._at: int | None = None
        kinds = [getattr(mlx_lm_caches, name) for name in CACHES]
        for kind in kinds:
            for operation in OPERATIONS:
                if operation in vars(kind):
                    own = vars(kind)[operation]
                    wrapped = self._wrap(getattr(own, "__func__", own), operation)
                    patched.setattr(
                        kind, operation, classmethod(wrapped) if isinstance(own, classmethod) else wrapped
                    )
        for module, operation in ((prefix_cache, "own_memory"), (kv_cache, "_compact")):
            patched.setattr(module, operation, self._wrap(getattr(module, operation), operation))
        networks = batch.runtime.networks.by_adapter
        patched.setitem(networks, "", RefusingNetwork(networks[""], self))

    def refuse(self, operation: str, at: int | None) -> None:
        self.calls.clear()
        self._refused, self._at = operation, at

    def on_call(self, operation: str) -> None:
        self.calls[operation] += 1
        if operation == self._refused and self._at in (None, self.calls[operation]):
            raise ValueError("[broadcast_shapes] Shapes (1,2) and (1,3) cannot be broadcast")

    def _wrap(self, original: Callable[..., Any], operation: str) -> Any:
        def call(*arguments: Any) -> Any:
            found = original(*arguments)
            self.on_call(operation)
            return found

        return call


class RefusingNetwork(WrappedNetwork):
    """May refuse to run several sequences at once."""

    def __init__(self, network: Any, faults: Faults) -> None:
        super().__init__(network)
        self._faults = faults

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        logits: mx.array = self._network(inputs, cache=cache)
        if isinstance(cache[0], PackedLayer) or inputs.shape[0] > 1:
            self._faults.on_call("run")
        return logits


@dataclass
class Case:
    """A loaded model, requests to it, the replies to each of them alone, and how often something is asked for."""

    batch: MLXBatch
    requests: list[GenerationRequest]
    expected: list[FoundReply]
    calls: Counter[str]

    def check(self) -> None:
        """Generate replies that join, leave and are cancelled; expect each as alone, and nothing left of them."""
        batch = self.batch
        prefixes = batch.runtime.prefix_store.prefixes
        prefixes.clear()
        chooser = random.Random(7)
        with pytest.MonkeyPatch.context() as patched:  # memory is short now and then
            patched.setattr(
                KVCacheBudget, "prefix_room", lambda *_: chooser.choice((CACHE_BYTES, prefixes.nbytes // 2))
            )
            found = generate(self.batch, self.requests, arrivals={4: 4, 5: 5}, cancelled_after={CANCELLED: 6})
        for at, (mine, alone) in enumerate(zip(found, self.expected, strict=True)):
            wanted = alone.tokens[: len(mine.tokens)] if at == CANCELLED else alone.tokens
            assert (mine.tokens, mine.error) == (wanted, None)
        assert not batch._decoders
        assert not batch._preempted
        counted = [entry.own_bytes for entry in prefixes._entries.values()]
        assert prefixes.nbytes == sum(counted) + sum(each.counted for each in prefixes._trunks.values())
        batch.runtime.prefix_store.report_usage()
        assert batch.runtime.cache_budget.used == 0


@pytest.fixture(scope="module", params=["windowed", "drafts", "lfm2", "falcon_h1"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """Sliding windows; drafts; states next to attention; both in one layer's list of caches."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mlx_backend.engine.mlx.batch_trial.MAX_MERGED_LENGTH", LONG)
        model, options = _model(tmp_path_factory.mktemp("model"), request.param)
        with loaded_batch(model, cache_bytes=CACHE_BYTES, **options) as batch:
            assert batch.runtime.abilities.can_pack
            asked = _requests()
            case = Case(batch, asked, [generate(batch, [each])[0] for each in asked], Counter())
            with pytest.MonkeyPatch.context() as counting:
                faults = Faults(counting, batch)
                case.check()
            case.calls = faults.calls
            yield case


def _model(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    match name:
        case "windowed":
            return write_model(folder, eos_token_id=[]), {}
        case "drafts":
            return write_qwen(folder), {"draft_from_text": True, "draft_tokens": 4}
    return architectures.write(folder, name), {}


def _requests() -> list[GenerationRequest]:
    """Return requests that begin alike, some of which outgrow the batch."""
    chooser = random.Random(16)
    common = [chooser.randrange(20, 60) for _ in range(8)]
    found = []
    for at in range(6):
        own = [chooser.randrange(20, 60) for _ in range(chooser.choice((1, 5, 18)))]
        found.append(
            GenerationRequest(
                prompt=common + own * 2,
                max_tokens=9 + 3 * at,
                checkpoints=(8, 8 + len(own)),
                sampling=Sampling(temperature=0.8, seed=at) if at % 2 else Sampling(),
            )
        )
    return found


@pytest.mark.parametrize("operation", [*OPERATIONS, "run", "own_memory", "_compact"])
def test_whatever_is_refused_changes_no_reply(
    case: Case, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (calls := case.calls[operation]):
        assert operation in ("own_memory", "_compact")  # of layers that hold every token, and of others
        return
    faults = Faults(monkeypatch, case.batch)
    for place in (random.Random(operation).randint(1, calls), None):
        faults.refuse(operation, place)
        case.check()
        assert faults.calls[operation]
