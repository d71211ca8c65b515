"""The format of a prompt checkpoint: what is read is what was written, and no damaged file is ever used."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from disk_stores import PROMPT, SOON, Gated, Stores, put, small, stored_in, warnings
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

from mlx_backend.engine.mlx.disk_cache import model_fingerprint
from mlx_backend.engine.mlx.kv_cache import compact_copies
from mlx_backend.engine.mlx.mlx_lm_patches.attention import Quantization
from mlx_backend.engine.mlx.mlx_lm_patches.kv_caches import GrowingKVCache, SharedArrays
from mlx_backend.models.folders import weight_files

WINDOW = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), sliding_window=WINDOW)


@pytest.fixture(scope="module")
def network(folder: Path) -> Any:
    return load(str(folder))[0]


def read_in(network: Any, tokens: list[int], *, one_by_one: bool = False) -> list[Any]:
    layers: list[Any] = make_prompt_cache(network)
    for part in [[token] for token in tokens] if one_by_one else [tokens]:
        network(mx.array([part]), cache=layers)
        mx.eval([layer.state for layer in layers])
    return layers


def continuation(network: Any, layers: list[Any], first: int = 9) -> list[int]:
    tokens = [first]
    for _ in range(WINDOW + 8):  # once around the window
        logits = network(mx.array([tokens[-1:]]), cache=layers)
        tokens.append(int(mx.argmax(logits[0, -1])))
    return tokens


# -- what is read is what was written ------------------------------------------------------------------------


def test_a_layer_that_fills_no_cache_is_read_as_it_was_written(store: Stores) -> None:
    full = KVCache()
    full.update_and_fetch(mx.zeros((1, 2, 6, 4)), mx.zeros((1, 2, 6, 4)))
    first = store()
    put(first, PROMPT[:6], [full, KVCache()])
    first.close()
    second = store()
    layers = second.read(stored_in(second, PROMPT[:6]))
    assert layers is not None
    assert [layer.empty() for layer in layers] == [False, True]


@pytest.mark.parametrize("one_by_one", [False, True], ids=["in one chunk", "token by token"])
@pytest.mark.parametrize("length", [5, WINDOW, WINDOW + 1, 90])
def test_a_prompt_continues_as_if_the_server_had_not_been_restarted(
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


def test_views_of_longer_caches_are_stored_without_the_rest(store: Stores, network: Any) -> None:
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


def test_every_kind_of_layer_and_of_number_is_restored(store: Stores) -> None:
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


class OurRotatingKVCache(RotatingKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """A cache class that mlx-lm does not know and need not."""


def test_a_layer_of_a_class_of_our_own_is_restored_as_its_base_class(
    store: Stores,
) -> None:
    layer = OurRotatingKVCache(max_size=8)
    layer.update_and_fetch(mx.ones((1, 1, 2, 8)), mx.ones((1, 1, 2, 8)))
    here = store()
    put(here, [1, 2], [layer])
    read = here.read(stored_in(here, [1, 2]))
    assert read is not None
    assert type(read[0]) is RotatingKVCache


@pytest.mark.parametrize("quantization", [None, Quantization(32, 8)], ids=["plain", "8 bits"])
def test_caches_in_a_list_that_appends_in_place_are_restored_as_mlx_lms(
    store: Stores, quantization: Quantization | None
) -> None:
    part = GrowingKVCache(SharedArrays((), quantization))
    part.update_and_fetch(mx.ones((1, 1, 2, 64)), mx.ones((1, 1, 2, 64)))
    here = store()
    put(here, [1, 2], compact_copies([CacheList(part, ArraysCache(2))]))
    read = here.read(stored_in(here, [1, 2]))
    assert read is not None
    kinds = [KVCache if quantization is None else QuantizedKVCache, ArraysCache]
    assert [type(each) for each in read[0].caches] == kinds
    assert read[0].caches[0].offset == 2


def test_mlx_lm_reads_our_files(store: Stores, network: Any) -> None:
    path = put(store(), PROMPT, read_in(network, PROMPT))
    layers, about = load_prompt_cache(str(path), return_metadata=True)
    assert continuation(network, layers) == continuation(network, read_in(network, PROMPT))
    assert about["fingerprint"] == "ours"


def test_a_checkpoint_is_as_of_its_writing_although_generation_continues(store: Stores, network: Any) -> None:
    here = store.of(Gated)
    layers = read_in(network, PROMPT, one_by_one=True)  # so that the window is written in place
    here.write(PROMPT, layers)
    assert here.begun.wait(SOON)
    expected = continuation(network, layers)  # writes to the layers that were passed on
    here.gate.set()
    here.flush()
    read = here.read(stored_in(here, PROMPT))
    assert read is not None
    assert continuation(network, read) == expected


# -- files that are not what they should be ------------------------------------------------------------------


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


UNREADABLE_FILES: dict[str, Callable[[bytes], bytes]] = {
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
    "a class": lambda content: content.replace(b'"KVCache"', b'"OSError"', 1),
    "the tokens": lambda content: content.replace(b'"0.tokens":"', b'"0.tokens":"A', 1)[: len(content)],
}


@pytest.mark.parametrize("kind", UNREADABLE_FILES)
def test_an_unreadable_file_is_removed_when_a_server_starts(
    store: Stores, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = store()
    path = put(first, PROMPT)
    put(first, [1, 2])
    path.write_bytes(UNREADABLE_FILES[kind](path.read_bytes()))
    second = store()
    assert len(second) == 1
    assert second.find_longest(PROMPT) is None
    assert not path.exists()
    assert len(warnings(caplog)) == 1
    assert str(path) in warnings(caplog)[0]


@pytest.mark.parametrize("kind", UNREADABLE_FILES | DAMAGED)
def test_a_file_that_is_damaged_when_it_is_needed_is_as_if_it_had_never_existed(
    store: Stores, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    here = store()
    path = put(here, PROMPT)
    content = path.read_bytes()
    path.write_bytes((UNREADABLE_FILES | DAMAGED)[kind](content))
    assert path.read_bytes() != content
    assert here.read(stored_in(here, PROMPT)) is None
    assert not path.exists()
    assert here.find_longest(PROMPT) is None
    assert not here.has(PROMPT)
    assert len(warnings(caplog)) == 1
    assert "damaged" in warnings(caplog)[0]
    put(here, PROMPT)
    assert here.read(stored_in(here, PROMPT)) is not None, "it can be written again"


def test_layers_that_do_not_hold_the_tokens_are_rejected(
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


def test_tokens_are_compared_and_not_only_the_file_name_made_from_them(
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
    assert "Strange is not one of mlx-lm's cache layers" in warnings(caplog)[0]


# -- other models --------------------------------------------------------------------------------------------


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
    for name in ("model.safetensors", "model-2.safetensors"):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        assert [path.name for path in weight_files(folder)] == [name]
        prints.append(model_fingerprint(folder))
    assert len(set(prints)) == len(prints)
    (folder / "chat_template.jinja").write_text("another")
    assert model_fingerprint(folder) == prints[-1], "what the text looks like is in the tokens"
