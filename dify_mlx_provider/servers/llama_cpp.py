"""llama.cpp: named as the owner of its models, or by its header `Server`; `meta.n_ctx` is the context of a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dify_mlx_provider.servers.base import ServerProfile
from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo

PROFILE = ServerProfile(
    kind=ServerKind.LLAMA_CPP,
    display_name="llama.cpp",
    effort_fields=("chat_template_kwargs",),
    efforts=LEVELS,
    thinking_budget_field="thinking_budget_tokens",
    renamed_fields={"repetition_penalty": "repeat_penalty"},
    remedy="Start it with --embeddings, or with --reranking.",
)


def recognise(listing: Listing) -> ServerInfo | None:
    """Return what llama.cpp says of itself; None if it is another server."""
    is_it = "llamacpp" in listing.owners or listing.response.server_header.startswith("llama.cpp")
    return listing.server(ServerKind.LLAMA_CPP) if is_it else None
