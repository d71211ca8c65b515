"""A tokenizer for a chat template without a model: it renders in the sandbox, and knows only the template's markers.

Enough to build a prompt as the server does, and to show it. Knows no vocabulary.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.engine.scripted import ScriptedTokenizer
from mlx_backend.errors import EngineRefused
from mlx_backend.models.template_sandbox import ChatTemplate, TemplateFault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECONDS: Final = 20.0
"""For one rendering. Those of published templates take milliseconds."""

# How control tokens are spelt: `<|im_end|>`, `<｜User｜>`, `<think>`, `<seed:tool_call>`, `[INST]`, `]~b]`.
_MARKER = re.compile(
    r"<[|｜][^<>\n]{1,60}>|</?[a-z][\w:|-]{1,60}>|\[/?[A-Z_]{3,30}\]|<[a-z_]{2,30}\|>|\]~\w*\]"
)


class TemplateTokenizer(ScriptedTokenizer):
    """Implements the `Tokenizer` protocol for a bare template. Raises EngineRefused for one that cannot be parsed."""

    def __init__(self, source: str) -> None:
        super().__init__(sorted(set(_MARKER.findall(source)), key=len, reverse=True), source)
        try:
            self._parsed = ChatTemplate(source, date=datetime.now().strftime)
        except TemplateFault as fault:
            raise EngineRefused(str(fault)) from fault

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
            return self._parsed.render(
                messages,
                template_kwargs,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                deadline=time.thread_time() + SECONDS,
            )
        except TemplateFault as fault:
            raise EngineRefused(f"The model's chat template refused the conversation: {fault}") from fault
