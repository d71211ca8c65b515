"""Plain: a model without channels. Everything it writes is the answer; its control tokens are not shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Continuation, Dialect, Piece, Reader
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from mlx_backend.conversation.events import EndedBy

END_MARKERS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<end_of_turn>", "<eos>", "</s>", "<|end|>", "<|return|>"),
        *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>"),
    }
)
"""Control tokens with which one family or another ends a turn."""


class PlainReader(Reader):
    """Reads a turn that is all answer."""

    __slots__ = ()

    def __init__(
        self,
        *,
        tools: Collection[str] | None = None,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str],
    ) -> None:
        super().__init__()
        self._open(opens_in or Channel.FINAL)

    def text(self, text: str) -> None:
        """Pass it on."""
        self._emit(text)

    def marker(self, marker: str) -> None:
        """Drop it; an end marker ends the turn."""
        if marker in END_MARKERS:
            self.ended = True
            self.delta = None

    def close(self, ended_by: EndedBy) -> None:
        """Nothing is ever held."""


def continuation(reasoning: str, content: str, *, opened: Channel | None = None) -> Continuation:
    """Write the begun answer. There is no place for reasoning."""
    return Continuation((Piece(content),) if content else (), opened)


def opens_in(prompt_tail: str) -> Channel | None:
    """Never: there are no channels."""
    return None


PLAIN = Dialect(name="plain", reader=PlainReader, continuation=continuation, opens_in=opens_in, tokens={})
