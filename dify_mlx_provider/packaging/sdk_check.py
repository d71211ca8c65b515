"""Loads an unpacked package as Dify's SDK does, and prints what is wrong with it, one line a fault.

Run by package.py in the package's folder, and in a process of its own: importing the SDK patches threads and sockets.
The SDK's own models decide what a declaration may hold. A key that they do not know is a fault too: it would be a typo
that goes unnoticed. Last, the plugin's classes are loaded, from the package.
"""

from __future__ import annotations

from dify_plugin import DifyPluginEnv  # isort: split

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from dify_plugin.core.entities.plugin.setup import PluginConfiguration
from dify_plugin.core.plugin_registration import PluginRegistration
from dify_plugin.entities.model import AIModelEntity
from dify_plugin.entities.model.provider import ModelProviderConfiguration
from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from collections.abc import Iterator

MANIFEST = Path("manifest.yaml")

_READ_ELSEWHERE = {"privacy", "tags", "verified", "help", "url"}
"""Keys that Dify's daemon or its marketplace read, and the SDK does not."""


def faults() -> Iterator[str]:
    """Yield the faults of the declarations in this folder."""
    manifest = yaml.safe_load(MANIFEST.read_bytes())
    yield from _check(MANIFEST, manifest, PluginConfiguration)
    for name in manifest["plugins"]["models"]:
        provider = yaml.safe_load(Path(name).read_bytes())
        for listed in provider.pop("models", {}).values():
            for pattern in listed["predefined"]:
                for path in sorted(Path().glob(pattern)):
                    if not path.name.endswith("_position.yaml"):
                        yield from _check(path, yaml.safe_load(path.read_bytes()), AIModelEntity)
        yield from _check(Path(name), provider, ModelProviderConfiguration)


def _check(path: Path, declared: Any, kind: type[BaseModel]) -> Iterator[str]:
    try:
        yield from _unknown_keys(f"{path}: ", declared, kind(**declared))
    except ValidationError as error:
        for each in error.errors():
            yield f"{path}: {'.'.join(map(str, each['loc']))} is {str(each['input'])[:80]!r}: {each['msg']}"


def _unknown_keys(where: str, declared: Any, entity: Any) -> Iterator[str]:
    if isinstance(declared, dict) and isinstance(entity, BaseModel):
        fields = {field.alias or name: name for name, field in type(entity).model_fields.items()}
        for key, value in declared.items():
            if key in fields:
                yield from _unknown_keys(f"{where}{key}.", value, getattr(entity, fields[key]))
            elif key not in _READ_ELSEWHERE:
                yield f"{where}{key} is an unknown key"
    elif isinstance(declared, list) and isinstance(entity, list):
        for number, (value, each) in enumerate(zip(declared, entity, strict=True)):
            yield from _unknown_keys(f"{where}{number}.", value, each)


if __name__ == "__main__":
    found: list[str] = []
    try:
        found += faults()
        if not found:
            PluginRegistration(DifyPluginEnv())
    except Exception as error:  # whatever the SDK raises, it would raise in Dify too
        found.append(f"Dify's SDK cannot load the package: {type(error).__name__}: {error}")
    print("\n".join(found))
