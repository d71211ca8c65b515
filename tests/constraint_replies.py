"""Replies written token by token under a constraint, with a vocabulary small enough to be masked."""

import re
from collections.abc import Sequence

from scripted_engine import ScriptedTokenizer

from mlx_backend.constraints import Spec
from mlx_backend.conversation.events import Channel
from mlx_backend.engine.base import Constraint

THINK_MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": NUMBER, "strict": True}}
    for name in ("look", "look_up")
]


class PairTokenizer(ScriptedTokenizer):
    """A scripted vocabulary of pieces of one and two bytes: small enough to be masked."""

    PIECE = 2
    _SIZES = (256, 256**2)  # type: ignore[assignment]  # of two lengths, not of three

    def encode_bytewise(self, text: str) -> list[int]:
        """Tokenise as a model may: markers as their tokens, and all else byte by byte."""
        parts = re.split("|".join(f"({re.escape(marker)})" for marker in self._ids), text)
        return [
            token
            for part in parts
            if part
            for token in ([self._ids[part]] if part in self._ids else part.encode())
        ]


def allows(constraint: Constraint, token: int) -> bool:
    mask = constraint.allowed_mask()
    assert mask is not None
    return bool(mask[token >> 5] >> (token & 31) & 1)


def choices(constraint: Constraint) -> list[int]:
    mask = constraint.allowed_mask()
    assert mask is not None
    return [at * 32 + bit for at, word in enumerate(mask) if word for bit in range(32) if word >> bit & 1]


class Reply:
    """Writes a reply token by token, and stops at a token that is not allowed. `written` is its text so far."""

    def __init__(
        self, tokenizer: PairTokenizer, spec: Spec, opens_in: Channel | None = None, begun: str = ""
    ) -> None:
        self.tokenizer = tokenizer
        self.constraint = spec.start(opens_in, begun=begun)
        self.written = ""

    def write(self, text: str) -> "Reply":
        """Write markers as their tokens, and everything else byte by byte."""
        self._advance(self.tokenizer.encode_bytewise(text))
        return self

    def write_encoded(self, text: str) -> "Reply":
        """Write a text as the tokenizer cuts it."""
        self._advance(self.tokenizer.encode(text, control_tokens=True))
        return self

    def _advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not allows(self.constraint, token):
                break
            self.constraint.advance(token)
            self.written += self.tokenizer.decode([token])

    @property
    def markers(self) -> set[str]:
        """The control tokens that may come next."""
        special = self.tokenizer.special_tokens
        return {special[token] for token in choices(self.constraint) if token in special}

    @property
    def allows_only_markers(self) -> bool:
        return all(token in self.tokenizer.special_tokens for token in choices(self.constraint))
