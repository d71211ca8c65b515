"""mlx-backend: named by its header `Server` and as the owner of its models; its /v1/models says everything.

The plugin and `mlx-backend` come from one project and share one version number. A server of the same major version
only adds to what the plugin needs; one older than OLDEST_SERVER lacks something the plugin relies on. This is the one
place where versions are compared.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dify_mlx_provider.servers.base import (
    LENIENT,
    ListedModel,
    ServedModel,
    ServerAnswer,
    ServerProfile,
    Size,
    Word,
    Words,
)
from dify_mlx_provider.servers.efforts import EFFORTS
from dify_mlx_provider.upstream.credentials import ServerKind
from mlx_backend import __version__ as PLUGIN_VERSION  # noqa: N812  # a constant here

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo

DEFAULT_ANSWER_RESERVE = 1024
"""Tokens of a limit that are kept for the answer, but at most half of it: enough for a few paragraphs."""

OLDEST_SERVER = (0, 1)
"""The oldest server that answers what this plugin asks: major, minor."""

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})")


class _Health(ServerAnswer):
    version: Word = None


class _Reasoning(ServerAnswer):
    efforts: Words = None
    default: Word = None
    preserved: Annotated[Annotated[bool, Field(strict=True)] | None, LENIENT] = None


class _MlxBackendModel(ListedModel):
    type: Word = None
    context_length: Size = None
    max_output_tokens: Size = None
    default_max_tokens: Size = None
    capabilities: Words = None
    reasoning: Annotated[_Reasoning | None, LENIENT] = None
    sampling_defaults: Annotated[dict[str, Any] | None, LENIENT] = None

    def described(self) -> ServedModel:
        """Return what the server says of the model."""
        # No capabilities at all: they are not known before the model is downloaded.
        capabilities = frozenset(self.capabilities or ()) or None
        reasoning = self.reasoning or _Reasoning()
        efforts = reasoning.efforts
        if efforts is None and capabilities is not None:
            efforts = ()  # a server that says what a model can do says it of reasoning too
        return ServedModel(
            name=self.id,
            type=self.type,
            context_size=self.context_length or self.max_model_len,
            max_output_tokens=self.max_output_tokens,
            default_max_tokens=self.default_max_tokens,
            capabilities=capabilities,
            efforts=efforts,
            default_effort=reasoning.default,
            preserves_reasoning=bool(reasoning.preserved),
            sampling={
                name: value for name, value in (self.sampling_defaults or {}).items() if _is_number(value)
            },
        )


def recognise(listing: Listing) -> ServerInfo | None:
    """Return what mlx-backend says of itself; None if it is another server."""
    if not listing.names(PROFILE):
        return None
    version = listing.response.server_header.partition("/")[2].split(" ")[0]
    if not version and (response := listing.probe.get("/health")):  # a proxy may write a header of its own
        health = response.parse_as(_Health)
        version = (health.version if health else None) or ""
    return listing.server(PROFILE, version)


PROFILE = ServerProfile(
    kind=ServerKind.MLX_BACKEND,
    display_name="mlx-backend",
    owner="mlx-backend",
    header="mlx-backend",
    entry=_MlxBackendModel,
    recognise=recognise,
    efforts=EFFORTS,
    thinking_budget_field="thinking_budget",
    own_fields=frozenset({"answer_reserve", "input_type", "priority", "reasoning_format"}),
    default_model="default",
    always_has_default=True,
    counts_tokens=True,
    separates_reasoning=True,
    vector_encoding="base64",
    truncates_texts=True,
    remedy="Start a newer one.",
)


def incompatibility(
    server: str, *, plugin: str = PLUGIN_VERSION, oldest: tuple[int, int] = OLDEST_SERVER
) -> str | None:
    """Return a sentence on what to update, or None if the versions fit. An unreadable version fits."""
    server_version, plugin_version = _major_minor(server), _major_minor(plugin)
    if server_version is None or plugin_version is None:
        return None
    if server_version < oldest:
        return (
            f"The server is mlx-backend {server}, and this plugin ({plugin}) needs {oldest[0]}.{oldest[1]} or newer. "
            "Update the server."
        )
    if server_version[0] > plugin_version[0]:
        return (
            f"The server is mlx-backend {server}, newer than this plugin ({plugin}) understands. Update the plugin "
            "in Dify."
        )
    return None


def _major_minor(version: str) -> tuple[int, int] | None:
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e9 < value < 1e9
