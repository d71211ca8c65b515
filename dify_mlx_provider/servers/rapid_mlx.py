"""Rapid-MLX: named as the owner of its models, whose `context_window` and `capabilities` it lists.

`reasoning_effort` only limits how much of the reasoning it shows, and without `enable_thinking` there may be none. JSON
it enforces only where it allows no reasoning; a streamed answer in another response format is empty (0.16.10).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dify_mlx_provider.servers.base import (
    ListedModel,
    ServedModel,
    ServerProfile,
    Size,
    Words,
    parse_entries,
    recognised,
)
from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo


class _RapidModel(ListedModel):
    context_window: Size = None
    capabilities: Words = None

    def described(self) -> ServedModel:
        """Return what Rapid-MLX says of the model. That it says nothing of tools means little: they are sent."""
        model = replace(super().described(), context_size=self.context_window or self.max_model_len)
        if not self.capabilities:
            return model
        if "text" not in self.capabilities:
            return replace(model, type=self.capabilities[0])
        sees = {"vision"} & {*self.capabilities}
        return replace(model, type="llm", capabilities=frozenset({"completion", "tools", *sees}))


def recognise(listing: Listing) -> ServerInfo | None:
    """Return what Rapid-MLX says of itself; None if it is another server."""
    if not listing.names(PROFILE):
        return None
    entries = parse_entries(listing.response.json, _RapidModel)
    return recognised(ServerKind.RAPID_MLX, [entry.described() for entry in entries])


PROFILE = ServerProfile(
    kind=ServerKind.RAPID_MLX,
    display_name="Rapid-MLX",
    owner="rapid-mlx",
    recognise=recognise,
    effort_fields=("chat_template_kwargs",),
    efforts=LEVELS,
    structured_output="prompt",
)
