"""Blocks that a client echoes inside an assistant's text: `<think>…</think>` and `<details>…</details>`.

Reasoning stands at the beginning of an answer, or in Dify's exact form anywhere; calls that Open WebUI displays cut an
answer into segments. Tags in code and in quotation marks are text.
"""

from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING

from mlx_backend.conversation.echo.harmony import hide_quoted_markup
from mlx_backend.conversation.echo.parts import Display, Echo, join_paragraphs
from mlx_backend.conversation.events import ToolCall
from mlx_backend.conversation.parser import parse_text
from mlx_backend.conversation.quoting import (
    CLAUSE_ENDS,
    HIDER,
    code_spans,
    is_mentioned,
    is_quoted,
    is_within,
    reveal,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


_TAGS = r"think|thinking|thought|reason|reasoning"
_OPENER = re.compile(rf"\s*<({_TAGS})(?:\s[^<>]*)?>(?![,;:)])", re.IGNORECASE)
_MORE_OPENERS = re.compile(rf"(?:\s*<(?:{_TAGS})>)+", re.IGNORECASE)
_OTHER_OPENER = re.compile(r"\s*(?:<\|begin_of_thought\|>|◁think▷|\[THINK\])")
_ANY_CLOSER = re.compile(rf"</({_TAGS})\s*>", re.IGNORECASE)
# Exactly what Dify's own blocks look like; agents leave them between the texts of their rounds.
_INNER_BLOCK = re.compile(r"<think>\n(.*?)\n</think>\n?", re.DOTALL)

_DETAILS = re.compile(
    r"(?<![ \t])[ \t]*<details\b(?=[^<>]*\stype=([\"'])(?P<type>reasoning|tool_calls)\1)(?P<attributes>[^<>]*)>"
    # Lines behind `>` may hold tags of their own: the block ends at the first line without it.
    r"(?P<body>\s*<summary>[^<]*</summary>[ \t]*\n(?:[ \t]*(?:(?:>|&gt;)[^\n]*)?\n)+(?=</details>)|.*?)"
    r"(?:</details>\n?|\Z)",
    re.DOTALL,
)
_OLD_DETAILS = re.compile(
    r"\s*<details[^>]*>\s*<summary>\W{0,20}"
    r"(?:(?:Thinking|Thought|Reasoning)(?:\s+process)?|Thoughts|Thought for [^<]{0,80}|Chain of thought"
    r"|思考(?:過程|过程|中)?)\W{0,20}</summary>(?P<body>.*?)(?:</details>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_SUMMARY = re.compile(r"\A\s*<summary>.*?</summary>\n?", re.DOTALL)


def begins_with_block(text: str) -> bool:
    """Whether a text begins with an opened block of reasoning, in tags or in another spelling."""
    return bool(_OPENER.match(text) or _OTHER_OPENER.match(text))


def parse_shown(text: str) -> list[Echo]:
    """Parse a text as it was shown: cut it at displayed calls, and take reasoning out of each segment."""
    return list(_segments(text))


def _segments(text: str) -> Iterator[Echo]:
    code = code_spans(text)
    reasoning: list[str] = []
    texts: list[str] = []
    position = 0

    def segment(display: Display | None) -> Echo:
        more_reasoning, answer = _split_reasoning("".join(texts))
        if reasoning:
            answer = answer.lstrip("\n")
        if display:
            answer = answer.rstrip("\n")
        return Echo(join_paragraphs([*reasoning, more_reasoning]), answer, (), display)

    for match in _DETAILS.finditer(text) if "<details" in text else ():
        if is_within(code, match.start()):
            continue
        texts.append(text[position : match.start()])
        position = match.end()
        if match["type"] == "reasoning":
            reasoning.append(_details_text(match["body"]))
            continue
        yield segment(_parse_display(match["attributes"], match["body"]))
        reasoning, texts = [], []
    texts.append(text[position:])
    yield segment(None)


def _parse_display(attributes: str, body: str) -> Display:
    written = re.findall(r"(?<![\w-])([\w-]+)=([\"'])(.*?)\2", attributes, re.DOTALL)
    values = {name: html.unescape(value) for name, _, value in written}
    call = ToolCall(values.get("name", "") or "tool", _json_string(values.get("arguments", "")) or "{}")
    # The result stands in an attribute, or, since some version, behind the summary.
    result = values.get("result", html.unescape(_SUMMARY.sub("", body)).strip() or None)
    return Display(call, None if result is None else _json_string(result), values.get("id", ""))


def _json_string(value: str) -> str:
    """Return the text inside a JSON string: Open WebUI writes what it displays as JSON, strings included."""
    try:
        text = json.loads(value)
    except ValueError:
        return value
    return text if isinstance(text, str) else value


def _details_text(body: str) -> str:
    """Return the text of a `<details>` block, without its summary, `> ` and escapes."""
    lines = html.unescape(_SUMMARY.sub("", body)).strip("\n").splitlines()
    if lines and all(line.startswith(">") or not line.strip() for line in lines):
        lines = [line.removeprefix(">").removeprefix(" ") for line in lines]
    return "\n".join(lines).strip()


def _split_reasoning(text: str) -> tuple[str, str]:
    """Split a text into reasoning and answer.

    Reasoning is what stands in blocks at its start, before a lone closing tag, or in Dify's exact form anywhere.
    """
    reasoning, rest = _take_leading_blocks(text)
    if not reasoning and (closer := _find_lone_closer(rest)):
        reasoning = [reveal(closer.string[: closer.start()]).strip()]
        rest = reveal(closer.string[closer.end() :])
    inner, answers = _take_inner_blocks(rest)
    answer = _join_answers(answers)
    return join_paragraphs([*reasoning, *inner]), (
        answer.lstrip("\n") if reasoning or inner else answer.removeprefix("\n")
    )


def _take_leading_blocks(text: str) -> tuple[list[str], str]:
    """Return the reasoning of every block a text begins with, and what follows them."""
    reasoning: list[str] = []
    while match := _OLD_DETAILS.match(text):
        reasoning.append(_details_text(match["body"]))
        text = text[match.end() :]
    while begins_with_block(text):
        block, rest = _parse_first_block(text)
        reasoning.append(block)
        if rest == text:
            break
        text = rest
    return reasoning, text


def _take_inner_blocks(text: str) -> tuple[list[str], list[str]]:
    """Return the reasoning of Dify's blocks in a text, and the texts around them."""
    reasoning: list[str] = []
    answers: list[str] = []
    position = 0
    code = code_spans(text)
    # Behind the last closing tag no block ends: looking there would cost the square of the text.
    for match in _INNER_BLOCK.finditer(text, 0, text.rfind("\n</think>") + len("\n</think>\n")):
        if is_within(code, match.start()):
            continue
        reasoning.append(match[1].strip())
        answers.append(text[position : match.start()])
        position = match.end()
    return reasoning, [*answers, text[position:]]


def _parse_first_block(text: str) -> tuple[str, str]:
    """Parse the block a text begins with; return its reasoning and the rest."""
    hidden = hide_quoted_markup(text)
    if opener := _OPENER.match(hidden):
        closer = re.compile(rf"</{opener[1]}\s*>", re.IGNORECASE)
        # Where every closing tag looks quoted, the first one is not: the reasoning ended in a quotation mark.
        body = hidden[opener.end() :] if closer.search(hidden) else text[opener.end() :]
        if more := _MORE_OPENERS.match(body):
            body = body[more.end() :]
        message = parse_text("<think>" + closer.sub("</think>", body, count=1), "think", tools=())
    else:
        message = parse_text(hidden.lstrip(), "think", tools=())
    return reveal(message.reasoning), reveal(message.content)


def _join_answers(texts: list[str]) -> str:
    """Join the texts around blocks: with an empty line where two would run into each other, and never with several."""
    joined = ""
    for text in texts:
        if not joined or not text:
            joined += text
            continue
        before, behind = joined.rstrip("\n"), text.lstrip("\n")
        breaks = len(joined) - len(before) + len(text) - len(behind)
        runs_on = not breaks and not joined[-1].isspace() and not text[0].isspace()
        joined = f"{before}{'\n' * (2 if runs_on else min(breaks, 2))}{behind}"
    return joined


def _find_lone_closer(text: str) -> re.Match[str] | None:
    """Find the `</think>` whose opening tag the template wrote, so that the client never saw it."""
    text = hide_quoted_markup(text)
    closer = _ANY_CLOSER.search(text)
    if closer is None or re.search(rf"<{HIDER}?{closer[1]}\b", text[: closer.start()], re.IGNORECASE):
        return None
    if is_within(code_spans(text), closer.start()):
        return None
    behind = text[closer.end() :]
    goes_on = behind.lstrip()[:1].islower() or behind.startswith(CLAUSE_ENDS)
    if is_quoted(text, closer.start()) or (goes_on and is_mentioned(text, *closer.span())):
        return None
    return closer
