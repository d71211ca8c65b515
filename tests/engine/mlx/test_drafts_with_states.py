"""Drafts for networks with recurrent states: what is wrong is taken back, what was right runs again (rewinding.py)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from architectures import write
from drafting import FoundReply, alone, first_position, generate, loaded_batch, tokens
from engine_models import WrappedNetwork, write_adapter, write_mamba, write_qwen

from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.mlx import batch_trial, rewinding
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.batch_trial import BatchTrial, BatchTrialError
from mlx_backend.engine.mlx.decode import Decoder
from mlx_backend.engine.mlx.draft_pacer import MAX_REPLIES
from mlx_backend.engine.mlx.drafting import MAX_REPLAY
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.engine.mlx.speculative import DraftTask, ModelDrafter, propose
from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import EngineOptions

REPLY = 24  # tokens
WITH_STATES = (
    *("qwen3_5", "kimi_linear", "mamba2"),
    *("falcon_h1", "recurrent_gemma"),  # states and keys in one layer; windows next to states
)
"""Of each kind one. Most are tried with drafts in test_architectures.py, and all by `make matrix`."""


def requests(count: int, **fields: Any) -> list[GenerationRequest]:
    """Return requests, every other one sampled, whose prompts and replies repeat themselves in part."""
    asked = []
    for at in range(count):
        phrase = as_ints(mx.random.randint(10, 250, (5 + 3 * at,), key=mx.random.key(at)))
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=at) if at % 2 else Sampling()
        named = {"max_tokens": REPLY, "sampling": sampling, **fields}
        asked.append(GenerationRequest(prompt=phrase * 3, **named))
    return asked


def drafted(replies: Sequence[FoundReply]) -> tuple[int, int]:
    """Return how many tokens were drafted, and how many of them accepted."""
    ended = [reply.ended for reply in replies if reply.ended is not None]
    return sum(each.drafted_tokens for each in ended), sum(each.accepted_tokens for each in ended)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("states") / "model", "qwen3_5")


@pytest.fixture(scope="module")
def half_right(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """A draft model that is right now and then: the model itself, of which the weights are a little off."""
    folder = write(tmp_path_factory.mktemp("states") / "draft", "qwen3_5")
    weights: dict[str, mx.array] = mx.load(str(model / "model.safetensors"))  # type: ignore[assignment]  # of this format, a dict
    off = {
        name: value + 0.015 * mx.random.normal(value.shape, key=mx.random.key(at))
        for at, (name, value) in enumerate(weights.items())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), off, {"format": "mlx"})
    return folder


@pytest.mark.parametrize("architecture", WITH_STATES)
def test_replies_alone_and_together_are_those_without_drafts(tmp_path: Path, architecture: str) -> None:
    folder, other = (write(tmp_path / str(seed), architecture, seed=seed) for seed in (3, 4))
    asked = requests(3, max_tokens=16)
    with loaded_batch(folder) as plain:
        expected = tokens(alone(plain, asked))
    found = []
    for drafts in ({"draft_from_text": True}, {"draft_model": str(folder)}, {"draft_model": str(other)}):
        with loaded_batch(folder, draft_tokens=3, **drafts) as drafting:
            found += alone(drafting, asked) + generate(drafting, asked, arrivals={1: 3, 2: 5})
    assert tokens(found) == expected * 6
    proposed, accepted = drafted(found)
    assert proposed > accepted > 0, "some are wrong"


def test_wrong_drafts_are_taken_back_from_each_of_several_replies(model: Path, half_right: Path) -> None:
    asked = requests(MAX_REPLIES)
    with loaded_batch(model) as plain:
        expected = tokens(alone(plain, asked))
    with loaded_batch(model, draft_model=str(half_right), draft_tokens=3) as drafting:
        found = generate(drafting, asked)
        late = generate(drafting, [*asked, *asked], arrivals={at: 2 * at for at in range(2 * MAX_REPLIES)})
    assert tokens(found) == expected
    assert tokens(late) == expected * 2
    for reply in found:
        proposed, accepted = drafted([reply])
        assert 0 < accepted < proposed


class Recording(WrappedNetwork):
    """A network that notes how many tokens it is run with."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self.runs: list[int] = []

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        self.runs.append(inputs.shape[1])
        logits: mx.array = self._network(inputs, cache=cache)
        return logits


def test_what_was_right_before_a_wrong_draft_runs_again_with_the_next_token_and_in_no_run_of_its_own(
    model: Path, half_right: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 4
    with loaded_batch(model, draft_model=str(half_right), draft_tokens=count) as drafting:
        networks = drafting.runtime.networks.by_adapter
        recording = Recording(networks[""])
        monkeypatch.setitem(networks, "", recording)
        steps = drafting.steps
        [found] = generate(drafting, requests(1, max_tokens=60))
        steps = drafting.steps - steps
    proposed, accepted = drafted([found])
    assert 0 < accepted < proposed
    _prompt, *verified = recording.runs
    assert len(verified) <= steps, "no run is there for these tokens alone"
    assert max(verified) > 1 + count, "they run with other drafts"
    assert max(verified) <= MAX_REPLAY + 2 + 2 * count, "but not for ever"


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens had to run again in each step without drafts."""
    counts: list[int] = []
    original = Decoder._forward

    def forward(self: Decoder, sequences: Any, prefilled: Any) -> mx.array:
        counts.extend(sequence.num_to_replay for sequence in sequences)
        return original(self, sequences, prefilled)

    monkeypatch.setattr(Decoder, "_forward", forward)
    return counts


@pytest.mark.parametrize("architecture", ["qwen3_5", "falcon_h1"])
def test_others_join_a_reply_whose_last_drafts_were_wrong(
    tmp_path: Path, architecture: str, replayed: list[int]
) -> None:
    folder, other = (write(tmp_path / str(seed), architecture, seed=seed) for seed in (3, 4))
    asked = requests(3)
    with loaded_batch(folder) as plain:
        expected = tokens(alone(plain, asked))
    with loaded_batch(folder, draft_model=str(other), draft_tokens=3) as drafting:
        for step in (2, 3, 5):
            assert tokens(generate(drafting, asked, arrivals={1: step, 2: step + 2})) == expected
    assert any(replayed)


def test_what_is_cached_of_a_reply_with_drafts_continues_as_without_them(
    model: Path, half_right: Path
) -> None:
    asked = [replace(each, max_tokens=count) for count in range(16, 20) for each in requests(2)]
    with loaded_batch(model) as plain:
        first = tokens(alone(plain, asked))
        turns = [
            replace(each, prompt=[*each.prompt, *reply, 30, 31])
            for each, reply in zip(asked, first, strict=True)
        ]
        expected = tokens(alone(plain, turns))
    with loaded_batch(model, draft_model=str(half_right), draft_tokens=3, cache_bytes=None) as drafting:
        lengths, store = [], drafting.runtime.prefix_store.store

        def noted(sequence: Any, length: int, layers: Any, **named: Any) -> None:
            if sequence.num_emitted:
                attending = next(layer for layer in layers if hasattr(layer, "offset"))
                assert attending.offset == length, "what is stored is what its caches hold"
                lengths.append(len(sequence.tokens) - length)
            store(sequence, length, layers, **named)

        drafting.runtime.prefix_store.store = noted  # type: ignore[method-assign]  # noted, and stored as always
        for at, each in enumerate(asked):
            assert generate(drafting, [each])[0].tokens == first[at]
            assert generate(drafting, [turns[at]])[0].tokens == expected[at]
    assert set(lengths) > {1}, "some replies ended with tokens that had been taken back"


def test_a_reply_is_preempted_and_resumed_wherever_it_is(model: Path, half_right: Path) -> None:
    [asked] = requests(1)
    with loaded_batch(model) as plain:
        [expected] = tokens(alone(plain, [asked]))
    pending = []
    with loaded_batch(model, draft_model=str(half_right), draft_tokens=3) as drafting:
        for step in range(3, 9):
            drafting.insert(0, asked)
            found = []
            for number in range(100):
                if number == step:
                    sequence = drafting.sequences[0]
                    pending.append(sequence.num_to_replay)
                    drafting.preempt(sequence)
                found += [outcome.token for _, outcome in drafting.step() if hasattr(outcome, "token")]
                if not drafting.sequences:
                    break
            assert found == expected
    assert any(pending)


class Fails(WrappedNetwork):
    """A network that refuses one run of several tokens, by its number."""

    def __init__(self, network: Any, at: int) -> None:
        super().__init__(network)
        self._at = at
        self.has_failed = False

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._network(inputs, cache=cache)
        self._at -= inputs.shape[1] > 1
        if self._at < 0 and not self.has_failed:
            self.has_failed = True
            raise ValueError("[broadcast_shapes] Shapes (2,1) and (3,1) cannot be broadcast")
        return logits


@pytest.mark.parametrize("at", [1, 3])
def test_a_verification_that_fails_leaves_everything_as_it_was(
    model: Path, half_right: Path, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [asked] = requests(1)
    with loaded_batch(model) as plain:
        [expected] = tokens(alone(plain, [asked]))
    with loaded_batch(model, draft_model=str(half_right), draft_tokens=3) as drafting:
        networks = drafting.runtime.networks.by_adapter
        monkeypatch.setitem(networks, "", Fails(networks[""], at))
        assert tokens(generate(drafting, [asked])) == [expected]
    assert caplog.text.count("replies go on without drafts") == 1


def test_an_adapter_has_drafts_too(tmp_path: Path, model: Path, half_right: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", model)
    asked = [replace(each, adapter=name) for each in requests(2) for name in (None, "one")]
    with loaded_batch(model, adapters={"one": adapter}) as plain:
        expected = tokens(alone(plain, asked))
    with loaded_batch(model, adapters={"one": adapter}, draft_model=str(half_right)) as drafting:
        found = alone(drafting, asked)
        together = generate(drafting, asked)
    assert tokens(found) == expected
    assert tokens(together) == expected
    assert all(drafted(found[at::2])[0] > 0 for at in range(2))


class Keeps(WrappedNetwork):
    """A network whose logits depend on how much it was ever run with, which no cache of its knows."""

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        self._seen = 0

    def __call__(self, inputs: mx.array, cache: Any) -> mx.array:
        self._seen += inputs.size
        logits: mx.array = self._network(inputs, cache=cache)
        return logits + mx.where(mx.arange(logits.shape[-1]) == self._seen % 7, 100.0, 0.0)


def test_a_network_that_cannot_go_on_from_earlier_states_is_found_out_when_it_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with loaded_batch(model) as plain:
        runtime = plain.runtime
        BatchTrial(runtime.networks.by_adapter[""], lambda: runtime.networks.fresh_layers("")).try_rewinding()
        with pytest.raises(BatchTrialError, match="from which tokens were taken back are off by"):
            BatchTrial(
                Keeps(runtime.networks.by_adapter[""]), lambda: runtime.networks.fresh_layers("")
            ).try_rewinding()
        asked = requests(2)
        expected = tokens(alone(plain, asked))
    monkeypatch.setattr(rewinding, "alias", lambda layer: layer)  # as if states were written to in place
    with loaded_batch(model, draft_from_text=True) as drafting:
        found = alone(drafting, asked)
    assert tokens(found) == expected
    assert drafted(found) == (0, 0)
    assert caplog.text.count("its ArraysCache cannot be rewound. It runs without.") == 1
    with pytest.raises(EngineError, match="not possible with this model: its ArraysCache cannot be rewound"):
        MLXBatch(model, EngineOptions(draft_model=str(model)), device=Device(8 << 30)).load(lambda _: None)


def test_the_trial_is_made_only_where_drafts_are_asked_for(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(batch_trial.BatchTrial, "try_rewinding", lambda self: tried.append(self))
    for options, count in (({}, 0), ({"draft_from_text": True}, 1), ({"draft_model": str(model)}, 2)):
        with loaded_batch(model, **options):
            assert len(tried) == count
        tried.clear()


def test_a_draft_model_with_states_drafts_for_one_without(tmp_path: Path) -> None:
    target, draft = write_qwen(tmp_path / "qwen"), write_mamba(tmp_path / "mamba")
    asked = requests(3)
    with loaded_batch(target) as plain:
        expected = tokens(alone(plain, asked))
    with loaded_batch(target, draft_model=str(draft), draft_tokens=3) as drafting:
        assert drafting.runtime.abilities.can_pack
        found = generate(drafting, asked)
    assert tokens(found) == expected
    assert drafted(found)[0] > 0


@pytest.mark.parametrize("architecture", ["qwen3_5", "falcon_h1", "recurrent_gemma"])
def test_a_draft_model_with_states_drafts_what_follows_the_text_whatever_it_drafted_before(
    tmp_path: Path, architecture: str
) -> None:
    network = load_model(write(tmp_path / "model", architecture), EngineOptions(), lambda _: None).network
    drafter, text = (
        ModelDrafter(network, 512),
        as_ints(mx.random.randint(10, 250, (9,), key=mx.random.key(1))),
    )
    at = first_position(512)
    for right in (0, 1, 3, 4, 2):
        [expected] = propose([DraftTask(ModelDrafter(network, 512), text, 4, at)])
        assert propose([DraftTask(drafter, text, 4, at)]) == [expected]
        assert propose([DraftTask(drafter, text, 4, at)]) == [expected], "as after a step that failed"
        assert expected is not None
        text = [*text, *expected[:right], 17 + right]


def test_memory_is_reserved_for_the_states_that_are_held(model: Path) -> None:
    used = []
    for options in ({}, {"draft_from_text": True}):
        with loaded_batch(model, **options) as batch:
            batch.runtime.cache_budget.reserve(0, 1)
            used.append(batch.runtime.cache_budget.used)
            states = sum(
                layer.nbytes for layer in _after_one_token(batch) if type(layer).__name__ == "ArraysCache"
            )
    assert used[1] - used[0] == states > 0


def _after_one_token(batch: MLXBatch) -> list[Any]:
    layers = batch.runtime.networks.fresh_layers("")
    mx.eval(batch.runtime.networks.by_adapter[""](mx.array([[1]]), cache=layers))
    return layers
