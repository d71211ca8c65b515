"""How Dify parses a plugin's text: its own patterns, restated.

`split_reasoning` and `PAGE_BLOCK` follow Dify's workflow engine and its page (graphon nodes/llm/reasoning.py, the
page's markdown-utils.ts): a block is `<think>…</think>`, attributes allowed by the engine but not by the page.
"""

from __future__ import annotations

import re
from typing import Any

ENGINE_BLOCK = re.compile(r"<think(?:\s[^<>]{0,512})?>(.*?)</think>", re.IGNORECASE | re.DOTALL)
PAGE_BLOCK = re.compile(r"<think>\n(.*?)\n</think>", re.DOTALL)


def split_reasoning(text: str) -> tuple[str, str]:
    """Return (answer, reasoning) as a `separated` LLM node does."""
    reasoning = "\n".join(match.strip() for match in ENGINE_BLOCK.findall(text))
    answer = ENGINE_BLOCK.sub("", text)
    head, opened, tail = answer.partition("<think>")
    return (head.strip(), tail) if opened else (answer.strip(), reasoning)


def web_page(text: str) -> str:
    """Return what Dify's page hands to its Markdown renderer: the tags of blocks become an HTML element."""
    opened = re.sub(r"(<think>\s*)+", "<details data-think=true>\n", text)
    return re.sub(r"(\s*</think>)+", "\n[ENDTHINKFLAG]</details>", opened)


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The text of an answer as Dify stores it."""
    return "".join(chunk["delta"]["message"]["content"] for chunk in chunks)


def calls_of(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tool calls of an answer."""
    return [call for chunk in chunks for call in chunk["delta"]["message"]["tool_calls"]]


def user(text: str) -> dict[str, Any]:
    """A user message with the empty values Dify's daemon adds."""
    return {"role": "user", "content": text, "name": "", "tool_calls": None, "tool_call_id": ""}


def assistant(text: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """An assistant message as Dify sends it back."""
    return {"role": "assistant", "content": text, "name": "", "tool_calls": calls or []}


def result(call: dict[str, Any], text: str) -> dict[str, Any]:
    """A tool's result as Dify sends it."""
    return {"role": "tool", "content": text, "name": call["function"]["name"], "tool_call_id": call["id"]}
