"""Dify's rules for declarations, broken one at a time: each is noticed, named with its value, and not packed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dify_mlx_provider.packaging import declaration, package

if TYPE_CHECKING:
    from collections.abc import Callable

PROVIDER = "provider_assets/mlx.yaml"
DEFAULT = "provider_assets/llm/default.yaml"
POSITION = "provider_assets/llm/_position.yaml"
TEXT = {"en_US": "Text", "ja_JP": "文", "zh_Hans": "文"}
REMOVED = object()


@pytest.fixture(scope="module")
def good() -> dict[str, bytes]:
    """The package as it is."""
    return package.collect(package.ROOT)


def faults_after(files: dict[str, bytes], path: str, change: Callable[[Any], Any]) -> list[str]:
    """The faults after one declaration was changed."""
    declared = copy.deepcopy(yaml.safe_load(files[path]))
    changed = change(declared)
    content = yaml.safe_dump(declared if changed is None else changed, allow_unicode=True, sort_keys=False)
    return list(declaration.faults({**files, path: content.encode()}))


def set_value(where: str, value: Any) -> Callable[[Any], None]:
    """Set (or with REMOVED delete) the value at a path such as `meta.runner.language` or `fields.0.type`."""

    def change(node: Any) -> None:
        *parents, last = (int(part) if part.isdecimal() else part for part in where.split("."))
        for part in parents:
            node = node[part]
        if value is REMOVED:
            del node[last]
        else:
            node[last] = value

    return change


def test_the_declarations_as_they_are_have_no_fault(good: dict[str, bytes]) -> None:
    assert list(declaration.faults(good)) == []


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        ("author", "MLX-backend", "author is 'MLX-backend'; Dify wants [a-z0-9_-]"),
        ("author", "0f5c6c9e-0000-4000-8000-000000000000", "reserves such ids for its own tenants"),
        ("author", "dify-friends", "marketplace reserves langgenius and dify"),
        ("name", "Dify MLX", "name is 'Dify MLX'"),
        ("version", "0.1.0.dev1", "version is '0.1.0.dev1'"),
        ("version", 1.0, "version is 1.0"),
        ("type", "bundle", "type is 'bundle'"),
        ("label", "MLX", "label is 'MLX'; Dify wants one text per language"),
        ("label.en_US", REMOVED, "label: en_US is missing"),
        ("description.ja_JP", " ", "description: ja_JP is missing"),
        ("description.ja_jp", "文", "description: ja_jp is not a language of Dify's"),
        ("icon", REMOVED, "icon is None"),
        ("icon", "_assets/icon.svg", "icon is '_assets/icon.svg'; Dify wants the name of an image"),
        ("icon_dark", "no.svg", "icon_dark: _assets/no.svg is missing"),
        ("created_at", "yesterday", "created_at is 'yesterday'"),
        ("created_at", "2026-11-21T00:00:00", "created_at is '2026-11-21T00:00:00'"),
        ("privacy", "PRIVATE.md", "privacy names PRIVATE.md, which is missing"),
        ("repo", "git@example.org:x", "repo is 'git@example.org:x'"),
        ("resource.memory", 0, "resource.memory is 0"),
        ("resource.permission", {"storage": {"enabled": True}}, "resource.permission asks for storage"),
        ("meta.version", "0.0.3", "meta.version is '0.0.3'"),
        ("meta.arch", ["x86"], "meta.arch is ['x86']"),
        ("meta.arch", [], "meta.arch is []"),
        ("meta.runner.language", "go", "meta.runner.language is 'go'"),
        ("meta.runner.version", 3.12, "meta.runner.version is 3.12; put it in quotes"),
        ("meta.runner.entrypoint", "dify_mlx_provider/__main__.py", "Dify wants a module's name"),
        ("meta.runner.entrypoint", "dify_mlx_provider.main", "nothing to run for the entrypoint"),
        ("meta.runner.entrypoint", REMOVED, "a declaration lacks 'entrypoint'"),
        ("meta.minimum_dify_version", "1.14", "minimum_dify_version is '1.14'"),
        ("meta.minimum_dify", "1.14.0", "minimum_dify is an unknown key"),
        ("plugins.tools", ["tools.yaml"], "models cannot be mixed with other kinds"),
        ("plugins.models", [PROVIDER, PROVIDER], "plugins.models names 2 providers; Dify takes one"),
        ("plugins.models", [], "plugins.models names 0 providers"),
        ("plugins.models.0", "provider_assets/xlm.yaml", "provider_assets/xlm.yaml is missing"),
        ("licence", "MIT", "licence is an unknown key"),
    ],
)
def test_a_manifest_keeps_the_daemons_rules(
    good: dict[str, bytes], where: str, value: Any, fault: str
) -> None:
    assert fault in "\n".join(faults_after(good, declaration.MANIFEST, set_value(where, value)))


FORM = "model_credential_schema.credential_form_schemas"


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        ("provider", "", "provider is ''"),
        ("provider", "x" * 300, "provider is 'xxx"),
        ("label", REMOVED, "label is None; Dify wants one text per language"),
        ("icon_small", REMOVED, "icon_small is missing; every version of Dify shows this one"),
        ("icon_small.en_US", "no.svg", "icon_small: _assets/no.svg is missing"),
        ("icon_large_dark.ja_JP", "icons/x.svg", "icon_large_dark is 'icons/x.svg'"),
        ("supported_model_types.0", "chat", "supported_model_types holds 'chat'"),
        ("supported_model_types", [], "supported_model_types holds []"),
        ("configurate_methods.0", "fetch-from-remote", "configurate_methods holds 'fetch-from-remote'"),
        ("provider_credential_schema", REMOVED, "predefined-model needs a provider_credential_schema"),
        ("model_credential_schema", REMOVED, "customizable-model needs a model_credential_schema"),
        ("model_credential_schema.model", {}, "model_credential_schema.model.label is None"),
        (f"{FORM}.0.variable", "endpoint url", "variable is not a valid name"),
        (f"{FORM}.1.variable", "endpoint_url", "endpoint_url appears twice"),
        (f"{FORM}.0.label.zh_Hans", REMOVED, "label: zh_Hans is missing"),
        (f"{FORM}.0.placeholder", "http://…", "placeholder is 'http://…'"),
        (f"{FORM}.0.type", "switch", "type is 'switch'; Dify's page draws"),
        (f"{FORM}.0.required", "yes", "required is 'yes', and must be true or false"),
        (f"{FORM}.0.default", 8080, "default is 8080; Dify reads text: put it in quotes"),
        (f"{FORM}.0.max_lenght", 10, "max_lenght is an unknown key"),
        (f"{FORM}.0.show_on", [{"variable": "no", "value": "x"}], "show_on no = 'x' can never be true"),
        (f"{FORM}.0.show_on", [{"variable": "__model_type", "value": "tts"}], "can never be true"),
        (
            "models.llm.predefined",
            ["provider_assets/**/*.yaml"],
            "holds **, which Dify's daemon does not know",
        ),
        ("models.llm.predefined", ["provider_assets/*/x.yaml"], "nothing matches provider_assets/*/x.yaml"),
        ("models.llm.predefined", ["provider_assets/llm/*.yaml"] * 2, "is declared in"),
        ("models.llm.position", "provider_assets/llm/order.yaml", "ends in _position.yaml"),
        ("models.tts", {"predefined": []}, "models.tts is not among the supported_model_types"),
        ("extra.python.provider_source", "dify_mlx_provider/x.py", "dify_mlx_provider/x.py is missing"),
        ("extra.python.model_sources.0", "dify_mlx_provider/dify_errors.py", "is not deep enough"),
        ("extra", {}, "a declaration lacks 'python'"),
        ("fetch_from", "remote", "fetch_from is an unknown key"),
    ],
)
def test_a_provider_keeps_the_rules_of_daemon_sdk_and_page(
    good: dict[str, bytes], where: str, value: Any, fault: str
) -> None:
    assert fault in "\n".join(faults_after(good, PROVIDER, set_value(where, value)))


def test_a_model_type_may_decide_what_a_form_shows(good: dict[str, bytes]) -> None:
    condition = [{"variable": "__model_type", "value": "llm"}]
    assert faults_after(good, PROVIDER, set_value(f"{FORM}.1.show_on", condition)) == []


def add_fields(provider: dict[str, Any]) -> None:
    fields = provider["model_credential_schema"]["credential_form_schemas"]
    fields += [
        {"variable": f"more_{number}", "type": "text-input", "required": False, "label": TEXT}
        for number in range(33 - len(fields))
    ]


@pytest.mark.parametrize(
    ("options", "default", "fault"),
    [
        ([], "a", "0 options; Dify takes 1 to 128"),
        ([f"o{number}" for number in range(129)], "o0", "129 options; Dify takes 1 to 128"),
        (["a", "b"], "c", "default 'c' is not among the options"),
        (["a", "a"], "a", "an option appears twice"),
        (["a", True], "a", "option True is not text: put it in quotes"),
    ],
)
def test_a_select_offers_its_default_and_not_too_much(
    good: dict[str, bytes], options: list[Any], default: str, fault: str
) -> None:
    field = {
        "variable": "pick",
        "type": "select",
        "required": False,
        "label": TEXT,
        "default": default,
        "options": [{"value": value, "label": TEXT} for value in options],
    }

    def change(provider: dict[str, Any]) -> None:
        provider["model_credential_schema"]["credential_form_schemas"].append(field)

    assert fault in "\n".join(faults_after(good, PROVIDER, change))


def test_a_form_of_thirty_three_fields_is_one_too_many(good: dict[str, bytes]) -> None:
    assert "33 fields; Dify takes 32" in "\n".join(faults_after(good, PROVIDER, add_fields))


@pytest.mark.parametrize(
    ("where", "value", "fault"),
    [
        ("model", "", "model is ''"),
        ("model", "m" * 256, "a name of at most 255 characters"),
        ("model", "other", "other is listed in provider_assets/llm/default.yaml only"),
        ("label.ja_JP", REMOVED, "label: ja_JP is missing"),
        ("model_type", "text-embedding", "model_type is 'text-embedding', but it is listed under llm"),
        ("features", ["thinking"], "features holds 'thinking'"),
        (
            "model_properties.mode",
            REMOVED,
            "model_properties.mode is None; workflows need chat or completion",
        ),
        ("model_properties.context_size", "131072", "context_size is '131072'"),
        ("model_properties.context_size", REMOVED, "context_size is None"),
        ("pricing", {"input": 0.0, "unit": "1", "currency": "USD"}, "pricing needs input, unit and currency"),
        ("features_", [], "features_ is an unknown key"),
    ],
)
def test_a_model_keeps_the_rules(good: dict[str, bytes], where: str, value: Any, fault: str) -> None:
    assert fault in "\n".join(faults_after(good, DEFAULT, set_value(where, value)))


def test_a_model_without_a_file_has_no_position(good: dict[str, bytes]) -> None:
    assert f"{POSITION}: ghost is listed here only" in faults_after(
        good, POSITION, lambda places: [*places, "ghost"]
    )


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ({"name": "9lives"}, "name is not a valid name"),
        ({"name": "temperature"}, "temperature appears twice"),
        ({"type": "number"}, "type is 'number'; Dify knows float"),
        ({"type": None, "use_template": "effort"}, "use_template is 'effort'; Dify knows temperature"),
        ({"label": "X"}, "label is 'X'"),
        ({"help": {"en_US": "x"}}, "help: ja_JP is missing"),
        ({"required": 1, "default": 1}, "required is 1, and must be true or false"),
        ({"required": True}, "required without a default"),
        ({"default": 1.5}, "default is 1.5, which is not a valid int"),
        ({"default": True}, "default is True, which is not a valid int"),
        ({"min": 5, "max": 1}, "min 5 is above max 1"),
        ({"min": 1, "max": 5, "default": 9}, "default 9 is not between 1 and 5"),
        ({"options": ["a"]}, "options are for a string, not for a int"),
        ({"type": "string", "min": 1}, "min has no meaning for a string"),
        ({"type": "string", "options": ["a", "a"]}, "Dify wants texts, each once"),
        ({"type": "string", "options": ["a", True]}, "Dify wants texts, each once"),
        ({"type": "string", "options": [str(n) for n in range(129)]}, "129 options; Dify takes 128"),
        ({"type": "string", "options": ["a"], "default": "b"}, "default 'b' is not among the options"),
        ({"type": "string", "default": 3}, "default is 3, which is not text"),
        ({"type": "boolean", "default": "true"}, "default is 'true', and must be true or false"),
        ({"use_template": "max_tokens"}, "the template's max is 2048 tokens; give one"),
        ({"use_template": "temperature", "type": "float", "default": 1.5}, "not between 0.0 and 1.0"),
        ({"maximum": 3}, "maximum is an unknown key"),
    ],
)
def test_a_parameter_keeps_the_rules(good: dict[str, bytes], rule: dict[str, Any], fault: str) -> None:
    whole = {"name": "extra", "type": "int", "label": TEXT, **rule}
    whole = {key: value for key, value in whole.items() if value is not None}

    def change(model: dict[str, Any]) -> None:
        model["parameter_rules"].append(whole)

    assert fault in "\n".join(faults_after(good, DEFAULT, change))


def test_a_hundred_and_twenty_nine_parameters_are_too_many(good: dict[str, bytes]) -> None:
    def change(model: dict[str, Any]) -> None:
        rules = model["parameter_rules"]
        rules += [
            {"name": f"extra_{number}", "type": "int", "label": TEXT} for number in range(129 - len(rules))
        ]

    assert "129 parameter_rules; Dify takes 128" in "\n".join(faults_after(good, DEFAULT, change))


def test_a_duplicate_key_is_an_error_as_in_difys_daemon(good: dict[str, bytes]) -> None:
    doubled = good[DEFAULT] + b"model: again\n"
    (fault,) = declaration.faults({**good, DEFAULT: doubled})
    assert fault == f"{DEFAULT}: a declaration is not YAML: model appears twice in one mapping"


@pytest.mark.parametrize("content", [b"", b"- a\n", b"type: [", b"\xff"])
def test_an_unreadable_manifest_is_one_fault(good: dict[str, bytes], content: bytes) -> None:
    (fault,) = declaration.faults({**good, "manifest.yaml": content})
    assert fault.startswith("manifest.yaml: a declaration is not ")


@pytest.mark.parametrize(
    ("path", "content", "fault"),
    [
        ("README.md", "推理".encode(), "README.md holds Chinese characters"),
        ("PRIVACY.md", "隐私".encode(), "PRIVACY.md holds Chinese characters"),
        ("readme/README_de_DE.md", b"Hallo", "Dify looks for README_zh_Hans.md"),
        ("_assets/../icon.svg", b"<svg/>", "is not a path that every system can unpack"),
        ("_assets/アイコン.svg", b"<svg/>", "is not a path that every system can unpack"),
        ("requirements.txt", b"requests\n", "dify-plugin is missing"),
        ("_assets/photo.png", b" " * package.MAX_BYTES, "more than a plugin should hold"),
    ],
)
def test_a_package_keeps_the_marketplaces_rules(
    good: dict[str, bytes], path: str, content: bytes, fault: str
) -> None:
    with pytest.raises(package.PackageError) as caught:
        package.check(package.ROOT, {**good, path: content})
    assert fault in str(caught.value)
