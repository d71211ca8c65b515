"""The list of models as Codex reads it: `models` of GET /v1/models, next to OpenAI's `data`.

Codex is given the address (`model_catalog_url`), and takes from an entry what it otherwise guesses: the efforts of its
picker, the context (it compacts a conversation while a tool's result still fits), whether to send images, and how files
are edited. Only for a model whose calls are held to a grammar is that the `apply_patch` tool, whose input any other may
get wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

from mlx_backend.conversation.effort import Effort

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.models.description import ModelDescription

MAX_RESULT_TOKENS = 10_000
"""Of a tool's result, which Codex cuts; a tenth of the context where that is less."""

_LEVELS: Mapping[Effort, str] = {
    Effort.NONE: "Answers at once",
    Effort.MINIMAL: "Reasons as little as it can",
    Effort.LOW: "Reasons briefly",
    Effort.MEDIUM: "Reasons for a while",
    Effort.HIGH: "Reasons at length",
    Effort.XHIGH: "Reasons very long",
    Effort.MAX: "Reasons as long as it can",
}

_INSTRUCTIONS = """\
You are a coding agent in Codex, a program in the user's terminal. You work in the user's folder, with the tools \
that you are given.

- Go on until the task is done: find the files that matter, read them before you change them, and run the tests or the \
program afterwards if there is a way. Do not guess what a file says or what a command prints.
- Change no more than the task needs, in the style of the code around it. Never undo changes that are not yours.
- `rg` and `rg --files` search quickly.
- {editing}
- At the end say in a few sentences what you have done and what you could not do.
"""
_BY_TOOL = "Edit files with the `apply_patch` tool."
_BY_COMMAND = """\
Edit files with the command `apply_patch`, and nothing else in that call:
apply_patch <<'EOF'
*** Begin Patch
*** Update File: path/of/the/file
@@
 a line that stays
-a line that goes
+a line that comes
*** End Patch
EOF
`*** Add File: path` (each line after it begins with +) and `*** Delete File: path` work in the same way."""


class LevelObject(TypedDict):
    """An effort, and what it does."""

    effort: Effort
    description: str


class TruncationPolicy(TypedDict):
    """How long the result of a tool may be."""

    mode: Literal["tokens"]
    limit: int


class CodexModel(TypedDict):
    """A model that can be served, as Codex reads it."""

    slug: str
    display_name: str
    description: str
    default_reasoning_level: Effort | None
    supported_reasoning_levels: list[LevelObject]
    shell_type: Literal["shell_command"]
    visibility: Literal["list", "hide"]
    supported_in_api: bool
    priority: int
    base_instructions: str
    supports_reasoning_summaries: bool
    default_reasoning_summary: Literal["auto"]
    support_verbosity: bool
    default_verbosity: None
    apply_patch_tool_type: Literal["freeform"] | None
    web_search_tool_type: Literal["text"]
    truncation_policy: TruncationPolicy
    supports_parallel_tool_calls: bool
    context_window: int | None
    max_context_window: int | None
    auto_compact_token_limit: int | None
    input_modalities: list[Literal["text", "image"]]
    experimental_supported_tools: list[str]


def codex_model(
    name: str, description: ModelDescription, priority: int, *, is_listed: bool = True
) -> dict[str, Any]:
    """Describe a language model under one of its names. Where it is not `is_listed`, it is not in Codex's picker."""
    context, can = description.context_length, description.capabilities
    is_held = "tool_choice" in can
    limit = MAX_RESULT_TOKENS if context is None else min(MAX_RESULT_TOKENS, context // 10)
    return {
        "slug": name,
        "display_name": name,
        "description": "On this server"
        if context is None
        else f"On this server; {context:,} tokens of context",
        "default_reasoning_level": description.default_effort,
        "supported_reasoning_levels": levels(description),
        "shell_type": "shell_command",
        "visibility": "list" if is_listed else "hide",
        "supported_in_api": True,
        "priority": priority,
        "base_instructions": _INSTRUCTIONS.format(editing=_BY_TOOL if is_held else _BY_COMMAND),
        "supports_reasoning_summaries": bool(description.efforts),  # without it no effort is sent
        "default_reasoning_summary": "auto",  # people see what it thinks
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform" if is_held else None,
        "web_search_tool_type": "text",
        "truncation_policy": {"mode": "tokens", "limit": limit},
        "supports_parallel_tool_calls": "tools" in can,
        "context_window": context,
        "max_context_window": context,
        "auto_compact_token_limit": None if context is None else context * 9 // 10 - limit,
        "input_modalities": ["text", "image"] if "vision" in can else ["text"],
        "experimental_supported_tools": [],
    }


def levels(description: ModelDescription) -> list[LevelObject]:
    """Return a model's efforts with what each of them does."""
    return [{"effort": effort, "description": _level(description, effort)} for effort in description.efforts]


def _level(description: ModelDescription, effort: Effort) -> str:
    budget = description.effort_budgets.get(effort)
    return _LEVELS[effort] if budget is None else f"{_LEVELS[effort]}: at most {budget:,} tokens"
