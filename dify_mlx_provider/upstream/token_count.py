"""How many tokens a prompt has: counted by the server that would read it, else estimated. Nothing is downloaded.

The count is exact where the server is an mlx-backend: its `/v1/tokenize` reads a request as it would to answer it,
template, tools and effort included. It is kept for a while, since Dify asks again and again for the same history. A
server that is away or does not know the question costs one attempt, and an estimate is as good as it gets.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream import discovery
from dify_mlx_provider.upstream.cache import Kept
from dify_mlx_provider.upstream.probe import Asker
from dify_mlx_provider.upstream.server_kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dify_mlx_provider.upstream.credentials import Credentials

PER_MESSAGE = 4
"""Tokens of markup around a message, about."""

_WIDE = re.compile(r"[\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]")
_NOT_COUNTED = ("stream", "stream_options", "max_tokens")

_counts: Kept[int] = Kept(60.0, most=512)


def estimated_tokens(text: str) -> int:
    """Estimate a text's tokens without a vocabulary: four letters a token, one for an East Asian character."""
    wide = len(_WIDE.findall(text))
    return wide + (len(text) - wide + 3) // 4


def counted_tokens(credentials: Credentials, request: Mapping[str, Any]) -> int | None:
    """Count a chat request's prompt, or a `prompt`'s text; None where the server cannot. Never raises."""
    if discovery.server(credentials).kind is not Kind.MLX_BACKEND:
        return None
    asked = {name: value for name, value in request.items() if name not in _NOT_COUNTED}
    key = hashlib.sha256(json.dumps([credentials.base_url, asked], sort_keys=True).encode()).hexdigest()
    return _counts.get(key, lambda: _ask(credentials, asked))


def _ask(credentials: Credentials, asked: Mapping[str, Any]) -> int | None:
    answer = Asker(credentials).send("POST", f"{credentials.base_url}/tokenize", asked)
    count = answer.data.get("count") if answer is not None and isinstance(answer.data, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count >= 0 else None
