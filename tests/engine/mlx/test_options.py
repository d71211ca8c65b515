"""An engine's options: adapters, quantised caches, limits. Each is honoured, or refused with a reason."""

import threading
from pathlib import Path

import pytest
from architectures import write
from engine_models import write_adapter, write_mamba
from engine_requests import TEXT, reply_tokens, request_for, together
from tolerances import check_replies

from mlx_backend.device import Device
from mlx_backend.engine.base import Finished, GenerationRequest, PromptStart, Sampling, TokenDelta
from mlx_backend.engine.batch import Ended
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.threaded import Engine
from mlx_backend.errors import EngineError
from mlx_backend.models.engine_options import EngineOptions

# -- adapters ------------------------------------------------------------------------------------------------


def test_requests_with_different_adapters_run_side_by_side_and_leave_nothing_behind(
    windowed: Path, tmp_path: Path
) -> None:
    one, other = (write_adapter(tmp_path / f"adapter-{seed}", windowed, seed=seed) for seed in (5, 6))
    with (
        load_engine(windowed) as plain,
        load_engine(windowed, adapters={"one": one}, adapter="one") as with_one,
        load_engine(windowed, adapters={"one": one, "other": other}) as engine,
    ):
        requests = [request_for(engine, adapter=name) for name in (None, "one", "other", "one", None)]
        expected = [reply_tokens(plain, requests[0]), reply_tokens(with_one, request_for(with_one))]
        alone = [reply_tokens(engine, each) for each in requests]
        assert alone[0] == alone[4] == expected[0]
        assert alone[1] == alone[3] == expected[1]
        assert len({tuple(each) for each in alone}) == 3
        check_replies(engine, requests, together(engine, requests), alone)
        assert reply_tokens(engine, requests[0]) == expected[0], "after all of them the model is what it was"


def test_a_prefix_prefilled_with_one_adapter_is_not_used_with_another(windowed: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", windowed)
    with load_engine(windowed, adapters={"a": adapter}) as engine:
        for name, cached in ((None, 0), ("a", 0), (None, 1), ("a", 1)):
            *_, last = engine.generate(request_for(engine, adapter=name))
            assert isinstance(last, Finished)
            assert bool(last.cached_tokens) == bool(cached)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("missing", "holds no adapter: there is no adapter_config.json"),
        ("another model's", "does not fit"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_at_start(
    windowed: Path, qwen: Path, tmp_path: Path, damage: str, words: str
) -> None:
    folder = tmp_path / "adapter"
    if damage == "another model's":
        write_adapter(folder, qwen)
    with pytest.raises(EngineError, match=words):
        load_engine(windowed, adapters={"a": folder})


# -- caches of other kinds -----------------------------------------------------------------------------------


def test_a_refused_group_size_is_followed_by_one_that_fits_and_by_none_where_none_does(
    qwen: Path, tmp_path: Path
) -> None:
    words = r"^--kv-bits is not possible .* groups of {}, because the sizes of its keys and values \({}\) .*\. {} the"
    with pytest.raises(EngineError, match=words.format(128, 64, "Give --kv-group-size 64, or start")):
        load_engine(qwen, kv_bits=8, kv_group_size=128)
    for name in ("llama", "qwen3_5"):  # without and with states
        with pytest.raises(EngineError, match=words.format(64, 16, "Start")):
            load_engine(write(tmp_path / name, name), kv_bits=8)


@pytest.mark.parametrize(("name", "caches"), [("mamba2", "ArraysCache"), ("deepseek_v41", "LayerCache")])
def test_every_kind_of_cache_that_cannot_be_quantised_is_refused_by_its_name(
    tmp_path: Path, name: str, caches: str
) -> None:
    words = rf"^--kv-bits is not possible with this model: its .*{caches}.* cannot be quantised\.$"
    with pytest.raises(EngineError, match=words):
        load_engine(write(tmp_path, name), kv_bits=8)


def test_without_packing_replies_on_quantised_caches_are_decoded_one_by_one_and_the_log_says_why(
    qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load_engine(qwen, kv_bits=8, packing=False) as engine:
        assert "one after the other in each step: --no-packing was given." in caplog.text
        assert engine.status().unbatched == "--no-packing was given"
        requests = [
            request_for(engine, TEXT * count, sampling=Sampling(temperature=1, seed=2)) for count in (1, 3)
        ]
        alone = [reply_tokens(engine, each) for each in requests]
        assert together(engine, requests) == alone
        *_, last = engine.generate(requests[1])
        assert isinstance(last, Finished)
        assert last.cached_tokens == len(requests[1].prompt) - 1


def test_a_model_without_windows_generates_the_same_alone_in_a_batch_and_from_cached_prefixes(
    qwen: Path,
) -> None:
    with load_engine(qwen) as engine, load_engine(qwen, cache_bytes=0) as cold:
        requests = [request_for(engine, TEXT * count) for count in (1, 2, 3)]
        expected = [reply_tokens(cold, each) for each in requests]
        check_replies(engine, requests, [reply_tokens(engine, each) for each in requests], expected)
        check_replies(engine, requests, together(engine, requests), expected)


def test_a_draft_model_is_refused_where_a_cache_cannot_be_rewound(tmp_path: Path) -> None:
    model = write(tmp_path / "v41", "deepseek_v41")
    with pytest.raises(
        EngineError, match="Drafts are not possible with this model: its LayerCache cannot be"
    ):
        load_engine(model, draft_model=str(model))


def test_replies_of_a_model_whose_caches_are_states_are_the_same_alone_together_and_from_cached_states(
    tmp_path: Path,
) -> None:
    with load_engine(write_mamba(tmp_path / "mamba")) as engine:
        requests = [request_for(engine, TEXT * count) for count in (1, 2, 3)]
        alone = [reply_tokens(engine, each) for each in requests]
        check_replies(engine, requests, together(engine, requests), alone)
        from_kept_states = [reply_tokens(engine, each) for each in requests]
        check_replies(engine, requests, from_kept_states, alone)


# -- prefixes on disk ----------------------------------------------------------------------------------------


def cached_of(engine: Engine, request: GenerationRequest) -> tuple[int, list[int]]:
    *items, last = engine.generate(request)
    assert isinstance(last, Finished)
    return last.cached_tokens, [item.token for item in items if isinstance(item, TokenDelta)]


@pytest.mark.parametrize("kind", ["windowed", "qwen"])
def test_prefixes_outlive_the_engine_in_a_folder(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model: Path = request.getfixturevalue(kind)
    prompt = list(range(20, 120))
    first = GenerationRequest(prompt=prompt, max_tokens=20, checkpoints=(60, 90))
    other = GenerationRequest(prompt=[*prompt[:60], 9, 9, 9], max_tokens=20)
    with load_engine(model, cache_bytes=0) as cold:
        expected = [cached_of(cold, each)[1] for each in (first, other)]
    with load_engine(model, cache_folder=tmp_path) as engine:
        assert cached_of(engine, first) == (0, expected[0])
    with load_engine(model, cache_folder=tmp_path, cache_bytes=0) as engine:
        assert cached_of(engine, first) == (90, expected[0])
        assert cached_of(engine, other) == (60, expected[1])
    with load_engine(model, cache_folder=tmp_path, cache_folder_bytes=0) as engine:
        assert cached_of(engine, first) == (0, expected[0])


def test_a_folder_is_not_used_by_an_engine_with_other_kinds_of_caches(qwen: Path, tmp_path: Path) -> None:
    asked = GenerationRequest(prompt=list(range(20, 60)), max_tokens=5, checkpoints=(30,))
    for bits, cached in ((8, 0), (None, 0), (8, 30)):
        with load_engine(qwen, cache_folder=tmp_path, kv_bits=bits) as engine:
            assert cached_of(engine, asked)[0] == cached


def test_prefixes_of_the_adapter_that_is_always_on_outlive_the_engine(windowed: Path, tmp_path: Path) -> None:
    asked = GenerationRequest(prompt=list(range(20, 60)), max_tokens=5, checkpoints=(30,))
    one, other = (write_adapter(tmp_path / f"adapter-{seed}", windowed, seed=seed) for seed in (5, 6))
    for adapter, cached in ((one, 0), (other, 0), (one, 30), (other, 30)):
        with load_engine(
            windowed, cache_folder=tmp_path / "kept", adapters={"a": adapter}, adapter="a"
        ) as engine:
            assert cached_of(engine, asked)[0] == cached


def test_a_warm_up_uses_the_adapter_it_is_for(windowed: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", windowed)
    prompt = list(range(20, 120))
    with load_engine(windowed, adapters={"a": adapter}) as engine:
        planned = threading.Event()

        def plan() -> PromptStart:
            planned.set()
            return PromptStart(prompt[:80])

        for _ in range(2):  # the second is cached already
            planned.clear()
            engine.prewarm(plan, "a")
            assert planned.wait(60)
        for name, cached in (("a", 80), (None, 0)):
            asked = GenerationRequest(prompt=prompt, max_tokens=2, adapter=name)
            # It is prefilled while the queue is empty: before or after the first request, if that arrives too soon.
            found = [cached_of(engine, asked)[0] for _ in range(3)]
            assert found[-1] >= cached
            assert name or found[0] == 0


def test_without_cached_prefixes_no_warm_up_is_rendered(windowed: Path) -> None:
    rendered = threading.Event()

    def make_start() -> PromptStart:
        rendered.set()
        return PromptStart(list(range(20, 90)))

    with load_engine(windowed, cache_bytes=0) as engine:
        engine.prewarm(make_start)
        for _ in range(2):  # between them the queue is empty
            list(engine.generate(GenerationRequest(prompt=[20] * 9, max_tokens=2)))
    assert not rendered.is_set()


def test_a_warm_up_of_a_cached_prompt_prefills_nothing(
    windowed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = MLXBatch(windowed, EngineOptions(), device=Device(8 << 30))
    batch.load(lambda _: None)
    ahead = GenerationRequest(prompt=list(range(20, 90)), max_tokens=0)
    for key in range(2):
        assert batch.admits(ahead)
        batch.insert(key, ahead)
        assert (key, Ended("length")) in list(batch.step())
    batch.unload()
    assert not caplog.records


def test_drafts_come_from_one_source(windowed: Path) -> None:
    with pytest.raises(EngineError, match="not from both"):
        load_engine(windowed, draft_model=str(windowed), draft_from_text=True)
