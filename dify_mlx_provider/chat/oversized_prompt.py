"""The error for a prompt that does not fit even without its older turns: which part of it is too long, and by how much.

The largest part is named, with its tokens and those there is room for. Where the server counts, both are exact: the
prompt is counted once more without the part. Knows no server: the count is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.chat.turns import INSTRUCTION_ROLES, estimate_message, estimate_tools
from dify_mlx_provider.servers.token_count import estimate_tokens
from dify_mlx_provider.upstream.errors import PromptTooLong
from mlx_backend.conversation.history import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    type Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A part of a prompt: the beginning of a sentence on its size, the estimated size, and the request without it."""

    has: str
    advice: str
    size: int
    rest: Body


def explain(
    error: PromptTooLong,
    body: Body,
    *,
    last_turn: int,
    documents: Sequence[tuple[str, str]] = (),
    reserve: int = 0,
    earlier_turns: int = 0,
    count: Callable[[Body], int | None] = lambda _: None,
) -> PromptTooLong:
    """Return the refusal of a request with a sentence on the part that is too long.

    `last_turn` is the number of messages from the last question on, `documents` are the texts of its files by name,
    `reserve` the tokens that an answer should have, `earlier_turns` those that were left out already.
    """
    tokens, context = error.overflow.prompt_tokens, error.overflow.context_length
    parts = list(_parts(body, last_turn, documents))
    part = max(parts, key=lambda each: each.size)
    if tokens is None or context is None:
        return PromptTooLong(
            f"{_sentence(str(error))} {part.has} the largest share of its tokens. {part.advice}",
            error.overflow,
        )
    about = ""
    of_rest = count(part.rest)
    if of_rest is None:
        about = "about "
        of_rest = round(tokens * (1 - part.size / max(1, sum(each.size for each in parts))))
    room = context - of_rest - reserve
    room = room if room > 0 else context - of_rest - 1
    without = f"Without the {_counted(earlier_turns, 'earlier turn')}, the" if earlier_turns else "The"
    numbers = (
        f"{without} prompt has {tokens} tokens; the context holds {context}, and the answer needs room too."
    )
    size = f"{part.has} {about}{tokens - of_rest} tokens"
    room_left = f"there is room for {about}{room}" if room > 0 else f"the rest has {about}{of_rest}"
    return PromptTooLong(f"{numbers} {size}, and {room_left}. {part.advice}", error.overflow)


def _counted(count: int, noun: str) -> str:
    """Return "tool" for one, else "2 tools"."""
    return noun if count == 1 else f"{count} {noun}s"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _parts(body: Body, last_turn: int, documents: Sequence[tuple[str, str]]) -> Iterator[_Part]:
    """Yield the parts that a person can do something about."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    start = len(messages) - last_turn
    instructions = [
        index
        for index, message in enumerate(messages)
        if index < start or message["role"] in INSTRUCTION_ROLES
    ]
    if instructions:
        yield _Part(
            has="The app's instructions, retrieved knowledge included, have",
            advice="Shorten them, or retrieve fewer chunks (Top K).",
            size=sum(estimate_message(messages[index]) for index in instructions),
            rest={
                **body,
                "messages": [each for index, each in enumerate(messages) if index not in instructions],
            },
        )
    if tools := body.get("tools"):
        yield _Part(
            has=f"The descriptions of the {_counted(len(tools), 'tool')} have",
            advice="Give the app fewer tools.",
            size=estimate_tools(tools),
            rest={name: value for name, value in body.items() if name != "tools"},
        )
    for index in range(start, len(messages)):
        message = messages[index]
        match message["role"]:
            case "user":
                yield from _question(body, index, documents)
            case "tool":
                yield _Part(
                    has=f"The result of the tool {message.get('name') or '?'} has",
                    advice="Have the tool return less.",
                    size=estimate_message(message),
                    rest=_replaced(body, index, {**message, "content": ""}),
                )
            case "assistant":
                yield _Part(
                    has="What the model wrote for its tools has",
                    advice="Ask for less at once.",
                    size=estimate_message(message),
                    rest=_replaced(body, index, _without_text(message)),
                )


def _question(body: Body, index: int, documents: Sequence[tuple[str, str]]) -> Iterator[_Part]:
    message = body["messages"][index]
    in_files = 0
    for name, text in documents:
        if text not in text_of(message["content"]):
            continue  # of an older question
        size = estimate_tokens(text)
        in_files += size
        yield _Part(
            has=f"The file {name} has",
            advice="Send a shorter one, or put it into a knowledge base.",
            size=size,
            rest=_replaced(body, index, {**message, "content": _without(message["content"], text)}),
        )
    yield _Part(
        has="The last question has",
        advice="Shorten it, or send it in parts.",
        size=max(0, estimate_message(message) - in_files),
        rest=_replaced(body, index, {**message, "content": ""}),
    )


def _replaced(body: Body, index: int, message: Mapping[str, Any]) -> Body:
    """The request with another message in one place."""
    messages = list(body["messages"])
    messages[index] = message
    return {**body, "messages": messages}


def _without_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a model wrote, without its texts: the calls alone, so that their results still have one."""
    calls = [
        {**call, "function": {**call["function"], "arguments": "{}"}}
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": "", **({"tool_calls": calls} if calls else {})}


def _without(content: Any, text: str) -> Any:
    """A content without one of its texts."""
    if isinstance(content, str):
        return content.replace(text, "", 1)
    return [
        {**part, "text": part["text"].replace(text, "", 1)} if "text" in part else part for part in content
    ]
