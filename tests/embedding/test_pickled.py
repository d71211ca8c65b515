"""PyTorch's files are loaded without PyTorch, and without running their code."""

from __future__ import annotations

import os
import pickle
import zipfile
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import pytest
from embedding_models import write_pickled

from mlx_backend.embedding.mlx.pickled import load_tensors

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = mx.arange(24, dtype=mx.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_keep_their_names_shapes_and_numbers(dtype: str, tmp_path: Path) -> None:
    written = {
        "matrix": NUMBERS.reshape(4, 6).astype(getattr(mx, dtype)),
        "row": NUMBERS[:5].astype(getattr(mx, dtype)),
        "one": mx.array(3.0, getattr(mx, dtype)),
    }
    found = load_tensors(write_pickled(tmp_path / "m.bin", written))
    assert found.keys() == written.keys()
    for name, value in written.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert mx.array_equal(found[name], value)


def test_a_tensor_may_be_a_view_of_its_storage(tmp_path: Path) -> None:
    file = write_pickled(tmp_path / "m.bin", {"transposed": NUMBERS}, offset=2, shape=(3, 2), strides=(1, 6))
    expected = NUMBERS[2:14].reshape(2, 6)[:, :3].T
    assert mx.array_equal(load_tensors(file)["transposed"], expected)


def test_entries_that_are_not_tensors_are_left_out(tmp_path: Path) -> None:
    assert load_tensors(write_pickled(tmp_path / "m.bin", {"a": NUMBERS, "version": 2})).keys() == {"a"}


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 1},
        {"shape": (5, 6), "strides": (6, 1)},
        {"shape": (24,), "strides": (2,)},
        {"shape": (24,), "strides": (-1,)},
        {"offset": -1, "shape": (1,), "strides": (1,)},
        {"shape": (4, 6), "strides": (6,)},
        {"shape": (2.0,), "strides": (1,)},
        {"count": 25},
        {"count": 23},
    ],
)
def test_a_tensor_cannot_reach_beyond_its_storage(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"m\.bin is not a file of tensors"):
        load_tensors(write_pickled(tmp_path / "m.bin", {"a": NUMBERS}, **changes))


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.called = function, arguments

    def __reduce__(self) -> Any:
        return self.called


@pytest.mark.parametrize("function", [os.mkdir, eval, getattr, print])
def test_code_in_a_pickle_is_not_run(function: Any, tmp_path: Path) -> None:
    file, made = tmp_path / "m.bin", tmp_path / "made"
    argument = str(made) if function is os.mkdir else f"__import__('os').mkdir({str(made)!r})"
    arguments = (object, "__class__") if function is getattr else (argument,)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps({"a": Calls(function, *arguments)}))
    with pytest.raises(ValueError, match="it wants to use"):
        load_tensors(file)
    assert not made.exists()


def test_other_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "m.bin"
    for content in (b"", b"\x80\x02l\n", pickle.dumps({"a": 1})):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.bin is not a file of tensors"):
            load_tensors(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/data.pkl", pickle.dumps([1, 2]))
    with pytest.raises(ValueError, match="holds a list"):
        load_tensors(file)
    with pytest.raises(ValueError, match="byte order is not little-endian"):
        load_tensors(write_pickled(file, {"a": NUMBERS}, order=b"big"))
    file.write_bytes(write_pickled(tmp_path / "whole.bin", {"a": NUMBERS}).read_bytes()[:200])
    with pytest.raises(ValueError, match="not a file of tensors"):
        load_tensors(file)


def archived(
    file: Path, description: bytes, *, compression: int = zipfile.ZIP_STORED, **storages: bytes
) -> Path:
    """Write an archive as PyTorch does, with any pickle in it."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("m/data.pkl", description)
        for key, data in storages.items():
            archive.writestr(f"m/data/{key}", data)
    return file


NESTED = b"\x80\x02)" + b"\x85" * 2_000_000 + b"."  # an empty tuple in a tuple in a tuple …
LISTS = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."


@pytest.mark.parametrize(
    ("description", "words"),
    [
        (NESTED, "nests tuples"),
        (LISTS, "holds a list"),
        (b"\x80\x02" + b"]0.", "instruction"),
        (b"\x80\x02" + b"K\x01" * 300_001 + b".", "more than 300000 instructions"),
        (b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".", "holds a int"),
        (b"\x80\x02}.}.", None),
        (b"\x80\x02.", "broken"),
        (b"\x80\x02(.", "broken"),
        (b"\x80\x02(t\x85R.", "broken"),
        (b"\x80\x02K\x01}s.", "broken"),
        (b"\x80\x02h\x07.", "not a file of tensors"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.", "sets attributes"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "makes no tensor"),
        (
            b"\x80\x02}X" + (1 << 22).to_bytes(4, "little") + b"a" * (1 << 22) + b".",
            "at most 4194304 are read",
        ),
    ],
)
def test_a_pickle_that_would_crash_or_fill_the_memory_is_refused(
    description: bytes, words: str | None, tmp_path: Path
) -> None:
    file = archived(tmp_path / "m.bin", description)
    if words is None:
        assert load_tensors(file) == {}
        return
    with pytest.raises(ValueError, match=words):
        load_tensors(file)


@pytest.mark.parametrize("shape", [(1 << 31,), (1 << 20, 1 << 20), (1,) * 9, (0, 1 << 40)])
def test_a_shape_with_more_numbers_than_its_storage_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    file = write_pickled(tmp_path / "m.bin", {"a": NUMBERS}, shape=shape, strides=(0,) * len(shape))
    with pytest.raises(ValueError, match=r"a tensor (has shape|reaches beyond)"):
        load_tensors(file)


def test_an_archive_that_unpacks_to_more_than_it_has_bytes_is_not_unpacked(tmp_path: Path) -> None:
    whole = write_pickled(tmp_path / "whole.bin", {"a": NUMBERS})
    with zipfile.ZipFile(whole) as archive:
        description = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    packed = archived(tmp_path / "m.bin", description, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="is compressed"):
        load_tensors(packed)


def test_the_attributes_of_a_dictionary_are_not_read(tmp_path: Path) -> None:
    """State dicts are OrderedDicts with an attribute that says which version each layer has."""
    metadata = b"}X\x09\x00\x00\x00_metadataX\x01\x00\x00\x00vsb"
    empty = b"\x80\x02ccollections\nOrderedDict\n)R" + metadata + b"."
    assert load_tensors(archived(tmp_path / "m.bin", empty)) == {}
