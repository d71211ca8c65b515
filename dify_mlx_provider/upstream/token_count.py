"""How many tokens a prompt has: counted by the server that would answer it, or estimated. Downloads no tokenizer.

mlx-backend counts exactly: its `/v1/tokenize` renders a request as for an answer, with template, tools and effort.
Counts are cached for a while, because Dify asks again and again about the same history. A server that is away or has
no such endpoint is asked once, and the count is estimated.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream import discovery
from dify_mlx_provider.upstream.cache import TtlCache
from dify_mlx_provider.upstream.listings import TokenCount
from dify_mlx_provider.upstream.probe import Probe
from dify_mlx_provider.upstream.server_kinds import ServerKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dify_mlx_provider.upstream.credentials import Credentials

TOKENS_PER_MESSAGE = 4
"""Tokens of markup around a message, roughly."""

_WIDE = re.compile(r"[\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]")
_NOT_IN_PROMPT = ("stream", "stream_options", "max_tokens")

_counts: TtlCache[int] = TtlCache(60.0, max_entries=512)


def estimate_tokens(text: str) -> int:
    """Estimate a text's tokens without a vocabulary: one per four letters, one per East Asian character."""
    wide = len(_WIDE.findall(text))
    return wide + (len(text) - wide + 3) // 4


def count_tokens(credentials: Credentials, request: Mapping[str, Any]) -> int | None:
    """Count the prompt of a chat request, or of one with a `prompt`; None if the server cannot. Never raises."""
    if discovery.find_server(credentials).kind is not ServerKind.MLX_BACKEND:
        return None
    prompt = {name: value for name, value in request.items() if name not in _NOT_IN_PROMPT}
    key = hashlib.sha256(json.dumps([credentials.base_url, prompt], sort_keys=True).encode()).hexdigest()
    return _counts.get(key, lambda: _fetch_count(credentials, prompt))


def _fetch_count(credentials: Credentials, request: Mapping[str, Any]) -> int | None:
    response = Probe(credentials).send("POST", f"{credentials.base_url}/tokenize", request)
    answer = response.parse_as(TokenCount) if response is not None else None
    return answer.count if answer is not None else None
