"""Whatever a model writes can be read, in every dialect and at every split; any history becomes a canonical one."""

from __future__ import annotations

import copy
import re
from itertools import pairwise
from typing import Any

import pytest
from conversation_cases import OFFERED, load_families
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel, Event, StreamEnd
from mlx_backend.conversation.history import HistoryError, sanitise
from mlx_backend.conversation.parser import ChannelParser, fold

CASES = load_families()
_PIECE = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\]|\w+|\s+|.", re.S)
_OTHERS = (
    "<think>",
    "</think>",
    "<|",
    "|>",
    "<tool_call>",
    "{",
    "}",
    '"',
    "\\",
    "\n",
    "`",
    "```\n",
    "é",
    "\0",
    "😀",
)


def pieces_of(name: str) -> list[str]:
    """Markers, words and signs of a dialect's own examples, and some that it shares with others."""
    texts = [DIALECTS[name].example, *(case.text for case in CASES if case.dialect == name)]
    return [*dict.fromkeys(piece for text in texts for piece in _PIECE.findall(text)), *_OTHERS]


TEXTS = {
    name: st.lists(st.sampled_from(pieces), max_size=40).map("".join)
    for name in DIALECTS
    if (pieces := pieces_of(name))
}


def read(name: str, parts: list[str], opens_in: Channel | None) -> list[Event]:
    parser = ChannelParser(name, tools=OFFERED, opens_in=opens_in)
    return [*(event for part in parts for event in parser.feed(part)), *parser.close()]


@pytest.mark.parametrize("name", TEXTS)
@examples(0.5)
@given(data=st.data())
def test_anything_is_read_and_means_the_same_however_it_is_split(name: str, data: st.DataObject) -> None:
    text = data.draw(TEXTS[name])
    opens_in = data.draw(st.sampled_from([None, Channel.ANALYSIS, Channel.FINAL]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = read(name, [text], opens_in)
    assert [type(event) for event in whole].count(StreamEnd) == 1
    assert isinstance(whole[-1], StreamEnd)
    parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert fold(read(name, parts, opens_in)) == fold(whole)
    assert fold(read(name, list(text), opens_in)) == fold(whole)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.text(max_size=4), st.sampled_from(["type", "text", "id", "function", "name", "arguments"])
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=6,
)
ECHOES = st.lists(
    st.sampled_from(
        [
            *(
                "<think>",
                "</think>",
                "<details>",
                "</details>",
                '<details type="reasoning" done="true">',
                "\n",
            ),
            *("<summary>Thought</summary>", "<|start|>assistant", "<|channel|>analysis", "<|channel|>final"),
            *("<|message|>", "<|end|>", "<|call|>", "```", "> ", "&gt;", "text", "&lt;", "<tool_call>", "{}"),
        ]
    ),
    max_size=12,
).map("".join)
CONTENTS = st.one_of(
    ECHOES,
    st.text(max_size=20),
    JSON,
    st.lists(
        st.fixed_dictionaries(
            {
                "type": st.sampled_from(
                    ["text", "input_text", "thinking", "tool_use", "tool_result", "reasoning"]
                )
            },
            optional={
                "text": ECHOES,
                "thinking": ECHOES,
                "id": st.text(max_size=3),
                "tool_use_id": JSON,
                "name": JSON,
            },
        ),
        max_size=3,
    ),
)
CALLS = st.one_of(
    JSON,
    st.lists(
        st.fixed_dictionaries(
            {
                "function": st.fixed_dictionaries(
                    {"name": st.sampled_from(["get_weather", "search", ""])}, optional={"arguments": JSON}
                )
            },
            optional={"id": st.one_of(st.sampled_from(["1", "2"]), JSON), "type": JSON},
        ),
        max_size=3,
    ),
)
HISTORIES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(
                ["system", "developer", "user", "assistant", "assistant", "tool", "function"]
            )
        },
        optional={
            "content": CONTENTS,
            "tool_calls": CALLS,
            "tool_call_id": st.one_of(st.sampled_from(["1", "2"]), JSON),
            "name": JSON,
            "reasoning_content": st.one_of(ECHOES, JSON),
            "reasoning": st.one_of(ECHOES, JSON),
            "reasoning_details": JSON,
            "thinking": JSON,
            "function_call": JSON,
        },
    ),
    min_size=1,
    max_size=6,
)


@examples(2)
@given(history=HISTORIES)
def test_any_history_becomes_a_canonical_one_and_is_not_changed(history: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(history)
    try:
        once = sanitise(history, tools=OFFERED)
    except HistoryError:
        return
    finally:
        assert history == before
    assert sanitise(once, tools=OFFERED) == once
    for message in once:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str | list)
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], str)
