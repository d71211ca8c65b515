"""Kernels that MLX compiles for an NVIDIA GPU are kept in a folder of the user's own, and only whole ones."""

import os
import stat
from importlib.metadata import version
from pathlib import Path

import pytest

from mlx_backend.device import mlx
from mlx_backend.device.mlx import KERNEL_FOLDER_VARIABLE, keep_compiled_kernels


@pytest.fixture(autouse=True)
def an_nvidia_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mlx, "gpu_name", lambda: "NVIDIA H100 80GB/HBM3")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(KERNEL_FOLDER_VARIABLE, "")  # so that it is undone afterwards
    monkeypatch.delenv(KERNEL_FOLDER_VARIABLE)


def test_the_folder_is_the_users_own_and_names_mlx_and_the_gpu(tmp_path: Path) -> None:
    keep_compiled_kernels()
    folder = tmp_path / "mlx-backend" / "cuda" / f"mlx-{version('mlx')}-NVIDIA-H100-80GB-HBM3"
    assert os.environ[KERNEL_FOLDER_VARIABLE] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keep_compiled_kernels()
    assert os.environ[KERNEL_FOLDER_VARIABLE] == str(folder)


def test_it_is_below_the_home_folder_if_no_other_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    keep_compiled_kernels()
    assert (
        Path(os.environ[KERNEL_FOLDER_VARIABLE]).parent
        == tmp_path / "home" / ".cache" / "mlx-backend" / "cuda"
    )


def test_a_folder_that_somebody_has_named_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(KERNEL_FOLDER_VARIABLE, "/elsewhere")
    keep_compiled_kernels()
    assert os.environ[KERNEL_FOLDER_VARIABLE] == "/elsewhere"
    assert not list(tmp_path.iterdir())


def test_nothing_is_done_on_other_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mlx, "gpu_name", str)
    keep_compiled_kernels()
    assert KERNEL_FOLDER_VARIABLE not in os.environ
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_leaves_mlx_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_compiled_kernels()
    assert KERNEL_FOLDER_VARIABLE not in os.environ


def test_a_kernel_whose_writing_was_cut_off_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_compiled_kernels()
    folder = Path(os.environ[KERNEL_FOLDER_VARIABLE])
    for name in ("whole.ptx", "whole.txt", "whole.cu", "killed.ptx", "full.ptx", "full.txt"):
        (folder / name).write_text("something")
    (folder / "full.cu").touch()  # no space was left for its source
    monkeypatch.delenv(KERNEL_FOLDER_VARIABLE)
    keep_compiled_kernels()
    assert [each.name for each in folder.glob("*.ptx")] == ["whole.ptx"]
