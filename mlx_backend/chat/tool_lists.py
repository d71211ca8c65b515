"""Lists of tools in the order in which they were first sent.

Some clients send the same tools in another order, or a schema's keys, and most templates tell of tools before anything
else: nothing of such a prompt would be found in the prefix cache. So the same tools are the same list, in the form in
which the client had sent it first. A strict tool's calls have their arguments in the order of its schema: with its keys
in another order it is another tool. Knows no templates.
"""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from operator import itemgetter
from sys import getsizeof
from typing import TYPE_CHECKING

from mlx_backend.byte_cache import ByteCache

if TYPE_CHECKING:
    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.chat.request import ChatRequest

_ENTRY_BYTES = 512
"""Of an entry, without its texts."""


class ToolLists:
    """The lists of tools that clients have sent, each client's own. Safe to use from several threads."""

    def __init__(self, caches: CacheBudget | None = None) -> None:
        # As JSON: what objects take of memory cannot be told by their text.
        self._lists: ByteCache[tuple[str, str], str] = ByteCache(caches, owner_of=itemgetter(0))

    def as_first_sent(self, request: ChatRequest) -> ChatRequest:
        """Return the request with its tools as its client first sent them; tools that are deferred come last."""
        if not request.tools:
            return request
        paths = request.tool_paths or [f"tools[{at}].function" for at in range(len(request.tools))]
        path_of = {tool["function"]["name"]: path for tool, path in zip(request.tools, paths, strict=True)}
        told = [tool for tool in request.tools if tool["function"]["name"] not in request.deferred_tools]
        deferred = [tool for tool in request.tools if tool["function"]["name"] in request.deferred_tools]
        forms: list[str] = []
        for tool in told:
            is_strict = tool["function"]["name"] in request.tool_choice.strict
            forms.append(f"{is_strict} {json.dumps(tool, sort_keys=not is_strict)}")
        key = request.owner, sha256("\n".join(sorted(forms)).encode()).hexdigest()
        sent = json.dumps(told)
        nbytes = sum(map(getsizeof, (*key, sent))) + _ENTRY_BYTES
        tools = [*json.loads(self._lists.get(key, nbytes, lambda: sent)), *deferred]
        return replace(request, tools=tools, tool_paths=[path_of[tool["function"]["name"]] for tool in tools])
