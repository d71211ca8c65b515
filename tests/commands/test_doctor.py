"""`mlx-backend doctor`: what each check finds, with what cure; and what a report may not tell."""

from __future__ import annotations

import json
import socket
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from free_ports import free_port
from running_server import running
from scripted_engine import ScriptedEngine

from mlx_backend.cli import main
from mlx_backend.commands import doctor
from mlx_backend.commands.doctor import ServerState
from mlx_backend.device.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mlx_backend.commands.doctor import Finding

GIB = 1 << 30
MLX: dict[str, Any] = {
    "product": 64.0**3,
    "version": "1.0",
    "gpu": True,
    "name": "M9",
    "memory": 16 * GIB,
    "wired": 20 * GIB,
    "blas": "",
    "slow": False,
}


def server(**known: Any) -> ServerState:
    return ServerState(**{"url": "http://127.0.0.1:8080", "port": 8080, **known})


ROWS: list[tuple[str, Callable[[], Finding], str, str]] = [
    ("a mac", lambda: doctor.check_system(Machine(system="Darwin", processor="arm64", macos=15)), "ok", ""),
    (
        "an old mac",
        lambda: doctor.check_system(Machine(system="Darwin", processor="arm64", macos=13)),
        "failed",
        "needs macOS 14",
    ),
    ("a python", lambda: doctor.check_python((3, 13)), "ok", ""),
    ("an old python", lambda: doctor.check_python((3, 11)), "failed", "3.12 to 3.14"),
    ("mlx", lambda: doctor.check_mlx(MLX), "ok", ""),
    ("no mlx", lambda: doctor.check_mlx({"error": "no such module"}), "failed", "Install again"),
    ("wrong products", lambda: doctor.check_mlx(MLX | {"product": 3.0}), "failed", "--blas"),
    ("a slow BLAS", lambda: doctor.check_mlx(MLX | {"slow": True}), "warning", "libopenblas0-pthread"),
    ("memory", lambda: doctor.check_memory(Machine(memory=32 * GIB), MLX), "ok", ""),
    ("little memory", lambda: doctor.check_memory(Machine(memory=4 * GIB), MLX), "warning", "recommend"),
    ("wired", lambda: doctor.check_wired(MLX), "ok", ""),
    ("free port", lambda: doctor.check_server(server()), "ok", ""),
    ("another program", lambda: doctor.check_server(server(in_use="Stop it.")), "warning", "Stop it."),
    (
        "another version",
        lambda: doctor.check_server(server(is_ours=True, version="0.0.1")),
        "warning",
        "start the server again",
    ),
    (
        "loopback on Linux",
        lambda: doctor.check_containers(server(is_ours=True, on_network=False), is_mac=False),
        "warning",
        "--host 0.0.0.0",
    ),
    (
        "loopback on a Mac",
        lambda: doctor.check_containers(server(is_ours=True, on_network=False), is_mac=True),
        "ok",
        "",
    ),
    (
        "a container",
        lambda: doctor.check_containers(
            server(is_ours=True, on_network=False), is_mac=False, in_container=True
        ),
        "ok",
        "",
    ),
    (
        "everybody is let in",
        lambda: doctor.check_key(server(is_ours=True, on_network=True)),
        "warning",
        "--api-key",
    ),
    (
        "no key is given",
        lambda: doctor.check_key(server(is_ours=True, needs_key=True)),
        "warning",
        "MLX_BACKEND_API_KEY",
    ),
    (
        "a wrong key",
        lambda: doctor.check_key(server(is_ours=True, needs_key=True, has_key=True, key_is_right=False)),
        "failed",
        "does not know it",
    ),
    (
        "the right key",
        lambda: doctor.check_key(server(is_ours=True, needs_key=True, has_key=True)),
        "ok",
        "",
    ),
]


@pytest.mark.parametrize(("check", "state", "cure"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_finding_has_a_cure_where_something_is_to_be_done(
    check: Callable[[], Finding], state: str, cure: str
) -> None:
    finding = check()
    assert finding.state == state
    assert finding.found
    assert cure in finding.cure
    assert bool(finding.cure) == (state != "ok")


@pytest.mark.parametrize(("free", "state"), [(50 * GIB, "ok"), (5 * GIB, "warning"), (1000, "failed")])
def test_the_disk_is_that_of_the_folder_or_of_what_it_will_be_made_in(
    free: int, state: str, tmp_path: Path
) -> None:
    asked: list[Path] = []

    def usage(folder: Path) -> Any:
        asked.append(folder)
        return SimpleNamespace(free=free)

    assert doctor.check_disk(tmp_path / "not/there", usage).state == state
    assert asked == [tmp_path]


def test_a_cache_that_is_not_there_yet_is_no_problem(tmp_path: Path) -> None:
    assert doctor.check_cache(tmp_path / "hub").state == "ok"
    (tmp_path / "hub/models--a--b").mkdir(parents=True)
    assert "1 model" in doctor.check_cache(tmp_path / "hub").found


def test_a_file_where_the_cache_would_be_made_is_no_matter_of_rights(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = doctor.check_cache(tmp_path / "file/hub")
    assert found.state == "failed"
    assert found.cure == f"{tmp_path / 'file'} is no folder: move it away, or set HF_HOME to another folder."


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise ImportError('libmlx.so: cannot open')", "libmlx.so: cannot open"),
        ("import os; os.abort()", "status -6"),
        ("print('no JSON')", "status 0"),
    ],
)
def test_an_mlx_that_cannot_be_imported_or_crashes_is_a_finding(program: str, error: str) -> None:
    found = doctor.ask_mlx(program)
    assert error in found["error"]
    assert doctor.check_mlx(found).state == "failed"


def test_a_package_that_is_missing_does_not_keep_the_rest_from_being_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ask_mlx", lambda: {"error": "No module named 'mlx'"})
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(["doctor", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    printed = capsys.readouterr().out
    assert "✗ mlx          MLX cannot be used: No module named 'mlx'" in printed
    assert "✗ cache        this could not be looked at (" in printed
    assert "✓ server" in printed


def test_a_healthy_machine_and_a_demo_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLX_BACKEND_API_KEY", "a-secret-key")
    monkeypatch.setenv("MLX_BACKEND_PROT", "1")
    monkeypatch.setattr(doctor, "LITTLE_SPACE", doctor.NO_SPACE)  # however full this disk is
    assert main(["doctor", "mlx-demo:high", "--url", f"http://127.0.0.1:{free_port()}"]) == 0
    printed = capsys.readouterr().out
    assert "✓ template     dialect harmony" in printed
    assert "⚠ variables    $MLX_BACKEND_PROT has no effect" in printed
    assert "→ Did you mean $MLX_BACKEND_PORT?" in printed
    assert "Nothing is wrong, 1 to look at" in printed
    block = printed.partition("```text\n")[2]
    assert block.endswith("\n```\n")
    assert "a-secret-key" not in printed
    assert str(tmp_path) not in block
    assert socket.gethostname() not in block or len(socket.gethostname()) <= 3


def test_what_is_wrong_is_the_exit_status_and_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ask_mlx", lambda: MLX)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    status = main(["doctor", str(tmp_path), "--json", "--url", f"http://127.0.0.1:{free_port()}"])
    said = json.loads(capsys.readouterr().out)
    assert status == 1
    [failed] = [each for each in said["findings"] if each["state"] == "failed"]
    assert failed["about"] == "model"
    assert failed["cure"]
    assert "✗ model" in said["report"]


def test_a_running_server_is_asked_what_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "ask_mlx", lambda: MLX)
    with running(ScriptedEngine([]), api_key="K9-right") as served:
        for key, words, expected in [
            ("K9-right", "and takes it", 0),
            ("K9-other", "a wrong one is given", 1),
        ]:
            assert main(["doctor", "--url", served.url, "--key", key, "--json"]) == expected
            said = capsys.readouterr().out
            assert words in said
            assert f"answers at {served.url}" in said
            assert "K9" not in said
