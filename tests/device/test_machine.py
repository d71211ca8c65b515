"""Which machines MLX cannot run on, and what their owners are told."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlx_backend.device import machine
from mlx_backend.device.machine import Machine, this_machine


def test_a_mac_with_apple_silicon_and_linux_are_fine() -> None:
    assert Machine(system="Darwin", processor="arm64", macos=14).refusal() is None
    assert Machine(system="Linux", processor="x86_64").refusal() is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Machine(system="Darwin", processor="x86_64", macos=14), "this one has an Intel processor"),
        (Machine(system="Darwin", processor="x86_64", macos=15, is_translated=True), "runs under Rosetta"),
        (Machine(system="Darwin", processor="arm64", macos=13), "macOS 14 or newer; this is macOS 13"),
    ],
)
def test_other_macs_are_told_why_not(found: Machine, said: str) -> None:
    refusal = found.refusal()
    assert refusal is not None
    assert said in refusal


def test_rosetta_is_known_by_what_macos_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.3.1", ("", "", ""), "x86_64"))
    for printed, is_translated in (("1\n", True), ("", False)):
        done = subprocess.CompletedProcess[str]([], 0, printed, "")
        monkeypatch.setattr("subprocess.run", lambda *_, done=done, **__: done)
        found = this_machine()
        assert (found.macos, found.is_translated) == (15, is_translated)


def test_the_file_runs_by_itself_before_anything_is_installed() -> None:
    file = Path(machine.__file__)
    done = subprocess.run([sys.executable, "-S", "-I", str(file)], capture_output=True, text=True)
    assert done.returncode == (this_machine().refusal() is not None), done.stderr
