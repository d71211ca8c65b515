"""mlx-vlm's server: named by its header `Server`. Its list says which model is in memory, and no more than that.

Its fields for reasoning stand beside the others, not in `chat_template_kwargs`. A model that is asked for takes the
place of the one in memory, which therefore is the default. Without max_tokens it stops after 2,048; without a seed it
draws with 0. Of a call that ends in a control token, as gpt-oss's do, it says nothing (0.7.10): only the tokens that it
names on request have it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from dify_mlx_provider.servers.base import LENIENT, ListedModel, ServerProfile, parse_entries, recognised
from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo


class _MlxVlmModel(ListedModel):
    loaded: Annotated[Annotated[bool, Field(strict=True)] | None, LENIENT] = None


def recognise(listing: Listing) -> ServerInfo | None:
    """Return what mlx-vlm says of itself; None if it is another server."""
    if not listing.names(PROFILE):
        return None
    entries = parse_entries(listing.response.json, _MlxVlmModel)
    entries.sort(key=lambda entry: not entry.loaded)
    return recognised(ServerKind.MLX_VLM, [entry.described() for entry in entries])


PROFILE = ServerProfile(
    kind=ServerKind.MLX_VLM,
    display_name="mlx-vlm",
    header="mlx_vlm",
    recognise=recognise,
    effort_fields=("template_fields",),
    efforts=LEVELS,
    structured_output="unknown",
    thinking_budget_field="thinking_budget",
    calls_have_one_text=True,
    calls_in_logprobs=True,
    has_one_seed=True,
    refuses_long_prompts=False,
)
