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
