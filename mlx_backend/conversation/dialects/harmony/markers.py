"""Harmony's control tokens: their texts, and their ids in the vocabulary of gpt-oss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN, END_OF_TEXT = "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"

HARMONY_TOKENS: Mapping[int, str] = {
    199998: "<|startoftext|>",
    199999: END_OF_TEXT,
    200002: RETURN,
    200003: CONSTRAIN,
    200005: CHANNEL,
    200006: START,
    200007: END,
    200008: MESSAGE,
    200012: CALL,
}
"""The control tokens of o200k_harmony, the vocabulary of gpt-oss."""
