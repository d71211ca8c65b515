"""A server that is off while Dify asks what its models can do, with the plugin and the server as processes.

Dify keeps the answer for an hour. So it must be the one the server would give, even by a plugin that was restarted.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from conftest import LOADED, listening
from daemon import PluginError, PluginProcess

if TYPE_CHECKING:
    from pathlib import Path

SERVER = [
    sys.executable,
    "-m",
    "mlx_backend",
    "--port",
    "0",
    "--api-key",
    "right",
    "--context-length",
    "3000",
]


@pytest.fixture
def root(plugin_root: Path, tmp_path: Path) -> Path:
    """A plugin that was just installed."""
    return shutil.copytree(plugin_root, tmp_path / "plugin", ignore=shutil.ignore_patterns(".cache"))


class Stopped(NamedTuple):
    """A plugin's folder, the form for a server that it described to Dify once and that is off now, and what it said."""

    root: Path
    form: dict[str, str]
    described: dict[str, Any]


@pytest.fixture(scope="module")
def first_stopped(plugin_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    root = tmp_path_factory.mktemp("described") / "plugin"
    shutil.copytree(plugin_root, root, ignore=shutil.ignore_patterns(".cache"))
    with PluginProcess(root) as plugin:
        with listening(SERVER, ready=LOADED) as address:
            form = {"endpoint_url": address, "api_key": "right"}
            described = schema(plugin, form)
        assert described["model_properties"]["context_size"] == 3_000
        assert schema(plugin, form) == described
    return Stopped(root, form, described)


@pytest.fixture
def stopped(first_stopped: Stopped, tmp_path: Path) -> Stopped:
    return first_stopped._replace(root=shutil.copytree(first_stopped.root, tmp_path / "plugin"))


def schema(
    plugin: PluginProcess, form: dict[str, str], model: str = "default", kind: str = "llm"
) -> dict[str, Any]:
    (answer,) = plugin.request(
        "get_ai_model_schemas", provider="mlx", model_type=kind, model=model, credentials=form
    )
    described: dict[str, Any] = answer["model_schema"]
    return described


def context_size(described: dict[str, Any]) -> int:
    size: int = described["model_properties"]["context_size"]
    return size


def test_a_restarted_plugin_describes_a_server_that_is_off_as_it_was(stopped: Stopped) -> None:
    root, form, described = stopped
    with PluginProcess(root) as plugin:
        assert schema(plugin, form) == described
        assert context_size(schema(plugin, form, "mlx-demo")) == 3_000
        assert context_size(schema(plugin, {**form, "context_size": "1500"})) == 1_500


def test_another_key_or_address_knows_nothing_of_it(stopped: Stopped) -> None:
    root, form, _ = stopped
    with PluginProcess(root) as plugin:
        assert context_size(schema(plugin, {**form, "api_key": "another"})) == 16_384
        assert (
            context_size(schema(plugin, {**form, "endpoint_url": f"{form['endpoint_url']}/elsewhere"}))
            == 16_384
        )


def test_neither_key_nor_address_is_written_down(stopped: Stopped) -> None:
    root, form, _ = stopped
    port = form["endpoint_url"].rpartition(":")[2].split("/")[0]
    (file,) = (file for file in (root / ".cache").rglob("*") if file.is_file())
    written = file.read_bytes()
    assert b"mlx-demo" in written
    for secret in ("right", port, "127.0.0.1"):
        assert secret.encode() not in written
        assert secret not in file.name


def test_a_spoilt_description_is_as_good_as_none(stopped: Stopped) -> None:
    root, form, _ = stopped
    for file in (root / ".cache").rglob("*.json"):
        file.write_bytes(b'{"kind": "mlx-backend", "models": [{"context_size": ')
    with PluginProcess(root) as plugin:
        assert context_size(schema(plugin, form)) == 16_384


def test_without_a_folder_to_write_to_the_plugin_works_and_remembers_until_it_ends(root: Path) -> None:
    (root / ".cache").write_text("in the way")
    with PluginProcess(root) as plugin:
        with listening(SERVER, ready=LOADED) as address:
            form = {"endpoint_url": address, "api_key": "right"}
            assert context_size(schema(plugin, form)) == 3_000
        with pytest.raises(PluginError, match="No server at"):  # saving a form asks the server again
            list(plugin.request("validate_provider_credentials", provider="mlx", credentials=form))
        assert context_size(schema(plugin, form)) == 3_000
    assert (root / ".cache").read_text() == "in the way"


def test_two_plugin_processes_share_what_one_was_told(root: Path) -> None:
    with PluginProcess(root) as one, PluginProcess(root) as other:
        with listening(SERVER, ready=LOADED) as address:
            form = {"endpoint_url": address, "api_key": "right"}
            described = schema(one, form)
        assert schema(other, form) == described
