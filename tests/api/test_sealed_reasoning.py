"""Reasoning as an opaque text: ours is read again, anybody else's is not."""

from __future__ import annotations

import zlib
from base64 import urlsafe_b64encode

import pytest

from mlx_backend.api.sealed_reasoning import MAX_CHARACTERS, NotSealedHere, _digest, seal, unseal

TEXT = "First this, then that. 先ず、😀"


@pytest.mark.parametrize("text", ["", TEXT, TEXT * 10_000])
def test_what_was_sealed_is_read_again(text: str) -> None:
    assert unseal(seal(text)) == text


@pytest.mark.parametrize(
    "other",
    [
        "",
        "mlx1.",
        "gAAAAABo",
        "mlx1.AAAA",
        seal(TEXT)[:-4],
        seal(TEXT).replace("mlx1.", "mlx2."),
        seal(TEXT) + "AAAA",
        seal(TEXT)[:30] + "A" + seal(TEXT)[31:],
        "é" * 20,
    ],
)
def test_what_was_not_sealed_here_is_told_apart(other: str) -> None:
    with pytest.raises(NotSealedHere):
        unseal(other)


def test_a_text_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    packed = zlib.compress(b"x" * (4 * MAX_CHARACTERS + 1), 9)
    with pytest.raises(NotSealedHere):
        unseal("mlx1." + urlsafe_b64encode(_digest(packed) + packed).decode())
