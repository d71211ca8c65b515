"""The declarations Dify reads before any of our code runs: valid for its SDK, in three languages, in order.

The SDK patches threads and sockets when it is imported, so it reads the files in a process of its own.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dify_mlx_provider.packaging import predefined
from dify_mlx_provider.packaging.package import ROOT
from dify_mlx_provider.upstream.credentials import Credentials

LANGUAGES = ["en_US", "ja_JP", "zh_Hans"]
MODELS = sorted(
    path for path in (ROOT / "provider_assets/llm").glob("*.yaml") if path.name != "_position.yaml"
)

# The SDK's own entities, which refuse what is wrong; then what they made of the files.
READ_BY_THE_SDK = """
import dify_plugin, json, yaml
from dify_plugin.core.entities.plugin.setup import PluginConfiguration
from dify_plugin.entities.model.provider import ModelProviderConfiguration

def load(path):
    return yaml.safe_load(open(path, encoding="utf-8"))

plugin = PluginConfiguration(**load("manifest.yaml"))
provider = ModelProviderConfiguration(**load(plugin.plugins.models[0]))
print(json.dumps({"plugin": plugin.model_dump(mode="json"), "provider": provider.model_dump(mode="json")}))
"""

# Every setting, in the order of Dify's panel, with the range the server takes.
RULES: dict[str, tuple[float, float] | None] = {
    "reasoning_effort": None,
    "thinking_budget": (0, 131_072),
    "reasoning_format": None,
    "temperature": (0, 2),
    "top_p": (0, 1),
    "max_tokens": (1, 131_072),
    "answer_reserve": (0, 65_536),
    "top_k": (0, 200),
    "min_p": (0, 1),
    "seed": None,
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.5, 2),
    "long_conversations": None,
    "response_format": None,
    "json_schema": None,
    "extra_body": None,
}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = load(ROOT / "manifest.yaml")
    return loaded


@pytest.fixture
def declared() -> dict[str, Any]:
    loaded: dict[str, Any] = load(ROOT / "provider_assets/mlx.yaml")
    return loaded


@pytest.fixture(scope="module")
def understood() -> dict[str, Any]:
    """The plugin and the provider as the SDK parses them."""
    command = [sys.executable, "-c", READ_BY_THE_SDK]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = json.loads(done.stdout)
    return loaded


@pytest.fixture(scope="module")
def provider(understood: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = understood["provider"]
    return loaded


def fields(declared: dict[str, Any], form: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = declared[form]["credential_form_schemas"]
    return found


def texts(node: Any, where: str = "") -> Iterator[tuple[str, dict[str, str]]]:
    """Every text for people in a declaration: under a label, help, placeholder or description."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("label", "help", "placeholder", "description") or key.startswith("icon_"):
                if isinstance(value, dict):
                    yield f"{where}/{key}", value
            else:
                yield from texts(value, f"{where}/{key}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from texts(value, f"{where}/{number}")


def test_the_sdk_accepts_the_manifest(understood: dict[str, Any]) -> None:
    plugin = understood["plugin"]
    assert plugin["meta"]["runner"]["entrypoint"] == "dify_mlx_provider"
    assert plugin["plugins"]["models"] == ["provider_assets/mlx.yaml"]
    assert plugin["meta"]["arch"] == ["amd64", "arm64"]


def test_it_asks_for_no_rights_in_dify(manifest: dict[str, Any]) -> None:
    assert not manifest["resource"]["permission"]


def test_the_marketplaces_rule_on_authors_is_kept(manifest: dict[str, Any]) -> None:
    assert not any(taken in manifest["author"] for taken in ("dify", "langgenius"))


def test_the_sdk_accepts_the_provider_and_finds_every_model(provider: dict[str, Any]) -> None:
    assert provider["provider"] == "mlx"
    assert provider["supported_model_types"] == ["llm", "text-embedding", "rerank"]
    assert sorted(provider["configurate_methods"]) == ["customizable-model", "predefined-model"]
    assert len(provider["models"]) == len(MODELS)


def test_default_comes_first_and_every_model_has_a_position(provider: dict[str, Any]) -> None:
    order = provider["position"]["llm"]
    assert order[0] == "default"
    assert sorted(order) == sorted(model["model"] for model in provider["models"])


def test_difys_daemon_and_the_sdk_get_the_same_order(declared: dict[str, Any]) -> None:
    # The daemon reads the file named here, the SDK any file of that ending among the models.
    assert declared["models"]["llm"] == {
        "predefined": ["provider_assets/llm/*.yaml"],
        "position": "provider_assets/llm/_position.yaml",
    }


@pytest.mark.parametrize(
    "path",
    [ROOT / "manifest.yaml", ROOT / "provider_assets/mlx.yaml", *MODELS],
    ids=lambda path: path.stem,
)
def test_every_text_is_there_in_three_languages(path: Path) -> None:
    found = list(texts(load(path)))
    assert found
    for where, text in found:
        assert sorted(text) == LANGUAGES, where
        assert all(isinstance(words, str) and words.strip() for words in text.values()), where


@pytest.mark.parametrize("form", ["provider_credential_schema", "model_credential_schema"])
def test_a_form_keeps_to_what_dify_can_show(declared: dict[str, Any], form: str) -> None:
    form_fields = fields(declared, form)
    assert len(form_fields) <= 32
    assert len({field["variable"] for field in form_fields}) == len(form_fields)
    for field in form_fields:
        assert field["type"] in ("text-input", "secret-input", "select", "radio")
        if field["type"] == "select":
            assert field["default"] in [option["value"] for option in field["options"]]
        else:
            assert "placeholder" in field
        # Dify reads `default` as a string, and a number would not load.
        assert isinstance(field.get("default", ""), str)


def test_a_models_form_repeats_the_providers_fields(declared: dict[str, Any]) -> None:
    of_provider = fields(declared, "provider_credential_schema")
    asked = ["endpoint_url", "api_key", "timeout", "connect_timeout", "server_kind"]
    assert [field["variable"] for field in of_provider] == asked
    assert fields(declared, "model_credential_schema")[: len(asked)] == of_provider


def test_only_the_address_is_required_and_it_has_a_default(declared: dict[str, Any]) -> None:
    for form in ("provider_credential_schema", "model_credential_schema"):
        required = [field for field in fields(declared, form) if field["required"]]
        assert [field["variable"] for field in required] == ["endpoint_url"]
        assert required[0]["default"] == "http://host.docker.internal:8080/v1"


def test_the_forms_defaults_are_what_empty_fields_mean(declared: dict[str, Any]) -> None:
    form_fields = fields(declared, "model_credential_schema")
    filled = {field["variable"]: field["default"] for field in form_fields if "default" in field}
    address = {"endpoint_url": filled["endpoint_url"]}
    assert Credentials.from_form(filled) == Credentials.from_form(address)


def test_every_choice_of_a_select_is_understood(declared: dict[str, Any]) -> None:
    address = {"endpoint_url": "http://host.docker.internal:8080/v1"}
    for field in fields(declared, "model_credential_schema"):
        read = [
            Credentials.from_form({**address, field["variable"]: option["value"]})
            for option in field.get("options", [])
        ]
        assert len(set(read)) == len(read), field["variable"]


def test_the_model_files_are_current() -> None:
    assert predefined.stale() == [], "run `make models`"


def test_a_model_file_that_was_edited_or_is_superfluous_is_found(tmp_path: Path) -> None:
    for name, text in predefined.files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "default.yaml").write_text("model: other\n", encoding="utf-8")
    (tmp_path / "old.yaml").write_text("model: old\n", encoding="utf-8")
    (tmp_path / "_position.yaml").unlink()
    assert predefined.stale(tmp_path) == ["_position.yaml", "default.yaml", "old.yaml"]


@pytest.mark.parametrize("model", predefined.MODELS, ids=lambda model: model.model)
def test_a_choice_of_effort_is_a_select_that_always_has_a_value(model: predefined.Predefined) -> None:
    first = predefined.declaration(model)["parameter_rules"][0]
    if len(model.efforts) < 2:  # a model that never reasons, or always does
        assert first["name"] != "reasoning_effort"
        return
    assert first["name"] == "reasoning_effort"
    assert first["type"] == "string"
    assert first["options"] == list(model.efforts)
    assert first["required"] is True
    assert first["default"] == model.default_effort
    assert first["default"] in first["options"]


def test_gpt_oss_offers_low_medium_and_high(provider: dict[str, Any]) -> None:
    found = [model for model in provider["models"] if "gpt-oss" in model["model"]]
    assert len(found) == 2
    for model in found:
        assert model["parameter_rules"][0]["options"] == ["low", "medium", "high"]
        assert model["model_properties"]["context_size"] == 131_072


def test_the_list_is_short_and_begins_with_default(provider: dict[str, Any]) -> None:
    order = load(ROOT / "provider_assets/llm/_position.yaml")
    assert order[0] == "default"
    assert len(order) <= 10
    labels = {model["model"]: model["label"] for model in provider["models"]}
    assert [labels["default"][language] for language in LANGUAGES] == ["Default", "既定", "默认"]
    # What Dify's list shows of a label before it cuts it off.
    assert all(len(label[language]) <= 32 for label in labels.values() for language in LANGUAGES)


def test_the_form_for_a_model_suggests_no_name_that_is_predefined(declared: dict[str, Any]) -> None:
    placeholder = declared["model_credential_schema"]["model"]["placeholder"]
    words = re.findall(r"[\w./-]+", " ".join(placeholder.values()).lower())
    for model in predefined.MODELS:
        assert model.model.rpartition("/")[2].lower() not in words, model.model


def test_the_settings_are_these_in_this_order_and_range(provider: dict[str, Any]) -> None:
    default = next(model for model in provider["models"] if model["model"] == "default")
    assert [rule["name"] for rule in default["parameter_rules"]] == list(RULES)
    for model in provider["models"]:
        names = [rule["name"] for rule in model["parameter_rules"]]
        assert names == [name for name in RULES if name in names]
        for rule in model["parameter_rules"]:
            limits = RULES[rule["name"]]
            if limits is not None:
                assert limits[0] <= rule["min"] <= rule["default"] <= rule["max"] <= limits[1], rule["name"]
            assert rule["required"] == (
                rule["name"] in ("reasoning_effort", "reasoning_format", "long_conversations")
            )


def test_max_tokens_cannot_exceed_a_models_context(provider: dict[str, Any]) -> None:
    for model in provider["models"]:
        most = next(rule["max"] for rule in model["parameter_rules"] if rule["name"] == "max_tokens")
        assert most <= model["model_properties"]["context_size"]


def test_dify_finds_the_option_it_uses_for_structured_output(provider: dict[str, Any]) -> None:
    for model in provider["models"]:
        assert "structured-output" in model["features"]
        (rule,) = (rule for rule in model["parameter_rules"] if rule["name"] == "response_format")
        assert "json_schema" in rule["options"]


def test_features_match_what_a_model_can_do(provider: dict[str, Any]) -> None:
    features = {model["model"]: set(model["features"]) for model in provider["models"]}
    tools = {"tool-call", "stream-tool-call"}
    assert all(
        each - {"vision"} == {"agent-thought", "structured-output"} | tools for each in features.values()
    )


def test_difys_pages_offer_vision_for_default_and_for_the_families_that_see(provider: dict[str, Any]) -> None:
    """They go by the list's rows; a server whose model does not see refuses an image in a sentence."""
    blind = {model["model"] for model in provider["models"] if "vision" not in model["features"]}
    assert blind == {"mlx-community/gpt-oss-20b-MXFP4-Q8", "mlx-community/gpt-oss-120b-MXFP4-Q8"}


def test_the_row_of_default_promises_no_more_context_than_the_demonstration_model_has(
    provider: dict[str, Any],
) -> None:
    [size] = [
        model["model_properties"]["context_size"]
        for model in provider["models"]
        if model["model"] == "default"
    ]
    assert (
        size
        == json.loads((ROOT / "mlx_backend/demo/model/config.json").read_text())["max_position_embeddings"]
    )
