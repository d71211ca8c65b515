"""What the rows of families share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import RESULT_TEXT, Dialect, HistoryPolicy, RawMarkup
from mlx_backend.conversation.dialects.block_format import BlockCalls, CallSection
from mlx_backend.conversation.dialects.block_reader import BlockReader
from mlx_backend.conversation.dialects.calls.any_syntax import AnySyntax

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.dialects.base import CallCodec, Sign, ToolPromptWriter
    from mlx_backend.conversation.dialects.block_format import BlockFormat
    from mlx_backend.conversation.dialects.calls.base import CallSyntax


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

WORDS = frozenset(f"<{word}>" for word in ("thinking", "thought", "Thought", "reason", "reasoning"))
"""Openers that people write, too."""

THINK_TAGS = {"<think>": "</think>"}

BY_TEMPLATE = HistoryPolicy()
"""The template decides which reasoning of answered turns stays."""
ALL_WITH_TOOLS = HistoryPolicy(keeps_with_tools=True)
"""As agents, its models were trained to see all of it, though the template's switch may be off by default."""


def tool_call(own: CallSyntax) -> CallSection:
    """Return the section that many families share; `own` is what a family writes in it."""
    return CallSection(openers=("<tool_call>",), closer="</tool_call>", syntax=AnySyntax(own))


def family(
    name: str,
    *aliases: str,
    signs: tuple[Sign, ...],
    form: BlockFormat,
    calls: CallCodec | None = None,
    leaked_calls: tuple[str, ...] = (),
    taught_by: tuple[str, ...] = (),
    history: HistoryPolicy = BY_TEMPLATE,
    result_text: str = RESULT_TEXT,
    tool_prompt: ToolPromptWriter | None = None,
    leaks: RawMarkup | None = None,
) -> Dialect:
    """Make a family's dialect of its table.

    `leaked_calls` open its calls, and are recognised where a server lets them through; so are blocks of its own. Or
    `leaks` says what is.
    """
    own = {
        opener: closer for opener, closer in form.reasoning.items() if opener not in {*OPENERS, *form.words}
    }
    return Dialect(
        name=name,
        aliases=aliases,
        signs=signs,
        reader=partial(BlockReader, form=form),
        continuation=form.continuation,
        opens_in=form.opens_in,
        calls=calls or BlockCalls(form, taught_by=taught_by),
        blocks=form.reasoning,
        markers=form.telling_markers,
        answers=form.answer_markers,
        ends=form.ends,
        suffixes=form.suffixes,
        has_reasoning=bool(form.reasoning),
        reasoning_markers=(*form.reasoning, *form.reasoning.values()),
        history=history,
        result_text=result_text,
        tool_prompt=tool_prompt,
        leaks=leaks
        or RawMarkup(
            openers=(*own,), call_openers=leaked_calls, reasoning_closers=(*dict.fromkeys(own.values()),)
        ),
    )
