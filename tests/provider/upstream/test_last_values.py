"""Values that outlive the process: whole or not at all, bounded, and never in the way of anything."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from dify_mlx_provider.servers.base import ServedModel, ServerInfo
from dify_mlx_provider.upstream.cache import LastValues
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Note:
    text: str


def notes(folder: Path, **bounds: int) -> LastValues[Note]:
    """A process's values; a second one stands for the next process."""
    values = LastValues(Note, **bounds)
    values.keep_in(folder)
    return values


def test_a_value_outlives_the_process(tmp_path: Path) -> None:
    notes(tmp_path / "new" / "folder").set("a", Note("one"))
    later = notes(tmp_path / "new" / "folder")
    assert later.get("a") == Note("one")
    assert later.get("b") is None
    later.set("a", Note("two"))
    assert notes(tmp_path / "new" / "folder").get("a") == Note("two")


def test_what_another_process_set_since_is_seen(tmp_path: Path) -> None:
    one, other = notes(tmp_path), notes(tmp_path)
    one.set("a", Note("one"))
    assert other.get("a") == Note("one")
    other.set("a", Note("two"))
    assert one.get("a") == Note("two")


def test_a_description_of_a_server_is_the_same_afterwards(tmp_path: Path) -> None:
    model = ServedModel(
        name="m",
        type="llm",
        context_size=4_096,
        capabilities=frozenset({"tools"}),
        efforts=("low", "high"),
        default_effort="low",
        sampling={"temperature": 0.5, "top_k": 20},
    )
    known = ServerInfo(kind=ServerKind.VLLM, version="1", models=(model, ServedModel(name="n")), reached=True)
    values = [LastValues(ServerInfo), LastValues(ServerInfo)]
    for each in values:
        each.keep_in(tmp_path)
    values[0].set("a", known)
    assert values[1].get("a") == known


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"text": 3}',
        b'{"other": "x"}',
        b"[" * 100_000,
        b'{"text": "x"}' + b" " * 99_999,
    ],
)
def test_a_spoilt_file_is_no_value_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    notes(tmp_path).set("a", Note("one"))
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    later = notes(tmp_path, max_file_bytes=50_000)
    assert later.get("a") is None
    later.set("a", Note("two"))
    assert notes(tmp_path).get("a") == Note("two")


def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_no_value(tmp_path: Path) -> None:
    notes(tmp_path).set("a", Note("one"))
    (file,) = tmp_path.iterdir()
    for make in (os.mkfifo, os.mkdir):
        file.unlink()
        make(file)
        assert notes(tmp_path).get("a") is None


def test_without_a_place_to_write_values_live_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    for values in (LastValues(Note), notes(tmp_path / "file"), notes(tmp_path / "file" / "below")):
        values.set("a", Note("one"))
        assert values.get("a") == Note("one")


def test_a_value_that_cannot_be_written_lives_in_memory(tmp_path: Path) -> None:
    values = notes(tmp_path, max_file_bytes=100)
    for text in ("x" * 101, "half a character: \ud800"):
        values.set("a", Note(text))
        assert values.get("a") == Note(text)
    assert list(tmp_path.iterdir()) == []


def test_files_are_bounded_in_number_and_the_oldest_go_first(tmp_path: Path) -> None:
    values = notes(tmp_path, max_files=3)
    for number in range(6):
        values.set(str(number), Note(str(number)))
        for file in tmp_path.iterdir():  # as if a day had passed
            os.utime(file, (file.stat().st_mtime - 86_400,) * 2)
    assert len(list(tmp_path.iterdir())) == 3
    later = notes(tmp_path)
    assert [later.get(str(number)) is not None for number in range(6)] == [False] * 3 + [True] * 3


def test_a_value_that_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    values = notes(tmp_path)
    values.set("a", Note("one"))
    (file,) = tmp_path.iterdir()
    file.unlink()
    values.set("a", Note("one"))
    assert list(tmp_path.iterdir()) == []


def test_a_key_is_not_readable_in_the_folder(tmp_path: Path) -> None:
    notes(tmp_path).set("http://mac:8080/v1 secret-key", Note("one"))
    (file,) = tmp_path.iterdir()
    assert "mac" not in file.name
    assert b"secret" not in file.read_bytes()


WRITE_MANY = """
import sys
from pathlib import Path
from dify_mlx_provider.upstream.cache import LastValues

values = LastValues(dict)
values.keep_in(Path(sys.argv[1]))
for number in range(300):
    values.set("shared", {sys.argv[2]: "x" * number * 50})
    values.set(sys.argv[2], {"number": number})
    found = LastValues(dict)
    found.keep_in(Path(sys.argv[1]))
    assert found.get("shared"), "half a file was read"
"""


def test_several_processes_may_use_one_folder(tmp_path: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", WRITE_MANY, tmp_path, name], stderr=subprocess.PIPE)
        for name in "abc"
    ]
    for process in running:
        assert process.communicate()[1] == b""
        assert process.returncode == 0
    values = LastValues(dict)
    values.keep_in(tmp_path)
    assert [values.get(name) for name in "abc"] == [{"number": 299}] * 3
    assert len(list(tmp_path.iterdir())) == 4
