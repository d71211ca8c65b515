"""Prefill: prompts run packed with each other and with the replies' next tokens, and are answered as if alone."""

import gc
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_models import write_adapter, write_model, write_qwen
from tolerances import held_memory

from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, Progress, TokenDelta
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.chunk_cost import PADDED_SIZES
from mlx_backend.engine.mlx.mlx_lm_patches.packed_layer import PackedLayer
from mlx_backend.engine.mlx.prefill_pacer import PrefillPacer
from mlx_backend.engine.mlx.warm_up import WarmUp
from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.models.engine_options import EngineOptions

WINDOW = 32  # of write_model's sliding layers


class Watched(MLXBatch):
    """Notes what its networks run. With `few_logits` a prompt's last chunk is its last token."""

    def __init__(
        self,
        model: Path,
        *,
        few_logits: bool = False,
        can_pack: bool = True,
        pads_chunks: bool = False,
        **options: Any,
    ) -> None:
        options_given = EngineOptions(prefill_chunk=4096, packing=can_pack, **options)
        super().__init__(model, options_given, device=Device(8 << 30))
        self.poison: int | None = None  # a token; a prompt with it fails once its caches have been written to
        self.runs: list[list[tuple[int, int]]] = []  # the segments of each run: rows, and tokens in each
        super().load(lambda _: None)
        assert self.runtime.abilities.can_pack == can_pack
        self.prefill_queue.pads_chunks = pads_chunks
        self.prefill_queue.max_spare_logits = 1 if few_logits else 1000
        networks = self.runtime.networks.by_adapter
        for adapter_name, network in networks.items():
            networks[adapter_name] = _Watched(network, self)

    @property
    def tokens_prefilled(self) -> int:
        """How many tokens of prompts were prefilled, in chunks of more than one."""
        return sum(length for run in self.runs for _, length in run if length > 1)

    def take(self, count: int) -> dict[int, list[int] | EngineError]:
        """Take steps; return what they generated."""
        generated: dict[int, list[int]] = {}
        failed: dict[int, EngineError] = {}
        for _ in range(count):
            for key, outcome in self.step():
                if isinstance(outcome, TokenDelta):
                    generated.setdefault(key, []).append(outcome.token)
                elif isinstance(outcome, EngineError):
                    failed[key] = outcome
        return generated | failed

    def answers(
        self, requests: Sequence[GenerationRequest], *, chunks: int = 2
    ) -> list[list[int] | EngineError]:
        """Insert all requests at once, and run them to their ends."""
        for key, request in enumerate(requests):
            self.insert(key, request)
        generated = self.take(chunks + max(request.max_tokens for request in requests))
        assert not self.sequences
        return [generated[key] for key in range(len(requests))]


class _Watched:
    def __init__(self, network: Any, batch: Watched) -> None:
        self._network, self._batch = network, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if isinstance(cache[0], PackedLayer):
            self._batch.runs.append(list(cache[0].shapes))
        else:
            self._batch.runs.append([(inputs.shape[0], inputs.shape[1])])
        logits: mx.array = self._network(inputs, cache=cache)
        reads = any(length > 1 for _, length in self._batch.runs[-1])
        if reads and self._batch.poison in as_ints(inputs.flatten()):
            raise RuntimeError("[malloc] Unable to allocate 99 bytes")
        return logits


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "windowed": write_model(tmp_path_factory.mktemp("gpt-oss"), eos_token_id=[]),
        "qwen": write_qwen(tmp_path_factory.mktemp("qwen")),
    }


@pytest.fixture
def watched() -> Iterator[Any]:
    made: list[Watched] = []

    def make(model: Path, **options: Any) -> Watched:
        made.append(Watched(model, **options))
        return made[-1]

    yield make
    for batch in made:
        batch.unload()


@pytest.fixture(scope="module", params=["windowed", "qwen"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def decoding_requests() -> list[GenerationRequest]:
    return [request_for(prompt(at, 40 + at), 50) for at in range(6)]


@pytest.fixture(scope="module")
def decoded_alone(models: dict[str, Path], kind: str) -> list[list[int] | EngineError]:
    """What `decoding_requests` are answered, one after the other."""
    alone = Watched(models[kind], cache_bytes=0)
    found = [alone.answers([request])[0] for request in decoding_requests()]
    alone.unload()
    return found


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 60), k=length)


def request_for(tokens: Sequence[int], count: int = 12, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt=list(tokens), max_tokens=count, **fields)


@pytest.mark.parametrize("few_logits", [False, True], ids=["one run", "two runs"])
@pytest.mark.parametrize("lengths", [(9, 9, 9), (3, 4, 30, 200, 180, 5)], ids=str)
def test_prompts_that_arrive_together_are_prefilled_in_one_run_and_answered_as_each_is_alone(
    models: dict[str, Path], watched: Any, kind: str, lengths: tuple[int, ...], few_logits: bool
) -> None:
    requests = [request_for(prompt(at, length)) for at, length in enumerate(lengths)]
    alone = watched(models[kind], cache_bytes=0)
    expected = [alone.answers([request])[0] for request in requests]
    batch = watched(models[kind], cache_bytes=0, few_logits=few_logits)
    assert batch.answers(requests) == expected
    if few_logits:
        assert sorted(batch.runs[0]) == sorted((1, length - 1) for length in lengths)
        assert batch.runs[1] == [(1, 1) for _ in lengths]
    else:
        assert sorted(batch.runs[0]) == sorted((1, length) for length in lengths)
    assert batch.runs[1 + few_logits :] == [[(len(lengths), 1)]] * 11


@pytest.mark.parametrize("few_logits", [False, True], ids=["one run", "two runs"])
@pytest.mark.parametrize("num_decoding", [1, 3])
def test_new_prompts_are_prefilled_in_the_run_that_decodes_the_next_tokens_of_the_replies(
    models: dict[str, Path], watched: Any, kind: str, decoded_alone: Any, num_decoding: int, few_logits: bool
) -> None:
    requests = decoding_requests()
    batch = watched(models[kind], cache_bytes=0, few_logits=few_logits)
    for key in range(num_decoding):
        batch.insert(key, requests[key])
    before = batch.take(20)
    del batch.runs[:]
    for key in range(num_decoding, 6):
        batch.insert(key, requests[key])
    step = batch.take(1)
    assert [len(step[key]) for key in range(num_decoding)] == [1] * num_decoding
    *ahead, together = batch.runs
    lasts = [1 if few_logits else 40 + at for at in range(num_decoding, 6)]
    assert together == [(num_decoding, 1), *((1, last) for last in lasts)]
    assert ahead == ([[(1, 39 + at) for at in range(num_decoding, 6)]] if few_logits else [])
    rest = batch.take(60)
    assert [before.get(key, []) + step.get(key, []) + rest[key] for key in range(6)] == decoded_alone
    assert all(len(run) == 1 for run in batch.runs[len(ahead) + 1 :])


def test_where_a_network_cannot_be_run_packed_each_prompt_is_prefilled_by_itself(
    models: dict[str, Path], watched: Any, kind: str
) -> None:
    requests = [request_for(prompt(at, 10 + at)) for at in range(4)]
    packed = watched(models[kind], cache_bytes=0)
    expected = packed.answers(requests)
    batch = watched(models[kind], cache_bytes=0, can_pack=False)
    assert batch.answers(requests) == expected
    assert all(len(run) == 1 for run in batch.runs)


@pytest.mark.parametrize("together", [1, 4])
@pytest.mark.parametrize(("length", "marks"), [(600, (100, 300)), (600, (20, 34))])
def test_cached_prefixes_of_prompts_hold_as_much_memory_as_is_counted(
    models: dict[str, Path], watched: Any, length: int, marks: tuple[int, int], together: int
) -> None:
    """Windows are slices of what a chunk, or a run of several prompts, has computed."""
    batch = watched(models["windowed"])
    batch.answers([request_for(prompt(0, length), checkpoints=marks)])
    gc.collect()
    mx.synchronize()
    mx.clear_cache()  # or larger freed buffers may be reused
    held, counted = mx.get_active_memory(), batch.runtime.prefix_store.prefixes.nbytes
    for turn in range(1, 5, together):
        batch.answers(
            [request_for(prompt(turn + at, length), checkpoints=marks) for at in range(together)],
        )
    mx.synchronize()
    counted = batch.runtime.prefix_store.prefixes.nbytes - counted
    assert mx.get_active_memory() - held == held_memory(counted, buffers=4 * 3 * 4)


def test_a_first_token_does_not_wait_for_a_chunk_of_a_long_prompt(
    models: dict[str, Path], watched: Any
) -> None:
    batch = watched(models["windowed"], cache_bytes=0)
    batch.prefill_queue.pacer = PrefillPacer(64, 1e9)
    batch.insert(0, request_for(prompt(0, 10)))
    batch.insert(1, request_for(prompt(1, 10)))
    batch.insert(2, request_for(prompt(2, 500)))
    order = [(key, type(outcome)) for _ in range(3) for key, outcome in batch.step()]
    firsts = [order.index((key, TokenDelta)) for key in (0, 1)]
    assert max(firsts) < [at for at, each in enumerate(order) if each == (2, Progress)][1]


def test_a_few_tokens_do_not_wait_for_prompts_that_came_before(models: dict[str, Path], watched: Any) -> None:
    batch = watched(models["windowed"], cache_bytes=0)
    batch.prefill_queue.pacer = PrefillPacer(128, 1e9)
    for key, length in enumerate((500, 60, 60, 10, 10)):
        batch.insert(key, request_for(prompt(key, length)))
    first = batch.take(2)
    assert {3, 4} <= {*first}
    assert 2 not in first


def test_short_prompts_that_keep_coming_do_not_hold_up_one_whose_log_probabilities_are_wanted(
    models: dict[str, Path], watched: Any
) -> None:
    batch = watched(models["windowed"], cache_bytes=0)
    batch.prefill_queue.pacer = PrefillPacer(64, 1e9)
    batch.insert(0, request_for(prompt(0, 200), prompt_logprobs=1))
    first: dict[int, Any] = {}
    for key in range(1, 13):
        batch.insert(key, request_for(prompt(key, 10)))
        first |= batch.take(1)
    assert {0, 1, 2, 3} <= {*first}


@pytest.mark.parametrize(("priority", "chunk"), [(1, 64), (0, 256), (-1, 256)])
def test_a_prompt_that_others_should_precede_is_prefilled_in_small_chunks(
    models: dict[str, Path], watched: Any, priority: int, chunk: int
) -> None:
    batch = watched(models["qwen"], cache_bytes=0)
    batch.prefill_queue.pacer = PrefillPacer(None, 400.0)  # tokens a second
    batch.insert(0, request_for(prompt(0, 900), priority=priority))
    batch.take(1)
    assert batch.tokens_prefilled == chunk


@pytest.mark.parametrize("few_logits", [False, True], ids=["one run", "two runs"])
def test_a_run_of_several_prompts_caches_each_ones_own_prefixes(
    models: dict[str, Path], watched: Any, kind: str, few_logits: bool
) -> None:
    before = [prompt(at, length) for at, length in enumerate((50, 65, 40, 70))]
    nexts = [[*tokens[:-5], 7, 8, 9, *prompt(9, 20)] for tokens in before]
    cold = watched(models[kind], cache_bytes=0)
    expected = [cold.answers([request_for(tokens)])[0] for tokens in nexts]
    warm = watched(models[kind], few_logits=few_logits)
    warm.answers([request_for(tokens, checkpoints=(20, len(tokens) - 5)) for tokens in before])
    read = warm.tokens_prefilled
    assert warm.answers([request_for(tokens) for tokens in nexts]) == expected
    assert warm.tokens_prefilled - read == 4 * (22 if few_logits else 23)


@pytest.mark.parametrize("lengths", [(1, 2, 3, 9), (70, 33, 200), (300,)], ids=str)
def test_chunks_that_are_filled_up_are_answered_and_cached_as_if_they_were_not(
    models: dict[str, Path], watched: Any, kind: str, lengths: tuple[int, ...]
) -> None:
    requests = [
        request_for(prompt(at, length), checkpoints=(length // 2,)) for at, length in enumerate(lengths)
    ]
    nexts = [request_for([*each.prompt[: len(each.prompt) // 2], 7, *prompt(9, 20)]) for each in requests]
    plain = watched(models[kind], cache_bytes=0)
    expected = [plain.answers([each])[0] for each in (*requests, *nexts)]
    padded = watched(models[kind], pads_chunks=True)
    assert padded.answers(requests) + padded.answers(nexts) == expected
    assert {length for run in padded.runs for _, length in run} <= {1, *PADDED_SIZES}


def test_a_common_prefix_is_prefilled_once(models: dict[str, Path], watched: Any) -> None:
    system = prompt(1, 100)
    requests = [request_for([*system, *prompt(at, 10)], checkpoints=(100,)) for at in range(2, 8)]
    batch = watched(models["windowed"])
    batch.answers(requests)
    assert batch.tokens_prefilled == 110 + 5 * 10
    assert batch.runs[:2] == [[(1, 110)], [(1, 1), *([(1, 10)] * 5)]]


def test_equal_prompts_that_arrive_together_are_prefilled_once(models: dict[str, Path], watched: Any) -> None:
    batch = watched(models["windowed"])
    first, *others = batch.answers([request_for(prompt(1, 80))] * 4)
    assert others == [first] * 3
    assert batch.tokens_prefilled == 80


def test_repeated_prompts_are_answered_from_the_cache_in_one_run(
    models: dict[str, Path], watched: Any
) -> None:
    requests = [request_for(prompt(at, length)) for at, length in enumerate((20, 60, 33, 32))]
    batch = watched(models["windowed"])
    expected = batch.answers(requests)
    del batch.runs[:]
    assert batch.answers(requests) == expected
    assert batch.runs == [[(1, 1)] * 4, *([[(4, 1)]] * 11)]


def test_prompts_for_different_adapters_are_not_prefilled_together(
    models: dict[str, Path], watched: Any, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", models["windowed"], seed=3)
    batch = watched(models["windowed"], cache_bytes=0, adapters={"one": adapter})
    requests = [
        request_for(prompt(at, 10), adapter=name) for at, name in enumerate((None, "one", None, "one"))
    ]
    expected = [batch.answers([request])[0] for request in requests]
    del batch.runs[:]
    assert batch.answers(requests) == expected
    assert batch.runs[:4] == [[(1, 10), (1, 10)], [(1, 10), (1, 10)], [(2, 1)], [(2, 1)]]


@pytest.mark.parametrize("num_decoding", [0, 3])
def test_a_prompt_that_fails_beside_others_fails_alone_and_leaves_their_replies_unchanged(
    models: dict[str, Path], watched: Any, kind: str, decoded_alone: Any, num_decoding: int
) -> None:
    requests = decoding_requests()
    batch = watched(models[kind], cache_bytes=0)
    for key in range(num_decoding):
        batch.insert(key, requests[key])
    before = batch.take(20)
    for key in range(num_decoding, 6):
        batch.insert(key, requests[key])
    batch.poison = 7
    batch.insert(6, request_for([*prompt(7, 8), batch.poison, 9]))
    after = batch.take(60)
    assert "Unable to allocate 99 bytes" in str(after.pop(6))
    assert [before.get(key, []) + after[key] for key in range(6)] == decoded_alone


def test_a_reply_of_one_token_ends_beside_others_that_continue(models: dict[str, Path], watched: Any) -> None:
    requests = [request_for(prompt(at, 10 + at), count) for at, count in enumerate((1, 12, 1, 12, 2))]
    batch = watched(models["windowed"], cache_bytes=0)
    expected = [batch.answers([request])[0] for request in requests]
    assert batch.answers(requests) == expected
    assert [len(answer) for answer in expected] == [1, 12, 1, 12, 2]


class _Confused:
    """A constraint that fails at the first token."""

    def unconstrained_tokens(self) -> int:
        return 0

    def allowed_mask(self) -> None:
        raise RuntimeError("the grammar is lost")

    def advance(self, token: int) -> None:
        raise AssertionError(token)


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.parametrize("others", [0, 3])
def test_a_first_token_that_cannot_be_sampled_fails_its_own_request_alone(
    models: dict[str, Path], watched: Any, others: int, count: int
) -> None:
    requests = [request_for(prompt(at, 10 + at)) for at in range(others)]
    batch = watched(models["windowed"], cache_bytes=0)
    expected = [batch.answers([request])[0] for request in requests]
    *found, lost = batch.answers([*requests, request_for(prompt(9, 9), count, constraint=_Confused())])
    assert "the grammar is lost" in str(lost)
    assert found == expected


def test_where_memory_is_short_cached_prefixes_go_and_chunks_get_shorter_before_a_prompt_is_refused(
    models: dict[str, Path], watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = request_for(prompt(1, 900))
    roomy = watched(models["windowed"])
    [expected] = roomy.answers([long])
    assert roomy.runs[0] == [(1, 900)]
    weights, caches = roomy.runtime.weight_bytes, roomy.runtime.cache_budget
    caches.reserve(0, 1024)
    cost = roomy.runtime.chunk_cost
    # What the second one would measure is not the same: when MLX frees what on a CPU depends on its threads.
    monkeypatch.setattr(WarmUp, "measure", lambda *_: cost)
    limit = int((weights + caches.used + cost.working_bytes(8, 1024)) / 0.95) + 1000
    tight = watched(models["windowed"], memory_bytes=limit)
    tight.answers([request_for(prompt(0, 100))], chunks=20)
    assert tight.runtime.prefix_store.prefixes.covered_tokens(prompt(0, 100))
    assert tight.answers([long], chunks=200) == [expected]
    *chunks, _ = [length for run in tight.runs[2:] for _, length in run if length > 1]
    assert 900 > max(chunks) > chunks[-1], (
        "attention to what is cached takes memory too, and here ever more of it"
    )
    assert tight.runtime.prefix_store.prefixes.covered_tokens(prompt(0, 100)) == 0
    info = tight.runtime.cache_budget
    assert 768 <= info.fitting_tokens() < 1280  # counted in steps of 256, from what was measured at load
    assert tight.admits(request_for(prompt(0, 900), 100))
    with pytest.raises(EngineRefused, match=f"enough for {info.fitting_tokens()} tokens of prompt and reply"):
        tight.admits(request_for(prompt(0, 900), info.fitting_tokens()))
