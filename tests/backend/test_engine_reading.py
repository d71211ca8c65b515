"""Prompts that arrive together: short ones are read in one run of the network, and each is answered as if alone."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_models import write_adapter, write_model, write_qwen

from mlx_backend.engine.base import EngineError, GenerationRequest, TokenDelta
from mlx_backend.engine.mlx.batching import MLXBatch
from mlx_backend.engine.options import EngineOptions

WINDOW = 32  # of write_model's sliding layers


class Counting(MLXBatch):
    """Notes the shape of everything its networks are given, and has no room for many logits if that is asked for."""

    def __init__(self, model: Path, *, few_logits: bool = False, **options: Any) -> None:
        super().__init__(model, EngineOptions(prefill_chunk=4096, **options))
        self.shapes: list[tuple[int, ...]] = []
        super().load(lambda _: None)
        assert self._machine is not None
        if few_logits:
            self._machine.most_logits = 1
        for space, network in self._networks.items():
            self._networks[space] = _Counted(network, self)

    @property
    def tokens_read(self) -> int:
        """How many tokens were read in runs of more than one, padding included."""
        return sum(rows * length for rows, length in self.shapes if length > 1)

    def answers(self, requests: Sequence[GenerationRequest]) -> list[list[int] | EngineError]:
        """Begin all requests in one step, and run them to their ends."""
        said: dict[int, list[int]] = {key: [] for key in range(len(requests))}
        failed: dict[int, EngineError] = {}
        for key, request in enumerate(requests):
            self.insert(key, request)
        while self._rows:
            for key, outcome in self.step():
                if isinstance(outcome, TokenDelta):
                    said[key].append(outcome.token)
                elif isinstance(outcome, EngineError):
                    failed[key] = outcome
        return [failed.get(key, said[key]) for key in said]


class _Counted:
    def __init__(self, network: Any, batch: Counting) -> None:
        self._network, self._batch = network, batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self._batch.shapes.append(inputs.shape)
        logits: mx.array = self._network(inputs, cache=cache)
        return logits


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "windowed": write_model(tmp_path_factory.mktemp("gpt-oss"), eos_token_id=[]),
        "qwen": write_qwen(tmp_path_factory.mktemp("qwen")),
    }


@pytest.fixture
def counting() -> Iterator[Any]:
    made: list[Counting] = []

    def make(model: Path, **options: Any) -> Counting:
        made.append(Counting(model, **options))
        return made[-1]

    yield make
    for batch in made:
        batch.unload()


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(10, 60), k=length)


def asked(tokens: Sequence[int], count: int = 12, **fields: Any) -> GenerationRequest:
    return GenerationRequest(prompt=list(tokens), max_tokens=count, **fields)


@pytest.mark.parametrize("few_logits", [False, True], ids=["one run", "two runs"])
@pytest.mark.parametrize(
    "lengths", [(9, 9, 9), (9, 14, 7, 11), (60, 75, 90), (3, 4, 3, 200, 180, 5)], ids=str
)
@pytest.mark.parametrize("kind", ["windowed", "qwen"])
def test_prompts_read_together_are_answered_as_each_is_alone(
    models: dict[str, Path], counting: Any, kind: str, lengths: tuple[int, ...], few_logits: bool
) -> None:
    requests = [asked(prompt(at, length)) for at, length in enumerate(lengths)]
    alone = counting(models[kind], cache_bytes=0)
    expected = [alone.answers([request])[0] for request in requests]
    crowd = counting(models[kind], cache_bytes=0, few_logits=few_logits)
    assert crowd.answers(requests) == expected
    assert max(rows for rows, length in crowd.shapes if length > 1) >= 3
    assert len([shape for shape in crowd.shapes if shape[1] > 1]) < len(requests) + few_logits


@pytest.mark.parametrize("few_logits", [False, True], ids=["one run", "two runs"])
@pytest.mark.parametrize("kind", ["windowed", "qwen"])
def test_what_a_run_of_several_prompts_leaves_behind_is_each_ones_own_prefix(
    models: dict[str, Path], counting: Any, kind: str, few_logits: bool
) -> None:
    begun = [prompt(at, length) for at, length in enumerate((50, 65, 40, 70))]
    nexts = [[*tokens[:-5], 7, 8, 9, *prompt(9, 20)] for tokens in begun]
    cold = counting(models[kind], cache_bytes=0)
    expected = [cold.answers([asked(tokens)])[0] for tokens in nexts]
    warm = counting(models[kind], few_logits=few_logits)
    warm.answers([asked(tokens, checkpoints=(20, len(tokens) - 5)) for tokens in begun])
    read = warm.tokens_read
    assert warm.answers([asked(tokens) for tokens in nexts]) == expected
    assert warm.tokens_read - read == 4 * 23


def test_newcomers_join_those_who_are_talking_in_one_run(models: dict[str, Path], counting: Any) -> None:
    requests = [asked(prompt(at, 40 + at), 30) for at in range(5)]
    alone = counting(models["windowed"], cache_bytes=0)
    expected = [alone.answers([request])[0] for request in requests]
    batch = counting(models["windowed"], cache_bytes=0)
    said: dict[int, list[int]] = {key: [] for key in range(5)}

    def steps(count: int) -> None:
        for _ in range(count):
            for key, outcome in batch.step():
                if isinstance(outcome, TokenDelta):
                    said[key].append(outcome.token)

    for first, until in ((0, 2), (2, 5)):
        for key in range(first, until):
            batch.insert(key, requests[key])
        steps(8)
    steps(60)
    assert list(said.values()) == expected
    assert [shape[0] for shape in batch.shapes if shape[1] > 1] == [2, 3]


def test_what_prompts_have_in_common_is_read_once(models: dict[str, Path], counting: Any) -> None:
    system = prompt(1, 100)
    requests = [asked([*system, *prompt(at, 10)], checkpoints=(100,)) for at in range(2, 8)]
    batch = counting(models["windowed"])
    batch.answers(requests)
    assert batch.tokens_read == 110 + 5 * 10
    assert (5, 10) in batch.shapes


def test_the_same_prompt_at_once_is_read_once(models: dict[str, Path], counting: Any) -> None:
    batch = counting(models["windowed"])
    first, *others = batch.answers([asked(prompt(1, 80))] * 4)
    assert others == [first] * 3
    assert batch.tokens_read == 80


def test_prompts_that_were_asked_before_are_answered_again_in_one_run(
    models: dict[str, Path], counting: Any
) -> None:
    requests = [asked(prompt(at, length)) for at, length in enumerate((20, 60, 33, 32))]
    batch = counting(models["windowed"])
    expected = batch.answers(requests)
    del batch.shapes[:]
    assert batch.answers(requests) == expected
    assert set(batch.shapes) == {(4, 1)}


def test_prompts_for_different_adapters_are_not_read_together(
    models: dict[str, Path], counting: Any, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", models["windowed"], seed=3)
    batch = counting(models["windowed"], cache_bytes=0, adapters={"one": adapter})
    requests = [asked(prompt(at, 10), adapter=name) for at, name in enumerate((None, "one", None, "one"))]
    expected = [batch.answers([request])[0] for request in requests]
    del batch.shapes[:]
    assert batch.answers(requests) == expected
    assert all(rows == 1 for rows, length in batch.shapes if length > 1)


def test_where_a_run_of_several_fails_each_is_read_by_itself(models: dict[str, Path], counting: Any) -> None:
    requests = [asked(prompt(at, 10 + at)) for at in range(4)]
    batch = counting(models["qwen"], cache_bytes=0)
    expected = [batch.answers([request])[0] for request in requests]
    counted = batch._networks[""]

    class TooMuchAtOnce:
        def __getattr__(self, name: str) -> Any:
            return getattr(counted, name)

        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            if inputs.shape[0] > 1 and inputs.shape[1] > 1:
                raise RuntimeError("[malloc] Unable to allocate 99 bytes")
            logits: mx.array = counted(inputs, cache=cache)
            return logits

    batch._networks[""] = TooMuchAtOnce()
    assert batch.answers(requests) == expected


def test_a_reply_of_one_token_ends_beside_others_that_go_on(models: dict[str, Path], counting: Any) -> None:
    requests = [asked(prompt(at, 10 + at), count) for at, count in enumerate((1, 12, 1, 12, 2))]
    batch = counting(models["windowed"], cache_bytes=0)
    expected = [batch.answers([request])[0] for request in requests]
    assert batch.answers(requests) == expected
    assert [len(answer) for answer in expected] == [1, 12, 1, 12, 2]
