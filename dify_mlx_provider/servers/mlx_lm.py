"""mlx_lm.server: Python's own HTTP server, whose /health says {"status": "ok"}.

It hands messages to the chat template as they are: gpt-oss's reads `thinking`, the others' `reasoning_content`, and
gpt-oss's refuses a call that has both that and a text. Without
max_tokens it stops after 512, in the middle of the reasoning. It lists a part of what it has, and downloads whatever it
is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dify_mlx_provider.servers.base import ServerProfile
from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo


def recognise(listing: Listing) -> ServerInfo | None:
    """Return what mlx_lm.server says of itself; None if it is another server."""
    health = listing.probe.get("/health") if listing.owners <= {None} else None
    is_it = (
        health is not None
        and health.server_header.startswith("BaseHTTP/")
        and health.json == {"status": "ok"}
    )
    return listing.server(ServerKind.MLX_LM) if is_it else None


PROFILE = ServerProfile(
    kind=ServerKind.MLX_LM,
    display_name="mlx_lm.server",
    recognise=recognise,
    effort_fields=("chat_template_kwargs",),
    efforts=LEVELS,
    structured_output="prompt",
    reasoning_fields=("reasoning_content", "thinking"),
    calls_have_one_text=True,
    refuses_long_prompts=False,
    default_model="default_model",
    lists_all_models=False,
    default_max_tokens=8192,
)
