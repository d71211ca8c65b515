"""What Dify, its daemon or its marketplace would refuse, broken one at a time: each is noticed and named."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dify_mlx_provider.packaging import package

if TYPE_CHECKING:
    from collections.abc import Callable

MANIFEST = package.MANIFEST
PROVIDER = "provider_assets/mlx.yaml"
DEFAULT = "provider_assets/llm/default.yaml"
FORM = "model_credential_schema.credential_form_schemas"
REMOVED = object()


@pytest.fixture(scope="module")
def good() -> dict[str, bytes]:
    """The package as it is."""
    return package.collect(package.ROOT)


def changed(files: dict[str, bytes], path: str, *changes: Callable[[Any], None]) -> dict[str, bytes]:
    """The files after one declaration was changed."""
    declared = copy.deepcopy(yaml.safe_load(files[path]))
    for change in changes:
        change(declared)
    content = yaml.safe_dump(declared, allow_unicode=True, sort_keys=False)
    return {**files, path: content.encode()}


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
    package.check(package.ROOT, good)


# -- the SDK's own models ------------------------------------------------------------------------------


def test_what_difys_sdk_refuses_is_named_with_its_value(good: dict[str, bytes]) -> None:
    broken = changed(
        good,
        MANIFEST,
        set_value("name", "Dify MLX"),
        set_value("type", "bundle"),
        set_value("label.en_US", REMOVED),
        set_value("icon", REMOVED),
        set_value("created_at", "yesterday"),
        set_value("meta.arch", ["x86"]),
        set_value("meta.runner.entrypoint", REMOVED),
        set_value("meta.runner.language", "go"),
        set_value("meta.runner.version", 3.12),
    )
    broken = changed(
        broken,
        PROVIDER,
        set_value("supported_model_types.0", "chat"),
        set_value("configurate_methods.0", "fetch-from-remote"),
        set_value("model_credential_schema.model", {}),
        set_value(f"{FORM}.0.placeholder", "http://…"),
        set_value(f"{FORM}.0.default", 8080),
        set_value("extra", {}),
    )
    broken = changed(
        broken,
        DEFAULT,
        set_value("model_type", "chat"),
        set_value("features", ["thinking"]),
        set_value("parameter_rules.0.type", "number"),
        set_value("parameter_rules.0.options", ["a", 1]),
    )
    found = "\n".join(package.sdk_faults(broken))
    for fault in (
        f"{MANIFEST}: name is 'Dify MLX'",
        f"{MANIFEST}: type is 'bundle'",
        f"{MANIFEST}: label.en_US is ",
        f"{MANIFEST}: icon is ",
        f"{MANIFEST}: created_at is 'yesterday'",
        f"{MANIFEST}: meta.arch.0 is 'x86'",
        f"{MANIFEST}: meta.runner.entrypoint is ",
        f"{MANIFEST}: meta.runner.language is 'go'",
        f"{MANIFEST}: meta.runner.version is '3.12'",
        f"{PROVIDER}: supported_model_types.0 is 'chat'",
        f"{PROVIDER}: configurate_methods.0 is 'fetch-from-remote'",
        f"{PROVIDER}: model_credential_schema.model.label is ",
        f"{PROVIDER}: {FORM}.0.placeholder is 'http://…'",
        f"{PROVIDER}: {FORM}.0.default is '8080'",
        f"{PROVIDER}: extra.python is ",
        f"{DEFAULT}: model_type is 'chat'",
        f"{DEFAULT}: features.0 is 'thinking'",
        f"{DEFAULT}: parameter_rules.0.type is 'number'",
        f"{DEFAULT}: parameter_rules.0.options.1 is '1'",
    ):
        assert fault in found


def test_a_key_that_nothing_of_difys_reads_is_named(good: dict[str, bytes]) -> None:
    broken = changed(good, MANIFEST, set_value("meta.minimum_dify", "1.14.0"), set_value("licence", "MIT"))
    broken = changed(broken, PROVIDER, set_value(f"{FORM}.0.max_lenght", 10))
    broken = changed(broken, DEFAULT, set_value("parameter_rules.1.label.ja_jp", "文"))
    assert package.sdk_faults(broken) == [
        f"{MANIFEST}: meta.minimum_dify is an unknown key",
        f"{MANIFEST}: licence is an unknown key",
        f"{DEFAULT}: parameter_rules.1.label.ja_jp is an unknown key",
        f"{PROVIDER}: {FORM}.0.max_lenght is an unknown key",
    ]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (MANIFEST, b"type: ["),
        ("dify_mlx_provider/provider.py", b"import nothing_of_this_name"),
    ],
)
def test_a_package_that_the_sdk_cannot_load_at_all_is_one_fault(
    good: dict[str, bytes], path: str, content: bytes
) -> None:
    (fault, *_) = package.sdk_faults({**good, path: content})
    assert fault.startswith("Dify's SDK cannot load the package: ")


# -- what it accepts, and others do not ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "where", "value", "fault"),
    [
        (MANIFEST, "author", "MLX-backend", "author is 'MLX-backend'; Dify wants a-z"),
        (MANIFEST, "author", "dify-friends", "without dify and langgenius"),
        (MANIFEST, "version", "0.1.0.dev1", "version is '0.1.0.dev1'"),
        (MANIFEST, "icon_dark", "no.svg", "_assets/no.svg is missing"),
        (MANIFEST, "privacy", "PRIVATE.md", "privacy is 'PRIVATE.md', which is missing"),
        (PROVIDER, "icon_small.en_US", "no.svg", "_assets/no.svg is missing"),
        (PROVIDER, "extra.python.model_sources.0", "dify_mlx_provider/dify_errors.py", "is not deep enough"),
        (DEFAULT, "model_properties.mode", REMOVED, "model_properties.mode must be chat or completion"),
        (DEFAULT, "parameter_rules.0.default", REMOVED, "reasoning_effort is required without a default"),
    ],
)
def test_what_failed_elsewhere_is_named(
    good: dict[str, bytes], path: str, where: str, value: Any, fault: str
) -> None:
    broken = changed(good, path, set_value(where, value))
    assert fault in "\n".join(package.declaration_faults(broken, version="0.1.0"))


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
