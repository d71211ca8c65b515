"""Rewrites of a canonical history for templates that take less: where system messages stand, and which ids calls have.

Knows no templates and no dialects; nothing is changed in place.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import reduce
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.message_parts import joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

type Messages = list[dict[str, Any]]


class CallIds(Enum):
    """What a template wants as the id of a call."""

    ANY = auto()
    NINE_LETTERS = auto()
    """Nine letters or digits; it raises an exception for others (Mistral)."""
    WITH_NAME = auto()
    """`functions.NAME:0`, counted over the conversation: it prints the id alone, and no name (Kimi K2)."""


def later_system_into_user(messages: Sequence[Mapping[str, Any]]) -> Messages:
    """Put system messages after the first message into the user message next to them, or make one of them.

    Never at the top: what comes before them stays as it was, and so does its place in the prefix cache.
    """
    rewritten: Messages = []
    pending: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "system" and index:
            pending.append(message["content"])
            continue
        if pending and message["role"] == "user":
            rewritten.append({**message, "content": _joined(*pending, message["content"])})
        else:
            _append_to_user(rewritten, pending)
            rewritten.append(dict(message))
        pending = []
    _append_to_user(rewritten, pending)
    return rewritten


def _append_to_user(messages: Messages, texts: Sequence[str]) -> None:
    """Add texts to the last message if it is the user's, else in a message of the user's own."""
    if not texts:
        return
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": _joined(messages[-1]["content"], *texts)}
    else:
        messages.append({"role": "user", "content": _joined(*texts)})


def _joined(*contents: Any) -> Any:
    return reduce(joined, contents)


def with_ids(messages: Sequence[Mapping[str, Any]], form: CallIds) -> Messages:
    """Rewrite the ids of calls and of their results to a form that a template takes."""
    renamed: dict[str, str] = {}
    rewritten: Messages = []
    for message in messages:
        copy = dict(message)
        if message.get("tool_calls"):
            for call in message["tool_calls"]:
                if form is CallIds.WITH_NAME:
                    renamed[call["id"]] = f"functions.{call['function']['name']}:{len(renamed)}"
                else:
                    renamed[call["id"]] = _nine_letters(call["id"])
            copy["tool_calls"] = [{**call, "id": renamed[call["id"]]} for call in message["tool_calls"]]
        if message["role"] == "tool":
            copy["tool_call_id"] = renamed.get(message["tool_call_id"], message["tool_call_id"])
        rewritten.append(copy)
    return rewritten


def _nine_letters(identifier: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", identifier):
        return identifier
    return sha256(identifier.encode("utf-8", "replace")).hexdigest()[:9]


def system_into_user(messages: Messages) -> Messages:
    """Put the first system message before the first text of the user."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, rest = messages[0], messages[1:]
    for index, message in enumerate(rest):
        if message["role"] == "user":
            content = joined(system["content"], message["content"])
            return [*rest[:index], {**message, "content": content}, *rest[index + 1 :]]
    return [{"role": "user", "content": system["content"]}, *rest]


def merge_neighbours(messages: Messages) -> Messages:
    """Join messages of the same role that follow each other. A message that is missing is not made up."""
    merged: Messages = []
    for message in messages:
        previous = merged[-1] if merged else None
        if (
            previous is not None
            and previous["role"] == message["role"]
            and message["role"] in ("user", "assistant")
            and not previous.get("tool_calls")
        ):
            content = joined(previous["content"], message["content"])
            merged[-1] = {**previous, **message, "content": content}
        else:
            merged.append(message)
    return merged
