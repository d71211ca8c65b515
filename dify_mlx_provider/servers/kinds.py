"""The kinds of servers that are not ours: the profile of each, and how it is recognised and describes its models."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

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
    parse_entries,
    recognised,
)
from dify_mlx_provider.servers.efforts import LEVELS, SWITCH
from dify_mlx_provider.upstream.credentials import ServerKind

if TYPE_CHECKING:
    from dify_mlx_provider.servers.base import Listing, ServerInfo
    from dify_mlx_provider.servers.probe import Probe


VLLM = ServerProfile(
    kind=ServerKind.VLLM,
    display_name="vLLM",
    owner="vllm",
    effort_fields=("reasoning_effort", "enable_thinking"),
    efforts=LEVELS,
    reasoning_fields=("reasoning", "reasoning_content"),
    thinking_budget_field="thinking_token_budget",
    default_max_tokens=None,
    truncates_texts=True,
)
"""vLLM: named as the owner of its models, whose `max_model_len` is the context.

`reasoning_effort` is for gpt-oss, the template's switch for the others. A limit that does not fit after the prompt is
refused, so it has no default here.
"""


LLAMA_CPP = ServerProfile(
    kind=ServerKind.LLAMA_CPP,
    display_name="llama.cpp",
    owner="llamacpp",
    header="llama.cpp",
    effort_fields=("chat_template_kwargs",),
    efforts=LEVELS,
    thinking_budget_field="thinking_budget_tokens",
    renamed_fields={"repetition_penalty": "repeat_penalty"},
    remedy="Start it with --embeddings, or with --reranking.",
)
"""llama.cpp: named as the owner of its models, or by its header `Server`; `meta.n_ctx` is the context of a slot."""


class _MlxVlmModel(ListedModel):
    loaded: Annotated[Annotated[bool, Field(strict=True)] | None, LENIENT] = None

    @property
    def is_default(self) -> bool:
        """Whether it is the one in memory."""
        return bool(self.loaded)


MLX_VLM = ServerProfile(
    kind=ServerKind.MLX_VLM,
    display_name="mlx-vlm",
    header="mlx_vlm",
    entry=_MlxVlmModel,
    effort_fields=("template_fields",),
    efforts=LEVELS,
    structured_output="unknown",
    thinking_budget_field="thinking_budget",
    calls_have_one_text=True,
    calls_in_logprobs=True,
    has_one_seed=True,
    refuses_long_prompts=False,
)
"""mlx-vlm's server: named by its header `Server`. Its list says which model is in memory, and no more than that.

Its fields for reasoning stand beside the others, not in `chat_template_kwargs`. A model that is asked for takes the
place of the one in memory, which therefore is the default. Without max_tokens it stops after 2,048; without a seed it
draws with 0. Of a call that ends in a control token, as gpt-oss's do, it says nothing (0.7.10): only the tokens that it
names on request have it.
"""


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


RAPID_MLX = ServerProfile(
    kind=ServerKind.RAPID_MLX,
    display_name="Rapid-MLX",
    owner="rapid-mlx",
    entry=_RapidModel,
    effort_fields=("chat_template_kwargs",),
    efforts=LEVELS,
    structured_output="prompt",
)
"""Rapid-MLX: named as the owner of its models, whose `context_window` and `capabilities` it lists.

`reasoning_effort` only limits how much of the reasoning it shows, and without `enable_thinking` there may be none. JSON
it enforces only where it allows no reasoning; a streamed answer in another response format is empty (0.16.10).
"""


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


def _recognise_lm_studio(listing: Listing) -> ServerInfo | None:
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


LM_STUDIO = ServerProfile(
    kind=ServerKind.LM_STUDIO,
    display_name="LM Studio",
    recognise=_recognise_lm_studio,
    effort_fields=("reasoning_effort", "reasoning"),
    structured_output="schemas",
    reasoning_fields=("reasoning_content", "reasoning"),
    renamed_fields={"repetition_penalty": "repeat_penalty"},
)
"""LM Studio: its own list, /api/v0/models, has each model's type, context and capabilities, and nothing of reasoning.

It enforces JSON schemas, and no plain JSON.
"""


def recognise_mlx_lm(listing: Listing) -> ServerInfo | None:
    """Return what mlx_lm.server says of itself; None if it is another server."""
    health = listing.probe.get("/health") if listing.owners <= {None} else None
    is_it = (
        health is not None
        and health.server_header.startswith("BaseHTTP/")
        and health.json == {"status": "ok"}
    )
    return listing.server(MLX_LM) if is_it else None


MLX_LM = ServerProfile(
    kind=ServerKind.MLX_LM,
    display_name="mlx_lm.server",
    recognise=recognise_mlx_lm,
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
"""mlx_lm.server: Python's own HTTP server, whose /health says {"status": "ok"}.

It hands messages to the chat template as they are: gpt-oss's reads `thinking`, the others' `reasoning_content`, and
gpt-oss's refuses a call that has both that and a text. Without max_tokens it stops after 512, in the middle of the
reasoning. It lists a part of what it has, and downloads whatever it is asked for.
"""


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


def _recognise_ollama(listing: Listing) -> ServerInfo | None:
    """Return what Ollama says of itself; None if it is another server."""
    version = listing.probe.get("/api/version")
    is_it = version is not None and isinstance(version.json, dict) and "version" in version.json
    return listing.server(OLLAMA) if is_it else None


def _describe_ollama_model(probe: Probe, listed: ServedModel) -> ServedModel | None:
    """Ask for one of the models; None if there is no answer."""
    response = probe.post("/api/show", {"model": listed.name})
    model = response.parse_as(_OllamaModel) if response is not None else None
    return model.described(listed) if model is not None else None


OLLAMA = ServerProfile(
    kind=ServerKind.OLLAMA,
    display_name="Ollama",
    recognise=_recognise_ollama,
    describe_model=_describe_ollama_model,
    reasoning_fields=("reasoning",),
    ignored_fields=frozenset({"top_k", "min_p", "repetition_penalty"}),
    refuses_long_prompts=False,
)
"""Ollama: answers at /api/version, and says at /api/show what one model can do.

Its own API has more settings than its OpenAI one, which ignores these. A prompt that is too long it cuts, without a
word.
"""
