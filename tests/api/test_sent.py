"""A value of a request knows where it stands: what is wrong with it is said with its path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mlx_backend.api.errors import ApiError
from mlx_backend.api.sent import MAX_ENTRIES, Sent

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = Sent({"messages": [{"role": "user"}, {"content": [{"type": "text", "text": 7}]}]})


def test_a_field_of_an_entry_has_the_path_that_leads_to_it() -> None:
    [first, second] = BODY["messages"].entries()
    assert (first["role"].value, first["role"].path) == ("user", "messages[0].role")
    [part] = second["content"].entries()
    with pytest.raises(ApiError) as caught:
        part["text"].text()
    assert caught.value.param == "messages[1].content[0].text"
    assert caught.value.message == "messages[1].content[0].text must be a text, not a number."


def test_what_is_not_there_is_null_at_its_place_however_deep() -> None:
    missing = BODY["tools"]["0"]["name"]
    assert (missing.value, missing.path) == (None, "tools.0.name")
    assert missing.entries() == []
    assert missing.text(default="none") == "none"
    with pytest.raises(ApiError, match=r"^tools\.0\.name is missing\.$"):
        missing.text()


def test_a_list_of_millions_is_refused_before_its_entries_are_looked_at() -> None:
    class Untouched(list[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("an entry was looked at")

    many = Untouched()
    many += ["a"] * (MAX_ENTRIES + 1)
    with pytest.raises(ApiError, match=r"^input: 100,001 entries are too many; send at most 100,000\.$"):
        Sent({"input": many})["input"].entries()
