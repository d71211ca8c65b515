"""LM Studio: its own list, /api/v0/models, has each model's type, context and capabilities, and nothing of reasoning.

It enforces JSON schemas, and no plain JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from dify_mlx_provider.servers.base import (
    ServedModel,
    ServerAnswer,
    ServerProfile,
    Size,
    Word,
    Words,
    parse_entries,
    recognised,
)
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo


class _LmStudioModel(ServerAnswer):
    id: str = Field(strict=True)
    type: Word = None
    state: Word = None
    loaded_context_length: Size = None
    max_context_length: Size = None
    capabilities: Words = None

    def described(self) -> ServedModel:
        """Return what LM Studio says of the model."""
        capabilities: frozenset[str] | None = None
        if self.capabilities is not None:
            capabilities = frozenset({"completion", "structured_output"})
            capabilities |= {"tools"} if "tool_use" in self.capabilities else set()
            capabilities |= {"vision"} if self.type == "vlm" else set()
        return ServedModel(
            name=self.id,
            type={"llm": "llm", "vlm": "llm", "embeddings": "embedding"}.get(self.type or ""),
            context_size=self.loaded_context_length or self.max_context_length,
            capabilities=capabilities,
        )


def recognise(listing: Listing) -> ServerInfo | None:
    """Return what LM Studio says of itself; None if it is another server."""
    # Others borrow its word for the owner, but not its own list.
    if listing.entries and "organization_owner" not in listing.owners:
        return None
    response = listing.probe.get("/api/v0/models")
    entries = parse_entries(response.json, _LmStudioModel) if response is not None else []
    if not any(entry.type for entry in entries):
        return None
    # The first one is the default: a model that is in memory goes before the rest.
    entries.sort(key=lambda entry: entry.state not in (None, "loaded"))
    return recognised(ServerKind.LM_STUDIO, [entry.described() for entry in entries])


PROFILE = ServerProfile(
    kind=ServerKind.LM_STUDIO,
    display_name="LM Studio",
    recognise=recognise,
    effort_fields=("reasoning_effort", "reasoning"),
    structured_output="schemas",
    reasoning_fields=("reasoning_content", "reasoning"),
    renamed_fields={"repetition_penalty": "repeat_penalty"},
)
