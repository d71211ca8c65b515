"""Reasoning in a block at the beginning, and calls as JSON in `<tool_call>` blocks: Qwen3, Hermes and many others.

    <think>
    REASONING
    </think>

    ANSWER <tool_call>{"name": "f", "arguments": {…}}</tool_call> …

The most common format, and therefore the one of models about which no more is known than that they reason: a block may
have any of the words that are in use, and other syntaxes than JSON are read in `<tool_call>`, too.
"""

from __future__ import annotations

from mlx_backend.conversation.dialects.base import RawMarkup, call_format, common
from mlx_backend.conversation.dialects.block_format import BlockCalls, BlockFormat
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.families.shared import (
    ALL_WITH_TOOLS,
    OPENERS,
    WORDS,
    family,
    tool_call,
)

SECTION = tool_call(JsonObjects())
FORMAT = BlockFormat(reasoning=OPENERS, words=WORDS, sections=(SECTION,))
_LEAKED_OPENERS = tuple(opener for opener in OPENERS if opener not in WORDS - {"<thinking>"})


THINK = family(
    "hermes-json",
    *("think", "hermes", "qwen3", "qwen", "qwen2.5", "smollm3", "deepseek-r1-distill"),
    signs=(
        call_format(*SECTION.openers, in_template=True),
        # Some templates name only what closes reasoning, to cut it from earlier answers.
        *(common(marker) for marker in (*SECTION.openers, *OPENERS.values(), *OPENERS)),
    ),
    form=FORMAT,
    calls=BlockCalls(FORMAT, foreign=("<function=", "<arg_key>")),
    # Qwen3 and R1 have no switch for it; a later family that writes this format and has one is made for agents.
    history=ALL_WITH_TOOLS,
    leaks=RawMarkup(
        openers=_LEAKED_OPENERS,
        call_openers=SECTION.openers,
        reasoning_closers=tuple(OPENERS[opener] for opener in _LEAKED_OPENERS),
        end_markers=("<|im_end|>", "<|endoftext|>", "<|eot_id|>"),
    ),
)
