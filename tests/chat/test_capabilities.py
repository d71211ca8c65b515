"""What is said of a model: read off its template and its settings, the same before it is loaded and after."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from engine_models import byte_level, write_adapter, write_model, write_qwen, write_tokenizer
from scripted_engine import HARMONY_MARKERS, HARMONY_TEMPLATE
from test_template_traits import CODER_LIKE, GEMMA_LIKE, QWEN_LIKE

from mlx_backend.chat.capabilities import FolderDescriber, ModelFacts, describe
from mlx_backend.chat.effort_probe import probe_effort
from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.service import Service
from mlx_backend.conversation.effort import Effort
from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.mlx import load_engine
from mlx_backend.models import files as model_files
from mlx_backend.models import templates
from mlx_backend.models.description import ModelDescription
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelDefaults
from mlx_backend.settings import Settings

QWEN = QWEN_LIKE + "{% for tool in tools %}{% endfor %}<tool_call></tool_call><think></think>"
R1 = "{{ messages[-1].content.split('</think>')[-1] }}{% if add_generation_prompt %}<think>\n{% endif %}"
QWEN_2 = "{% if tools %}{{ tools }}<tool_call>{% endif %}{{ messages }}"
CODER = CODER_LIKE + "{% if tools %}{{ tools }}<tool_call><function=f>{% endif %}"
BOTH = HARMONY_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"
GRANITE = (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{% if thinking %}<think>{% endif %}"
)
NAMES_A_VARIABLE = "<think>{% set thinking = 'x' %}{% if message.thinking is defined %}{% endif %}"
ALL = "none low medium high"
CHATML = ["<|im_start|>", "<|im_end|>"]


def told(template: str | None, tokens: Any = CHATML, **changes: Any) -> ModelDescription:
    own, effort = changes.pop("defaults", None), changes.pop("server_effort", None)
    facts: dict[str, Any] = {"vocabulary_size": 512, "context_length": 1024} | changes
    settings = ModelSettings.of(own, Settings(reasoning_effort=effort))
    return describe(ModelFacts(template=template, control_tokens=tokens, **facts), settings)


def from_folder(
    folder: Path,
    *,
    options: EngineOptions | None = None,
    defaults: ModelDefaults | None = None,
    describer: FolderDescriber | None = None,
    **more: Any,
) -> ModelDescription:
    describer = describer or FolderDescriber()
    return describer.describe(folder, options or EngineOptions(), ModelSettings.of(defaults), **more)


@pytest.mark.parametrize(
    ("template", "tokens", "capabilities", "efforts"),
    [
        (HARMONY_TEMPLATE, HARMONY_MARKERS, "thinking tools tool_choice structured_output", ALL),
        (HARMONY_TEMPLATE, HARMONY_MARKERS[:-1], "thinking tools", ALL),
        (BOTH, HARMONY_MARKERS, "thinking tools tool_choice structured_output", ALL),
        (QWEN, CHATML, "thinking tools tool_choice structured_output", ALL),
        (GRANITE, CHATML, "thinking structured_output", ALL),
        (R1, CHATML, "thinking structured_output", ALL),
        (QWEN_2, CHATML, "tools tool_choice structured_output", ""),
        (CODER, CHATML, "structured_output", ""),
        (GEMMA_LIKE, ["<end_of_turn>"], "structured_output", ""),
        (GEMMA_LIKE, [], "", ""),
        (None, CHATML, "structured_output", ""),
    ],
    ids=[
        "harmony",
        "no-call-token",
        "both",
        "qwen",
        "granite",
        "r1",
        "qwen-2",
        "coder",
        "gemma",
        "no-tokens",
        "base",
    ],
)
def test_what_a_model_can_do_is_read_off_its_template_and_its_tokens(
    template: str | None, tokens: Any, capabilities: str, efforts: str
) -> None:
    description = told(template, tokens)
    assert description.capabilities == ("completion", *capabilities.split())
    assert description.efforts == tuple(efforts.split())
    assert (description.default_effort in description.efforts) == bool(efforts)


def test_a_variable_called_thinking_is_no_switch() -> None:
    description = told(NAMES_A_VARIABLE)
    assert (description.efforts, description.default_effort) == (tuple(ALL.split()), "high")


@pytest.mark.parametrize(
    ("template", "wanted", "default"),
    [
        (HARMONY_TEMPLATE, Effort.NONE, "none"),
        (HARMONY_TEMPLATE, Effort.XHIGH, "high"),
        (HARMONY_TEMPLATE, None, "medium"),
        (BOTH, Effort.NONE, "none"),
        (QWEN, Effort.NONE, "none"),
        (QWEN, Effort.LOW, "low"),
        (QWEN, Effort.MAX, "high"),
        (QWEN, None, "high"),
        (GRANITE, None, "none"),
        (R1, Effort.NONE, "none"),
        (R1, None, "high"),
        (GEMMA_LIKE, Effort.HIGH, None),
    ],
)
def test_the_default_is_one_of_the_choices(template: str, wanted: Effort | None, default: str | None) -> None:
    assert told(template, defaults=ModelDefaults(reasoning_effort=wanted)).default_effort == default
    assert told(template, server_effort=wanted).default_effort == default


def test_the_models_own_default_wins_over_the_servers() -> None:
    defaults = ModelDefaults(reasoning_effort=Effort.HIGH)
    assert told(HARMONY_TEMPLATE, defaults=defaults, server_effort=Effort.LOW).default_effort == "high"


def test_several_processes_hold_no_reply_to_a_schema() -> None:
    assert "structured_output" not in told(QWEN, one_process=False).capabilities
    assert "structured_output" not in told(QWEN, vocabulary_size=2_000_000).capabilities


def test_what_is_set_for_a_model_wins_over_its_makers_advice() -> None:
    said = told(None, advice={"temperature": 0.6, "top_k": 20}, defaults=ModelDefaults(top_k=40)).sampling
    assert said == {"temperature": 0.6, "top_k": 40}
    assert told(None).sampling == {"temperature": 1.0}


RESPONSE_TEMPLATE = {
    "start_anchor": "<|bot|>",
    "fields": {
        "reasoning_content": {"open": "<|plan|>", "close": "<|/plan|>"},
        "tool_calls": {"open": "<|use|>", "close": "<|/use|>", "content": "json"},
    },
}


def loaded(folder: Path, defaults: ModelDefaults, **options: Any) -> ModelDescription:
    with load_engine(folder, **options) as engine:
        return Service(engine, ModelSettings.of(defaults)).description()


@pytest.mark.parametrize(
    "kind", ["demo", "qwen", "stretched", "limited", "other template", "adapters", "response template"]
)
def test_a_model_is_described_alike_before_and_after_it_was_loaded(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    defaults = ModelDefaults(reasoning_effort=Effort.LOW, top_p=0.9)
    match kind:
        case "demo":
            folder = MODEL_PATH
        case "adapters":
            folder = write_model(tmp_path / "model")
            options["adapters"] = {"poet": write_adapter(tmp_path / "poet", folder)}
        case _:
            folder = write_qwen(tmp_path / "model")
            (folder / "chat_template.jinja").write_text(QWEN)
    if kind == "stretched":
        config = json.loads((folder / "config.json").read_text())
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
        (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}))
        (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "do_sample": true}')
    if kind == "limited":
        options["context_length"] = 100
    if kind == "other template":
        options["chat_template"] = R1
    if kind == "response template":
        (folder / "chat_template.jinja").write_text("{{ tools }}{{ messages[0].content }}<|plan|>")
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": RESPONSE_TEMPLATE}))
    before = from_folder(folder, options=EngineOptions(**options), defaults=defaults)
    after = loaded(folder, defaults, **options)
    assert before.adapters == (("poet",) if kind == "adapters" else ())
    assert (before.context_length == 16_384) == (kind in ("demo", "stretched"))
    for part in ("kind", "context_length", "capabilities", "efforts", "default_effort", "sampling"):
        assert getattr(before, part) == getattr(after, part), part
    if kind == "response template":
        assert {"thinking", "tools"} <= set(before.capabilities)
    else:
        assert "structured_output" in before.capabilities or kind in (
            *("qwen", "stretched", "limited", "adapters"),
        )


def test_the_demonstration_model_is_described() -> None:
    assert from_folder(MODEL_PATH) == ModelDescription(
        context_length=16_384,
        dialect="harmony",
        recognised_by="the template has <|channel|>, <|message|>",
        capabilities=("completion", "thinking", "tools", "tool_choice", "structured_output"),
        efforts=(Effort.NONE, Effort.LOW, Effort.MEDIUM, Effort.HIGH),
        default_effort=Effort.MEDIUM,
        sampling={"temperature": 0.0},
    )


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 32768}, 32768),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"max_position_embeddings": 9, "text_config": {"max_position_embeddings": 8192}}, 8192),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": True, "max_seq_len": 77}, 77),
        ({"max_position_embeddings": 0}, None),
        ({"text_config": None}, None),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "original_max_position_embeddings": 4096,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 9,
                "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 9},
            },
            9,
        ),
    ],
)
def test_the_context_is_as_long_as_the_model_was_made_for(config: dict[str, Any], length: int | None) -> None:
    assert model_files.context_length(config) == length


BROKEN: dict[str, dict[str, Any]] = {
    "no config": {"config.json": None},
    "half a config": {"config.json": '{"max_position'},
    "a list": {"config.json": "[]"},
    "deep": {"config.json": "[" * 100_000},
    "half a character": {"chat_template.jinja": b"\xff\xfe{"},
    "settings": {"tokenizer_config.json": "null"},
    "a huge template": {"chat_template.jinja": "x" * (1 << 20)},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_described_as_far_as_it_goes_and_the_log_says_why(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 99}')
    for name, text in BROKEN[kind].items():
        if text is None:
            (tmp_path / name).unlink()
        else:
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    folders = FolderDescriber()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            description = from_folder(tmp_path, describer=folders)
    assert "completion" in description.capabilities
    assert description.context_length in (None, 99)
    [line] = caplog.messages
    assert line.startswith(f"{tmp_path} is listed with incomplete information: ")


def test_a_template_that_never_ends_is_tried_once_and_its_model_listed_by_what_its_text_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "TRIAL_SECONDS", 0.2)
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / "config.json").write_text("{}")
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text("{% if enable_thinking %}<think>{% endif %}" + endless)
    folders = FolderDescriber()

    def described() -> ModelDescription:
        return from_folder(tmp_path, describer=folders)

    first, tried = described(), probe_effort.cache_info().misses
    assert list(first.efforts) == ALL.split()
    assert described() == first
    assert probe_effort.cache_info().misses == tried


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level())
    config = tmp_path / "config.json"
    config.write_text('{"max_position_embeddings": 99}')
    folders = FolderDescriber()

    def length() -> int | None:
        return from_folder(tmp_path, describer=folders).context_length

    assert length() == 99
    config.write_text('{"max_position_embeddings": 1000}')
    assert length() == 1000


@pytest.mark.parametrize(
    "settings",
    [
        {"chat_template": QWEN},
        {"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": QWEN}]},
    ],
    ids=["one", "several"],
)
def test_a_template_among_the_tokenizers_settings_is_found(settings: dict[str, Any], tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level(), **settings)
    (tmp_path / "chat_template.jinja").unlink()
    assert model_files.chat_template(tmp_path) == QWEN


def test_a_model_that_ends_with_a_token_of_its_own_can_be_constrained_if_its_files_name_it(
    tmp_path: Path,
) -> None:
    tokenizer = byte_level(("<first>", "<stop>"))
    write_tokenizer(tmp_path, tokenizer, eos_token=None)
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert "structured_output" not in from_folder(tmp_path).capabilities
    for ids in (tokenizer.token_to_id("<stop>"), [tokenizer.token_to_id("<stop>")]):
        config.write_text(json.dumps({"eos_token_id": ids}))
        assert "structured_output" in from_folder(tmp_path).capabilities
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0]}')  # comes before the config
    assert model_files.end_tokens(tmp_path) == {"<first>"}


def test_added_tokens_are_found_in_either_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level())
    found = model_files.added_tokens(tmp_path)
    assert found["<|return|>"] is True
    assert found["<think>"] is False
    (tmp_path / "tokenizer.json").write_text("{")
    decoder = {"7": {"content": "<|call|>", "special": True}, "8": {"content": "<b>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "eos_token": {"content": "<|im_end|>"}})
    )
    assert model_files.added_tokens(tmp_path) == {"<|call|>": True, "<b>": False, "<|im_end|>": True}
