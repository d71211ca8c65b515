"""Agents that go by ReAct: Dify describes the tools in the prompt, and looks for an action in the answer's text.

A model that was trained to call tools may call one in its own way all the same. Dify would find no action then, and end
with the call as the agent's answer. So the tools are offered to such a model as tools too, and its call becomes the
action that Dify looks for. It takes one action a round: of several calls the first.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dify_plugin.entities.model.message import PromptMessageTool
from pydantic import TypeAdapter, ValidationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_plugin.entities.model.message import PromptMessage

    from dify_mlx_provider.chat.tool_calls import ServerToolCall

_WORDS = "Use a json blob to specify a tool by providing an action key (tool name) and an action_input key"
_TOOLS = TypeAdapter(list[PromptMessageTool])


def described_tools(messages: Sequence[PromptMessage]) -> list[PromptMessageTool]:
    """Return the tools that an agent's instructions describe; none if these are no such instructions."""
    for message in messages[:2]:
        before, words, _ = message.get_text_content().partition(_WORDS)
        if not words:
            continue
        for line in reversed(before.splitlines()):
            if line.lstrip().startswith("["):
                try:
                    return _TOOLS.validate_json(line)
                except ValidationError:
                    continue
    return []


def as_action(call: ServerToolCall) -> str:
    """Return a call as the text of an action."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        arguments = call.arguments
    action = {"action": call.name, "action_input": arguments}
    return f"\nAction: {json.dumps(action, ensure_ascii=False)}\n"
