"""An MCP server over standard input and output, with one tool: `lookup`, which knows one answer."""

from __future__ import annotations

import json
import sys
from typing import Any

ANSWER = "The tower of Lyon is 165 metres high."
TOOL: dict[str, Any] = {
    "name": "lookup",
    "description": "Look a fact up.",
    "inputSchema": {
        "type": "object",
        "properties": {"key": {"type": "string", "description": "what to look up"}},
        "required": ["key"],
    },
}


def result_of(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """What a request is answered with."""
    match method:
        case "initialize":
            return {
                "protocolVersion": parameters["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "demo", "version": "1"},
            }
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": ANSWER}]}
        case _:
            return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            result = result_of(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
