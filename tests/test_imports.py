"""Imports go one way: plugin -> conversation <- server. Each row is proved in a process of its own."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_backend

ROOT = Path(mlx_backend.__file__).parents[1]

# import this | and none of these may have been loaded afterwards
ROWS = [
    ("mlx_backend", ["werkzeug", "pydantic", "mlx", "mlx_lm", "dify_plugin", "argparse", "json"]),
    ("mlx_backend.cli", ["werkzeug", "pydantic", "mlx", "mlx_lm", "transformers", "dify_plugin"]),
    ("mlx_backend.commands.parse", ["werkzeug", "pydantic", "mlx", "transformers", "dify_plugin"]),
    ("mlx_backend.commands.sanitise", ["werkzeug", "pydantic", "mlx", "transformers", "dify_plugin"]),
    ("mlx_backend.demo", ["mlx", "numpy", "transformers"]),
    ("mlx_backend.device", ["mlx", "mlx_lm", "mlx_backend.engine", "mlx_backend.models"]),
    ("mlx_backend.device.mlx", ["mlx_lm", "mlx_backend.engine", "mlx_backend.models"]),
    ("mlx_backend.engine.base", ["mlx", "werkzeug", "pydantic", "mlx_backend.conversation"]),
    ("mlx_backend.engine.scheduler", ["mlx", "werkzeug", "pydantic", "mlx_backend.conversation"]),
    ("mlx_backend.engine.scripted", ["mlx", "mlx_lm", "werkzeug", "mlx_backend.conversation"]),
    ("mlx_backend.engine.mlx", ["werkzeug", "pydantic", "mlx_backend.conversation", "dify_plugin"]),
    (
        "mlx_backend.embedding.service",
        ["mlx", "mlx_lm", "werkzeug", "transformers", "tokenizers", "mlx_backend.chat.service"],
    ),
    ("mlx_backend.chat.request", ["mlx", "werkzeug", "pydantic", "mlx_backend.engine", "mlx_backend.server"]),
    ("mlx_backend.embedding.mlx", ["mlx", "mlx_lm", "werkzeug", "transformers", "tokenizers"]),
    ("mlx_backend.constraints", ["llguidance", "mlx", "werkzeug", "transformers", "dify_plugin"]),
    (
        "mlx_backend.registry.registry",
        ["werkzeug", "pydantic", "mlx", "mlx_lm", "huggingface_hub", "dify_plugin"],
    ),
    ("mlx_backend.commands.serve", ["werkzeug", "pydantic", "mlx", "transformers", "dify_plugin"]),
    ("mlx_backend.chat.service", ["werkzeug", "llguidance", "mlx", "mlx_lm", "transformers", "dify_plugin"]),
    ("mlx_backend.api.openai.chat", ["werkzeug", "cheroot", "mlx", "dify_plugin"]),
    ("mlx_backend.server.app", ["mlx", "mlx_lm", "transformers", "dify_plugin", "dify_mlx_provider"]),
]


def loaded_after_importing(module: str) -> set[str]:
    code = f"import {module}, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(("module", "forbidden"), ROWS, ids=[row[0] for row in ROWS])
def test_a_room_does_not_load_what_it_refuses_to_know(module: str, forbidden: list[str]) -> None:
    assert loaded_after_importing(module).isdisjoint(forbidden)


def modules_of(package: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def test_the_conversation_core_needs_only_the_standard_library() -> None:
    code = "import sys, {}; print('\\n'.join(sys.modules))".format(
        ", ".join(modules_of("mlx_backend/conversation"))
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    ours = {"mlx_backend", "__main__"}
    assert roots - ours <= sys.stdlib_module_names | {"_distutils_hack", "sitecustomize"}


def imported_by(package: str) -> Iterator[tuple[str, str]]:
    """Every line that imports something, with the module it names."""
    for path in (ROOT / package).rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                yield f"{path.name}: {line}", words[1]


def test_the_server_never_imports_the_plugin() -> None:
    for line, module in imported_by("mlx_backend"):
        assert not module.startswith(("dify_plugin", "dify_mlx_provider")), line


def test_of_the_backend_the_plugin_imports_only_the_conversation_core() -> None:
    for line, module in imported_by("dify_mlx_provider"):
        room = module.split(".")
        assert room[0] not in ("mlx", "mlx_lm"), line
        assert room[0] != "mlx_backend" or room[1:2] in ([], ["conversation"]), line


def test_the_map_of_the_plugin_names_every_module() -> None:
    source = (ROOT / "dify_mlx_provider/__init__.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", source))
    assert {
        path.stem for path in (ROOT / "dify_mlx_provider").rglob("[a-z]*.py") if path.parent.name != "models"
    } <= named


def test_the_rooms_on_mlx_know_nothing_of_each_other() -> None:
    for here, other in (("embedding", "engine"), ("engine", "embedding")):
        for line, module in imported_by(f"mlx_backend/{here}/mlx"):
            assert not module.startswith(f"mlx_backend.{other}"), line


def test_only_the_rooms_on_mlx_import_mlx() -> None:
    rooms = ("engine/mlx", "embedding/mlx", "device/mlx.py", "demo")
    allowed = {ROOT / "mlx_backend" / room for room in rooms}
    for path in (ROOT / "mlx_backend").rglob("*.py"):
        if allowed & {path, *path.parents}:
            continue
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words[:1] in (["import"], ["from"]):
                assert words[1].partition(".")[0] not in {"mlx", "mlx_lm"}, f"{path.name}: {line}"
