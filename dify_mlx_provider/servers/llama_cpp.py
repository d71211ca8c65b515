"""llama.cpp: named as the owner of its models, or by its header `Server`; `meta.n_ctx` is the context of a slot."""

from __future__ import annotations

from dify_mlx_provider.servers.base import ServerProfile
from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.upstream.credentials import ServerKind

PROFILE = ServerProfile(
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
