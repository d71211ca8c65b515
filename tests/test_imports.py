"""Imports go one way: plugin -> conversation <- server, and in each from the top floor down."""

import ast
import json
import os
import re
import socket
import subprocess
import sys
import threading
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from free_ports import free_port

import mlx_backend

ROOT = Path(mlx_backend.__file__).parents[1]

# import this | and none of these may have been loaded afterwards
ROWS = [
    ("mlx_backend", ["werkzeug", "pydantic", "mlx", "mlx_lm", "dify_plugin", "argparse", "json"]),
    ("mlx_backend.cli", ["werkzeug", "pydantic", "mlx", "mlx_lm", "transformers", "dify_plugin"]),
    ("mlx_backend.clients", ["pydantic", "werkzeug", "mlx", "argparse", "mlx_backend.server"]),
    *(
        (
            f"mlx_backend.commands.{name}",
            ["werkzeug", "pydantic", "mlx", "transformers", "rich", "httpx2", "tomlkit"],
        )
        for name in ("bench", "completion", "connect", "doctor", "inspect", "service")
    ),
    ("mlx_backend.commands.parse", ["werkzeug", "pydantic", "mlx", "transformers", "dify_plugin"]),
    ("mlx_backend.commands.sanitise", ["werkzeug", "pydantic", "mlx", "transformers", "dify_plugin"]),
    ("mlx_backend.demo", ["mlx", "numpy", "transformers"]),
    ("mlx_backend.device", ["mlx", "mlx_lm", "mlx_backend.engine", "mlx_backend.models"]),
    ("mlx_backend.device.mlx", ["mlx_lm", "mlx_backend.engine", "mlx_backend.models"]),
    ("mlx_backend.engine.base", ["mlx", "werkzeug", "pydantic", "mlx_backend.conversation"]),
    ("mlx_backend.engine.scheduler", ["mlx", "werkzeug", "pydantic", "mlx_backend.conversation"]),
    ("mlx_backend.engine.mlx.vision.tower", ["mlx_vlm", "werkzeug", "pydantic", "dify_plugin"]),
    ("mlx_backend.engine.mlx", ["werkzeug", "pydantic", "mlx_backend.conversation", "dify_plugin"]),
    (
        "mlx_backend.embedding.embedder",
        ["mlx", "mlx_lm", "werkzeug", "transformers", "tokenizers", "mlx_backend.chat.service"],
    ),
    (
        "mlx_backend.images.loader",
        ["PIL", "mlx", "mlx_vlm", "numpy", "werkzeug", "pydantic", "mlx_backend.conversation"],
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
    ("mlx_backend.api.openai.chat", ["werkzeug", "waitress", "mlx", "dify_plugin"]),
    ("mlx_backend.server.app", ["mlx", "mlx_lm", "transformers", "dify_plugin", "dify_mlx_provider"]),
]


def loaded_after_importing(module: str) -> set[str]:
    code = f"import {module}, sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(("module", "forbidden"), ROWS, ids=[row[0] for row in ROWS])
def test_a_room_does_not_load_what_it_refuses_to_know(module: str, forbidden: list[str]) -> None:
    assert loaded_after_importing(module).isdisjoint(forbidden)


HEAVY = (
    "mlx_lm",
    "transformers",
    "tokenizers",
    "numpy",
    "pydantic",
    "werkzeug",
    "waitress",
    "prompt_toolkit",
)
LIGHT_COMMANDS = (
    ["help"],
    ["list"],
    ["recommend"],
    ["ps"],
    ["stop", "mlx-demo"],
    ["load", "mlx-demo"],
    ["connect"],
    ["connect", "codex"],
    ["pull", "mlx-demo"],
    ["rm", "nothing"],
    ["show", "nothing"],
    ["chat", "nothing", "-p", "hello"],
    ["bench", "nothing"],
    ["serve", "--nothing"],
    ["serve", "nothing"],
    ["serve", "--port", "BUSY"],
)


def test_a_command_that_computes_nothing_loads_nothing_heavy(tmp_path: Path) -> None:
    """They are run one after the other in one process, so what one of them loads is found at that one."""
    code = (
        "import json, sys; from contextlib import suppress; from mlx_backend.cli import main\n"
        f"for words in json.loads(sys.argv[1]):\n with suppress(SystemExit): main(words)\n"
        f" loaded = [each for each in {HEAVY} if each in sys.modules]\n"
        " if loaded: sys.exit(f'{words} {loaded}')"
    )
    with socket.create_server(("127.0.0.1", 0)) as busy:
        other_program = threading.Thread(target=lambda: busy.accept()[0].close(), daemon=True)
        other_program.start()
        port = str(busy.getsockname()[1])
        commands = json.dumps(LIGHT_COMMANDS).replace("BUSY", port)
        environment = {**os.environ, "MLX_BACKEND_PORT": str(free_port()), "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", code, commands], cwd=ROOT, env=environment, capture_output=True, text=True
        )
    assert f"Port {port} is in use" in done.stderr
    assert done.returncode == 0, done.stderr


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


# The rooms from the top floor down: a room imports from its own floor's folder and from floors below, never upwards.
FLOORS = [
    ["mlx_backend.__main__"],
    ["mlx_backend.commands.completion"],  # of the whole command line
    ["mlx_backend.cli"],
    ["mlx_backend.commands"],
    ["mlx_backend.server"],
    ["mlx_backend.api"],
    ["mlx_backend.registry"],
    ["mlx_backend.chat"],
    ["mlx_backend.constraints", "mlx_backend.embedding.mlx"],
    ["mlx_backend.embedding"],
    ["mlx_backend.engine.mlx"],
    ["mlx_backend.engine.distributed"],
    ["mlx_backend.engine"],
    ["mlx_backend.demo"],
    ["mlx_backend.layers"],
    ["mlx_backend.device"],
    ["mlx_backend.models"],
    ["mlx_backend.settings"],
    ["mlx_backend.declaration"],
    ["mlx_backend.images"],
    ["mlx_backend.child_process", "mlx_backend.foreign_calls", "mlx_backend.installation"],
    ["dify_mlx_provider.packaging"],  # in no package that is installed
    ["dify_mlx_provider.provider", "dify_mlx_provider.models", "dify_mlx_provider.__main__"],
    ["dify_mlx_provider.chat", "dify_mlx_provider.knowledge", "dify_mlx_provider.settings"],
    ["dify_mlx_provider.dify_errors"],
    ["dify_mlx_provider.servers"],
    ["dify_mlx_provider.upstream"],
    ["mlx_backend.conversation"],
    ["mlx_backend.preparation", "mlx_backend.byte_cache", "mlx_backend.common_prefix", "mlx_backend.clients"],
    ["mlx_backend.errors"],
    ["mlx_backend", "dify_mlx_provider"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Beyond its floor, what a room may not import although it lies below.
REFUSED = {
    "mlx_backend": ("dify_mlx_provider",),  # importing dify_plugin patches threading
    "dify_mlx_provider": tuple(  # the plugin runs where there is no MLX and nothing else of the server
        room for room in FLOOR_OF if room.startswith("mlx_backend.") and room != "mlx_backend.conversation"
    ),
    # Two users of one device, neither of which knows the other.
    "mlx_backend.embedding.mlx": ("mlx_backend.engine",),
    "mlx_backend.engine": ("mlx_backend.embedding",),
}


def modules() -> dict[str, Path]:
    return {
        name: path
        for package in ("mlx_backend", "dify_mlx_provider")
        for path in sorted((ROOT / package).rglob("*.py"))
        if (name := ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    }


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Every module of ours with those of ours that it imports, also inside functions and for types alone."""
    ours = modules()
    found: dict[str, set[str]] = {}
    for name, path in ours.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}:{node.lineno}: a relative import; write it whole"
                named |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
        # `from package.module import name` names the module alone, `from package import module` both.
        named = {each for each in named if each in ours}
        found[name] = named - {name} - {each.rpartition(".")[0] for each in named}
    return found


def room_of(module: str) -> str:
    """The innermost room that a module lies in."""
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
    return module


def test_every_import_goes_to_the_same_room_or_down(imports: dict[str, set[str]]) -> None:
    upwards = [
        f"{module} -> {target}"
        for module, targets in imports.items()
        for target in targets
        if room_of(module) != room_of(target) and FLOOR_OF[room_of(module)] >= FLOOR_OF[room_of(target)]
    ]
    assert upwards == []


def test_a_room_does_not_import_what_it_refuses_to_know(imports: dict[str, set[str]]) -> None:
    refused = [
        f"{module} -> {target}"
        for module, targets in imports.items()
        for target in targets
        for room, others in REFUSED.items()
        if f"{module}.".startswith(f"{room}.")
        and any(target == other or target.startswith(f"{other}.") for other in others)
    ]
    assert refused == []


def test_no_modules_import_each_other_in_a_circle(imports: dict[str, set[str]]) -> None:
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_the_packages_named_are_those_that_a_room_may_import() -> None:
    """The server never imports Dify's SDK; MLX is imported by its two adapters and their layers alone."""
    mlx = (
        "mlx_backend.engine.mlx",
        "mlx_backend.embedding.mlx",
        "mlx_backend.layers",
        "mlx_backend.device.mlx",
    )
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [str(node.module)]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            roots = {each.partition(".")[0] for each in named}
            assert "dify_plugin" not in roots or name.startswith("dify_mlx_provider"), name
            assert roots.isdisjoint({"mlx", "mlx_lm"}) or name.startswith(mlx), name


def test_mlx_is_imported_first_where_a_fast_blas_is_arranged_for() -> None:
    """A module that imports MLX as it is imported is itself imported by others within `importing_mlx`."""
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}
    at_import = {name: imported(tree.body) for name, tree in trees.items()}
    need_mlx = {"mlx", "mlx_lm"}
    while more := {name for name, named in at_import.items() if named & need_mlx} - need_mlx:
        need_mlx |= more
    assert "mlx_backend.engine.mlx.batch" in need_mlx
    unprepared = [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        if name not in need_mlx
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in function.body
        if imported([node]) & need_mlx and "importing_mlx" not in ast.dump(node)
    ]
    assert unprepared == []


def imported(nodes: list[ast.stmt]) -> set[str]:
    """What statements import when they are run, and their packages; not for types, and not in functions."""
    found: set[str] = set()
    for node in nodes:
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.FunctionDef() | ast.ClassDef():
                pass
            case _:
                inner = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
                found |= imported(inner)
    return found | {name.partition(".")[0] for name in found}


def test_the_map_of_the_plugin_names_every_module() -> None:
    source = (ROOT / "dify_mlx_provider/__init__.py").read_text(encoding="utf-8")
    named = set(re.findall(r"\w+", source))
    assert {
        path.stem for path in (ROOT / "dify_mlx_provider").rglob("[a-z]*.py") if path.parent.name != "models"
    } <= named
