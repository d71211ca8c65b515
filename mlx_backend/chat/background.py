"""How a request that a client makes by itself is answered: cheaply, and after users' own.

    effort          the model's lowest                        unless the request states one
    priority        behind users' turns                       unless the request has one, or a user's turn awaits it
    max_tokens      enough for a brief answer                 unless the request has a limit, or a lower one holds
    answer_reserve  most of those tokens are for the answer   unless the request limits its reasoning itself

conversation/background_requests.py knows which requests these are; the effort is applied where efforts are decided
(chat_prompt.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_backend.conversation.background_requests import (
    MAX_TOKENS,
    answer_reserve,
    find_background_prompt,
)

if TYPE_CHECKING:
    from mlx_backend.chat.request import ChatRequest

PRIORITY = 1


def recognised(request: ChatRequest, default_max_tokens: int | None) -> ChatRequest:
    """Return the request as it is answered: itself, unless it is a background request."""
    prompt = find_background_prompt(request.messages, stream=request.fields.get("stream") is True)
    if prompt is None:
        return request
    priority, max_tokens, reserve = request.priority, request.max_tokens, request.answer_reserve
    if priority is None and not prompt.is_awaited:
        priority = PRIORITY
    if max_tokens is None and prompt.is_brief:
        # Some models never end a list; the page shows that it is busy until they do.
        max_tokens = min(MAX_TOKENS, default_max_tokens or MAX_TOKENS)
    if max_tokens is not None and reserve is None and request.thinking_budget is None:
        reserve = answer_reserve(max_tokens)
    return replace(
        request, background=prompt, priority=priority, max_tokens=max_tokens, answer_reserve=reserve
    )
