"""From the canonical history to the messages a model's own chat template renders without loss.

Templates differ in what they take and what they refuse. `TemplateTraits` names the differences that matter, guessed
from the template's source (chat/history_probe.py tries them); `for_template` rewrites a sanitised history accordingly.
Knows no Jinja: a template is only text here, and never run.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.dialects.plain import PLAIN
from mlx_backend.conversation.json_values import is_too_deep
from mlx_backend.conversation.message_layout import (
    CallIds,
    later_system_into_user,
    merge_neighbours,
    system_into_user,
    with_ids,
)
from mlx_backend.conversation.message_parts import REASONING_CONTENT, TEMPLATE_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.dialects.base import HistoryPolicy

type Messages = list[dict[str, Any]]

INVISIBLE = "\N{WORD JOINER}"
"""What `accepted` puts inside a refused text: without width or line break, and hardly ever written by people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateTraits:
    """What a chat template takes and refuses, as far as a history depends on it."""

    reasoning_key: str | None = None
    """The message key it renders reasoning from."""
    takes_effort: bool = False
    """It takes an argument that says how much to reason, or whether to (chat/effort_probe.py finds out which)."""
    has_reasoning_markers: bool = False
    """It writes or looks for a marker of reasoning, such as `<think>`."""
    has_tools: bool = False
    """It tells the model which tools there are."""
    refuses_tools: bool = False
    """It raises an exception where there are tools."""
    needs_parameters: bool = False
    """It refuses a tool whose description, parameters or their properties are left out, as they may be (Seed-OSS)."""
    one_call_per_message: bool = False
    """It renders only `tool_calls[0]` (gpt-oss)."""
    quotes_tool_results: bool = False
    """It prints a tool's result through `tojson`: a string comes out quoted (gpt-oss)."""
    has_system_role: bool = True
    """It takes a system message."""
    must_alternate: bool = False
    """It insists on user and assistant messages alternating."""
    iterates_arguments: bool = False
    """It iterates over a call's arguments, so they must be an object (GLM, Qwen3-Coder)."""
    takes_parts: bool = False
    """It takes a list of parts (text, images) as a user's content, and writes something for an image."""
    takes_result_parts: bool = False
    """It does so for a tool's result, too."""
    takes_system_anywhere: bool = False
    """It renders a system message in the middle of a conversation where it stands."""
    takes_calls: bool = True
    """It renders `tool_calls`."""
    takes_results: bool = True
    """It renders messages of the role `tool`."""
    arguments_as_text: bool = False
    """It prints a call's arguments as they are: an object would come out as Python, or not at all."""
    call_ids: CallIds = CallIds.ANY
    writes_content_beside_calls: bool = True
    """It renders the text of a message that has calls, too."""
    keeps_answered_reasoning: bool = False
    """It renders the reasoning of answered turns by itself; with tools, or in any case."""
    keep_switches: tuple[tuple[str, bool], ...] = ()
    """The argument that makes it render more of that reasoning, with its value."""
    refused: tuple[str, ...] = ()
    """Texts it raises an exception for in an assistant's message, even where they are only quoted (gpt-oss)."""

    @property
    def is_reasoning_model(self) -> bool:
        """Whether the model reasons, as far as its template tells."""
        return bool(self.takes_effort or self.reasoning_key or self.has_reasoning_markers)

    def may_keep_answered_reasoning(self, policy: HistoryPolicy) -> bool:
        """Whether the reasoning of answered turns can be part of a prompt, under a family's policy."""
        return policy.keeps_answered_turns and (self.keeps_answered_reasoning or bool(self.keep_switches))

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, chat_template: str | None) -> TemplateTraits:
        """Find the traits in a template's source."""
        source = chat_template or ""
        access = re.compile(rf"""(?:message|msg|m)(?:\.|\[['"]|\.get\(['"])({"|".join(TEMPLATE_KEYS)})\b""")
        keys = set(access.findall(source))
        refuses_system = re.search(r"raise_exception\([^)]{0,400}[Ss]ystem role", source) is not None
        return cls(
            reasoning_key=next((key for key in TEMPLATE_KEYS if key in keys), None),
            takes_effort=_EFFORT_ARGUMENT.search(source) is not None,
            has_reasoning_markers=any(
                marker in source for dialect in DIALECTS.values() for marker in dialect.reasoning_markers
            ),
            has_tools=re.search(r"(?<![\w.])tools\b", source) is not None,
            one_call_per_message="tool_calls[0]" in source,
            quotes_tool_results=re.search(r"message\.content\s*\|\s*tojson", source) is not None,
            has_system_role=not refuses_system,
            must_alternate=re.search(r"raise_exception\([^)]{0,400}alternat", source) is not None,
            iterates_arguments=re.search(r"arg(?:ument)?s\s*(?:\|\s*items|\.items\()", source) is not None,
            takes_parts=re.search(r"""["']image""", source) is not None,
            refused=tuple(dict.fromkeys(re.findall(r"""["'](<\|channel\|>[^"'\n]+)["'] in """, source))),
        )


# Many templates have a variable of their own called `thinking`: as an argument it is asked whether it is defined.
_EFFORT_ARGUMENT = re.compile(
    r"reasoning_effort|thinking_effort|enable_thinking|thinking_budget|thinking_mode"
    r"|(?<![\w.'\"])thinking is (?:not )?(?:un)?defined"
)

GPT_OSS_TRAITS = TemplateTraits(
    reasoning_key="thinking",
    takes_effort=True,
    has_reasoning_markers=True,
    has_tools=True,
    one_call_per_message=True,
    quotes_tool_results=True,
    refused=("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""The traits of gpt-oss's template."""


def for_template(
    messages: Sequence[Mapping[str, Any]], traits: TemplateTraits, dialect: Dialect = PLAIN
) -> Messages:
    """Rewrite a sanitised history for a template. The messages given are not changed.

    Where the template renders no calls, they are texts as the dialect writes them.
    """
    rewritten: Messages = []
    if not traits.takes_system_anywhere:
        messages = later_system_into_user(messages)
    if traits.call_ids is not CallIds.ANY:
        messages = with_ids(messages, traits.call_ids)
    open_from = _open_loop_start(messages)
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        if message["role"] != "assistant" or not message.get("tool_calls"):
            rewritten.append(_convert(message, traits))
            continue
        results: list[Mapping[str, Any]] = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        rewritten += _convert_calls(
            message, results, traits, dialect, in_open_loop=position - len(results) > open_from
        )
    if not traits.has_system_role:
        rewritten = system_into_user(rewritten)
    if traits.must_alternate:
        rewritten = merge_neighbours(rewritten)
    return rewritten


def tools_for_template(
    tools: Sequence[Mapping[str, Any]], traits: TemplateTraits
) -> Sequence[Mapping[str, Any]]:
    """Return tool definitions as a template takes them. Those given are not changed."""
    if not traits.needs_parameters:
        return tools
    return [{**tool, "function": _complete(tool["function"])} for tool in tools]


def _complete(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    schema = {"type": "object", "properties": {}, **(parameters if isinstance(parameters, dict) else {})}
    return {**function, "description": function.get("description") or "", "parameters": schema}


def accepted(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> Messages:
    """Break the texts a template refuses in assistant messages, so that an answer may quote them.

    The last marker of such a text gets `INVISIBLE` before it; taking every `INVISIBLE` out gives the text back.
    Only for people who render the messages themselves: a prompt that is built marker by marker keeps its texts.
    """
    return [
        {
            key: _break_refused(value, traits) if message["role"] == "assistant" else value
            for key, value in message.items()
        }
        for message in messages
    ]


def _break_refused(value: Any, traits: TemplateTraits) -> Any:
    if isinstance(value, str):
        for text in traits.refused:
            head, marker, tail = text.rpartition("<|")
            value = value.replace(text, f"{head}{INVISIBLE}{marker}{tail}")
    return value


def _open_loop_start(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the last answered turn's end: calls after it belong to an open tool loop."""
    finals = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and not message.get("tool_calls")
    ]
    return finals[-1] + 1 if finals else 0


def _convert(message: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    copy = {key: value for key, value in message.items() if key not in (REASONING_CONTENT, "tool_calls")}
    reasoning = message.get(REASONING_CONTENT)
    if reasoning and traits.reasoning_key:
        copy[traits.reasoning_key] = reasoning
    is_result = message["role"] == "tool"
    if isinstance(message["content"], list):
        if not (traits.takes_result_parts if is_result else traits.takes_parts):
            copy["content"] = "\n".join(map(_named_part, message["content"]))
    elif is_result:
        copy["content"] = _result(message["content"], traits)
    return copy


def _convert_calls(
    message: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
    traits: TemplateTraits,
    dialect: Dialect,
    *,
    in_open_loop: bool,
) -> Messages:
    """Rewrite an assistant message with calls, and the results after it."""
    content, reasoning = message.get("content") or "", message.get(REASONING_CONTENT) or ""
    calls = [_convert_call(call, traits) for call in message["tool_calls"]]
    # In the order of the calls: some templates tell them apart by it alone.
    order = {call["id"]: place for place, call in enumerate(calls)}
    results = sorted(results, key=lambda result: order.get(result.get("tool_call_id"), len(order)))
    rendered_results = [_convert(result, traits) for result in results]
    if not traits.takes_results:
        shown = "\n".join(dialect.result_text.format(result["content"]) for result in rendered_results)
        rendered_results = [{"role": "user", "content": shown}] if shown else []
    if not traits.takes_calls:
        written = [content.rstrip("\n"), *(_written(call, dialect) for call in message["tool_calls"])]
        said: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, written))}
        if reasoning and traits.reasoning_key:
            said[traits.reasoning_key] = reasoning
        return [said, *rendered_results]
    if not traits.one_call_per_message:
        before: Messages = []
        if content and not traits.writes_content_beside_calls:
            before, content = [{"role": "assistant", "content": content}], ""
            if reasoning and traits.reasoning_key and traits.keeps_answered_reasoning:
                before[0][traits.reasoning_key], reasoning = reasoning, ""
        whole: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls}
        if reasoning and traits.reasoning_key:
            whole[traits.reasoning_key] = reasoning
        return [*before, whole, *rendered_results]
    before = []
    if content and in_open_loop and traits.reasoning_key:
        # This template has no preamble: next to a call it prints text as analysis, and never two texts. A message
        # of its own would make it drop the loop's earlier analysis, so the preamble joins the reasoning.
        reasoning = f"{reasoning}\n\n{content}" if reasoning else content
    elif content:
        # After an answered turn it prints no text next to a call at all: there the preamble stands alone.
        before = [{"role": "assistant", "content": content}]
    rewritten = before
    by_call: dict[Any, Messages] = {call["id"]: [] for call in calls}
    rest: Messages = []
    for result in rendered_results:
        by_call.get(result.get("tool_call_id"), rest).append(result)
    for index, call in enumerate(calls):
        single: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        if index == 0 and reasoning and traits.reasoning_key:
            single[traits.reasoning_key] = reasoning
        rewritten += [single, *by_call[call["id"]]]
    return rewritten + rest


def _written(call: Mapping[str, Any], dialect: Dialect) -> str:
    """Write a call as a model of this family does."""
    name, arguments = call["function"]["name"], _object(call["function"]["arguments"])
    if dialect.calls is None or not isinstance(arguments, dict):
        return f"{name}({call['function']['arguments']})"
    return "".join(piece.text for piece in dialect.calls.encode(name, arguments))


def _named_part(part: Any) -> str:
    """Return a part as text; one that is not text by its type, so that the model knows of it: `[image_url]`."""
    match part:
        case {"text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
        case _:
            return str(part)


def _convert_call(call: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    """Return a call with its arguments as an object: most templates print them with `tojson`."""
    name, written = call["function"]["name"], call["function"]["arguments"]
    if traits.arguments_as_text:
        return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": written}}
    arguments = _object(written)
    if traits.iterates_arguments and not isinstance(arguments, dict):
        arguments = {"arguments": written}
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _object(text: str) -> Any:
    """Parse a JSON text; return the text itself if it is not JSON, or could not be written as JSON again."""
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    return text if is_too_deep(value) else value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a JSON number")
    return number


def _result(content: Any, traits: TemplateTraits) -> Any:
    """Return a tool's result: as data where the template would quote a string, and data prints as the same text."""
    if traits.quotes_tool_results and isinstance(content, str) and content[:1] in ("{", "["):
        data = _object(content)
        if not isinstance(data, str) and json.dumps(data, ensure_ascii=False) == content:
            return data
    return content
