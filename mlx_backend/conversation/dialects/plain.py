"""Plain: a model without channels. All it writes is the answer; its control tokens are not shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Continuation, Dialect, Piece, Reader
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from mlx_backend.conversation.events import EndedBy
    from mlx_backend.conversation.tools import ToolSet

END_MARKERS = frozenset(
    {
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        *("<end_of_turn>", "<eos>", "</s>", "<|end|>", "<|return|>"),
        *("<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|user|>", "<|observation|>"),
        *("<turn|>", "<seed:eos>", "[e~[", "<|eot|>", "<|role_end|>"),
    }
)
"""Control tokens that end a turn in one family or another."""


class PlainReader(Reader):
    """Reads a turn that is nothing but an answer."""

    __slots__ = ()

    def __init__(
        self,
        *,
        tools: ToolSet,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str],
    ) -> None:
        super().__init__()
        self._open(opens_in or Channel.FINAL)

    def text(self, text: str) -> None:
        """Put it out."""
        self._emit(text)

    def marker(self, marker: str) -> None:
        """Drop it; an end marker ends the turn."""
        if marker in END_MARKERS:
            self.ended = True
            self.delta = None

    def close(self, ended_by: EndedBy) -> None:
        """Do nothing: no text is held back."""


def recognises(template: str, control_tokens: Set[str]) -> bool:
    """Return True: any model may be plain, so this dialect is tried last."""
    return True


def opens_in(prompt_tail: str) -> Channel | None:
    """Return None: there are no channels."""
    return None


def continuation(reasoning: str, content: str, *, opened: Channel | None = None) -> Continuation:
    """Write the begun answer. There is nowhere to write reasoning."""
    return Continuation((Piece(content),) if content else (), opened)


PLAIN = Dialect(
    name="plain",
    recognises=recognises,
    reader=PlainReader,
    continuation=continuation,
    opens_in=opens_in,
    has_reasoning=False,
    example="It is sunny in Paris.",
)
