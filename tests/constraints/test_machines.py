"""Which dialect is constrained by which machine, and what cannot be enforced."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer

from mlx_backend.constraints import GrammarError, Grammars, can_require_calls
from mlx_backend.constraints.machines import machine_of
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.base import CallCodec, Piece


class OtherCalls(CallCodec):
    """Calls in a format that no grammar is known of."""

    def is_taught_by(self, template: str) -> bool:
        return True

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return (Piece(f"{name}!"),)


NEW_FAMILY = dataclasses.replace(DIALECTS["think"], name="new")


def test_the_machines_of_dialects_that_reason_have_a_closer() -> None:
    for dialect in DIALECTS.values():
        assert bool(machine_of(dialect).closer) is dialect.has_reasoning


def test_a_family_of_blocks_whose_calls_cannot_be_enforced_has_its_answers_constrained() -> None:
    family = dataclasses.replace(NEW_FAMILY, calls=OtherCalls())
    assert not can_require_calls(family)
    tokenizer = ByteTokenizer(("<think>", "</think>", "<|im_end|>"), None)
    grammars = Grammars(tokenizer, family)
    mask = grammars.json_object().start().allowed_mask()
    assert mask is not None
    [brace] = tokenizer.encode("{", control_tokens=False)
    assert mask[brace // 32] >> brace % 32 & 1
    with pytest.raises(GrammarError, match="its format of calls cannot be enforced yet"):
        grammars.tool_calls([{"type": "function", "function": {"name": "f"}}], required=True)


@pytest.mark.parametrize("is_token", [True, False])
def test_calls_can_be_forbidden_where_they_begin_with_a_token_of_their_own(is_token: bool) -> None:
    markers = ("<think>", "</think>", "<|im_end|>", *(("<tool_call>", "</tool_call>") if is_token else ()))
    tokenizer = ByteTokenizer(markers, None)
    grammars = Grammars(tokenizer, DIALECTS["hermes-json"])
    if not is_token:
        with pytest.raises(GrammarError, match="begin as a text may"):
            grammars.no_calls()
        return
    mask = grammars.no_calls().start().allowed_mask()
    assert mask is not None
    allowed = [
        text for token, text in tokenizer.special_tokens.items() if mask[token // 32] >> token % 32 & 1
    ]
    assert allowed == ["<think>", "<|im_end|>"]
