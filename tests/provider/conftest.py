"""The plugin as a process, run from the built package; a scripted server and the real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
import zipfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from daemon import PluginProcess  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

LOADED = "  Try: "  # begins the line that mlx-backend prints last, when its models are loaded


@contextmanager
def listening(
    command: list[str], *, ready: str = "Listening on ", log: Path = Path(os.devnull)
) -> Iterator[str]:
    """Run a server; yield its address once it listens and has printed a line that begins with `ready`.

    Its log is complete when the server has ended.
    """
    environment = {
        **os.environ,
        "MLX_BACKEND_MAX_QUEUE": "16",
    }  # there is a thread for each request that may wait
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout is not None
        address = None
        for line in process.stdout:
            if line.startswith("Listening on "):
                address = line.split()[2]
            if line.startswith(ready):
                break
        assert address is not None, "the server did not start"
        yield address
    finally:
        process.terminate()
        process.communicate()


class Stub:
    """Scripts the stub server's answers, and returns the requests it got."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.credentials = {"endpoint_url": f"{address}/v1", "api_key": "secret-key"}

    def will_send(self, *pieces: str, **script: Any) -> None:
        """Script the next answer."""
        self._call("/script", {"pieces": pieces, **script})

    def will_stream(self, *deltas: dict[str, Any], finish: str = "stop", **usage: int) -> None:
        """Script a well-formed stream of deltas."""
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if usage:
            chunks.append({"choices": [], "usage": usage})
        self.will_send(*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n")

    def take_requests(self) -> list[dict[str, Any]]:
        """Return what the plugin sent since the last call."""
        with urllib.request.urlopen(f"{self.address}/requests") as answer:
            seen: list[dict[str, Any]] = json.load(answer)
        return seen

    def _call(self, path: str, body: Any) -> None:
        request = urllib.request.Request(self.address + path, json.dumps(body).encode())
        with urllib.request.urlopen(request):
            pass


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built .difypkg."""
    target = tmp_path_factory.mktemp("dist") / "plugin.difypkg"
    command = [sys.executable, "-m", "dify_mlx_provider.packaging.package", "--output", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return target


@pytest.fixture(scope="session")
def plugin_root(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, unpacked into an empty folder as the daemon does it."""
    folder = tmp_path_factory.mktemp("plugin")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def container_python(plugin_root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has what the package's requirements.txt names, in the versions of our lock, and no more."""
    folder = tmp_path_factory.mktemp("container")
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(re.findall(r"^([\w.-]+==[^\s;\\]+)", lock, re.MULTILINE)))
    # With pip, as `make setup` does it: where that found the packages, this does.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    install += ["--disable-pip-version-check"]
    install += ["-r", str(plugin_root / "requirements.txt"), "-c", str(constraints)]
    done = subprocess.run(install, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"pip could not install what the plugin needs:\n{done.stderr}"
    return python


@pytest.fixture(scope="session")
def plugin(plugin_root: Path) -> Iterator[PluginProcess]:
    """The plugin, running."""
    with PluginProcess(plugin_root) as process:
        yield process


@pytest.fixture(scope="session")
def stub_address() -> Iterator[str]:
    with listening([sys.executable, str(Path(__file__).parent / "stub_server.py")]) as address:
        yield address


@pytest.fixture
def stub(stub_address: str) -> Stub:
    """A server whose answers the test scripts."""
    urllib.request.urlopen(f"{stub_address}/forget").close()
    return Stub(stub_address)


@pytest.fixture(scope="session")
def real_server() -> Iterator[str]:
    """`mlx-backend` on the model that ships."""
    command = [sys.executable, "-m", "mlx_backend", "--port", "0", "--api-key", "right"]
    with listening(command, ready=LOADED) as address:
        yield address


@pytest.fixture
def credentials(real_server: str) -> dict[str, str]:
    """The form for the real server."""
    return {"endpoint_url": real_server, "api_key": "right"}


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No server is known yet; for tests that run the plugin's code in this process.

    A test's server may get the port of an earlier one, so nothing that is kept by address may be left.
    """
    # Not above: what these load must not come before the SDK.
    from dify_mlx_provider.servers import discovery, token_count
    from dify_mlx_provider.servers.base import ServedModel, ServerInfo
    from dify_mlx_provider.upstream.cache import LastValues, TtlCache

    monkeypatch.setattr(discovery, "_last_servers", LastValues(ServerInfo))
    monkeypatch.setattr(discovery, "_last_models", LastValues(ServedModel))
    monkeypatch.setattr(token_count, "_counts", TtlCache())
    discovery.forget_servers()
    yield
    discovery.forget_servers()
