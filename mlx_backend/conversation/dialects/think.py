"""Reasoning in a block at the beginning, and calls as JSON in `<tool_call>` blocks: Qwen3, Hermes and many others.

    <think>
    REASONING
    </think>

    ANSWER <tool_call>{"name": "f", "arguments": {…}}</tool_call> …

The most common format, and therefore the one of models about which no more is known than that they reason: a block may
have any of the words that are in use, and other syntaxes than JSON are read in `<tool_call>`, too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Dialect, HistoryPolicy, RawMarkup, call_format, common
from mlx_backend.conversation.dialects.block_format import BlockCalls, BlockFormat, CallSection
from mlx_backend.conversation.dialects.block_reader import BlockReader
from mlx_backend.conversation.dialects.calls.any_syntax import AnySyntax
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects

if TYPE_CHECKING:
    from collections.abc import Mapping

OPENERS: Mapping[str, str] = {
    **{
        f"<{word}>": f"</{word}>"
        for word in ("think", "thinking", "thought", "Thought", "reason", "reasoning")
    },
    "<seed:think>": "</seed:think>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
    "[THINK]": "[/THINK]",
}
"""Every way to open a block of reasoning, with the marker that closes it."""

JSON = AnySyntax(JsonObjects())
SECTION = CallSection(openers=("<tool_call>",), closer="</tool_call>", syntax=JSON)
WORDS = frozenset(f"<{word}>" for word in ("thinking", "thought", "Thought", "reason", "reasoning"))
"""Openers that people write, too."""
FORMAT = BlockFormat(reasoning=OPENERS, words=WORDS, sections=(SECTION,))
_LEAKED_OPENERS = tuple(opener for opener in OPENERS if opener not in WORDS - {"<thinking>"})


THINK = Dialect(
    name="hermes-json",
    aliases=("think", "hermes", "qwen3", "qwen", "qwen2.5", "smollm3", "deepseek-r1-distill"),
    signs=(
        call_format(*SECTION.openers, in_template=True),
        # Some templates name only what closes reasoning, to cut it from earlier answers.
        *(common(marker) for marker in (*SECTION.openers, *OPENERS.values(), *OPENERS)),
    ),
    reader=partial(BlockReader, form=FORMAT),
    continuation=FORMAT.continuation,
    opens_in=FORMAT.opens_in,
    calls=BlockCalls(FORMAT, foreign=("<function=", "<arg_key>")),
    # Qwen3 and R1 have no switch for it; a later family that writes this format and has one is made for agents.
    history=HistoryPolicy(keeps_with_tools=True),
    blocks=OPENERS,
    markers=FORMAT.telling_markers,
    reasoning_markers=(*OPENERS, *OPENERS.values()),
    leaks=RawMarkup(
        openers=_LEAKED_OPENERS,
        call_openers=SECTION.openers,
        reasoning_closers=tuple(OPENERS[opener] for opener in _LEAKED_OPENERS),
        end_markers=("<|im_end|>", "<|endoftext|>", "<|eot_id|>"),
    ),
)
