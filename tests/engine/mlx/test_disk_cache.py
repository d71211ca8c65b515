"""The folder of prompt checkpoints: what is found, what is evicted, and that nothing in the folder can do harm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from disk_stores import PROMPT, SOON, Gated, Stores, files, put, small, stored_in, used, warnings

from mlx_backend.engine.mlx import disk_cache
from mlx_backend.engine.mlx.kv_cache import as_bytes
from mlx_backend.errors import EngineRefused

# -- finding -------------------------------------------------------------------------------------------------


def test_the_longest_stored_prefix_is_found_after_a_restart(store: Stores) -> None:
    first = store()
    for tokens in ([1], [1, 2], [1, 2, 3, 4], [1, 2, 9]):
        put(first, tokens)
    first.close()
    second = store()
    assert len(second) == 4

    def found(tokens: list[int], beyond: int = 0) -> int | None:
        stored = second.find_longest(tokens, beyond=beyond)
        return stored.length if stored is not None else None

    assert found([1, 2, 3]) == 2
    assert found([1, 2, 3, 4]) == 4
    assert found([1, 2, 3, 4, 5, 6]) == 4
    assert found([1, 2, 3, 5], beyond=1) == 2
    assert found([1, 2, 3, 5], beyond=2) is None
    assert found([2, 1]) is None
    assert found([]) is None
    assert second.has([1, 2])
    assert not second.has([1, 2, 3])


def test_a_queued_checkpoint_is_not_queued_again(store: Stores) -> None:
    here = store.of(Gated)
    here.write([1], small([1]))
    assert here.begun.wait(SOON)
    here.write([2], small([2]))
    assert here.has([1])
    assert here.has([2])
    assert here.find_longest([1, 2]) is None, "there is nothing to read yet"
    here.gate.set()


def test_the_oldest_of_the_queue_is_dropped_when_it_is_full(store: Stores) -> None:
    here = store.of(Gated)
    here.write([1], small([1]))
    assert here.begun.wait(SOON)
    for token in range(2, 2 + disk_cache.MAX_QUEUED + 2):
        here.write([token], small([token]))
    assert not here.has([2])
    assert not here.has([3])
    here.gate.set()
    here.flush()
    assert len(here) == 1 + disk_cache.MAX_QUEUED


def test_the_queue_holds_one_checkpoint_or_as_many_as_fit_into_its_memory(
    store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = store.of(Gated)
    here.write([1], small([1]))
    assert here.begun.wait(SOON)
    here.write([2], small([2]))
    monkeypatch.setattr(disk_cache, "MAX_QUEUED_BYTES", 2 * here._queued[as_bytes([2])].size)
    for token in (3, 4):
        here.write([token], small([token]))
    assert [here.has([token]) for token in (2, 3, 4)] == [False, True, True]
    monkeypatch.setattr(disk_cache, "MAX_QUEUED_BYTES", 1)
    here.write([5], small([5]))
    here.gate.set()
    here.flush()
    assert [here.has([token]) for token in (1, 3, 4, 5)] == [True, False, False, True]


# -- the limit -----------------------------------------------------------------------------------------------


def test_the_least_recently_used_is_removed_first_and_reading_is_use(
    store: Stores,
) -> None:
    first = store()
    paths = [put(first, [token]) for token in range(4)]
    for when, path in enumerate(paths):
        used(path, 1_000 + when)
    assert first.read(stored_in(first, [0])) is not None
    first.close()
    size = paths[0].stat().st_size
    second = store(max_bytes=3 * size)
    assert not second.has([1])
    assert len(second) == 3
    put(second, [4])
    assert not second.has([2])
    assert second.has([0]), "it had been read before the restart"
    assert sum(path.stat().st_size for path in files(second)) <= 3 * size
    assert len(files(second)) == len(second) == 3


def test_other_models_checkpoints_count_and_are_removed_by_age_too(
    store: Stores,
) -> None:
    old, new = (put(store(model="theirs"), [token]) for token in (1, 2))
    used(old, 1_000)
    used(new, 3_000)
    size = new.stat().st_size
    here = store(max_bytes=int(2.5 * size))
    assert old.exists()
    put(here, [3])
    assert not old.exists()
    assert new.exists()
    assert here.has([3])


def test_a_checkpoint_larger_than_the_limit_is_not_written(store: Stores) -> None:
    size = put(store(), [1]).stat().st_size
    here = store(max_bytes=size)
    here.write(PROMPT, small(PROMPT))
    here.flush()
    assert not here.has(PROMPT)
    assert here.has([1]), "nothing had to go for it"


def test_a_limit_of_zero_stores_nothing(store: Stores) -> None:
    path = put(store(), [1])
    here = store(max_bytes=0)
    assert not path.exists()
    here.write([1], small([1]))
    here.flush()
    assert files(here) == []


# -- the folder ----------------------------------------------------------------------------------------------


def test_other_users_cannot_read_the_files(store: Stores) -> None:
    before = os.umask(0)
    try:
        here = store()
        path = put(here, [1])
    finally:
        os.umask(before)
    assert here.folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path, store: Stores) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    names = ["model.safetensors", "prompt-cache.safetensors", "notes.partial", ".partial", "prompt-.partial"]
    for name in names:
        (folder / name).write_bytes(b"precious")
        used(folder / name, 0)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    link = folder / f"prompt-{'0' * 32}.partial"
    link.symlink_to(elsewhere)
    os.utime(link, (0, 0), follow_symlinks=False)
    put(store(), [1])
    here = store(max_bytes=1)
    assert len(here) == 0
    assert [path.read_bytes() for path in files(here)] == [b"precious"] * (len(names) + 1)


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path, store: Stores) -> None:
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(
        EngineRefused, match=r"kept cannot hold prompt checkpoints: File exists. Name a folder"
    ):
        store()


def test_two_servers_on_one_folder_do_not_harm_each_other(store: Stores) -> None:
    one, other = store.of(Gated), store.of(Gated)
    for each in (one, other):
        each.write([1, 2], small([1, 2]))
    assert one.begun.wait(SOON)
    assert other.begun.wait(SOON)  # both are in the middle of the same checkpoint
    assert len(files(one)) == 2
    third = store()  # a third starts meanwhile
    assert len(third) == 0
    for each in (one, other):
        each.gate.set()
        each.flush()
        assert each.read(stored_in(each, [1, 2])) is not None
    assert len(files(one)) == 1
    put(other, [3])
    assert one.find_longest([3]) is None
    put(one, [4])
    assert one.read(stored_in(one, [3])) is not None, "whoever writes sees what others have written"


def test_a_file_removed_by_one_server_is_missing_for_another_without_harm(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    one = store()
    put(one, [1])
    old = stored_in(one, [1])
    used(old.path, 1_000)
    size = old.path.stat().st_size
    put(store(max_bytes=size), [2])
    assert not old.path.exists()
    assert one.read(old) is None
    put(one, [1])
    assert one.read(stored_in(one, [1])) is not None
    assert not warnings(caplog)


# -- in a process of its own ---------------------------------------------------------------------------------

START = """
import logging, os, resource, sys, threading
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_backend.engine.mlx.disk_cache import Checkpoint, DiskCheckpoints

def large(megabytes, length=1024):
    layer = KVCache()
    heads = megabytes * 512 // length
    layer.update_and_fetch(mx.ones((1, heads, length, 256)), mx.ones((1, heads, length, 256)))
    mx.eval(layer.state)
    return [layer]

logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
store = DiskCheckpoints(Path(sys.argv[1]), max_bytes=1 << 30, fingerprint="ours")
store.open()
"""


def program(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START + code, str(folder)], capture_output=True, text=True, timeout=120
    )


def test_a_full_disk_costs_one_warning_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = program(
        tmp_path,
        """
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
for _ in range(2):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 << 20, hard))
    for first in range(3):
        store.write([first] * 1024, large(16))
        store.flush()
        assert not store.has([first] * 1024)
        assert os.listdir(sys.argv[1]) == []
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    store.write([9] * 1024, large(16))
    store.flush()
    stored = store.find_longest([9] * 1024)
    assert store.read(stored) is not None
    stored.path.unlink()
    assert store.read(stored) is None
store.close()
""",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("WARNING") == 2, "one for each time it became full"
    assert "cannot be written" in done.stdout
    assert "File too large" in done.stdout


def test_a_crashed_servers_partial_file_is_removed_once_it_is_old(tmp_path: Path, store: Stores) -> None:
    done = program(
        tmp_path / "kept",
        """
Checkpoint.write_to = lambda *_: os._exit(9)
store.write([1] * 1024, large(1))
store.flush()
""",
    )
    assert done.returncode == 9, done.stdout + done.stderr
    [left] = (tmp_path / "kept").iterdir()
    assert left.suffix == ".partial"
    assert files(store()) == [left], "it might be another server's that is being written"
    used(left, int(left.stat().st_mtime - disk_cache.LEFTOVER_SECONDS - 1))
    assert files(store()) == []


ENDINGS = {
    "idle": "store.write([1] * 1024, large(1)); store.flush()",
    "busy": "for first in range(4): store.write([first] * 1024, large(64))",
    "in the middle of a file": """
begun = threading.Event()
Checkpoint.write_to = lambda *_: (begun.set(), threading.Event().wait())
store.write([1] * 1024, large(1))
begun.wait()
""",
    "closed while it is busy": """
for first in range(3): store.write([first] * 1024, large(16))
store.close()
assert len(os.listdir(sys.argv[1])) == 3 and len(store) == 3, os.listdir(sys.argv[1])
""",
    "closed twice": "store.close(); store.close(); store.write([1] * 1024, large(1)); store.flush()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_exits_cleanly_whatever_the_writer_does(tmp_path: Path, ending: str) -> None:
    done = program(tmp_path, ENDINGS[ending] + "\nsys.exit(3)")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr == ""


def test_closing_gives_up_after_a_while_and_what_waits_is_not_written(
    store: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = store.of(Gated)
    here.write([1], small([1]))
    assert here.begun.wait(SOON)
    here.write([2], small([2]))
    monkeypatch.setattr(disk_cache, "MAX_CLOSE_SECONDS", 0.01)
    here.close()
    here.gate.set()
    here.flush()
    assert [stored.tokens for stored in here._stored.values()] == [as_bytes([1])]
    assert len(files(here)) == 1
    assert not warnings(caplog)


def test_a_closed_cache_can_be_opened_again(store: Stores) -> None:
    here = store()
    put(here, [1])
    here.close()
    here.open()
    put(here, [2])
    assert here.read(stored_in(here, [1])) is not None
