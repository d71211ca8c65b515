"""Random calls, written by our codecs, are read the same by the parsers of the `renderers` package: 200 a family.

Its parsers read token ids; a tokenizer of characters and the family's markers is all that they need.
"""

from __future__ import annotations

import inspect
import json
import random
import re
from typing import Any

import pytest
from renderers import parsing
from test_call_conformance import CALLS, call, written

from mlx_backend.conversation.dialects import DIALECTS

END = "<END>"
THINKING = {"think_id": "<think>", "think_end_id": "</think>"}
TAGGED = {
    **THINKING,
    "tool_call_id": "<tool_call>",
    "tool_call_end_id": "</tool_call>",
    "arg_key_id": "<arg_key>",
    "arg_key_end_id": "</arg_key>",
    "arg_value_id": "<arg_value>",
    "arg_value_end_id": "</arg_value>",
}
SUFFIXED = {name: marker.replace(">", ":opensource>") for name, marker in TAGGED.items()}
PARSERS: dict[str, tuple[Any, dict[str, str]]] = {
    "hermes-json": (parsing.parse_qwen3, TAGGED),
    "qwen-xml": (parsing.parse_qwen35, TAGGED),
    "glm": (parsing.parse_glm, TAGGED),
    "laguna": (parsing.parse_laguna_xs2, TAGGED),
    "minimax-m2": (
        parsing.parse_minimax,
        {**THINKING, "tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"},
    ),
    "kimi-k2": (
        parsing.parse_kimi_k2,
        {
            "tool_calls_section_begin_id": "<|tool_calls_section_begin|>",
            "tool_calls_section_end_id": "<|tool_calls_section_end|>",
            "tool_call_begin_id": "<|tool_call_begin|>",
            "tool_call_argument_begin_id": "<|tool_call_argument_begin|>",
            "tool_call_end_id": "<|tool_call_end|>",
        },
    ),
    "deepseek-v3": (
        parsing.parse_deepseek_v3,
        {
            "tool_calls_begin_id": "<｜tool▁calls▁begin｜>",
            "tool_calls_end_id": "<｜tool▁calls▁end｜>",
            "tool_call_begin_id": "<｜tool▁call▁begin｜>",
            "tool_call_end_id": "<｜tool▁call▁end｜>",
            "tool_sep_id": "<｜tool▁sep｜>",
        },
    ),
    "dsml-v4": (parsing.parse_deepseek_v4, {"think_start_id": "<think>", "think_end_id": "</think>"}),
    "hunyuan-opensource": (
        parsing.parse_hy3,
        {
            **SUFFIXED,
            "assistant_id": "<assistant>",
            "tool_calls_id": "<tool_calls:opensource>",
            "tool_calls_end_id": "</tool_calls:opensource>",
            "tool_sep_id": "<tool_sep:opensource>",
        },
    ),
}


class MarkerTokenizer:
    """One token a character, and one for each marker."""

    def __init__(self, markers: list[str]) -> None:
        self.ids = {marker: 0x200000 + number for number, marker in enumerate(markers)}
        self._texts = {token: marker for marker, token in self.ids.items()}
        self._markers = re.compile("(" + "|".join(map(re.escape, markers)) + ")")

    def encode(self, text: str, **_: Any) -> list[int]:
        parts = self._markers.split(text)
        return [each for part in parts for each in ([self.ids[part]] if part in self.ids else map(ord, part))]

    def decode(self, tokens: list[int] | int, **_: Any) -> str:
        tokens = [tokens] if isinstance(tokens, int) else tokens
        return "".join(self._texts.get(token) or chr(token) for token in tokens)

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self.ids.get(text)


@pytest.mark.parametrize("name", PARSERS)
def test_its_parser_reads_what_a_family_writes(name: str) -> None:
    parse, markers = PARSERS[name]
    tokenizer, choose = MarkerTokenizer([*markers.values(), END]), random.Random(name)
    accepted = inspect.signature(parse).parameters
    ids = {parameter: tokenizer.ids[marker] for parameter, marker in markers.items() if parameter in accepted}
    for _ in range(CALLS):
        called, arguments, tools = call(choose)
        text = written(DIALECTS[name], called, arguments)
        options: dict[str, Any] = {"tools": [tool["function"] for tool in tools], "thinking_enabled": False}
        options = {option: value for option, value in options.items() if option in accepted}
        found = parse(tokenizer, tokenizer.encode(text), stop_ids={tokenizer.ids[END]}, **ids, **options)
        read = [
            (each.name, json.loads(each.arguments) if isinstance(each.arguments, str) else each.arguments)
            for each in found.tool_calls
        ]
        assert read == [(called, arguments)], text
