"""The options of `serve`: made from the declared settings, set by the command line or by the environment."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from mlx_backend.api.errors import ApiError
from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.commands.options import (
    OWNERS,
    ChosenOptions,
    ServeOptions,
    add_options,
    options_by_group,
    unknown_variables,
    values_of,
)
from mlx_backend.commands.running_server import URL_VARIABLE
from mlx_backend.conversation.effort import Effort
from mlx_backend.declaration import declared, variable_of
from mlx_backend.demo import EMBEDDING_MODEL_PATH, MODEL_PATH, VISION_MODEL_PATH
from mlx_backend.engine.distributed.transport import LEADER_VARIABLE
from mlx_backend.models.engine_options import REMOVED, EngineOptions
from mlx_backend.registry.config_file import parse
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.settings import ReplySettings, Settings


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(words)


def chosen(*words: str) -> ChosenOptions:
    return ChosenOptions.of(arguments(*words))


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in options_by_group().values():
        for _, _, option, _ in options:
            monkeypatch.delenv(variable_of(option), raising=False)


def test_what_nobody_sets_has_its_default() -> None:
    assert chosen().settings == Settings()
    assert chosen().serve == ServeOptions()
    assert chosen().engine == EngineOptions(max_waiting=Settings().max_queue)


def test_options_set_settings_in_their_own_units() -> None:
    given = arguments(
        *("--temperature", "0.5", "--reasoning-effort", "HIGH", "--max-body-mb", "2", "--no-prewarm"),
        *(
            "--cors-origin",
            "https://a",
            "--cors-origin",
            "https://b",
            "--memory-gb",
            "1.5",
            "--max-queue",
            "3",
        ),
    )
    settings, engine = ChosenOptions.of(given).settings, ChosenOptions.of(given).engine
    assert (settings.temperature, settings.reasoning_effort) == (0.5, Effort.HIGH)
    assert (settings.max_body_bytes, settings.prewarm) == (2 << 20, False)
    assert settings.cors_origins == ("https://a", "https://b")
    assert (engine.memory_bytes, engine.max_waiting) == (3 << 29, 3)


def test_a_variable_sets_what_no_option_does_and_an_option_wins_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLX_BACKEND_API_KEY", "sesame")
    monkeypatch.setenv("MLX_BACKEND_PORT", "9000")
    monkeypatch.setenv("MLX_BACKEND_KV_BITS", "8")
    settings = chosen("--port", "9001").settings
    assert (settings.api_key, settings.port) == ("sesame", 9001)
    model = chosen().named_model()
    assert model is not None
    assert model.engine["kv_bits"] == 8


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_BACKEND_API_KEY", "")
    assert chosen().settings.api_key is None


def test_a_variable_of_a_repeatable_option_holds_several_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_BACKEND_MODELS_DIR", "/one, /two")
    monkeypatch.setenv("MLX_BACKEND_ADAPTER_PATH", "pirate=/p,/default")
    options = chosen().serve
    assert options.models_dir == (Path("/one"), Path("/two"))
    assert options.adapter_path == (("pirate", Path("/p")), ("default", Path("/default")))


@pytest.mark.parametrize(
    ("written", "on"), [("true", True), ("1", True), ("Yes", True), ("off", False), ("0", False)]
)
def test_a_variable_of_a_switch_is_true_or_false(
    written: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_BACKEND_HF_CACHE", written)
    monkeypatch.setenv("MLX_BACKEND_NO_PREWARM", written)
    assert chosen().serve.hf_cache is on
    assert chosen().settings.prewarm is not on


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("MLX_BACKEND_PORT", "70000", "MLX_BACKEND_PORT: '70000' is not a port (0 to 65535)."),
        ("MLX_BACKEND_TEMPERATURE", "nan", "MLX_BACKEND_TEMPERATURE: 'nan' is not a number from 0 to 2."),
        ("MLX_BACKEND_NO_PREWARM", "maybe", "MLX_BACKEND_NO_PREWARM: 'maybe' is not true or false."),
        (
            "MLX_BACKEND_REASONING_FIELD",
            "x",
            "MLX_BACKEND_REASONING_FIELD: 'x' is not one of reasoning_content, reasoning, both.",
        ),
    ],
)
def test_a_wrong_variable_is_named_with_what_would_be_right(
    variable: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        chosen()
    assert str(caught.value) == says


def test_the_demo_model_is_greedy_unless_a_temperature_is_set() -> None:
    for words, temperature in (((), 0.0), (("--temperature", "1"), None), (("--model", "a/b"), None)):
        model = chosen(*words).named_model()
        assert model is not None
        assert model.defaults.temperature == temperature


def test_both_demo_models_can_be_named_and_a_folder_of_that_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, folder in (("mlx-demo", MODEL_PATH), ("mlx-demo-vision", VISION_MODEL_PATH)):
        model = chosen("--model", name).named_model()
        assert model is not None
        assert (model.name, model.source, model.defaults.temperature) == (name, str(folder), 0.0)
    (tmp_path / "mlx-demo").mkdir()
    own, default = chosen("--model", "mlx-demo").named_model(), chosen().named_model()
    assert own is not None
    assert (own.name, own.source, own.defaults.temperature) == ("mlx-demo", "mlx-demo", None)
    assert default is not None
    assert default.source == str(MODEL_PATH)


def test_the_demo_brings_a_model_for_embeddings_which_can_be_named_beside_others() -> None:
    for words in ((), ("--model", "a/b", "--embedding-model", "mlx-demo-embedding")):
        (model,) = chosen(*words).embedding_and_rerank_models()
        assert (model.name, model.source, model.type) == (
            "mlx-demo-embedding",
            str(EMBEDDING_MODEL_PATH),
            "embedding",
        )
    assert chosen("--model", "mlx-demo").embedding_and_rerank_models() == []


def test_other_models_take_the_place_of_the_demo() -> None:
    given = arguments("--embedding-model", "a/b", "--rerank-model", "c/d", "--ttl", "60")
    assert ChosenOptions.of(given).named_model() is None
    assert [
        (spec.name, spec.type, spec.ttl) for spec in ChosenOptions.of(given).embedding_and_rerank_models()
    ] == [
        ("a/b", "embedding", 60.0),
        ("c/d", "rerank", 60.0),
    ]


def test_a_hidden_option_is_taken_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert "--engine" not in parser.format_help()
    assert chosen("--engine", "plain").engine.engine == "plain"
    monkeypatch.setenv("MLX_BACKEND_ENGINE", "plain")
    assert chosen().engine.engine == "plain"


def test_no_two_options_have_a_name_or_a_variable_in_common() -> None:
    options = [option for group in options_by_group().values() for _, _, option, _ in group]
    assert len({variable_of(option) for option in options}) == len(options)
    names = [name for group in options_by_group().values() for name, _, _, _ in group]
    assert len(set(names)) == len(names)


def test_every_declared_setting_is_set_by_an_option_or_by_the_models_file() -> None:
    for owner in OWNERS:
        for name, setting in declared(owner).items():
            assert setting.option is not None or setting.in_file, name


BEYOND: dict[str, Any] = {
    "temperature": 2.01,
    "top_p": 1.01,
    "top_k": -2,
    "min_p": -0.01,
    "seed": 0.5,
    "repetition_penalty": 0.0,
    "presence_penalty": -2.01,
    "frequency_penalty": 2.01,
    "xtc_probability": 1.01,
    "xtc_threshold": 0.51,
    "reasoning_format": "aside",
    "max_tokens": 0,
    "thinking_budget": -2,
    "answer_reserve": -1,
    "max_repeated_tokens": 65_537,
}


@pytest.mark.parametrize(("name", "value"), BEYOND.items(), ids=BEYOND)
def test_a_limit_is_the_same_in_an_option_a_file_and_a_request(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(f"--{name.replace('_', '-')}={value}")
    words = declared(ReplySettings)[name].kind.words
    assert f"is not {words}" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match=f"must be {words}"):
        parse(f"[defaults]\n{name} = {value!r}", folder=tmp_path)
    with pytest.raises(ApiError, match=name):
        ChatBody.parse({"messages": [], name: value})


def test_every_setting_of_a_reply_is_checked_above() -> None:
    # Not fields of a request as in a file: spelt in many ways, told by thinking_budget, booleans, any text.
    others = {
        *("reasoning_effort", "effort_budgets", "background_detection", "list_efforts"),
        "thinking_budget_message",
    }
    assert BEYOND.keys() | others == declared(ReplySettings).keys()


@pytest.mark.parametrize(
    "text", ["low", "low=0", "low=x", "banana=5", "none=5", "max=5", "", "low=1,,", "low=99999999"]
)
def test_a_wrong_budget_of_an_effort_is_refused_in_an_option_and_in_a_file(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        arguments(f"--effort-budgets={text}")
    assert "efforts with a number of tokens each" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="efforts with a number of tokens each"):
        parse(f"[defaults]\neffort_budgets = {text!r}", folder=tmp_path)


def test_budgets_of_efforts_are_read_from_an_option_and_from_a_files_table(tmp_path: Path) -> None:
    budgets = ((Effort.LOW, 500), (Effort.HIGH, 9000))
    assert values_of(ReplySettings, arguments("--effort-budgets", "low=500,High=9000"), {}) == {
        "effort_budgets": budgets
    }
    written = parse("[defaults]\neffort_budgets = { low = 500, high = 9000 }", folder=tmp_path)
    assert written.others.defaults.effort_budgets == budgets


def test_values_are_those_that_are_set_and_no_others() -> None:
    assert values_of(ReplySettings, arguments("--top-k", "5"), {"MLX_BACKEND_SEED": "7"}) == {
        "top_k": 5,
        "seed": 7,
    }


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MLX_BACKEND_MAX_TOKEN", "MLX_BACKEND_MAX_TOKENS"),
        ("MLX_BACKEND_PREWARM", "MLX_BACKEND_NO_PREWARM"),
        ("MLX_BACKEND_DRAFT_TOKENS", "MLX_BACKEND_NUM_DRAFT_TOKENS"),  # the key of the models file
        ("MLX_BACKEND_CORS_ORIGINS", "MLX_BACKEND_CORS_ORIGIN"),
    ],
)
def test_a_misspelt_variable_is_found_with_the_one_that_was_meant(variable: str, meant: str) -> None:
    assert unknown_variables({variable: "1", "PATH": "/bin"}) == {variable: f"Did you mean ${meant}?"}


@pytest.mark.parametrize(
    ("variable", "cure"),
    [
        ("MLX_BACKEND_TLS_CERT", "No option has that name: docs/settings.md lists them."),
        ("MLX_BACKEND_MAX_KV_SIZE", f"It {REMOVED['max_kv_size']}."),
    ],
)
def test_a_variable_that_resembles_no_option_is_found_too(variable: str, cure: str) -> None:
    assert unknown_variables({variable: "1"}) == {variable: cure}


def test_variables_that_something_reads_and_those_of_others_are_not_taken_for_misspelt_ones() -> None:
    options = [option for group in options_by_group().values() for _, _, option, _ in group]
    others = [LEADER_VARIABLE, URL_VARIABLE, "BACKEND_MAX_TOKEN"]
    assert unknown_variables(dict.fromkeys([*map(variable_of, options), *others], "1")) == {}


def test_a_variable_that_is_empty_counts_as_not_set_whatever_its_name() -> None:
    assert unknown_variables({"MLX_BACKEND_MAX_TOKEN": "", "MLX_BACKEND_TLS_CERT": " "}) == {}
