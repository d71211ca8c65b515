"""How many tokens a prompt has: counted by the server that would answer it, or estimated. Downloads no tokenizer.

mlx-backend counts exactly: its `/v1/tokenize` renders a request as for an answer, with template, tools and effort.
Counts of prompts are cached for a while, because Dify asks again and again about the same history. The chunks of a
document go together, many to a request. A server that is away or has no such endpoint is asked once at most, and the
count is estimated.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.base import ServerAnswer
from dify_mlx_provider.servers.probe import Probe
from dify_mlx_provider.upstream.cache import TtlCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dify_mlx_provider.upstream.credentials import Credentials

TOKENS_PER_MESSAGE = 4
"""Tokens of markup around a message, roughly."""

MAX_TEXTS = 2048
"""Texts counted in one request: the server's limit."""

MAX_BYTES = 250_000
"""Bytes counted in one request, so that the answer can be read even at a token a byte."""

_WIDE = re.compile(r"[\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef]")
_NOT_IN_PROMPT = ("stream", "stream_options", "max_tokens")

_counts: TtlCache[int] = TtlCache(60.0, max_entries=512)


type _Count = Annotated[int, Field(strict=True, ge=0)]


class _TokenCount(ServerAnswer):
    count: _Count | list[_Count]


def estimate_tokens(text: str) -> int:
    """Estimate a text's tokens without a vocabulary: one per four letters, one per East Asian character."""
    wide = len(_WIDE.findall(text))
    return wide + (len(text) - wide + 3) // 4


def count_tokens(credentials: Credentials, request: Mapping[str, Any]) -> int | None:
    """Count the prompt of a chat request, or of one with a `prompt`; None if the server cannot. Never raises."""
    if not discovery.find_profile(credentials).counts_tokens:
        return None
    prompt = {name: value for name, value in request.items() if name not in _NOT_IN_PROMPT}
    key = hashlib.sha256(json.dumps([credentials.base_url, prompt], sort_keys=True).encode()).hexdigest()

    def fetch() -> int | None:
        counted = _fetch_count(Probe(credentials), credentials, prompt)
        return counted if isinstance(counted, int) else None

    return _counts.get(key, fetch)


def count_tokens_each(credentials: Credentials, model: str, texts: Sequence[str]) -> list[int]:
    """Count each text's tokens for an embedding model: exactly if the server can, else by an estimate. Never raises."""
    counts: list[int] = []
    if discovery.find_profile(credentials).counts_tokens:
        # /tokenize serves models of all kinds, and its default is the one that chats.
        info = discovery.find_model(model, credentials, "embedding")
        probe, name = Probe(credentials), model if info is None else info.name
        for batch in _batches(texts):
            counted = _fetch_count(probe, credentials, {"model": name, "prompt": list(batch)})
            if not isinstance(counted, list) or len(counted) != len(batch):
                break
            counts += counted
    return counts + [estimate_tokens(text) for text in texts[len(counts) :]]


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split the texts, in order, into batches of at most MAX_TEXTS and MAX_BYTES; a longer text is one alone."""
    start, total = 0, 0
    for at, text in enumerate(texts):
        size = len(text.encode("utf-8", "surrogatepass"))
        if at > start and (at - start == MAX_TEXTS or total + size > MAX_BYTES):
            yield texts[start:at]
            start, total = at, 0
        total += size
    if texts:
        yield texts[start:]


def _fetch_count(
    probe: Probe, credentials: Credentials, request: Mapping[str, Any]
) -> int | list[int] | None:
    response = probe.send("POST", f"{credentials.base_url}/tokenize", request)
    answer = response.parse_as(_TokenCount) if response is not None else None
    return answer.count if answer is not None else None
