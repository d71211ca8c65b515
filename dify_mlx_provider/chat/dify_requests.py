"""Requests Dify makes by itself: a conversation's title, suggested questions, generated prompts, code and schemas.

They are not streamed, often have room for a few hundred tokens and none of the user's settings, and Dify takes the
whole text for the answer. A model that reasons at its usual effort spends that room thinking, and a thinking block
becomes part of the answer; meanwhile the user's next question waits. So these are decided about a request:

`is_own_prompt`          it is known by the words of Dify's own prompts (mlx_backend/conversation/background_requests.py
                         has them, for the server too): then the reasoning is hidden, and not a character of the answer
                         is changed, because a program takes it as it is.
`asks_for_json`          Dify parses JSON out of the answer: the same.
`asks_for_json_block`    it looks for a fenced block first, and is misled by half a fence, and by a backtick in bare
                         JSON: then it is given the whole block (`as_json_block`).
`is_background_request`  it is not streamed, no effort was chosen, and it is one of Dify's prompts or its max_tokens
                         leave no room to reason. Then it runs at the model's lowest effort, and the server is asked to
                         keep most of the tokens for the answer (`answer_limits`) and to put users' own questions first.

A user who sends Dify's words by hand gets what suits them as well: a short answer, soon.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.servers.efforts import in_order
from mlx_backend.conversation.background_requests import DIFY, find_background_prompt

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dify_plugin.entities.model.message import PromptMessage

MIN_REASONING_ROOM = 1024
"""Tokens. With fewer, a model that reasons at its usual effort often has none left for the answer."""

# In a workflow's nodes, streamed or not, at the node's effort; Dify parses JSON out of the text.
_PARSED_PROMPTS = (
    "You could answer questions and output in JSON format",
    "extracting structured information based on specific criteria",
    "Here is the structure of the JSON object, you should always follow the structure",
    "Here is the structure of the expected output, I should always follow the output structure",
    "You are a text metadata extract engine",
    "You are a text classification engine",
)
_FENCE = "```"
_WHOLE_BLOCK = re.compile(r"```json.*?```", re.DOTALL)
_JSON_START = re.compile(r"[{\[]")
_MAX_STARTS = 64
"""Brackets at which JSON is looked for in one answer."""

_EFFORT_SETTINGS = ("reasoning_effort", "enable_thinking", "thinking_budget")


def is_own_prompt(messages: Sequence[PromptMessage], *, stream: bool) -> bool:
    """Whether these messages are one of Dify's own prompts."""
    plain = [{"role": message.role.value, "content": message.get_text_content()} for message in messages]
    prompt = find_background_prompt(plain, stream=stream)
    return prompt is not None and prompt.client == DIFY


def asks_for_json(messages: Sequence[PromptMessage]) -> bool:
    """Whether Dify parses JSON out of the answer to these messages. The instructions stand in the first two."""
    texts = [message.get_text_content() for message in messages[:2]]
    return any(words in text for text in texts for words in _PARSED_PROMPTS)


def asks_for_json_block(messages: Sequence[PromptMessage]) -> bool:
    """Whether Dify looks for a fenced block of JSON in the answer, which these messages ask for or show."""
    return asks_for_json(messages) and any(f"{_FENCE}json" in each.get_text_content() for each in messages)


def as_json_block(text: str) -> str:
    """Return the JSON of an answer in a whole block; the text itself if it has one, or holds no JSON."""
    found = "" if _WHOLE_BLOCK.search(text) else json_in(text)
    return f"{_FENCE}json\n{found}\n{_FENCE}" if found else text


def json_in(text: str, brackets: int = _MAX_STARTS) -> str:
    """Return the JSON that begins at one of the first `brackets` in a text, after words or in a fence; "" for none."""
    for start in islice(_JSON_START.finditer(text), brackets):
        with suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(text, start.start())
            return text[start.start() : end]
    return ""


def is_background_request(
    parameters: Mapping[str, Any], *, is_own_prompt: bool, chosen: Collection[str], stream: bool
) -> bool:
    """Whether a request is to be answered quickly. `chosen` are the settings Dify sent, without defaults."""
    if stream or any(name in chosen for name in _EFFORT_SETTINGS):
        return False
    limit = parameters.get("max_tokens")
    return is_own_prompt or (isinstance(limit, int) and limit <= MIN_REASONING_ROOM)


def background_parameters(parameters: Mapping[str, Any], efforts: Collection[str]) -> dict[str, Any]:
    """Return the parameters for a background request. `efforts` are those the model has."""
    settings = {**parameters, "priority": 1}
    if "reasoning_effort" in settings:
        settings["reasoning_effort"] = next(iter(in_order(efforts)), "low")
    if settings.get("enable_thinking") is True:
        settings["enable_thinking"] = False
    return settings
