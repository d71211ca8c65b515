"""Raw Harmony that a client echoes: whole, cut at either end, with its markers removed, or several turns at once.

Tells raw Harmony from an answer that quotes a marker, restores what was cut off, and parses every generation in it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_backend.conversation.echo.parts import Display, Echo
from mlx_backend.conversation.parser import parse_text
from mlx_backend.conversation.quoting import (
    code_spans,
    hide,
    hide_quotations,
    is_mentioned,
    is_quoted,
    is_within,
    reveal,
)

if TYPE_CHECKING:
    from mlx_backend.conversation.tools import ToolSet


def _prefix_pattern(word: str) -> str:
    """Return a pattern for a word of which any number of letters may be missing at the end."""
    pattern = ""
    for letter in reversed(word):
        pattern = f"(?:{letter}{pattern})?"
    return pattern


_END_MARKERS = ("<|end|>", "<|return|>", "<|endoftext|>")
_MARKER = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_BARE_HEADER = re.compile(
    r"(?:assistant ?)?(?:(?:analysis|commentary|final)\b ?)?(?:to=\S+ ?)?(?:json|code)?"
)
# What only raw output holds: the seam of two messages, a whole header, a call's end.
_STRUCTURE = re.compile(
    r"<\|end\|>\s*(?:<\|start\|>|<\|channel\|>|<\|return\|>)"
    r"|(?:<\|start\|>\s*assistant\s*)?"
    r"<\|channel\|>\s*(?:analysis|commentary|final)[^\n<]*(?:<\|constrain\|>[^\n<]*)?<\|message\|>"
    r"|<\|start\|>\s*assistant(?=\s*(?:<\||to=|\Z))"
    r"|<\|call\|>\s*\Z"
)
STRIPPED_SEAM = "assistantfinal"
"""What remains between reasoning and answer where the markers were removed."""
_STRIPPED = re.compile(r"\s*(?:analysis.*)?assistantfinal(?=\S)|\s*analysis.*assistantfinal", re.DOTALL)
_ANOTHER_ROLE = re.compile(r"(?:<\|end\|>)?\s*<\|start\|>\s*(?:user|system|developer)\b")
_RESULT = re.compile(
    r"\s*<\|start\|>\s*(?!assistant|user|system|developer)[\w.:-]++[^<\n]*(?:<\|channel\|>[^<\n]*)?<\|message\|>"
    r"(?P<text>.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_MESSAGE_SEAM = re.compile(r"<\|end\|>\s*<\|start\|>")
_FINAL = re.compile(r"<\|channel\|>\s*final[^\n<]*(?:<\|constrain\|>[^\n<]*)?<\|message\|>")
_MENTION = re.compile(r"(?<=[ \u3000])(?:<\|\w+\|>\w*)+(?=[ ,.;:!?、。])(?! *<\|)")
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
# A header of which only the beginning was echoed: `<|start|>assist`, `<|start|>assistant<|channel|>fin`.
_CUT_HEADER = re.compile(
    rf"(?:<\|start\|>{_prefix_pattern('assistant')}|(?:<\|start\|>assistant)?<\|channel\|>"
    rf"(?:{'|'.join(map(_prefix_pattern, ('analysis', 'commentary', 'final')))}))(?:<(?:\|[a-z]*\|?)?)?\Z"
)


def is_raw_harmony(text: str) -> bool:
    """Whether a text is raw Harmony (perhaps cut), rather than an answer that quotes a marker."""
    if _STRIPPED.match(text):
        return True
    text = hide_quoted_markup(text)
    first = _MARKER.search(text)
    if first is None:
        return False
    if _is_bare_header(text[: first.start()]):
        return True
    code = code_spans(text)
    return any(
        not is_quoted(text, match.start())
        and not is_mentioned(text, match.start(), match.end())
        and not is_within(code, match.start())
        for match in _STRUCTURE.finditer(text)
    )


def parse_raw(text: str, tools: ToolSet | None) -> list[Echo]:
    """Parse raw Harmony: one segment for each generation and for each tool result between them.

    A generation ends with a call; what a client stored behind it is the result and the generations that followed.
    """
    segments: list[Echo] = []
    for generation in _generations(_restore_beginning(_CUT_HEADER.sub("", hide_quoted_markup(text)))):
        while segments and (result := _RESULT.match(generation)):
            generation = generation[result.end() :]
            _attach_result(segments, reveal(result["text"]))
        if generation.strip() and not _ANOTHER_ROLE.match(generation):
            message = parse_text(generation, "harmony", tools=tools)
            content = message.content.lstrip("\n") if _STRIPPED.match(text) else message.content
            calls = tuple(replace(call, arguments=reveal(call.arguments)) for call in message.tool_calls)
            segments.append(Echo(reveal(message.reasoning), reveal(content), calls))
    return segments or [Echo()]


def strip_end_markers(text: str) -> str:
    """Take end markers off the end of a text, with the white space behind them."""
    while (stripped := text.rstrip()).endswith(_END_MARKERS):
        text = stripped[: stripped.rindex("<|")]
    return text


def hide_quoted_markup(text: str) -> str:
    """Hide the markup that stands in quotation marks, or in code of a final message. `reveal` undoes it."""
    text = hide_quotations(text, lambda quotation: not _MESSAGE_SEAM.search(quotation))
    if final := _FINAL.search(text):
        answer = _FENCED.sub(lambda match: hide(match[0]), text[final.end() :])
        answer = _MENTION.sub(lambda match: hide(match[0]), answer)
        text = text[: final.end()] + answer
    return text


def _generations(text: str) -> list[str]:
    *calls, rest = text.split("<|call|>")
    return [*(f"{call}<|call|>" for call in calls), rest]


def _attach_result(segments: list[Echo], result: str) -> None:
    """Put a result behind the call it follows; one that follows no call is shown as it stands."""
    match segments[-1]:
        case Echo(tool_calls=(call,)) as called:
            segments[-1] = replace(called, tool_calls=(), display=Display(call, result))
        case _:
            segments.append(Echo(content=result))


def _is_bare_header(text: str) -> bool:
    """Whether a text is nothing, or a header whose first marker was cut off."""
    return _BARE_HEADER.fullmatch(" ".join(text.split())) is not None


def _restore_beginning(text: str) -> str:
    """Put the lost beginning back before a turn that was cut at the front."""
    first = _MARKER.search(text)
    if first is None:
        return text
    header = text[: first.start()]
    if _is_bare_header(header):
        if first.group() != "<|message|>" or header.strip() not in ("", "assistant"):
            return text
        text = text[first.end() :]
        first = _MARKER.search(text)
    channel = "analysis" if first is not None and _goes_on(text, first) else "final"
    return f"<|channel|>{channel}<|message|>{text}"


def _goes_on(text: str, marker: re.Match[str]) -> bool:
    """Whether another message of the turn follows: then what stood before it was reasoning, else it was the answer."""
    rest = text[marker.end() :].strip()
    if marker.group() in ("<|return|>", "<|call|>") or rest in ("", "<|return|>", "<|end|>"):
        return False
    return _ANOTHER_ROLE.match(text, marker.start()) is None
