"""Plain: a model without channels. All it writes is the answer; its control tokens are not shown.

Where a request offers tools, its models are told of them in the general way, and calls are read as JSON in
`<tool_call>` blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.block_format import BlockFormat, CallSection
from mlx_backend.conversation.dialects.block_reader import BlockReader
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.families.control_tokens import INTERNLM_CALLS
from mlx_backend.conversation.dialects.families.shared import family
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.conversation.dialects.base import Reader
    from mlx_backend.conversation.tools import ToolSet


_WITH_CALLS = BlockFormat(
    sections=(
        CallSection(openers=("<tool_call>",), closer="</tool_call>", syntax=JsonObjects()),
        INTERNLM_CALLS,  # older templates of this family say nothing of them
    )
)


def reader(*, tools: ToolSet, opens_in: Channel | None = None, special_tokens: Mapping[int, str]) -> Reader:
    """Make the reader of a turn that is an answer, or calls of these tools."""
    return BlockReader(
        form=_WITH_CALLS if tools.names else BlockFormat(),
        tools=tools,
        opens_in=opens_in or Channel.FINAL,
        special_tokens=special_tokens,
    )


PLAIN = replace(family("plain", signs=(), form=_WITH_CALLS), reader=reader)
