"""Values are put into JSON with comments, and nothing else of the text changes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_backend.commands.json_edit import with_values

ZED = """\
// Zed settings
{
  "theme": "One Dark", // the dark one
  /* models */
  "language_models": {
    "openai": {"api_url": "https://a.example//v1"},
  },
  "fonts": ["a", "b",], // the last
}
"""


def newer(_old: Any, new: Any) -> Any:
    return new


def values(text: str) -> Any:
    """The values of JSON with comments, for texts whose strings have no slashes next to each other or commas."""
    plain = re.sub(
        r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', lambda found: found[1] or "", text, flags=re.DOTALL
    )
    return json.loads(re.sub(r",(\s*[}\]])", r"\1", plain))


def test_comments_commas_and_layout_stay() -> None:
    edited = with_values(ZED, {"language_models": {"mlx": {"a": [1]}}, "theme": "Light", "new": True}, newer)
    assert (
        edited
        == """\
// Zed settings
{
  "theme": "Light", // the dark one
  /* models */
  "language_models": {
    "openai": {"api_url": "https://a.example//v1"},
    "mlx": {
      "a": [
        1
      ]
    }
  },
  "fonts": ["a", "b",], // the last
  "new": true
}
"""
    )


@pytest.mark.parametrize(
    ("text", "edited"),
    [
        ("{}", '{\n  "x": 1\n}'),
        ('{"a": 2}', '{"a": 2,\n  "x": 1\n}'),
        ('{"a": 2 // why\n}', '{"a": 2, // why\n  "x": 1\n}'),
        ('{\n    "a": 2\n}\n', '{\n    "a": 2,\n    "x": 1\n}\n'),
        ('{\n\t"a": {}\n}', '{\n\t"a": {},\n\t"x": 1\n}'),
        ("{ // nothing yet\n}", '{ // nothing yet\n  "x": 1\n}'),
        ('{"x": 1}', '{"x": 1}'),
        ('{"x": [1, /* two */ 2]}', '{"x": 1}'),
    ],
)
def test_a_member_is_added_in_the_layout_that_is_there(text: str, edited: str) -> None:
    assert with_values(text, {"x": 1}, newer) == edited


@pytest.mark.parametrize(
    "text", ["", "{", "{]", '{"a"}', '{"a": }', "{a: 1}", '{"a": 1} x', "{'a': 1}", '{"a": 1 2}', "/*"]
)
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no JSON"):
        with_values(text, {"x": 1}, newer)


@pytest.mark.parametrize("text", ["[]", "1", '"{}"'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no JSON object"):
        with_values(text, {"x": 1}, newer)


def test_what_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        with_values('{"a":' * 10_000, {"x": 1}, newer)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters='/,"\\'), max_size=4)
OBJECTS = st.recursive(
    st.none() | st.booleans() | st.integers() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)
TABLES = st.dictionaries(NAMES, OBJECTS, max_size=4)


def merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: merged(old.get(name), value) for name, value in new.items()}
    return new


@settings(max_examples=40, deadline=None)
@given(old=TABLES, new=TABLES, indent=st.sampled_from([None, 2, "\t"]))
def test_what_is_read_afterwards_is_both(old: Any, new: Any, indent: Any) -> None:
    text = json.dumps(old, indent=indent)
    assert values(with_values(text, new, newer)) == merged(old, new)
