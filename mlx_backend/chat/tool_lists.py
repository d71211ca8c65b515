"""Lists of tools in the order in which they were first sent.

Some clients send the same tools in another order, or a schema's keys, and most templates tell of tools before anything
else: nothing of such a prompt would be found in the prefix cache. So the same tools are the same list, in the form in
which the client had sent it first. Knows no templates.
"""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from mlx_backend.byte_cache import ByteCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.chat.request import ChatRequest

_FACTOR = 4
"""How much larger JSON is as objects and as text together, about."""


class ToolLists:
    """The lists of tools that clients have sent, each client's own. Safe to use from several threads."""

    def __init__(self, caches: CacheBudget | None = None) -> None:
        self._lists: ByteCache[tuple[str, str], Mapping[str, Mapping[str, Any]]] = ByteCache(caches)

    def as_first_sent(self, request: ChatRequest) -> ChatRequest:
        """Return the request with its tools as its client first sent them; tools that are deferred come last."""
        told: dict[str, tuple[Mapping[str, Any], str]] = {}
        deferred: list[tuple[Mapping[str, Any], str]] = []
        paths = request.tool_paths or [f"tools[{at}].function" for at in range(len(request.tools))]
        for tool, path in zip(request.tools, paths, strict=True):
            if tool["function"]["name"] in request.deferred_tools:
                deferred.append((tool, path))
            else:
                told[json.dumps(tool, sort_keys=True)] = tool, path
        if not request.tools:
            return request
        digest = sha256("\n".join(sorted(told)).encode("utf-8", "surrogatepass")).hexdigest()
        nbytes = _FACTOR * sum(map(len, told))
        sent = {written: tool for written, (tool, _) in told.items()}
        first = self._lists.get((request.owner, digest), nbytes, lambda: sent)
        tools: Sequence[tuple[Mapping[str, Any], str]] = [
            *((tool, told[written][1]) for written, tool in first.items()),
            *deferred,
        ]
        return replace(request, tools=[tool for tool, _ in tools], tool_paths=[path for _, path in tools])
