"""One effort from everything people write: words in any case, Japanese, numbers, switches."""

import math

import pytest

from mlx_backend.conversation.effort import WORDS, Effort, EffortError, parse_effort


@pytest.mark.parametrize(
    ("effort", "word"), [(effort, word) for effort, words in WORDS.items() for word in words]
)
def test_every_word_means_its_effort_in_any_case(effort: Effort, word: str) -> None:
    for written in (
        word,
        word.upper(),
        word.title(),
        f"  {word}\n",
        word.replace("-", "_"),
        word.replace(" ", "-"),
    ):
        assert parse_effort(written) is effort


@pytest.mark.parametrize(
    ("word", "effort"),
    [
        *(("none", Effort.NONE), ("off", Effort.NONE), ("minimal", Effort.MINIMAL), ("low", Effort.LOW)),
        *(("medium", Effort.MEDIUM), ("middle", Effort.MEDIUM), ("mid", Effort.MEDIUM)),
        *(("moderate", Effort.MEDIUM), ("normal", Effort.MEDIUM), ("high", Effort.HIGH)),
        *(("xhigh", Effort.XHIGH), ("max", Effort.MAX), ("ultra", Effort.MAX)),
        *(("低", Effort.LOW), ("中", Effort.MEDIUM), ("高", Effort.HIGH)),
        *(("Extra High", Effort.XHIGH), ("x_high", Effort.XHIGH), ("very-high", Effort.XHIGH)),
    ],
)
def test_the_words_people_use(word: str, effort: Effort) -> None:
    assert parse_effort(word) is effort


@pytest.mark.parametrize(
    ("number", "effort"),
    [
        *((0, Effort.NONE), (1, Effort.LOW), (2, Effort.MEDIUM), (3, Effort.HIGH)),
        *(
            (0.1, Effort.MINIMAL),
            (0.2, Effort.LOW),
            (0.5, Effort.MEDIUM),
            (0.8, Effort.HIGH),
            (0.95, Effort.XHIGH),
        ),
        *((128, Effort.MINIMAL), (1024, Effort.LOW), (8192, Effort.MEDIUM), (16_000, Effort.HIGH)),
        *((64_000, Effort.XHIGH), ("2", Effort.MEDIUM), ("0.5", Effort.MEDIUM), ("4096", Effort.MEDIUM)),
        *((True, Effort.MEDIUM), (False, Effort.NONE), (1.0, Effort.LOW), (Effort.HIGH, Effort.HIGH)),
    ],
)
def test_numbers_and_switches(number: object, effort: Effort) -> None:
    assert parse_effort(number) is effort


@pytest.mark.parametrize(
    "value",
    [
        *("banana", "", " ", "highest of all", "lowmedium", "-1", "1e3", "高低", "\ud800"),
        *(-1, 4, 15, 2.5, math.nan, math.inf, None, [], {}, ["high"], {"effort": "high"}, b"high"),
    ],
)
def test_anything_else_is_refused_with_the_words_that_are_known(value: object) -> None:
    with pytest.raises(EffortError, match="none, minimal, low, medium, high, xhigh, max") as refused:
        parse_effort(value, "reasoning.effort")
    assert refused.value.param == "reasoning.effort"
    assert len(str(refused.value)) < 200


def test_a_number_of_any_size_is_a_budget() -> None:
    assert parse_effort(10**400) is Effort.XHIGH
