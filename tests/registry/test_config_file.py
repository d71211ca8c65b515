"""The models file: what it means, and that every mistake in it is named with what would be right."""

from dataclasses import fields
from pathlib import Path

import pytest

from mlx_backend.conversation.effort import Effort
from mlx_backend.demo import MODEL_PATH, VISION_MODEL_PATH
from mlx_backend.engine.base import Sampling
from mlx_backend.models.engine_options import REMOVED, EngineOptions
from mlx_backend.models.spec import ModelDefaults, ModelSpec
from mlx_backend.registry.config_file import ENGINE, SHARED_KEYS, Configuration, parse, read
from mlx_backend.registry.errors import ConfigurationError
from mlx_backend.settings import SAMPLING, ReasoningFormat


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "local").mkdir()
    (tmp_path / "lora").mkdir()
    (tmp_path / "short.jinja").write_text("{{ messages }}")
    return tmp_path


def mistakes(text: str, folder: Path) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        parse(text, name="m.toml", folder=folder)
    return str(caught.value).splitlines()


def mistake(line: str, folder: Path) -> str:
    """What is said of one line in a model's table."""
    (said,) = mistakes(f'[models.x]\nmodel = "a/b"\n{line}', folder)
    return said.removeprefix("m.toml: models.x.")


def test_a_file_with_everything_becomes_specs(folder: Path) -> None:
    text = """
        [defaults]
        ttl = 900
        temperature = 1
        chat_template_kwargs = { builtin_tools = ["python"], deep = false }

        [models."gpt-oss-20b"]
        model = "mlx-community/gpt-oss-20b-MXFP4-Q8"
        aliases = ["gpt-oss", "gpt-4o"]
        pinned = true
        reasoning_effort = "HIGH"
        reasoning_format = "think"
        context_length = 32768
        max_tokens = 8192
        thinking_budget = 2048
        answer_reserve = 256
        temperature = 0.7
        top_k = 40
        chat_template_kwargs = { deep = true }
        chat_template = "short.jinja"
        adapter_path = "lora"
        draft_model = "./local"
        kv_bits = 8
        trust_remote_code = true

        [models.small]
        model = "local"
        ttl = 0
    """
    read = parse(text, folder=folder)
    shared = {"builtin_tools": ["python"], "deep": False}
    assert read == Configuration(
        models=(
            ModelSpec(
                name="gpt-oss-20b",
                source="mlx-community/gpt-oss-20b-MXFP4-Q8",
                aliases=("gpt-oss", "gpt-4o"),
                pinned=True,
                ttl=900,
                defaults=ModelDefaults(
                    reasoning_effort=Effort.HIGH,
                    reasoning_format=ReasoningFormat.THINK,
                    max_tokens=8192,
                    thinking_budget=2048,
                    answer_reserve=256,
                    temperature=0.7,
                    top_k=40,
                    template_kwargs=shared | {"deep": True},
                ),
                engine={
                    "context_length": 32768,
                    "chat_template": "{{ messages }}",
                    "trust_remote_code": True,
                    "adapters": {"lora": folder / "lora"},
                    "adapter": "lora",
                    "kv_bits": 8,
                    "draft_model": str(folder / "local"),
                },
            ),
            ModelSpec(
                name="small",
                source=str(folder / "local"),
                defaults=ModelDefaults(temperature=1.0, template_kwargs=shared),
            ),
        ),
        others=ModelSpec(
            name="", source="", ttl=900, defaults=ModelDefaults(temperature=1.0, template_kwargs=shared)
        ),
    )


def test_an_empty_file_says_nothing(folder: Path) -> None:
    assert parse("", folder=folder) == Configuration()


def test_a_path_is_relative_to_the_file_and_not_to_where_the_server_was_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "models.toml").write_text('[models.x]\nmodel = "./local"')
    monkeypatch.chdir(folder.parent)
    assert read(Path(folder.name, "models.toml")).models[0].source == str(folder / "local")


def test_the_models_that_ship_are_named_without_a_path(folder: Path) -> None:
    text = '[models.sees]\nmodel = "mlx-demo-vision"\n[models.talks]\nmodel = "mlx-demo"'
    specs = parse(text, folder=folder).models
    assert {spec.name: spec.source for spec in specs} == {
        "sees": str(VISION_MODEL_PATH),
        "talks": str(MODEL_PATH),
    }


def test_a_ttl_of_the_command_line_is_for_models_that_set_none(folder: Path) -> None:
    text = '[models.a]\nmodel = "o/a"\n[models.b]\nmodel = "o/b"\nttl = 0\n[models.c]\nmodel = "o/c"\nttl = 5'
    configuration = parse(text, folder=folder, ttl=60)
    assert [spec.ttl for spec in configuration.models] == [60, None, 5]
    assert configuration.others.ttl == 60


def test_a_specs_options_are_the_servers_with_its_own_changes(folder: Path) -> None:
    (spec,) = parse('[models.x]\nmodel = "a/b"\nkv_bits = 4', folder=folder).models
    assert spec.options(EngineOptions(max_concurrent=3)) == EngineOptions(max_concurrent=3, kv_bits=4)


def test_only_the_sampling_that_was_said_is_said() -> None:
    assert ModelDefaults(temperature=0.0, top_k=3, max_tokens=9).sampling == {"temperature": 0.0, "top_k": 3}


def test_every_setting_has_the_name_of_what_it_sets() -> None:
    assert set(SAMPLING) == {field.name for field in fields(Sampling)} - {"logit_bias"}
    assert set(SAMPLING) <= SHARED_KEYS.keys()
    assert ENGINE.keys() <= {field.name for field in fields(EngineOptions)}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temperature = 3", "temperature = 3: must be a number from 0 to 2."),
        ("temperature = nan", "temperature = NaN: must be a number from 0 to 2."),
        ('temperature = "0.7"', 'temperature = "0.7": must be a number from 0 to 2.'),
        ("top_p = true", "top_p = true: must be a number from 0 to 1."),
        ("context_length = 0", "context_length = 0: must be a whole number from 1 up."),
        ("max_tokens = 1.5", "max_tokens = 1.5: must be a whole number from 1 up."),
        (
            "thinking_budget = -1",
            "thinking_budget = -1: must be a whole number of tokens, 0 for no reasoning.",
        ),
        ("answer_reserve = -1", "answer_reserve = -1: must be a whole number of tokens, 0 for none."),
        ("ttl = -1", "ttl = -1: must be a number of seconds, or 0 for never."),
        ("ttl = 1979-05-27", 'ttl = "1979-05-27": must be a number of seconds, or 0 for never.'),
        ("kv_bits = 7", "kv_bits = 7: must be one of 2, 3, 4, 5, 6, 8."),
        ('pinned = "yes"', 'pinned = "yes": must be true or false, without quotes.'),
        ('aliases = "a"', 'aliases = "a": must be a list of names: ["one", "two"].'),
        ("aliases = [7]", "aliases = [7]: must be a text in quotes."),
        (
            'reasoning_effort = "much"',
            'reasoning_effort = "much": must be one of none, minimal, low, medium, high, xhigh, max.',
        ),
        (
            'reasoning_format = "aside"',
            'reasoning_format = "aside": must be one of separate, think, details, hidden, raw.',
        ),
        (
            "chat_template_kwargs = { messages = [] }",
            'chat_template_kwargs = {"messages": []}: cannot replace messages: the server sets that itself.',
        ),
        ('adapter = "x"', 'adapter = "x": must be the name of one of its adapters: none.'),
    ],
)
def test_a_wrong_value_is_shown_with_what_would_be_right(line: str, said: str, folder: Path) -> None:
    assert mistake(line, folder) == said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('draft_model = "./nowhere"', "there is no folder {}/nowhere; a repository is written owner/name."),
        ('draft_model = "nowhere"', "there is no folder {}/nowhere; a repository is written owner/name."),
        ('draft_model = "a/../b"', "there is no folder {}/a/../b; a repository is written owner/name."),
        ('draft_model = "short.jinja"', "is a file: name the folder that holds config.json and the weights."),
        ('draft_model = "~nobody-of-that-name/m"', "begins with the home of a user that does not exist."),
        ('adapter_path = "nowhere"', "there is no folder {}/nowhere."),
        (
            'chat_template = "no.jinja"',
            "must be a file with a Jinja template, and {}/no.jinja cannot be read (No such file or directory).",
        ),
    ],
)
def test_a_place_where_nothing_is_is_named(line: str, said: str, folder: Path) -> None:
    assert mistake(line, folder) == f"{line}: {said.format(folder)}"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("temprature = 1", "temprature is not a setting of a model; did you mean 'temperature'?"),
        ("max_kv_size = 4096", f"max_kv_size {REMOVED['max_kv_size']}."),
        ("Context-Length = 1", "Context-Length is not a setting of a model; did you mean 'context_length'?"),
        ('"reasoning effort" = 1', "did you mean 'reasoning_effort'?"),
    ],
)
def test_an_unknown_key_is_told_which_one_was_meant(line: str, said: str, folder: Path) -> None:
    assert mistake(line, folder).endswith(said)


def test_an_unknown_key_that_is_like_none_is_told_all_of_them(folder: Path) -> None:
    (said,) = mistakes("zzz = 1", folder)
    assert said == "m.toml: zzz is not a table of this file; known are defaults, models."


def test_all_mistakes_are_named_at_once(folder: Path) -> None:
    text = """
        [defaults]
        aliases = ["x"]
        [models."a b"]
        top_p = 2
        [models]
        plain = "a/b"
    """
    assert mistakes(text, folder) == [
        'm.toml: defaults.aliases = ["x"]: belongs to one model: write it below its [models."name"].',
        'm.toml: models."a b".top_p = 2: must be a number from 0 to 1.',
        'm.toml: models."a b".model is missing: the model\'s folder, or its repository on Hugging Face.',
        'm.toml: models.plain = "a/b": must be a table: [models.plain].',
    ]


def test_two_models_cannot_share_a_name(folder: Path) -> None:
    text = '[models.a]\nmodel = "o/a"\naliases = ["b", "c", "a"]\n[models.b]\nmodel = "o/b"\naliases = ["c"]'
    assert mistakes(text, folder) == [
        "m.toml: models.a.aliases = \"b\": the model 'b' has this name already.",
        "m.toml: models.b.aliases = \"c\": the model 'a' has this name already.",
    ]


@pytest.mark.parametrize("name", ["", " x", "a\\nb", "x" * 201])
def test_a_name_that_cannot_be_shown_in_a_line_is_refused(name: str, folder: Path) -> None:
    (said,) = mistakes(f'[models."{name}"]\nmodel = "a/b"', folder)
    assert ": the name must be" in said


def test_what_is_no_toml_is_told_where(folder: Path) -> None:
    (said,) = mistakes("[models.x]\nmodel = a/b", folder)
    assert said == "m.toml is not TOML: Invalid value (at line 2, column 9)."
    (said,) = mistakes("models = " + "[" * 5000, folder)
    assert said == "m.toml is nested too deeply."


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "latin.toml").write_bytes(b"# \xe9")
    for place, reason in (
        (folder / "none.toml", f"There is no file '{folder}/none.toml'."),
        (folder, f"{folder} cannot be read: Is a directory."),
        (folder / "latin.toml", f"{folder}/latin.toml: byte 2 is not UTF-8; save it as UTF-8."),
    ):
        with pytest.raises(ConfigurationError) as caught:
            read(place)
        assert str(caught.value) == reason
