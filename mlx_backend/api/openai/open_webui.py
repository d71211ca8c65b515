"""What Open WebUI reads in a model's object of /v1/models: where its defaults would not suit the model.

Undocumented there, and measured with 0.12.4: `info` of an entry is taken for the model's settings, and what an
administrator sets for the model comes before it. Only what has to be turned off is said. Other clients ignore `info`.

    capabilities.builtin_tools   the page adds its own 36 tools to every message of a new installation
    capabilities.vision          the page sends images to any model, unless it is told not to
    hidden                       the page offers every model for chatting, those for embeddings too
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_backend.models.description import ModelDescription

BUILTIN_TOOLS_TOKENS = 6_000
"""About how many tokens describe those tools in a prompt: 26 KB of JSON, 4,100 tokens for gpt-oss, 7,700 for Qwen3."""

MIN_CONTEXT = 4 * BUILTIN_TOOLS_TOKENS
"""Tokens of context from which on the tools are worth their room: about a quarter of it at most."""


def page_info(description: ModelDescription) -> dict[str, Any] | None:
    """Return the value of `info`; None where the page's defaults are right, as far as is known."""
    if description.kind != "llm":
        return {"meta": {"hidden": True}}
    if not description.capabilities:  # the model has yet to be downloaded: nothing is known of it
        return None
    has_room = description.context_length is None or description.context_length >= MIN_CONTEXT
    suits = {
        "builtin_tools": has_room and "tools" in description.capabilities,
        "vision": "vision" in description.capabilities,
    }
    off = {name: False for name, is_suited in suits.items() if not is_suited}
    return {"meta": {"capabilities": off}} if off else None
