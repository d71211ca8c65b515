"""The dialects: one output grammar per family of models, and how to tell which one a model speaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Continuation, Dialect, Piece
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.dialects.plain import PLAIN
from mlx_backend.conversation.dialects.think import OPENERS, THINK, TOOL_CALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["DIALECTS", "Continuation", "Dialect", "Piece", "detect"]

DIALECTS: Mapping[str, Dialect] = {dialect.name: dialect for dialect in (HARMONY, THINK, PLAIN)}


def detect(chat_template: str | None, special_tokens: Iterable[str]) -> str:
    """Return the name of the dialect a model speaks, from its template and its control tokens."""
    tokens = set(special_tokens)
    template = chat_template or ""
    if {"<|channel|>", "<|message|>"} <= tokens or ("<|channel|>" in template and "<|message|>" in template):
        return HARMONY.name
    if any(opener in tokens or opener in template for opener in (*OPENERS, TOOL_CALL)):
        return THINK.name
    return PLAIN.name
