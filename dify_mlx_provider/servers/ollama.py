"""Ollama: answers at /api/version, and says at /api/show what one model can do.

Its own API has more settings than its OpenAI one, which ignores these. A prompt that is too long it cuts, without a
word.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from dify_mlx_provider.servers.base import LENIENT, ServedModel, ServerAnswer, ServerProfile, Word, Words
from dify_mlx_provider.servers.efforts import LEVELS, SWITCH
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo
    from dify_mlx_provider.servers.probe import Probe


class _OllamaDetails(ServerAnswer):
    family: Word = None


class _OllamaModel(ServerAnswer):
    capabilities: Words = None
    parameters: Word = None
    details: Annotated[_OllamaDetails | None, LENIENT] = None

    def described(self, listed: ServedModel) -> ServedModel:
        """Return the listed model with what Ollama says of it."""
        # Ollama does not always allow what the model could read: only a size that was set is certain.
        size = re.search(r"^num_ctx\s+(\d+)", self.parameters or "", re.MULTILINE)
        listed = replace(listed, context_size=int(size[1]) if size else None)
        if self.capabilities is None:
            return replace(listed, type="llm")
        return replace(
            listed,
            type="embedding" if self.capabilities == ("embedding",) else "llm",
            capabilities=frozenset({*self.capabilities, "structured_output"}),
            efforts=self._efforts() if "thinking" in self.capabilities else (),
        )

    def _efforts(self) -> tuple[str, ...]:
        family = (self.details.family if self.details else None) or ""
        return LEVELS if "gptoss" in family.replace("-", "") else SWITCH


def recognise(listing: Listing) -> ServerInfo | None:
    """Return what Ollama says of itself; None if it is another server."""
    version = listing.probe.get("/api/version")
    is_it = version is not None and isinstance(version.json, dict) and "version" in version.json
    return listing.server(ServerKind.OLLAMA) if is_it else None


def describe_model(probe: Probe, listed: ServedModel) -> ServedModel | None:
    """Ask for one of the models; None if there is no answer."""
    response = probe.post("/api/show", {"model": listed.name})
    model = response.parse_as(_OllamaModel) if response is not None else None
    return model.described(listed) if model is not None else None


PROFILE = ServerProfile(
    kind=ServerKind.OLLAMA,
    display_name="Ollama",
    recognise=recognise,
    describe_model=describe_model,
    reasoning_fields=("reasoning",),
    ignored_fields=frozenset({"top_k", "min_p", "repetition_penalty"}),
    refuses_long_prompts=False,
)
