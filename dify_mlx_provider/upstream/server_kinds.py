"""The kinds of servers, and what each expects of a chat request. Knows no network and no Dify.

A chat request is built once, in mlx-backend's fields, and `adapt_request` fits it to the server: OpenAI's protocol says
nothing of reasoning, so every server has fields of its own for it, and some refuse the others'.

    effort              `reasoning_effort`, inside `chat_template_kwargs`, or an object `reasoning`
    structured output   any `response_format`; JSON schemas only; or none, so that the prompt has to ask
    reasoning           the field that carries a turn's reasoning back while its tools run
    other fields        those of mlx-backend alone are left out; those with another name are renamed
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from dify_mlx_provider.upstream.effort_levels import EFFORTS, LEVELS, nearest


class ServerKind(StrEnum):
    """A make of server, as the form calls it."""

    MLX_BACKEND = "mlx-backend"
    MLX_LM = "mlx_lm.server"
    LM_STUDIO = "lm-studio"
    LLAMA_CPP = "llama.cpp"
    OLLAMA = "ollama"
    VLLM = "vllm"
    OTHER = "other"


DISPLAY_NAMES: Mapping[ServerKind, str] = {
    ServerKind.MLX_BACKEND: "mlx-backend",
    ServerKind.MLX_LM: "mlx_lm.server",
    ServerKind.LM_STUDIO: "LM Studio",
    ServerKind.LLAMA_CPP: "llama.cpp",
    ServerKind.OLLAMA: "Ollama",
    ServerKind.VLLM: "vLLM",
    ServerKind.OTHER: "another OpenAI-compatible server",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProfile:
    """What a kind of server expects of a chat request.

    `effort_fields` are sent together; `efforts` are the words they may hold. `thinking_budget_field` is "" where there
    is none. `ignored_fields` have no effect there. `default_max_tokens` limits an answer for which nobody set a limit;
    None where a limit that does not fit behind the prompt is refused: there the rest of the context is the default.
    A server that does not refuse prompts longer than the context cuts them, or runs the model beyond it.
    """

    effort_fields: tuple[str, ...] = ("reasoning_effort",)
    efforts: tuple[str, ...] = ("none", *LEVELS)
    structured_output: Literal["formats", "schemas", "prompt"] = "formats"
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)
    thinking_budget_field: str = ""
    renamed_fields: Mapping[str, str] = field(default_factory=dict)
    ignored_fields: frozenset[str] = frozenset()
    takes_mlx_backend_fields: bool = False
    refuses_long_prompts: bool = True
    default_model: str = "default"
    default_max_tokens: int | None = None


DEFAULT_ANSWER_RESERVE = 1024
"""Tokens of a limit that are kept for the answer, but at most half of it: enough for a few paragraphs."""

MAX_UNREAD_TOKENS = 32_768
"""A limit for answers for which nobody set one.

When a user presses Stop, Dify does not tell its plugins: what nobody reads must end by itself, even where the model
repeats itself and its context is large. Dify itself gives a call up after 600 seconds (PLUGIN_DAEMON_TIMEOUT); a server
that is to reach this limit within that time has to write 55 tokens a second.
"""

PROFILES: Mapping[ServerKind, ServerProfile] = {
    ServerKind.MLX_BACKEND: ServerProfile(
        efforts=EFFORTS,
        thinking_budget_field="thinking_budget",
        takes_mlx_backend_fields=True,
        default_max_tokens=MAX_UNREAD_TOKENS,
    ),
    # It hands messages to the chat template as they are: gpt-oss's reads `thinking`, the others' `reasoning_content`.
    # Without max_tokens it stops after 512, in the middle of the reasoning.
    ServerKind.MLX_LM: ServerProfile(
        effort_fields=("chat_template_kwargs",),
        efforts=LEVELS,
        structured_output="prompt",
        reasoning_fields=("reasoning_content", "thinking"),
        refuses_long_prompts=False,
        default_model="default_model",
        default_max_tokens=8192,
    ),
    ServerKind.LM_STUDIO: ServerProfile(
        effort_fields=("reasoning_effort", "reasoning"),
        structured_output="schemas",
        reasoning_fields=("reasoning_content", "reasoning"),
        renamed_fields={"repetition_penalty": "repeat_penalty"},
        default_max_tokens=MAX_UNREAD_TOKENS,
    ),
    ServerKind.LLAMA_CPP: ServerProfile(
        effort_fields=("chat_template_kwargs",),
        efforts=LEVELS,
        thinking_budget_field="thinking_budget_tokens",
        renamed_fields={"repetition_penalty": "repeat_penalty"},
        default_max_tokens=MAX_UNREAD_TOKENS,
    ),
    # Its own API has more settings than its OpenAI one, which ignores these.
    ServerKind.OLLAMA: ServerProfile(
        reasoning_fields=("reasoning",),
        ignored_fields=frozenset({"top_k", "min_p", "repetition_penalty"}),
        refuses_long_prompts=False,
        default_max_tokens=MAX_UNREAD_TOKENS,
    ),
    # `reasoning_effort` is for gpt-oss, the template's switch for the others.
    ServerKind.VLLM: ServerProfile(
        effort_fields=("reasoning_effort", "enable_thinking"),
        efforts=LEVELS,
        reasoning_fields=("reasoning", "reasoning_content"),
        thinking_budget_field="thinking_token_budget",
    ),
    ServerKind.OTHER: ServerProfile(effort_fields=("reasoning_effort", "chat_template_kwargs")),
}


def default_max_tokens(kind: ServerKind, max_output: int | None = None) -> int | None:
    """Return the limit for answers for which nobody sets one; None if this kind of server is to decide.

    `max_output` is the most the model can write, if the form says it.
    """
    default = PROFILES[kind].default_max_tokens
    return default and min(max_output or default, MAX_UNREAD_TOKENS)


MLX_BACKEND_FIELDS = frozenset({"answer_reserve", "priority", "reasoning_format"})
"""Fields that only mlx-backend reads. They are hints: without them another server's answer is as right."""

PROTECTED_FIELDS = ("messages", "stream", "stream_options", "model")
"""What the extra body may not replace: the plugin would misread the answer, or get one to another question."""

# Words in a refusal that point to a field without being its name.
_REFUSAL_PHRASES = {
    "reasoning_effort": ("does not support thinking", "think value", "invalid reasoning", "reasoning effort"),
    "chat_template_kwargs": ("enable_thinking", "chat template"),
    "reasoning": ("reasoning.effort", "'reasoning'", '"reasoning"', "`reasoning`"),
    "stream_options": ("include_usage",),
}
_REMOVABLE_FIELDS = (
    *("reasoning_effort", "chat_template_kwargs", "reasoning", "stream_options"),
    *sorted(MLX_BACKEND_FIELDS),
)


def adapt_request(
    body: Mapping[str, Any], kind: ServerKind, *, omit: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return a chat request as a kind of server expects it, without the fields in `omit`.

    Raises ValueError for a setting that the user chose and this kind does not have.
    """
    profile = PROFILES[kind]
    request = dict(body)
    extra = request.pop("extra_body", None) or {}
    if request.get("model") == "default":
        request["model"] = profile.default_model
    if profile.takes_mlx_backend_fields:
        request.setdefault("reasoning_format", "separate")
    else:
        for name in MLX_BACKEND_FIELDS:
            request.pop(name, None)
    _set_effort(request, profile)
    _set_thinking_budget(request, kind, profile)
    for name, other_name in profile.renamed_fields.items():
        if name in request:
            request[other_name] = request.pop(name)
    _set_response_format(request, profile)
    request["messages"] = [
        _with_reasoning_fields(message, profile.reasoning_fields) for message in request.get("messages") or ()
    ]
    for name in omit:
        request.pop(name, None)
    return merge_fields(request, extra)


def merge_fields(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with the user's own fields in it; objects such as chat_template_kwargs are merged."""
    merged = dict(body)
    for name, value in extra.items():
        present = merged.get(name)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[name] = {**present, **value}
        else:
            merged[name] = value
    return merged


def refused_fields(message: str, request: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields that a refusal names and that we added by ourselves: the request can do without them."""
    text = message.lower()
    return frozenset(
        name
        for name in _REMOVABLE_FIELDS
        if name in request
        # `reasoning` alone is a word of any sentence; it counts in quotation marks.
        and (
            (name != "reasoning" and name in text)
            or any(phrase in text for phrase in _REFUSAL_PHRASES.get(name, ()))
        )
    )


def _set_effort(request: dict[str, Any], profile: ServerProfile) -> None:
    effort = request.pop("reasoning_effort", None)
    if effort is None:
        return
    word = nearest(effort, profile.efforts)
    for name in profile.effort_fields:
        match name:
            case "reasoning_effort" if not (effort == "none" and "none" not in profile.efforts):
                request["reasoning_effort"] = word
            case "reasoning":
                request["reasoning"] = {"effort": word}
            case "chat_template_kwargs":
                arguments = {
                    "reasoning_effort": word if word != "none" else "low",
                    "enable_thinking": effort != "none",
                }
                request["chat_template_kwargs"] = merge_fields(
                    request.get("chat_template_kwargs") or {}, arguments
                )
            case "enable_thinking":
                switch = {"enable_thinking": effort != "none"}
                request["chat_template_kwargs"] = merge_fields(
                    request.get("chat_template_kwargs") or {}, switch
                )


def _set_thinking_budget(request: dict[str, Any], kind: ServerKind, profile: ServerProfile) -> None:
    budget = request.pop("thinking_budget", None)
    if budget is None:
        return
    if not profile.thinking_budget_field:
        raise ValueError(
            f"{DISPLAY_NAMES[kind]} takes no thinking budget. Switch the setting Thinking budget off, or send the "
            "server's own field in Extra body."
        )
    request[profile.thinking_budget_field] = budget


def _set_response_format(request: dict[str, Any], profile: ServerProfile) -> None:
    wanted = request.get("response_format")
    if not isinstance(wanted, Mapping) or profile.structured_output == "formats":
        return
    if profile.structured_output == "schemas":
        if wanted.get("type") == "json_object":
            schema = {"name": "answer", "schema": {"type": "object"}}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return
    del request["response_format"]
    request["messages"] = _with_json_instruction(request.get("messages") or (), wanted)


def _with_json_instruction(messages: Any, wanted: Mapping[str, Any]) -> list[Any]:
    """Ask for JSON in the system prompt, for servers that cannot constrain the model."""
    instruction = "Answer with one JSON object and nothing else: no explanation, no code fence."
    schema = (wanted.get("json_schema") or {}).get("schema")
    if schema is not None:
        instruction += (
            f"\nIt must be valid against this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}"
        )
    history = list(messages)
    if history and history[0].get("role") == "system" and isinstance(history[0].get("content"), str):
        return [{**history[0], "content": f"{history[0]['content']}\n\n{instruction}"}, *history[1:]]
    return [{"role": "system", "content": instruction}, *history]


def _with_reasoning_fields(message: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    copy = dict(message)
    reasoning = copy.pop("reasoning_content", None)
    if reasoning is not None:
        for name in names:
            # gpt-oss's template refuses a turn that has both `thinking` and a text.
            if name != "thinking" or not copy.get("content"):
                copy[name] = reasoning
    return copy
