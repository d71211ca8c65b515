"""What keeps the product plain to read and safe to serve, as far as it shows in names."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import mlx_backend

ROOT = Path(mlx_backend.__file__).parents[1]
PACKAGES = ("mlx_backend", "dify_mlx_provider")

type Modules = dict[str, list[ast.AST]]

# Begins with an underscore, and is public all the same.
PUBLIC = {
    "_exit",  # os: documented
    "_asdict",  # of named tuples: documented, as is the next
    "_replace",
    "_SubParsersAction",  # argparse: the type of what a documented method returns
    "_typeshed",  # types alone
    "_calc_response_usage",  # Dify's SDK: its documentation tells a model to call it
}
PATCHES = "mlx_backend/engine/mlx/mlx_lm_patches/"
"""The one folder that may use what mlx-lm keeps to itself; it says of each what for."""


def modules(*folders: str) -> Modules:
    """Every module in these folders: its path, and the nodes of its syntax tree."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {
        path.relative_to(ROOT).as_posix(): list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in paths
    }


@pytest.fixture(scope="module")
def product() -> Modules:
    return modules(*PACKAGES)


def test_no_two_classes_have_one_name(product: Modules) -> None:
    assert_unique(product)
    assert_unique(modules("tests/training"))


def assert_unique(all_modules: Modules) -> None:
    places = defaultdict(list)
    for path, nodes in all_modules.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_what_is_running_is_not_interrupted_from_outside(product: Modules) -> None:
    """By a trace function or an exception from another thread: either may strike in any line of ours."""
    forbidden = {"settrace", "setprofile", "PyThreadState_SetAsyncExc"}
    found = [
        path for path, nodes in product.items() for node in nodes if forbidden & {*used(node), *defined(node)}
    ]
    assert found == []


def test_what_a_class_must_have_is_abstract_instead_of_not_implemented(
    product: Modules,
) -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, nodes in product.items()
        for node in nodes
        if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc)
    ]
    assert found == []


def test_nothing_of_the_tests_and_the_training_is_imported(product: Modules) -> None:
    ours = {path.stem for path in (ROOT / "tests").iterdir()} | {"tests"}
    assert "training" in ours
    found = [
        f"{path}: {root}"
        for path, nodes in product.items()
        for node in nodes
        for root in imported_roots(node)
        if root in ours
    ]
    assert found == []


def imported_roots(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name.partition(".")[0] for alias in node.names]
        case ast.ImportFrom(module=str(module)):
            return [module.partition(".")[0]]
    return []


def test_what_other_packages_keep_to_themselves_is_used_in_the_patches_alone(
    product: Modules,
) -> None:
    """A private name that is defined nowhere in the product is another package's."""
    known = PUBLIC | {name for nodes in product.values() for node in nodes for name in defined(node)}
    found = [
        f"{path}:{name}"
        for path, nodes in product.items()
        if not path.startswith(PATCHES)
        for node in nodes
        for name in used(node)
        if name.startswith("_") and not name.startswith("__") and name not in known
    ]
    assert found == []


def defined(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
            return [name]
        case ast.Constant(value=str(name)):  # in __slots__
            return [name]
    return []


def used(node: ast.AST) -> list[str]:
    match node:
        case ast.Attribute(attr=name):
            return [name]
        case ast.ImportFrom(module=str(module)) if module.partition(".")[0] not in PACKAGES:
            return [*module.split("."), *(alias.name for alias in node.names)]
        case ast.Import():
            return [part for alias in node.names for part in alias.name.split(".")]
    return []
