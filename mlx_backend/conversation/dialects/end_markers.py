"""The control tokens that end a turn, whatever the family."""

from __future__ import annotations

END_MARKERS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<end_of_turn>", "<eos>", "</s>", "<|end|>", "<|return|>"),
        *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>"),
        *("<turn|>", "<seed:eos>", "[e~[", "<|eot|>", "<|role_end|>"),
    }
)
"""Control tokens that end a turn in one family or another."""
