"""The package in an empty folder, with nothing installed but its own requirements: what Dify's container has.

Dify's cloud and the marketplace's checks start it as a small web server on a port.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import requests
from daemon import PluginProcess
from dify_view import text_of, user
from free_ports import free_port
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from mlx_backend import version_and_commit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Stub


def test_the_package_runs_with_its_own_requirements_and_without_mlx(
    plugin_root: Path, container_python: str, stub: Stub
) -> None:
    probe = "import importlib.util as u; print([n for n in ('mlx', 'mlx_lm', 'waitress') if u.find_spec(n)])"
    found = subprocess.run([container_python, "-c", probe], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
    stub.will_stream({"reasoning_content": "why"}, {"content": "Hi"})
    with PluginProcess(plugin_root, python=container_python) as plugin:
        assert plugin.manifest["name"] == "dify_mlx_provider"
        chunks = list(plugin.invoke([user("hi")], credentials=stub.credentials))
    assert any(f"MLX plugin {version_and_commit()}" in line for line in plugin.logs)
    assert text_of(chunks) == "<think>\nwhy\n</think>\n\nHi"


START = Retry(total=None, connect=70, backoff_factor=0.05, backoff_max=1.0)
"""A minute for the first connection; the marketplace gives it five."""


@dataclass
class Serverless:
    """The running plugin."""

    address: str
    session: requests.Session

    def invoke(self, data: dict[str, Any]) -> list[dict[str, Any]]:
        """Send one model request; return what was streamed back, with its end."""
        call = {"session_id": "s", "event": "request", "data": {"user_id": "u", "type": "model", **data}}
        with self.session.post(f"{self.address}/invoke", json=call, stream=True) as response:
            assert response.status_code == 200, response.text
            lines = [json.loads(line) for line in response.iter_lines() if line]
        assert {line["event"] for line in lines} == {"session"}
        return [line["data"] for line in lines]

    def ask(self, credentials: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        """Send `invoke_llm`."""
        call: dict[str, Any] = {
            "action": "invoke_llm",
            "provider": "mlx",
            "model": "default",
            "model_type": "llm",
        }
        call |= {"model_parameters": {}, "prompt_messages": [user("hi")], "tools": [], "stop": []}
        return self.invoke({**call, "credentials": credentials, "stream": True, **more})


@contextmanager
def serverless(python: str, folder: Path, output: Path) -> Iterator[Serverless]:
    """Start the unpacked plugin with nothing in its environment but what the marketplace sets."""
    port = free_port()
    environment = {"INSTALL_METHOD": "serverless", "SERVERLESS_PORT": str(port)}
    environment |= {
        "SERVERLESS_HOST": "127.0.0.1",
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with (
        output.open("w") as log,
        subprocess.Popen(
            [python, "-m", "dify_mlx_provider"], cwd=folder, env=environment, stdout=log, stderr=log
        ) as process,
        requests.Session() as session,
    ):
        session.trust_env = False
        session.mount("http://", HTTPAdapter(max_retries=START))
        try:
            address = f"http://127.0.0.1:{port}"
            assert session.get(f"{address}/health").text == "OK"
            yield Serverless(address, session)
        except requests.ConnectionError:
            raise AssertionError(f"the plugin does not listen:\n{output.read_text()}") from None
        finally:
            process.kill()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.fixture(scope="module")
def started(
    container_python: str, plugin_root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serverless]:
    """The package, run with what its own requirements install and no more."""
    with serverless(container_python, plugin_root, tmp_path_factory.mktemp("log") / "output") as plugin:
        yield plugin


def test_it_listens_and_answers_a_chat(started: Serverless, stub: Stub) -> None:
    stub.will_stream({"reasoning_content": "why"}, {"content": "Hi"})
    *chunks, end = started.ask(stub.credentials)
    assert {chunk["type"] for chunk in chunks} == {"stream"}
    assert text_of([chunk["data"] for chunk in chunks]) == "<think>\nwhy\n</think>\n\nHi"
    assert end["type"] == "end"


def test_it_answers_from_the_real_server(started: Serverless, credentials: dict[str, str]) -> None:
    question = [user("What is the capital of France?")]
    chunks = started.ask(credentials, prompt_messages=question, model_parameters={"temperature": 0})
    text = text_of([chunk["data"] for chunk in chunks if chunk["type"] == "stream"])
    assert text.endswith("The capital of France is Paris.")


def test_a_server_that_it_cannot_reach_is_an_error_for_people_and_not_the_end(
    started: Serverless, stub: Stub
) -> None:
    error, end = started.ask({"endpoint_url": "http://127.0.0.1:9"})
    assert (error["type"], error["data"]["error_type"]) == ("error", "InvokeConnectionError")
    assert "no server at http://127.0.0.1:9/v1" in error["data"]["message"]
    assert end["type"] == "end"
    stub.will_stream({"content": "Hi"})
    assert started.ask(stub.credentials)[-1]["type"] == "end"


def describe(plugin: Serverless, credentials: dict[str, Any]) -> Any:
    """Ask for a model's schema, which needs what its server says."""
    model = {"action": "get_ai_model_schemas", "provider": "mlx", "model": "default", "model_type": "llm"}
    answer, _ = plugin.invoke({**model, "credentials": credentials})
    return answer["data"]["model_schema"]


def test_the_code_stays_as_it_was_and_a_folder_that_cannot_be_written_does_no_harm(
    container_python: str, package: Path, credentials: dict[str, str], tmp_path: Path
) -> None:
    described = []
    for name in ("writable", "read-only"):
        folder = tmp_path / name
        with zipfile.ZipFile(package) as archive:
            archive.extractall(folder)
        if name == "read-only":
            (folder / ".cache").touch()  # permissions would not hold where the tests run as root
        before = contents(folder)
        with serverless(container_python, folder, tmp_path / "output") as plugin:
            described.append(describe(plugin, credentials))
            assert plugin.ask(credentials)[-1]["type"] == "end"
        after = contents(folder)
        assert {path: after[path] for path in before} == before
        assert {path.partition("/")[0] for path in after.keys() - before.keys()} <= {".cache"}
    assert described[0] == described[1]
