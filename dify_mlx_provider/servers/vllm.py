"""vLLM: named as the owner of its models, whose `max_model_len` is the context.

`reasoning_effort` is for gpt-oss, the template's switch for the others. A limit that does not fit after the prompt is
refused, so it has no default here.
"""

from __future__ import annotations

from dify_mlx_provider.servers.base import ServerProfile
from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.upstream.credentials import ServerKind

PROFILE = ServerProfile(
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
