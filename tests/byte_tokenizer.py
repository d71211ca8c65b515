"""A tokenizer whose tokens are single bytes: the smallest vocabulary that can be masked."""

from __future__ import annotations

from scripted_engine import ScriptedTokenizer


class ByteTokenizer(ScriptedTokenizer):
    """Tokens 0 to 255 are bytes; the control tokens follow."""

    PIECE = 1
    _SIZES = (256,)  # type: ignore[assignment]  # a vocabulary with pieces of one length
