"""Read what a client echoes as an assistant's text: what it was shown, or what it stored.

Clients send back raw Harmony, `<think>` blocks, `<details>` blocks, or any of these cut in half. Each is brought to
the beginning its grammar expects and then read by the same parser as a model's output. An answer that merely
talks about markers or tags is left alone: what stands in quotation marks or in code is hidden while a text is read.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .events import ToolCall
from .parser import read

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Display:
    """A finished call as Open WebUI displays it inside an answer."""

    call: ToolCall
    result: str | None  # None: it never ended
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
    r"(?:assistant ?)?(?:(?:analysis|commentary|final)\b ?)?(?:to=\S+ ?)?(?:json|code)?"
)
_STRUCTURE = re.compile(
    r"<\|end\|>\s*(?:<\|start\|>|<\|channel\|>|<\|return\|>)"
    r"|(?P<header>(?:<\|start\|>\s*assistant\s*)?"
    r"<\|channel\|>\s*(?:analysis|commentary|final)[^\n<]*(?:<\|constrain\|>[^\n<]*)?<\|message\|>)"
    r"|<\|start\|>\s*assistant"
    r"|<\|call\|>\s*\Z"
)
_STRIPPED = re.compile(r"\s*analysis.*assistantfinal", re.DOTALL)

_TAGS = r"think|thinking|thought|reason|reasoning"
_OPENER = re.compile(rf"\s*<({_TAGS})(?:\s[^<>]*)?>(?![,;:)])", re.IGNORECASE)
_OTHER_OPENER = re.compile(r"\s*(?:<\|begin_of_thought\|>|◁think▷|\[THINK\])")
_ANY_CLOSER = re.compile(rf"</({_TAGS})\s*>", re.IGNORECASE)
# Exactly what Dify's own blocks look like; agents leave them between the texts of their rounds.
_INNER_BLOCK = re.compile(r"<think>\n(.*?)\n</think>\n?", re.DOTALL)

_DETAILS = re.compile(
    r"(?<![ \t])[ \t]*<details\b(?=[^>]*\stype=([\"'])(?P<type>reasoning|tool_calls)\1)(?P<attributes>[^>]*)>"
    # Lines behind `>` may hold tags of their own: the block ends on a line that is none.
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
# Markers or tags in quotation marks: `<think>`, "<|end|>", 「<|channel|>analysis<|message|>」.
_QUOTATION = re.compile(
    r"`<[^`\n]{0,200}[>▷]`|\"<[^\"\n]{0,200}[>▷]\"|'<[^'\n]{0,200}[>▷]'|“<[^”\n]{0,200}[>▷]”|「<[^」\n]{0,200}[>▷]」"
)
_BOUNDARY = re.compile(r"<\|end\|>\s*<\|start\|>")
_FINAL = re.compile(r"<\|channel\|>\s*final[^\n<]*(?:<\|constrain\|>[^\n<]*)?<\|message\|>")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_HIDER = "\ufdd0"  # stands behind the `<` of what is hidden; no text may hold this character
_CODE = re.compile(r"^(```|~~~).*?(?:^\1|\Z)|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def read_echo(text: str, tools: Sequence[str] | None = None) -> list[Echo]:
    """Read an assistant's text; return its stretches in order (one, unless calls are displayed in between).

    What was echoed twice is in two wrappings: an answer is read again until nothing comes off it.
    """
    stretches: list[Echo] = []
    for echo in _read_once(text, tools):
        if echo.content in ("", text):
            stretches.append(echo)
            continue
        first, *rest = read_echo(echo.content, tools)
        inner = [replace(first, reasoning=_joined([echo.reasoning, first.reasoning])), *rest]
        calls = (*inner[-1].tool_calls, *echo.tool_calls)
        stretches += [*inner[:-1], replace(inner[-1], tool_calls=calls, display=echo.display)]
    return stretches


def read_reasoning(text: str) -> str:
    """Read the text of a reasoning field: servers leave the markup of the channel in it."""
    while is_raw_harmony(text) or _OPENER.match(text) or _OTHER_OPENER.match(text):
        bare = _joined([part for echo in read_echo(text) for part in (echo.reasoning, echo.content)])
        if bare == text:
            break
        text = bare
    return text


def _read_once(text: str, tools: Sequence[str] | None) -> list[Echo]:
    text = _without_end_markers(text)
    if not is_raw_harmony(text):
        return list(_stretches(text))
    message = read(_from_its_beginning(_without_quotations(text)), "harmony", tools=tools)
    content = message.content.lstrip("\n") if _STRIPPED.match(text) else message.content
    calls = tuple(replace(call, arguments=_shown(call.arguments)) for call in message.tool_calls)
    return [Echo(_shown(message.reasoning), _shown(content), calls)]


def _without_end_markers(text: str) -> str:
    while (stripped := text.rstrip()).endswith(("<|end|>", "<|return|>")):
        text = stripped[: stripped.rindex("<|")]
    return text


def is_raw_harmony(text: str) -> bool:
    """Whether a text is raw Harmony (perhaps cut), rather than an answer that quotes a marker."""
    if _STRIPPED.match(text):
        return True
    text = _without_quotations(text)
    first = _HARMONY_MARKER.search(text)
    if first is None:
        return False
    if _is_bare_header(text[: first.start()]):
        return True
    code = [match.span() for match in _CODE.finditer(text)]
    return any(
        not _quoted(text, match.start())
        and not _mentioned(text, match)
        and not any(start <= match.start() < end for start, end in code)
        for match in _STRUCTURE.finditer(text)
    )


def _is_bare_header(text: str) -> bool:
    """Whether a text is nothing, or a header whose first marker was cut off."""
    return _BARE_HEADER.fullmatch(" ".join(text.split())) is not None


def _without_quotations(text: str) -> str:
    """Hide the markers and tags that stand in quotation marks, or in code of a final message. `_shown` undoes it."""
    text = _QUOTATION.sub(lambda match: match[0] if _BOUNDARY.search(match[0]) else _hidden(match[0]), text)
    if final := _FINAL.search(text):
        answer = _FENCE.sub(lambda match: _hidden(match[0]), text[final.end() :])
        text = text[: final.end()] + answer
    return text


def _hidden(text: str) -> str:
    return text.replace("<", f"<{_HIDER}").replace("◁", f"◁{_HIDER}")


def _shown(text: str) -> str:
    return text.replace(_HIDER, "")


def _quoted(text: str, position: int) -> bool:
    """Whether the character before a marker makes it a quotation."""
    return text[max(0, position - 1) : position] in ("`", '"', "'", "“", "「", "(")


def _mentioned(text: str, match: re.Match[str]) -> bool:
    """Whether a header stands in a sentence: blanks around it, or a blank and a punctuation mark."""
    before, after = text[: match.start()][-1:], text[match.end() :][:1]
    return match["header"] is not None and before in (" ", "\u3000") and after in tuple(" ,.;:!?、。")


def _from_its_beginning(text: str) -> str:
    """Put the lost beginning back before a turn that was cut at the front."""
    first = _HARMONY_MARKER.search(text)
    if first is None or _is_bare_header(text[: first.start()]):
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
        if reasoning:
            answer = answer.lstrip("\n")
        if display:
            answer = answer.rstrip("\n")
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
    written = re.findall(r"([\w-]+)=([\"'])(.*?)\2", attributes, re.DOTALL)
    values = {name: html.unescape(value) for name, _, value in written}
    call = ToolCall(values.get("name", "") or "tool", _unquoted(values.get("arguments", "")) or "{}")
    result = _unquoted(values["result"]) if "result" in values else None
    return Display(call, result, values.get("id", ""))


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
    while _OPENER.match(text) or _OTHER_OPENER.match(text):
        thought, rest = _first_block(text)
        reasoning.append(thought)
        took = True
        if rest == text:
            break
        text = rest
    if not took and (lone := _lone_closer(text)):
        thought, text, took = (
            _shown(lone.string[: lone.start()]).strip(),
            _shown(lone.string[lone.end() :]),
            True,
        )
        reasoning.append(thought)
    answers: list[str] = []
    position = 0
    code = [match.span() for match in _CODE.finditer(text)]
    for match in _INNER_BLOCK.finditer(text):
        if any(start <= match.start() < end for start, end in code):
            continue
        reasoning.append(match[1].strip())
        answers.append(text[position : match.start()])
        position = match.end()
    answer = _paragraphs([*answers, text[position:]])
    return _joined(reasoning), answer.lstrip("\n") if took or answers else answer.removeprefix("\n")


def _first_block(text: str) -> tuple[str, str]:
    """Read the block a text begins with; return its reasoning and the rest."""
    hidden = _without_quotations(text)
    if opener := _OPENER.match(hidden):
        closer = re.compile(rf"</{opener[1]}\s*>", re.IGNORECASE)
        # Where every closing tag looks quoted, the first one is not: a thought ended in a quotation mark.
        body = hidden[opener.end() :] if closer.search(hidden) else text[opener.end() :]
        message = read("<think>" + closer.sub("</think>", body, count=1), "think", tools=())
    else:
        message = read(hidden.lstrip(), "think", tools=())
    return _shown(message.reasoning), _shown(message.content)


def _paragraphs(texts: list[str]) -> str:
    """Put texts together that a block stood between: they do not run into each other."""
    joined = ""
    for text in texts:
        runs_on = joined and text and not joined[-1].isspace() and not text[0].isspace()
        joined += f"\n\n{text}" if runs_on else text
    return joined


def _lone_closer(text: str) -> re.Match[str] | None:
    """The `</think>` whose opening tag the template wrote, so that the client never saw it."""
    text = _without_quotations(text)
    closer = _ANY_CLOSER.search(text)
    if closer is None or re.search(rf"<{_HIDER}?{closer[1]}\b", text[: closer.start()], re.IGNORECASE):
        return None
    if any(match.start() <= closer.start() < match.end() for match in _CODE.finditer(text)):
        return None
    return None if _quoted(text, closer.start()) else closer


def _joined(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text)
