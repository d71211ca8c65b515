"""Kernels are compiled in processes of their own, whose results are on disk for the next start."""

import threading
from pathlib import Path

import pytest

from mlx_backend.layers import kernel_compiler
from mlx_backend.layers.kernel_compiler import KernelCompiler, KernelJob

EXPERTS = KernelJob(
    operation="many", inputs=128, outputs=192, experts=4, quantization=("mxfp4", 4, 32), rows=64
)
UNKNOWN = KernelJob(operation="few", inputs=128, outputs=192, quantization=("no such", 4, 32), rows=8)


def compiled(folder: Path, *jobs: KernelJob) -> KernelCompiler:
    done = threading.Event()
    compiler = KernelCompiler(dict.fromkeys(jobs, ()), folder, done.set)
    assert compiler.is_done or done.wait(60)
    compiler.close()
    return compiler


def test_a_process_does_a_job_and_the_next_start_finds_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = {EXPERTS: {"is_right": True, "by_kernel": False}}
    assert compiled(tmp_path, EXPERTS, EXPERTS, UNKNOWN).found == expected | {UNKNOWN: None}
    assert [each.name for each in tmp_path.iterdir()] == [EXPERTS.name], "a process's own folder is gone"
    assert "could not be compiled" in caplog.text
    monkeypatch.setattr("subprocess.Popen", None)
    assert compiled(tmp_path, EXPERTS).found == expected


def test_what_is_compiled_appears_whole_and_a_kernel_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX looks for a .ptx file, and then for the others of that name."""
    own, moved = tmp_path / "own", list[str]()
    (own / "long name").mkdir(parents=True)
    for name in ("a.ptx", "a.txt", "long name/b.cu", "long name/b.ptx"):
        (own / name).write_text(name)
    replace = Path.replace

    def noted(path: Path, target: Path) -> Path:
        moved.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    kernel_compiler.move_kernels(own, tmp_path)
    assert {each[-4:] for each in moved[:2]} == {".txt", "b.cu"}
    assert (tmp_path / "long name" / "b.ptx").read_text() == "long name/b.ptx"


def test_closing_ends_the_processes(tmp_path: Path) -> None:
    started = threading.Event()
    compiler = KernelCompiler({EXPERTS: ()}, tmp_path)
    while not compiler._running:
        started.wait(0.01)
    [process] = compiler._running
    compiler.close()
    assert process.wait(60) != 0
    assert not compiler.found.get(EXPERTS)
