"""The kinds of servers there are, and how each wants to be asked. Knows no network and no Dify.

A chat request is built once, in mlx-backend's words, and `adapted` to the server's: OpenAI's protocol says nothing
of reasoning, so everybody invented a way of their own, and some refuse the ways of the others.

    effort        as `reasoning_effort`, inside `chat_template_kwargs`, or as an object `reasoning`
    structure     a `response_format` it holds to; one of schemas only; or none, so the prompt has to ask
    reasoning     the key under which a turn's reasoning goes back while its tools run
    own fields    what only mlx-backend reads is left out for the others, and what means the same is renamed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from dify_mlx_provider.upstream.effort_levels import LEVELS, ORDER, nearest


class Kind(StrEnum):
    """A server's make, as the form calls it."""

    MLX_BACKEND = "mlx-backend"
    MLX_LM = "mlx_lm.server"
    LM_STUDIO = "lm-studio"
    LLAMA_CPP = "llama.cpp"
    OLLAMA = "ollama"
    VLLM = "vllm"
    OTHER = "other"


NAMES: Mapping[Kind, str] = {
    Kind.MLX_BACKEND: "mlx-backend",
    Kind.MLX_LM: "mlx_lm.server",
    Kind.LM_STUDIO: "LM Studio",
    Kind.LLAMA_CPP: "llama.cpp",
    Kind.OLLAMA: "Ollama",
    Kind.VLLM: "vLLM",
    Kind.OTHER: "another OpenAI-compatible server",
}
"""What people call them."""

type Structure = Literal["formats", "schemas", "prompt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How a kind of server is asked."""

    effort: tuple[str, ...] = ("reasoning_effort",)
    words: tuple[str, ...] = ("none", *LEVELS)
    structure: Structure = "formats"
    reasoning_keys: tuple[str, ...] = ("reasoning_content",)
    thinking_budget: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    own_fields: bool = False
    default_model: str = "default"
    max_tokens: int | None = None


WAYS: Mapping[Kind, Ways] = {
    Kind.MLX_BACKEND: Ways(words=ORDER, thinking_budget="thinking_budget", own_fields=True),
    # It passes messages to the chat template as they are: gpt-oss's reads `thinking`, the others' `reasoning_content`.
    # Without max_tokens it stops after 512, in the middle of a thought.
    Kind.MLX_LM: Ways(
        effort=("chat_template_kwargs",),
        words=LEVELS,
        structure="prompt",
        reasoning_keys=("reasoning_content", "thinking"),
        default_model="default_model",
        max_tokens=8192,
    ),
    Kind.LM_STUDIO: Ways(
        effort=("reasoning_effort", "reasoning"),
        structure="schemas",
        reasoning_keys=("reasoning_content", "reasoning"),
        renamed={"repetition_penalty": "repeat_penalty"},
    ),
    Kind.LLAMA_CPP: Ways(
        effort=("chat_template_kwargs",),
        words=LEVELS,
        thinking_budget="thinking_budget_tokens",
        renamed={"repetition_penalty": "repeat_penalty"},
    ),
    # Its own API has more settings than its OpenAI one, which overlooks these.
    Kind.OLLAMA: Ways(
        reasoning_keys=("reasoning",), unread=frozenset({"top_k", "min_p", "repetition_penalty"})
    ),
    # `reasoning_effort` is for gpt-oss, the template's switch for the others.
    Kind.VLLM: Ways(
        effort=("reasoning_effort", "enable_thinking"),
        words=LEVELS,
        reasoning_keys=("reasoning", "reasoning_content"),
        thinking_budget="thinking_token_budget",
    ),
    Kind.OTHER: Ways(effort=("reasoning_effort", "chat_template_kwargs")),
}

OWN_FIELDS = frozenset({"answer_reserve", "priority", "reasoning_format"})
"""Fields that only mlx-backend reads, and that are mere wishes: other servers do without."""

NEVER_IN_EXTRA_BODY = ("messages", "stream", "stream_options", "model")
"""What the extra body may not replace: the plugin would not understand the answer, or would answer another question."""

# Words in a refusal that name a field, where they are not the field's own name.
_NAMED_BY = {
    "reasoning_effort": ("does not support thinking", "think value", "invalid reasoning", "reasoning effort"),
    "chat_template_kwargs": ("enable_thinking", "chat template"),
    "reasoning": ("reasoning.effort", "'reasoning'", '"reasoning"', "`reasoning`"),
    "stream_options": ("include_usage",),
}
_OPTIONAL = ("reasoning_effort", "chat_template_kwargs", "reasoning", "stream_options", *sorted(OWN_FIELDS))


def adapted(
    body: Mapping[str, Any],
    kind: Kind,
    *,
    without: frozenset[str] = frozenset(),
    max_tokens: int | None = None,
) -> dict[str, Any]:
    """Return a chat request as a kind of server wants it; fields in `without` were refused before.

    `max_tokens` is for servers whose own default is too small. Raises ValueError for a setting that the user chose
    and this kind does not have.
    """
    ways = WAYS[kind]
    posted = dict(body)
    extra = posted.pop("extra_body", None) or {}
    if posted.get("model") == "default":
        posted["model"] = ways.default_model
    if ways.max_tokens is not None and "max_tokens" not in posted:
        posted["max_tokens"] = max_tokens or ways.max_tokens
    if ways.own_fields:
        posted.setdefault("reasoning_format", "separate")
    else:
        for name in OWN_FIELDS:
            posted.pop(name, None)
    _set_effort(posted, ways)
    _set_budget(posted, kind, ways)
    for name, other in ways.renamed.items():
        if name in posted:
            posted[other] = posted.pop(name)
    _set_structure(posted, ways)
    posted["messages"] = [
        _with_keys(message, ways.reasoning_keys) for message in posted.get("messages") or ()
    ]
    for name in without:
        posted.pop(name, None)
    return merged(posted, extra)


def merged(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with the user's own fields in it; objects such as chat_template_kwargs are joined."""
    whole = dict(body)
    for name, value in extra.items():
        here = whole.get(name)
        if isinstance(here, Mapping) and isinstance(value, Mapping):
            whole[name] = {**here, **value}
        else:
            whole[name] = value
    return whole


def refused_fields(words: str, posted: Mapping[str, Any]) -> frozenset[str]:
    """Which of the fields that we send by ourselves a refusal names: the request can be sent without them."""
    said = words.lower()
    return frozenset(
        name
        for name in _OPTIONAL
        if name in posted
        and ((name != "reasoning" and name in said) or any(word in said for word in _NAMED_BY.get(name, ())))
    )


def _set_effort(posted: dict[str, Any], ways: Ways) -> None:
    effort = posted.pop("reasoning_effort", None)
    if effort is None:
        return
    word = nearest(effort, ways.words)
    for way in ways.effort:
        match way:
            case "reasoning_effort" if not (effort == "none" and "none" not in ways.words):
                posted["reasoning_effort"] = word
            case "reasoning":
                posted["reasoning"] = {"effort": word}
            case "chat_template_kwargs":
                told = {
                    "reasoning_effort": word if word != "none" else "low",
                    "enable_thinking": effort != "none",
                }
                posted["chat_template_kwargs"] = merged(posted.get("chat_template_kwargs") or {}, told)
            case "enable_thinking":
                told = {"enable_thinking": effort != "none"}
                posted["chat_template_kwargs"] = merged(posted.get("chat_template_kwargs") or {}, told)


def _set_budget(posted: dict[str, Any], kind: Kind, ways: Ways) -> None:
    budget = posted.pop("thinking_budget", None)
    if budget is None:
        return
    if not ways.thinking_budget:
        raise ValueError(
            f"a thinking budget cannot be given to {NAMES[kind]}. Switch the setting Thinking budget off, or send the "
            "server's own field in Extra body."
        )
    posted[ways.thinking_budget] = budget


def _set_structure(posted: dict[str, Any], ways: Ways) -> None:
    wanted = posted.get("response_format")
    if not isinstance(wanted, Mapping) or ways.structure == "formats":
        return
    if ways.structure == "schemas":
        if wanted.get("type") == "json_object":
            schema = {"name": "answer", "schema": {"type": "object"}}
            posted["response_format"] = {"type": "json_schema", "json_schema": schema}
        return
    del posted["response_format"]
    posted["messages"] = _asking(posted.get("messages") or (), wanted)


def _asking(messages: Any, wanted: Mapping[str, Any]) -> list[Any]:
    """The messages with the wish for JSON in the system prompt, for servers that cannot hold a model to it."""
    words = "Answer with one JSON object and nothing else: no explanation, no code fence."
    schema = (wanted.get("json_schema") or {}).get("schema")
    if schema is not None:
        words += f"\nIt must be valid against this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}"
    turns = list(messages)
    if turns and turns[0].get("role") == "system" and isinstance(turns[0].get("content"), str):
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{words}"}, *turns[1:]]
    return [{"role": "system", "content": words}, *turns]


def _with_keys(message: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    turn = dict(message)
    reasoning = turn.pop("reasoning_content", None)
    if reasoning is not None:
        for key in keys:
            # gpt-oss's template refuses a turn that has both `thinking` and a text.
            if key != "thinking" or not turn.get("content"):
                turn[key] = reasoning
    return turn
