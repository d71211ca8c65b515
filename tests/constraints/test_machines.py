"""Which dialect is constrained by which machine, and what happens to one that has none."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer
from scripted_engine import HARMONY_MARKERS, ScriptedTokenizer

from mlx_backend.constraints import GrammarError, Grammars, can_constrain, can_require_calls
from mlx_backend.constraints.machines import STATE_MACHINES, block_machine
from mlx_backend.constraints.reasoning_budget import ReasoningBudgets
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.base import CallCodec, Piece


class OtherCalls(CallCodec):
    """Calls in a format that no grammar is known of."""

    def is_taught_by(self, template: str) -> bool:
        return True

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        return (Piece(f"{name}!"),)


NEW_FAMILY = dataclasses.replace(DIALECTS["think"], name="new")


def test_every_dialect_has_a_machine_and_only_reasoning_ones_a_closer() -> None:
    assert set(STATE_MACHINES) == set(DIALECTS.values())
    assert {dialect.name for dialect, machine in STATE_MACHINES.items() if machine.closer} == {
        dialect.name for dialect in DIALECTS.values() if dialect.has_reasoning
    }


def test_a_family_without_a_machine_is_not_constrained() -> None:
    tokenizer = ScriptedTokenizer(HARMONY_MARKERS, None)
    assert not can_constrain(NEW_FAMILY, HARMONY_MARKERS, (), 1000)
    assert ReasoningBudgets(tokenizer, NEW_FAMILY).start([1], room=10, tokens=0) is None
    with pytest.raises(GrammarError, match="cannot be constrained to a grammar"):
        Grammars(tokenizer, NEW_FAMILY).tool_calls(
            [{"type": "function", "function": {"name": "f"}}], required=True
        )


def test_a_family_of_blocks_whose_calls_cannot_be_enforced_has_its_answers_constrained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = dataclasses.replace(NEW_FAMILY, calls=OtherCalls())
    monkeypatch.setitem(STATE_MACHINES, family, block_machine(family))
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
