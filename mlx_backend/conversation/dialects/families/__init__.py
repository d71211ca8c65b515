"""The families that write blocks: a row each, in the modules of this folder.

What a row says is read from the families' own chat templates and from what their models write. How calls are written is
`calls/`; what reads by these tables is `block_reader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.families import (
    control_tokens,
    function_tags,
    invoke_tags,
    key_value_tags,
    python_and_gemma,
)

if TYPE_CHECKING:
    from mlx_backend.conversation.dialects.base import Dialect

_MODULES = (control_tokens, invoke_tags, key_value_tags, function_tags, python_and_gemma)
FAMILIES: tuple[Dialect, ...] = (
    *(family for module in _MODULES for family in module.FAMILIES),
    key_value_tags.JAMBA,  # last: it is known by what surrounds calls, which says less than how calls are written
)
