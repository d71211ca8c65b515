"""The `usage`, `timings` and `reasoning` of a reply."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_backend.api.openai.objects import PromptTokens, ReasoningObject, TimingsObject, UsageObject
    from mlx_backend.chat.reply import Reply, Usage


def usage_object(usage: Usage) -> UsageObject:
    """Build OpenAI's `usage`."""
    details: PromptTokens = {"cached_tokens": usage.cached_tokens}
    if usage.image_tokens:
        details["image_tokens"] = usage.image_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timings_object(usage: Usage) -> TimingsObject:
    """Build `timings` under llama.cpp's names, from which chat pages show tokens per second.

    Two are ours. Drafts are counted if there were any.
    """
    prefilled = usage.prompt_tokens - usage.cached_tokens
    timings: TimingsObject = {
        "cache_n": usage.cached_tokens,
        "prompt_n": prefilled,
        "prompt_ms": round(usage.prefill_seconds * 1000, 3),
        "prompt_per_second": _rate(prefilled, usage.prefill_seconds),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(usage.decode_seconds * 1000, 3),
        "predicted_per_second": _rate(usage.completion_tokens, usage.decode_seconds),
        "queue_ms": round(usage.queue_seconds * 1000, 3),
        "first_token_ms": round((usage.queue_seconds + usage.prefill_seconds) * 1000, 3),
    }
    if usage.drafted_tokens:
        timings["draft_n"] = usage.drafted_tokens
        timings["draft_n_accepted"] = usage.accepted_tokens
    return timings


def reasoning_object(reply: Reply) -> ReasoningObject | None:
    """Build what was decided about a reply's reasoning; None for a completion of a bare text."""
    decided = reply.effort
    if decided is None:
        return None
    return {
        "effort": decided.effort,
        "level": decided.level.effort if decided.level else None,
        "source": decided.source,
        "budget": reply.thinking_budget,
    }


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 2) if seconds > 0 else 0.0
