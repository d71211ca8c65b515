"""Read what a client echoes as an assistant's text: what it was shown, or what it stored.

Clients send back raw Harmony, `<think>` blocks, `<details>` blocks, or any of these cut in half. Each is brought to
the beginning its grammar expects and then read by the same parser as a model's output. An answer that merely
talks about markers or tags is left alone.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .events import ToolCall
from .parser import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Display:
    """A finished call as Open WebUI displays it inside an answer."""

    call: ToolCall
    result: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Echo:
    """One stretch of an assistant's text, read. `display` is a displayed call that follows it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = field(default=())
    display: Display | None = None


_HARMONY_MARKER = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_BARE_HEADER = re.compile(
    r"\s*(?:assistant)?\s*(?:(?:analysis|commentary|final)\b)?\s*(?:to=\S+)?\s*(?:json|code)?\s*"
)
_STRUCTURE = re.compile(
    r"<\|end\|>\s*(?:<\|start\|>|<\|channel\|>|<\|return\|>|\Z)"
    r"|<\|start\|>\s*assistant"
    r"|<\|channel\|>\s*(?:analysis|commentary|final)[^\n<]*(?:<\|constrain\|>[^\n<]*)?<\|message\|>"
    r"|<\|(?:return|call)\|>\s*\Z"
)
_STRIPPED = re.compile(r"\s*analysis.*assistantfinal", re.DOTALL)

_TAGS = r"think|thinking|thought|reason|reasoning"
_OPENER = re.compile(rf"\s*<({_TAGS})(?:\s[^<>]*)?>", re.IGNORECASE)
_OTHER_OPENER = re.compile(r"\s*(?:<\|begin_of_thought\|>|◁think▷|\[THINK\])")
_ANY_CLOSER = re.compile(rf"</({_TAGS})\s*>", re.IGNORECASE)
# Exactly what Dify's own blocks look like; agents leave them between the texts of their rounds.
_INNER_BLOCK = re.compile(r"<think>\n(.*?)\n</think>\n?", re.DOTALL)

_DETAILS = re.compile(
    r"[ \t]*<details\s+type=\"(?P<type>reasoning|tool_calls)\"(?P<attributes>[^>]*)>(?P<body>.*?)(?:</details>\n?|\Z)",
    re.DOTALL,
)
_OLD_DETAILS = re.compile(
    r"\s*<details[^>]*>\s*<summary>\s*(?:Thinking|Thought|Reasoning|思考)[^<]*</summary>(?P<body>.*?)(?:</details>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_SUMMARY = re.compile(r"\A\s*<summary>.*?</summary>\n?", re.DOTALL)
_CODE = re.compile(r"^(```|~~~).*?(?:^\1|\Z)|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def read_echo(text: str, tools: Sequence[str] | None = None) -> list[Echo]:
    """Read an assistant's text; return its stretches in order (one, unless calls are displayed in between)."""
    if is_raw_harmony(text):
        message = read(_from_its_beginning(text), "harmony", tools=tools)
        return [Echo(message.reasoning, message.content, message.tool_calls)]
    return list(_stretches(text))


def is_raw_harmony(text: str) -> bool:
    """Whether a text is raw Harmony (perhaps cut), rather than an answer that quotes a marker."""
    if _STRIPPED.match(text):
        return True
    first = _HARMONY_MARKER.search(text)
    if first is None:
        return False
    if _BARE_HEADER.fullmatch(text, 0, first.start()):
        return True
    code = [match.span() for match in _CODE.finditer(text)]
    structure = [
        match
        for match in _STRUCTURE.finditer(text)
        if not any(start <= match.start() < end for start, end in code)
    ]
    return bool(structure) and not _quoted(text, structure[0].start())


def _quoted(text: str, position: int) -> bool:
    """Whether the character before a marker makes it a quotation."""
    return text[max(0, position - 1) : position] in ("`", '"', "'", "“", "「", "(")


def _from_its_beginning(text: str) -> str:
    """Put the lost beginning back before a turn that was cut at the front."""
    first = _HARMONY_MARKER.search(text)
    if first is None or not text[: first.start()].strip():
        return text
    if _BARE_HEADER.fullmatch(text, 0, first.start()):
        return text
    rest = text[first.end() :].strip()
    # What stands before another message was thought; what stands at the end was the answer.
    more = first.group() not in ("<|return|>", "<|call|>") and rest and rest not in ("<|return|>", "<|end|>")
    channel = "analysis" if more else "final"
    return f"<|channel|>{channel}<|message|>{text}"


def _stretches(text: str) -> Iterator[Echo]:
    """Cut at displayed calls; take reasoning out of each stretch."""
    code = [match.span() for match in _CODE.finditer(text)]
    reasoning: list[str] = []
    shown: list[str] = []
    position = 0

    def echo(display: Display | None) -> Echo:
        thought, answer = _blocks("".join(shown))
        return Echo(_joined([*reasoning, thought]), answer, (), display)

    for match in _DETAILS.finditer(text):
        if any(start <= match.start() < end for start, end in code):
            continue
        shown.append(text[position : match.start()])
        position = match.end()
        if match["type"] == "reasoning":
            reasoning.append(_quoted_lines(match["body"]))
            continue
        yield echo(_display(match["attributes"]))
        reasoning, shown = [], []
    shown.append(text[position:])
    yield echo(None)


def _display(attributes: str) -> Display:
    values = {name: html.unescape(value) for name, value in re.findall(r"([\w-]+)=\"([^\"]*)\"", attributes)}
    call = ToolCall(values.get("name", "") or "tool", _unquoted(values.get("arguments", "")) or "{}")
    return Display(call, _unquoted(values.get("result", "")), values.get("id", ""))


def _unquoted(value: str) -> str:
    """The text inside a JSON string: Open WebUI writes what it displays as JSON, strings included."""
    try:
        text = json.loads(value)
    except ValueError:
        return value
    return text if isinstance(text, str) else value


def _quoted_lines(body: str) -> str:
    """The text of a `<details>` block: the summary goes, `> ` and escapes are undone."""
    lines = html.unescape(_SUMMARY.sub("", body)).strip("\n").splitlines()
    if lines and all(line.startswith(">") or not line.strip() for line in lines):
        lines = [line.removeprefix(">").removeprefix(" ") for line in lines]
    return "\n".join(lines).strip()


def _blocks(text: str) -> tuple[str, str]:
    """Split reasoning blocks from a text: at its start, in Dify's exact form anywhere, or left unopened."""
    reasoning: list[str] = []
    took = False
    while match := _OLD_DETAILS.match(text):
        reasoning.append(_quoted_lines(match["body"]))
        text, took = text[match.end() :], True
    while opener := _OPENER.match(text) or _OTHER_OPENER.match(text):
        if opener.re is _OPENER:
            closed = re.compile(rf"</{opener[1]}\s*>", re.IGNORECASE).sub("</think>", text[opener.end() :], 1)
            message = read("<think>" + closed, "think", tools=())
        else:
            message = read(text.lstrip(), "think", tools=())
        reasoning.append(message.reasoning)
        took = True
        if message.content == text:
            break
        text = message.content
    if not took and (lone := _lone_closer(text)):
        reasoning.append(text[: lone.start()].strip())
        text, took = text[lone.end() :], True
    code = [match.span() for match in _CODE.finditer(text)]
    inner = [
        match
        for match in _INNER_BLOCK.finditer(text)
        if not any(start <= match.start() < end for start, end in code)
    ]
    for match in inner:
        reasoning.append(match[1].strip())
    for match in reversed(inner):
        text = text[: match.start()] + text[match.end() :]
    return _joined(reasoning), text.lstrip("\n") if took or inner else text.removeprefix("\n")


def _lone_closer(text: str) -> re.Match[str] | None:
    """The `</think>` whose opening tag the template wrote, so that the client never saw it."""
    closer = _ANY_CLOSER.search(text)
    if closer is None or re.search(rf"<{closer[1]}\b", text[: closer.start()], re.IGNORECASE):
        return None
    if any(match.start() <= closer.start() < match.end() for match in _CODE.finditer(text)):
        return None
    return None if _quoted(text, closer.start()) else closer


def _joined(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text)
