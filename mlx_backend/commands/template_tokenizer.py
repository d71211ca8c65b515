"""A tokenizer for a chat template without a model: it renders as the server does, and knows the template's markers.

Enough to build a prompt as the server does, and to show it. Knows no model's vocabulary.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.errors import EngineRefused
from mlx_backend.models import templates
from mlx_backend.models.templates import TemplateFault, TemplateOverrun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# How control tokens are spelt: `<|im_end|>`, `<｜User｜>`, `<think>`, `<seed:tool_call>`, `[INST]`, `]~b]`.
_MARKER = re.compile(
    r"<[|｜][^<>\n]{1,60}>|</?[a-z][\w:|-]{1,60}>|\[/?[A-Z_]{3,30}\]|<[a-z_]{2,30}\|>|\]~\w*\]"
)


class TemplateTokenizer:
    """Implements the `Tokenizer` protocol for a bare template: a token is a character, or one of the markers.

    Raises EngineRefused for a template that cannot be parsed.
    """

    chat_template: Final[str]
    response_template: Final = None
    end_tokens: Final[frozenset[int]] = frozenset()
    bos_tokens: Final = ()

    def __init__(self, source: str) -> None:
        markers = sorted(set(_MARKER.findall(source)), key=len, reverse=True)
        self.chat_template = source
        self.special_tokens = dict(enumerate(markers, start=sys.maxunicode + 1))
        self.vocabulary_size = sys.maxunicode + 1 + len(markers)
        self._ids = {marker: token for token, marker in self.special_tokens.items()}
        self._pieces = re.compile("|".join([*map(re.escape, markers), "."]), re.DOTALL)
        try:
            templates.examined(source)
        except TemplateOverrun as overrun:
            raise EngineRefused(f"The chat template cannot be used: {overrun}.") from overrun
        except TemplateFault as fault:
            raise EngineRefused(f"The chat template cannot be parsed: {fault}") from fault

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render the template to text. Raises EngineRefused if the template rejects the conversation."""
        try:
            return templates.render(
                self.chat_template,
                messages,
                template_kwargs,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateOverrun as overrun:
            raise EngineRefused(f"The chat template cannot render this conversation: {overrun}.") from overrun
        except TemplateFault as fault:
            raise EngineRefused(f"The model's chat template refused the conversation: {fault}") from fault

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Tokenise. With control_tokens False a marker spelt in the text becomes the tokens of its characters."""
        if not control_tokens:
            return [ord(character) for character in text]
        return [self._ids.get(piece) or ord(piece) for piece in self._pieces.findall(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, markers included."""
        return "".join(self.special_tokens.get(token) or chr(token) for token in tokens)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token."""
        return self.decode([token]).encode("utf-8", "replace")
