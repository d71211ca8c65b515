"""Checks the plugin's declarations by Dify's rules, before anything is packed.

Dify reads `manifest.yaml`, the provider's YAML and the models' YAML in three places that do not agree: its daemon, the
SDK inside the plugin, and the web page. A file that one accepts another may refuse, or refuse only in remote debugging,
or accept and show nothing. `faults` applies the strictest rule of the three and the marketplace's; what passes, all of
them accept. A key that none of them reads is a fault too: it would be a typo that nobody notices.

The functions yield one line per fault, for people: the file, the key, the value, what is wanted. Knows YAML and the
package's file names; not how a package is written (package.py), and nothing of Dify's SDK.
"""

from __future__ import annotations

import re
from datetime import datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import yaml

try:  # ten times as fast, where PyYAML was built with it
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]  # another class of the same use

from dify_mlx_provider.packaging.declaration_fields import (
    form_faults,
    i18n_faults,
    parameter_faults,
    unknown_keys,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MANIFEST = "manifest.yaml"

AUTHOR = re.compile(r"[a-z0-9_-]{1,64}")
NAME = re.compile(r"[a-z0-9_-]{1,128}")
VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){2}(-\w{1,16})?", re.ASCII)
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
RELEASE = re.compile(r"\d+\.\d+\.\d+")
NOT_AN_AUTHOR = ("langgenius", "dify")

MODEL_TYPES = ("llm", "text-embedding", "rerank", "speech2text", "moderation", "tts")
METHODS = ("predefined-model", "customizable-model")
FEATURES = (
    "tool-call",
    "multi-tool-call",
    "agent-thought",
    "vision",
    "stream-tool-call",
    "document",
    "video",
    "audio",
    "structured-output",
    "polling",
)
ICONS = ("icon_small", "icon_large", "icon_small_dark", "icon_large_dark")
MAX_RULES = 128
MAX_NAME_LENGTH = 255

MANIFEST_KEYS = {
    *("version", "type", "author", "name", "label", "description", "icon", "icon_dark", "created_at"),
    *("resource", "plugins", "meta", "tags", "privacy", "verified", "repo"),
}
META_KEYS = {"version", "arch", "runner", "minimum_dify_version"}
PROVIDER_KEYS = {
    *("provider", "label", "description", "background", "help", *ICONS, "supported_model_types"),
    *("configurate_methods", "provider_credential_schema", "model_credential_schema", "models", "extra"),
}
MODEL_KEYS = {
    *("model", "label", "model_type", "features", "model_properties", "parameter_rules", "pricing"),
    *("deprecated", "fetch_from"),
}


class _Strict(SafeLoader):
    """YAML as Dify's daemon reads it: a duplicate key is an error; the last one does not win."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise yaml.YAMLError(f"{', '.join(twice)} appears twice in one mapping")
        return super().construct_mapping(node, deep)


def parse_yaml(path: str, content: bytes) -> Any:
    """Parse a declaration. Raises ValueError with a sentence that names the file."""
    try:
        return yaml.load(content, _Strict)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: a declaration is not YAML: {error}") from error


def faults(files: Mapping[str, bytes]) -> Iterator[str]:
    """Yield every fault of the declarations in these files of a package."""
    try:
        yield from _manifest(parse_yaml(MANIFEST, files[MANIFEST]), files)
    except ValueError as error:
        yield str(error)
    except (KeyError, TypeError, AttributeError) as error:
        yield f"a declaration lacks {error}"


# -- the manifest ------------------------------------------------------------------------------------------


def _manifest(manifest: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[str]:
    if not isinstance(manifest, dict):
        raise ValueError(f"{MANIFEST}: a declaration is not a YAML mapping")
    where = f"{MANIFEST}: "
    yield from unknown_keys(where, manifest, MANIFEST_KEYS)
    for key, rule in (("author", AUTHOR), ("name", NAME), ("version", VERSION)):
        if not isinstance(manifest.get(key), str) or not rule.fullmatch(manifest[key]):
            yield f"{where}{key} is {manifest.get(key)!r}; Dify wants {rule.pattern}"
    author = str(manifest.get("author"))
    if UUID.fullmatch(author):
        yield f"{where}author is {author!r}; Dify reserves such ids for its own tenants"
    if any(taken in author for taken in NOT_AN_AUTHOR):
        yield f"{where}author is {author!r}; Dify's marketplace reserves {' and '.join(NOT_AN_AUTHOR)}"
    if manifest.get("type") != "plugin":
        yield f"{where}type is {manifest.get('type')!r}, and must be 'plugin'"
    for key in ("label", "description"):
        yield from i18n_faults(f"{where}{key}", manifest.get(key))
    yield from _icon(f"{where}icon", manifest.get("icon"), files)
    if "icon_dark" in manifest:
        yield from _icon(f"{where}icon_dark", manifest["icon_dark"], files)
    if not _is_a_time(manifest.get("created_at")):
        yield f"{where}created_at is {manifest.get('created_at')!r}; Dify wants a time such as 2026-01-31T00:00:00Z"
    if manifest.get("privacy") and manifest["privacy"] not in files and "://" not in manifest["privacy"]:
        yield f"{where}privacy names {manifest['privacy']}, which is missing"
    if manifest.get("repo") and not str(manifest["repo"]).startswith("https://"):
        yield f"{where}repo is {manifest['repo']!r}, and must be an https:// address"
    yield from _resource(where, manifest.get("resource") or {})
    yield from _meta(where, manifest.get("meta") or {}, files)
    plugins: dict[str, Any] = manifest.get("plugins") or {}
    if set(plugins) != {"models"}:
        yield f"{where}plugins holds {', '.join(plugins) or 'nothing'}; models cannot be mixed with other kinds"
    providers = plugins.get("models") or []
    if len(providers) != 1:
        yield f"{where}plugins.models names {len(providers)} providers; Dify takes one"
    for path in providers:
        if path not in files:
            yield f"{where}{path} is missing"
            continue
        yield from _provider(path, parse_yaml(path, files[path]), files)


def _resource(where: str, resource: Mapping[str, Any]) -> Iterator[str]:
    memory = resource.get("memory")
    if type(memory) is not int or memory <= 0:
        yield f"{where}resource.memory is {memory!r}; Dify wants a number of bytes above 0"
    if resource.get("permission"):
        named = ", ".join(resource["permission"])
        yield f"{where}resource.permission asks for {named}; a model provider needs no rights in Dify"


def _meta(where: str, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[str]:
    yield from unknown_keys(f"{where}meta: ", meta, META_KEYS)
    if meta.get("version") not in ("0.0.1", "0.0.2"):
        yield f"{where}meta.version is {meta.get('version')!r}; Dify knows 0.0.1 and 0.0.2"
    arch = meta.get("arch") or []
    if not arch or set(arch) - {"amd64", "arm64"}:
        yield f"{where}meta.arch is {arch!r}; Dify knows amd64 and arm64"
    runner = meta["runner"]
    if runner["language"] != "python":
        yield f"{where}meta.runner.language is {runner['language']!r}; Dify knows python"
    if not isinstance(runner.get("version"), str):
        yield f"{where}meta.runner.version is {runner.get('version')!r}; put it in quotes"
    entry = str(runner["entrypoint"])
    if not re.fullmatch(r"\w+(\.\w+)*", entry, re.ASCII) or len(entry) > 256:
        yield f"{where}meta.runner.entrypoint is {entry!r}; Dify wants a module's name"
    stem = entry.replace(".", "/")
    if not {f"{stem}.py", f"{stem}/__main__.py"} & files.keys():
        yield f"{where}nothing to run for the entrypoint {entry}"
    oldest = meta.get("minimum_dify_version")
    if oldest is not None and not RELEASE.fullmatch(str(oldest)):
        yield f"{where}meta.minimum_dify_version is {oldest!r}; Dify wants one like 1.14.0"


def _is_a_time(value: Any) -> bool:
    if isinstance(value, datetime):
        return value.tzinfo is not None
    return isinstance(value, str) and bool(RFC_3339.fullmatch(value))


# -- the provider ------------------------------------------------------------------------------------------


def _provider(path: str, provider: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[str]:
    where = f"{path}: "
    yield from unknown_keys(where, provider, PROVIDER_KEYS)
    name = provider.get("provider")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        yield f"{where}provider is {name!r}; Dify wants {NAME.pattern}"
    for key in ("label", *(key for key in ("description", *ICONS) if key in provider)):
        yield from i18n_faults(f"{where}{key}", provider.get(key))
    for key in ICONS:
        for icon in dict.fromkeys((provider.get(key) or {}).values()):
            yield from _icon(f"{where}{key}", icon, files)
    if not provider.get("icon_small"):
        yield f"{where}icon_small is missing; every version of Dify shows this one"
    types = provider.get("supported_model_types") or []
    for unknown in sorted(set(types) - set(MODEL_TYPES)) or ([] if types else [types]):
        yield f"{where}supported_model_types holds {unknown!r}; Dify knows {', '.join(MODEL_TYPES)}"
    methods = provider.get("configurate_methods") or []
    for unknown in sorted(set(methods) - set(METHODS)) or ([] if methods else [methods]):
        yield f"{where}configurate_methods holds {unknown!r}; Dify knows {', '.join(METHODS)}"
    for method, form in zip(METHODS, ("provider_credential_schema", "model_credential_schema"), strict=True):
        if method in methods and form not in provider:
            yield f"{where}{method} needs a {form}"
        if form in provider:
            fields = provider[form].get("credential_form_schemas") or []
            yield from form_faults(f"{where}{form}: ", fields, types)
    if "model_credential_schema" in provider:
        model = provider["model_credential_schema"].get("model") or {}
        yield from i18n_faults(f"{where}model_credential_schema.model.label", model.get("label"))
    yield from _code(where, provider["extra"]["python"], files)
    yield from _models(where, provider, types, files)


def _code(where: str, code: Mapping[str, Any], files: Mapping[str, bytes]) -> Iterator[str]:
    for source in (code["provider_source"], *code["model_sources"]):
        if source not in files:
            yield f"{where}{source} is missing"
    for source in code["model_sources"]:
        if len(source.split("/")) < 3:
            yield f"{where}{source} is not deep enough: the SDK needs a module name of three parts (a/b/c.py)"


def _icon(where: str, icon: Any, files: Mapping[str, bytes]) -> Iterator[str]:
    if not isinstance(icon, str) or "/" in icon or not icon.endswith((".svg", ".png")):
        yield f"{where} is {icon!r}; Dify wants the name of an image in _assets"
    elif f"_assets/{icon}" not in files:
        yield f"{where}: _assets/{icon} is missing"


# -- the models --------------------------------------------------------------------------------------------


def _models(
    where: str, provider: Mapping[str, Any], types: list[str], files: Mapping[str, bytes]
) -> Iterator[str]:
    for kind, listed in (provider.get("models") or {}).items():
        if kind.replace("_", "-") not in types:
            yield f"{where}models.{kind} is not among the supported_model_types"
        declared: dict[str, str] = {}
        for pattern in listed.get("predefined") or []:
            if "**" in pattern:
                yield f"{where}models.{kind}: {pattern} holds **, which Dify's daemon does not know"
            found = _matching(pattern, files)
            if not found:
                yield f"{where}models.{kind}: nothing matches {pattern}"
            for path in found:
                model = parse_yaml(path, files[path])
                name = str(model.get("model"))
                if name in declared:
                    yield f"{path}: model {name} is declared in {declared[name]} already"
                declared[name] = path
                yield from _model(path, model, kind.replace("_", "-"))
        position = listed.get("position")
        if position is None:
            continue
        if position not in files or not position.endswith("_position.yaml"):
            yield f"{where}models.{kind}.position is {position}; Dify wants a file whose name ends in _position.yaml"
            continue
        placed = parse_yaml(position, files[position]) or []
        for name in sorted(set(placed) ^ set(declared)):
            yield f"{position}: {name} is listed {'here' if name in placed else 'in ' + declared[name]} only"


def _matching(pattern: str, files: Mapping[str, bytes]) -> list[str]:
    """The files a glob matches in Go's filepath.Match: a star stops at a slash. Position files are no models."""
    depth = pattern.count("/")
    return [
        path
        for path in sorted(files)
        if path.count("/") == depth and fnmatchcase(path, pattern) and not path.endswith("_position.yaml")
    ]


def _model(path: str, model: Mapping[str, Any], kind: str) -> Iterator[str]:
    where = f"{path}: "
    yield from unknown_keys(where, model, MODEL_KEYS)
    name = model.get("model")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        yield f"{where}model is {name!r}; Dify wants a name of at most {MAX_NAME_LENGTH} characters"
    yield from i18n_faults(f"{where}label", model.get("label"))
    if model.get("model_type") != kind:
        yield f"{where}model_type is {model.get('model_type')!r}, but it is listed under {kind}"
    for unknown in sorted(set(model.get("features") or []) - set(FEATURES)):
        yield f"{where}features holds {unknown!r}; Dify knows {', '.join(FEATURES)}"
    properties = model.get("model_properties") or {}
    if kind == "llm" and properties.get("mode") not in ("chat", "completion"):
        yield f"{where}model_properties.mode is {properties.get('mode')!r}; workflows need chat or completion"
    for key in ("context_size", "max_chunks"):
        value = properties.get(key, None if key == "context_size" and kind != "rerank" else 1)
        if type(value) is not int or value <= 0:
            yield f"{where}model_properties.{key} is {value!r}; Dify wants a whole number above 0"
    rules = model.get("parameter_rules") or []
    if len(rules) > MAX_RULES:
        yield f"{where}{len(rules)} parameter_rules; Dify takes {MAX_RULES}"
    names = [rule.get("name") for rule in rules]
    for twice in sorted({str(name) for name in names if names.count(name) > 1}):
        yield f"{where}parameter_rules: {twice} appears twice"
    for rule in rules:
        yield from parameter_faults(f"{where}parameter {rule.get('name')}: ", rule)
    pricing = model.get("pricing")
    if pricing is not None and not all(
        isinstance(pricing.get(key), str) for key in ("input", "unit", "currency")
    ):
        yield f"{where}pricing needs input, unit and currency, in quotes"
