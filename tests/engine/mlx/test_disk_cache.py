"""Prompt checkpoints in a folder: what is read is what was written, and nothing in a folder can do harm."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from engine_models import write_model
from mlx_lm import load
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
)

from mlx_backend.engine.mlx import disk_cache
from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints, StoredCheckpoint, model_fingerprint
from mlx_backend.engine.mlx.kv_cache import as_bytes
from mlx_backend.errors import EngineRefused

WINDOW = 32
SOON = 60  # seconds; nothing takes that long
PROMPT = [(at * 7) % 300 + 9 for at in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return load(str(folder))[0]


class Stores:
    """Opens stores on one folder; all of them are closed at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened: list[DiskCheckpoints] = []

    def __call__(self, *, max_bytes: int = 1 << 30, model: str = "ours") -> DiskCheckpoints:
        return self.of(DiskCheckpoints, max_bytes=max_bytes, model=model)

    def of[Kind: DiskCheckpoints](
        self, kind: type[Kind], *, max_bytes: int = 1 << 30, model: str = "ours"
    ) -> Kind:
        store = kind(self._folder, max_bytes=max_bytes, fingerprint=model)
        self._opened.append(store)
        store.open()
        return store

    def close(self) -> None:
        for store in self._opened:
            if isinstance(store, Gated):
                store.gate.set()
            store.close()


class Gated(DiskCheckpoints):
    """Its writer waits, in the middle of a file, until the gate is open."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def _check_abandoned(self) -> None:
        self.begun.set()
        assert self.gate.wait(SOON)
        super()._check_abandoned()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path / "kept")
    yield stores
    stores.close()


def read_in(network: Any, tokens: list[int], *, one_by_one: bool = False) -> list[Any]:
    layers: list[Any] = make_prompt_cache(network)
    for part in [[token] for token in tokens] if one_by_one else [tokens]:
        network(mx.array([part]), cache=layers)
        mx.eval([layer.state for layer in layers])
    return layers


def continuation(network: Any, layers: list[Any], first: int = 9) -> list[int]:
    said = [first]
    for _ in range(WINDOW + 8):  # round the ring once
        logits = network(mx.array([said[-1:]]), cache=layers)
        said.append(int(mx.argmax(logits[0, -1])))
    return said


def small(tokens: list[int], value: float = 1.0, width: int = 64) -> list[Any]:
    """Return layers that hold the tokens, for tests that ask nothing of a model."""
    layer = KVCache()
    layer.update_and_fetch(
        mx.full((1, 2, len(tokens), width), value), mx.full((1, 2, len(tokens), width), -value)
    )
    mx.eval(layer.state)
    return [layer]


def files(store: DiskCheckpoints) -> list[Path]:
    return sorted(store.folder.iterdir())


def stored_in(store: DiskCheckpoints, tokens: list[int]) -> StoredCheckpoint:
    stored = store.find_longest(tokens)
    assert stored is not None
    assert stored.length == len(tokens)
    return stored


def put(store: DiskCheckpoints, tokens: list[int], layers: list[Any] | None = None) -> Path:
    store.write(tokens, layers or small(tokens))
    store.flush()
    return stored_in(store, tokens).path


def used(path: Path, when: int) -> None:
    os.utime(path, (when, when))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- what is read is what was written -----------------------------------------------------------------------


@pytest.mark.parametrize("one_by_one", [False, True], ids=["in one chunk", "token by token"])
@pytest.mark.parametrize("length", [5, WINDOW, WINDOW + 1, 90])
def test_a_prompt_goes_on_as_if_the_server_had_not_been_restarted(
    store: Stores, network: Any, length: int, one_by_one: bool
) -> None:
    prompt = PROMPT[:length]
    first = store()
    put(first, prompt, read_in(network, prompt, one_by_one=one_by_one))
    first.close()
    second = store()
    layers = second.read(stored_in(second, prompt))
    assert layers is not None
    expected = continuation(network, read_in(network, prompt, one_by_one=one_by_one))
    assert continuation(network, layers) == expected


def test_views_of_longer_caches_are_stored_as_what_they_show(store: Stores, network: Any) -> None:
    layers, longer = read_in(network, PROMPT[:40]), read_in(network, PROMPT)
    for mine, theirs in zip(layers, longer, strict=True):
        if type(mine) is KVCache:
            mine.keys, mine.values = theirs.keys[..., :40, :], theirs.values[..., :40, :]
    here = store()
    put(here, PROMPT[:40], layers)
    del layers, longer
    read = here.read(stored_in(here, PROMPT[:40]))
    assert read is not None
    assert continuation(network, read) == continuation(network, read_in(network, PROMPT[:40]))


def test_every_kind_of_layer_and_of_number_comes_back(store: Stores) -> None:
    tokens = [1, 2, 3, 4]
    keys = mx.random.normal((1, 2, 4, 64))
    layers: list[Any] = []
    for kind in (mx.float32, mx.float16, mx.bfloat16):
        layers.append(KVCache())
        layers[-1].update_and_fetch(keys.astype(kind), -keys.astype(kind))
        layers.append(RotatingKVCache(max_size=3, keep=1))
        layers[-1].update_and_fetch(keys.astype(kind), -keys.astype(kind))
    layers.append(QuantizedKVCache(group_size=32, bits=8))
    layers[-1].update_and_fetch(keys, -keys)
    layers.append(ArraysCache(3))
    layers[-1][1] = keys
    layers.append(CacheList(layers[0], layers[1]))
    here = store()
    put(here, tokens, layers)
    read = here.read(stored_in(here, tokens))
    assert read is not None
    assert [type(layer) for layer in read] == [type(layer) for layer in layers]
    for mine, theirs in zip(flat(layers), flat(read), strict=True):
        if isinstance(mine, mx.array):
            assert isinstance(theirs, mx.array)
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert mx.array_equal(mine, theirs)
        else:
            assert mine == theirs


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [each for item in value for each in flat(item)]
    return flat(value.state) if hasattr(value, "state") else [value]


class OurRotatingKVCache(RotatingKVCache):  # type: ignore[misc]
    """A cache that mlx-lm does not know, with nothing that it would have to."""


def test_a_layer_of_a_class_of_our_own_comes_back_as_the_one_it_extends(
    store: Stores,
) -> None:
    layer = OurRotatingKVCache(max_size=8)
    layer.update_and_fetch(mx.ones((1, 1, 2, 8)), mx.ones((1, 1, 2, 8)))
    here = store()
    put(here, [1, 2], [layer])
    read = here.read(stored_in(here, [1, 2]))
    assert read is not None
    assert type(read[0]) is RotatingKVCache


def test_mlx_lm_reads_our_files(store: Stores, network: Any) -> None:
    path = put(store(), PROMPT, read_in(network, PROMPT))
    layers, about = load_prompt_cache(str(path), return_metadata=True)
    assert continuation(network, layers) == continuation(network, read_in(network, PROMPT))
    assert about["fingerprint"] == "ours"


def test_what_is_stored_is_the_moment_of_writing_although_generating_goes_on(
    store: Stores, network: Any
) -> None:
    here = store.of(Gated)
    layers = read_in(network, PROMPT, one_by_one=True)  # so that the ring is written to in place
    here.write(PROMPT, layers)
    assert here.begun.wait(SOON)
    expected = continuation(network, layers)  # writes to the layers that have been handed over
    here.gate.set()
    here.flush()
    read = here.read(stored_in(here, PROMPT))
    assert read is not None
    assert continuation(network, read) == expected


# -- finding ------------------------------------------------------------------------------------------------


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


def test_what_is_about_to_be_written_need_not_be_written_again(store: Stores) -> None:
    here = store.of(Gated)
    here.write([1], small([1]))
    assert here.begun.wait(SOON)
    here.write([2], small([2]))
    assert here.has([1])
    assert here.has([2])
    assert here.find_longest([1, 2]) is None, "there is nothing to read yet"
    here.gate.set()


def test_the_oldest_that_waits_gives_way_when_too_many_do(store: Stores) -> None:
    here = store.of(Gated)
    here.write([1], small([1]))
    assert here.begun.wait(SOON)
    for token in range(2, 2 + disk_cache.MAX_WAITING + 2):
        here.write([token], small([token]))
    assert not here.has([2])
    assert not here.has([3])
    here.gate.set()
    here.flush()
    assert len(here) == 1 + disk_cache.MAX_WAITING


def test_what_waits_takes_no_more_memory_than_one_or_a_limit(
    store: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = store.of(Gated)
    here.write([1], small([1]))
    assert here.begun.wait(SOON)
    here.write([2], small([2]))
    monkeypatch.setattr(disk_cache, "MAX_WAITING_BYTES", 2 * here._waiting[as_bytes([2])].size)
    for token in (3, 4):
        here.write([token], small([token]))
    assert [here.has([token]) for token in (2, 3, 4)] == [False, True, True]
    monkeypatch.setattr(disk_cache, "MAX_WAITING_BYTES", 1)
    here.write([5], small([5]))
    here.gate.set()
    here.flush()
    assert [here.has([token]) for token in (1, 3, 4, 5)] == [True, False, False, True]


# -- files that are not what they should be -----------------------------------------------------------------


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "junk": lambda content: b"junk" * 100,
    "deep junk": lambda content: (100_000).to_bytes(8, "little") + b"[" * 100_000,
    "zeros": lambda content: bytes(len(content)),
    "a header alone": lambda content: (2).to_bytes(8, "little") + b"{}",
    "cut in the header": lambda content: content[:100],
    "cut in the arrays": lambda content: content[:-1],
    "too long": lambda content: content + b"\0",
}
DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "an array": lambda content: flipped(content, len(content) - 5),
    "a shape": lambda content: content.replace(b'"shape":[1,2,', b'"shape":[2,1,', 1),
    "a type": lambda content: content.replace(b'"F32"', b'"I32"', 1),
    "a class": lambda content: content.replace(b'"KVCache"', b'"OSError"', 1),
    "the checksum": lambda content: content.replace(b'checksum":"', b'checksum":"0', 1)[: len(content)],
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_file_that_cannot_be_understood_is_dropped_when_a_server_starts(
    store: Stores, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = store()
    path = put(first, PROMPT)
    put(first, [1, 2])
    path.write_bytes(SPOILED[kind](path.read_bytes()))
    second = store()
    assert len(second) == 1
    assert second.find_longest(PROMPT) is None
    assert not path.exists()
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0]


@pytest.mark.parametrize("kind", SPOILED | DAMAGED)
def test_a_file_that_is_spoiled_when_it_is_needed_is_as_if_it_had_never_been(
    store: Stores, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = store()
    path = put(here, PROMPT)
    content = path.read_bytes()
    path.write_bytes((SPOILED | DAMAGED)[kind](content))
    assert path.read_bytes() != content
    assert here.read(stored_in(here, PROMPT)) is None
    assert not path.exists()
    assert here.find_longest(PROMPT) is None
    assert not here.has(PROMPT)
    assert len(warnings(caplog)) == 1
    assert "damaged" in warnings(caplog)[0]
    put(here, PROMPT)
    assert here.read(stored_in(here, PROMPT)) is not None, "it can be written again"


def test_no_bit_of_a_file_can_be_wrong_unnoticed(store: Stores) -> None:
    here = store()
    path = put(here, [1, 2, 3], small([1, 2, 3], width=2))
    content = path.read_bytes()
    stored = stored_in(here, [1, 2, 3])
    for at in range(len(content)):
        path.write_bytes(flipped(content, at))
        assert here.read(stored) is None, f"byte {at}"


def test_layers_that_do_not_hold_the_tokens_are_not_taken(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    here = store()
    put(here, [1, 2, 3], small([1, 2]))
    assert here.read(stored_in(here, [1, 2, 3])) is None
    assert "do not hold 3 tokens" in warnings(caplog)[0]


def test_a_file_that_has_vanished_is_simply_not_there(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    here = store()
    put(here, [1, 2]).unlink()
    assert here.read(stored_in(here, [1, 2])) is None
    assert here.find_longest([1, 2]) is None
    assert not warnings(caplog)


def test_a_file_that_vanishes_while_it_is_read_is_not_there_either(
    store: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = store()
    path = put(here, [1, 2])

    def load_too_late(name: str) -> Any:
        path.unlink()  # as another server may, when the file has been checked
        return load_prompt_cache(name)

    monkeypatch.setattr(mlx_lm_caches, "load_prompt_cache", load_too_late)
    assert here.read(stored_in(here, [1, 2])) is None
    assert not here.has([1, 2])
    assert not warnings(caplog)


def test_tokens_are_compared_and_not_only_the_name_made_from_them(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    first = store()
    ours, theirs = put(first, [1, 2]), put(first, [7, 8])
    theirs.replace(ours)  # as if both had one name, and the other had been written last
    second = store()
    assert second.find_longest([1, 2]) is None
    assert second.find_longest([7, 8]) is not None
    assert first.read(stored_in(first, [1, 2])) is None
    assert "other tokens" in warnings(caplog)[0]


def test_a_layer_that_cannot_be_stored_costs_a_warning_and_nothing_else(
    store: Stores, caplog: pytest.LogCaptureFixture
) -> None:
    class Strange:
        state = (1, 2)

    here = store()
    for _ in range(3):
        here.write([1, 2], [Strange()])
    here.flush()
    assert len(here) == 0
    assert len(warnings(caplog)) == 1
    assert "Strange is no cache layer" in warnings(caplog)[0]


# -- other models -------------------------------------------------------------------------------------------


def test_a_model_never_sees_what_another_has_stored(store: Stores) -> None:
    mine, theirs = put(store(), [1, 2]), put(store(model="theirs"), [1, 2])
    assert mine != theirs
    third = store(model="a third")
    assert third.find_longest([1, 2]) is None
    assert mine.exists()
    assert theirs.exists()
    theirs.replace(mine)  # even under our name
    assert store().find_longest([1, 2]) is None


def test_the_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    prints = [model_fingerprint(folder)]
    assert model_fingerprint(folder) == prints[0]
    prints.append(model_fingerprint(folder, "an adapter"))
    weights = folder / "model.safetensors"
    content, status = weights.read_bytes(), weights.stat()
    weights.write_bytes(flipped(content, len(content) - 1))  # other weights of the same shapes
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000))
    prints.append(model_fingerprint(folder))
    config = folder / "config.json"
    config.write_text(config.read_text().replace("10000", "20000"))
    prints.append(model_fingerprint(folder))
    (folder / "modelling.py").write_text("pass")
    prints.append(model_fingerprint(folder))
    (folder / "model-2.safetensors").write_bytes(content)
    prints.append(model_fingerprint(folder))
    assert len(set(prints)) == len(prints)
    (folder / "chat_template.jinja").write_text("another")
    assert model_fingerprint(folder) == prints[-1], "what the text looks like is in the tokens"


# -- the limit ----------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_goes_first_and_reading_is_use(
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


def test_what_other_models_have_stored_counts_and_goes_by_age_too(
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


def test_what_alone_is_larger_than_the_limit_is_not_written(store: Stores) -> None:
    size = put(store(), [1]).stat().st_size
    here = store(max_bytes=size)
    here.write(PROMPT, small(PROMPT))
    here.flush()
    assert not here.has(PROMPT)
    assert here.has([1]), "nothing had to go for it"


def test_a_limit_of_nothing_keeps_nothing(store: Stores) -> None:
    path = put(store(), [1])
    here = store(max_bytes=0)
    assert not path.exists()
    here.write([1], small([1]))
    here.flush()
    assert files(here) == []


# -- the folder ---------------------------------------------------------------------------------------------


def test_nobody_else_may_read_what_is_stored(store: Stores) -> None:
    before = os.umask(0)
    try:
        here = store()
        path = put(here, [1])
    finally:
        os.umask(before)
    assert here.folder.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_files_in_the_folder_are_none_of_our_business(tmp_path: Path, store: Stores) -> None:
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
    third = store()  # and one more starts meanwhile
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


def test_what_a_server_has_removed_another_does_without(
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


# -- in a process of its own --------------------------------------------------------------------------------

START = """
import logging, os, resource, sys, threading
from pathlib import Path
import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_backend.engine.mlx.disk_cache import DiskCheckpoints

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


def test_what_a_crash_leaves_is_cleaned_up_when_nobody_can_still_be_writing_it(
    tmp_path: Path, store: Stores
) -> None:
    done = program(
        tmp_path / "kept",
        """
store._check_abandoned = lambda: os._exit(9)
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
    "never used": "",
    "busy": "for first in range(4): store.write([first] * 1024, large(64))",
    "in the middle of a file": """
begun = threading.Event()
store._check_abandoned = lambda: (begun.set(), threading.Event().wait())
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
def test_a_program_can_end_whatever_the_writer_does(tmp_path: Path, ending: str) -> None:
    done = program(tmp_path, ENDINGS[ending] + "\nsys.exit(3)")
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stderr == ""


class Slow(DiskCheckpoints):
    """Its writer does not get anywhere until it is told to give up."""

    def _check_abandoned(self) -> None:
        while not self._abandoned:
            pass
        super()._check_abandoned()


def test_closing_does_not_wait_for_ever_and_leaves_no_partial_file(
    store: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = store.of(Slow)
    here.write([1], small([1]))
    here.write([2], small([2]))
    monkeypatch.setattr(disk_cache, "MAX_CLOSE_SECONDS", 0.01)
    closing = threading.Thread(target=here.close)
    closing.start()
    closing.join(SOON)
    assert not closing.is_alive()
    here.flush()
    assert files(here) == []
    assert not warnings(caplog)


def test_it_can_be_opened_again_after_it_was_closed(store: Stores) -> None:
    here = store()
    put(here, [1])
    here.close()
    here.open()
    put(here, [2])
    assert here.read(stored_in(here, [1])) is not None
