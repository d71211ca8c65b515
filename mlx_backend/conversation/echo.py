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

from mlx_backend.conversation.events import ToolCall
from mlx_backend.conversation.parser import read

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


def _begun(word: str) -> str:
    """Return a pattern for a word of which any number of letters may be missing at the end."""
    pattern = ""
    for letter in reversed(word):
        pattern = f"(?:{letter}{pattern})?"
    return pattern


_HARMONY_MARKER = re.compile(r"<\|(?:start|channel|message|constrain|end|call|return)\|>")
_BARE_HEADER = re.compile(
    r"(?:assistant ?)?(?:(?:analysis|commentary|final)\b ?)?(?:to=\S+ ?)?(?:json|code)?"
)
_STRUCTURE = re.compile(
    r"<\|end\|>\s*(?:<\|start\|>|<\|channel\|>|<\|return\|>)"
    r"|(?:<\|start\|>\s*assistant\s*)?"
    r"<\|channel\|>\s*(?:analysis|commentary|final)[^\n<]*(?:<\|constrain\|>[^\n<]*)?<\|message\|>"
    r"|<\|start\|>\s*assistant(?=\s*(?:<\||to=|\Z))"
    r"|<\|call\|>\s*\Z"
)
_STRIPPED = re.compile(r"\s*(?:analysis.*)?assistantfinal(?=\S)|\s*analysis.*assistantfinal", re.DOTALL)
_ANOTHER_ROLE = re.compile(r"(?:<\|end\|>)?\s*<\|start\|>\s*(?:user|system|developer)\b")
_RESULT = re.compile(
    r"\s*<\|start\|>\s*(?!assistant|user|system|developer)[\w.:-]+[^<\n]*(?:<\|channel\|>[^<\n]*)?<\|message\|>"
    r"(?P<text>.*?)(?:<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)

_TAGS = r"think|thinking|thought|reason|reasoning"
_OPENER = re.compile(rf"\s*<({_TAGS})(?:\s[^<>]*)?>(?![,;:)])", re.IGNORECASE)
_MORE_OPENERS = re.compile(rf"(?:\s*<(?:{_TAGS})>)+", re.IGNORECASE)
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
_MENTION = re.compile(r"(?<=[ \u3000])(?:<\|\w+\|>\w*)+(?=[ ,.;:!?、。])(?! *<\|)")
# A header of which only the beginning was echoed: `<|start|>assist`, `<|start|>assistant<|channel|>fin`.
_CUT_HEADER = re.compile(
    rf"(?:<\|start\|>{_begun('assistant')}|(?:<\|start\|>assistant)?<\|channel\|>"
    rf"(?:{'|'.join(map(_begun, ('analysis', 'commentary', 'final')))}))(?:<(?:\|[a-z]*\|?)?)?\Z"
)
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_CLAUSE_ENDS = tuple(",.;:!?、。")
_SENTENCE_ENDS = (*".!?…:。！？", ")", "`", '"', "'")
_MAX_WRAPPINGS = 16
_HIDER = "\ufdd0"  # stands behind the `<` of what is hidden; no text may hold this character
_CODE = re.compile(r"^(```|~~~).*?(?:^\1|\Z)|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def read_echo(text: str, tools: Sequence[str] | None = None) -> list[Echo]:
    """Read an assistant's text; return its stretches in order (one, unless there are calls in between).

    What was echoed twice is in two wrappings: an answer is read again until nothing comes off it.
    """
    return _read_wrapped(text, tools, 0)


def _read_wrapped(text: str, tools: Sequence[str] | None, depth: int) -> list[Echo]:
    stretches: list[Echo] = []
    for echo in _read_once(text, tools):
        if echo.content in ("", text) or depth == _MAX_WRAPPINGS:
            stretches.append(echo)
            continue
        first, *rest = _read_wrapped(echo.content, tools, depth + 1)
        inner = [replace(first, reasoning=_joined([echo.reasoning, first.reasoning])), *rest]
        calls = (*inner[-1].tool_calls, *echo.tool_calls)
        stretches += [*inner[:-1], replace(inner[-1], tool_calls=calls, display=echo.display)]
    return stretches


def read_reasoning(text: str) -> str:
    """Read the text of a reasoning field: servers leave the markup of the channel in it."""
    for _ in range(_MAX_WRAPPINGS):
        if not (is_raw_harmony(text) or _OPENER.match(text) or _OTHER_OPENER.match(text)):
            break
        bare = _joined([part for echo in read_echo(text) for part in (echo.reasoning, echo.content)])
        if bare == text:
            break
        text = bare
    return text


def _read_once(text: str, tools: Sequence[str] | None) -> list[Echo]:
    text = _without_end_markers(text)
    if not is_raw_harmony(text):
        return list(_stretches(text))
    stretches: list[Echo] = []
    # A turn ends with a call; what a client stored behind it is the result and the turns that followed.
    for generation in _generations(_from_its_beginning(_CUT_HEADER.sub("", _without_quotations(text)))):
        while stretches and (result := _RESULT.match(generation)):
            generation = generation[result.end() :]
            _give(stretches, _shown(result["text"]))
        if generation.strip() and not _ANOTHER_ROLE.match(generation):
            message = read(generation, "harmony", tools=tools)
            content = message.content.lstrip("\n") if _STRIPPED.match(text) else message.content
            calls = tuple(replace(call, arguments=_shown(call.arguments)) for call in message.tool_calls)
            stretches.append(Echo(_shown(message.reasoning), _shown(content), calls))
    return stretches or [Echo()]


def _generations(text: str) -> list[str]:
    *calls, rest = text.split("<|call|>")
    return [*(f"{call}<|call|>" for call in calls), rest]


def _give(stretches: list[Echo], result: str) -> None:
    """Put a result behind the call it follows; what follows no call was said by nobody."""
    match stretches[-1]:
        case Echo(tool_calls=(call,)) as called:
            stretches[-1] = replace(called, tool_calls=(), display=Display(call, result))
        case _:
            stretches.append(Echo(content=result))


def _without_end_markers(text: str) -> str:
    while (stripped := text.rstrip()).endswith(("<|end|>", "<|return|>", "<|endoftext|>")):
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
        and not _mentioned(text, match.start(), match.end())
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
        answer = _MENTION.sub(lambda match: _hidden(match[0]), answer)
        text = text[: final.end()] + answer
    return text


def _hidden(text: str) -> str:
    return text.replace("<", f"<{_HIDER}").replace("◁", f"◁{_HIDER}")


def _shown(text: str) -> str:
    return text.replace(_HIDER, "")


def _quoted(text: str, position: int) -> bool:
    """Whether the character before a marker makes it a quotation."""
    return text[max(0, position - 1) : position] in ("`", '"', "'", "“", "「", "(")


def _mentioned(text: str, start: int, end: int) -> bool:
    """Whether a marker stands in a sentence: behind a blank, and the sentence goes on."""
    before = text[max(0, start - 40) : start]
    if not before.endswith((" ", "\u3000")):
        return False
    return text.startswith((" ", *_CLAUSE_ENDS), end) or not before.rstrip(" \u3000").endswith(_SENTENCE_ENDS)


def _from_its_beginning(text: str) -> str:
    """Put the lost beginning back before a turn that was cut at the front."""
    first = _HARMONY_MARKER.search(text)
    if first is None:
        return text
    header = text[: first.start()]
    if _is_bare_header(header):
        if first.group() != "<|message|>" or header.strip() not in ("", "assistant"):
            return text
        text = text[first.end() :]
        first = _HARMONY_MARKER.search(text)
    channel = "analysis" if first is not None and _goes_on(text, first) else "final"
    return f"<|channel|>{channel}<|message|>{text}"


def _goes_on(text: str, marker: re.Match[str]) -> bool:
    """Whether another message of the turn follows: then what stood before it was thought, else it was the answer."""
    rest = text[marker.end() :].strip()
    if marker.group() in ("<|return|>", "<|call|>") or rest in ("", "<|return|>", "<|end|>"):
        return False
    return _ANOTHER_ROLE.match(text, marker.start()) is None


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
        yield echo(_display(match["attributes"], match["body"]))
        reasoning, shown = [], []
    shown.append(text[position:])
    yield echo(None)


def _display(attributes: str, body: str) -> Display:
    written = re.findall(r"([\w-]+)=([\"'])(.*?)\2", attributes, re.DOTALL)
    values = {name: html.unescape(value) for name, _, value in written}
    call = ToolCall(values.get("name", "") or "tool", _unquoted(values.get("arguments", "")) or "{}")
    # The result stands in an attribute, or, since some version, behind the summary.
    result = values.get("result", html.unescape(_SUMMARY.sub("", body)).strip() or None)
    return Display(call, None if result is None else _unquoted(result), values.get("id", ""))


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
    # Behind the last closing tag no block ends: looking there would cost the square of the text.
    for match in _INNER_BLOCK.finditer(text, 0, text.rfind("\n</think>") + len("\n</think>\n")):
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
        if more := _MORE_OPENERS.match(body):
            body = body[more.end() :]
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
    behind = text[closer.end() :]
    goes_on = behind.lstrip()[:1].islower() or behind.startswith(_CLAUSE_ENDS)
    if _quoted(text, closer.start()) or (goes_on and _mentioned(text, *closer.span())):
        return None
    return closer


def _joined(texts: list[str]) -> str:
    return "\n\n".join(text for text in texts if text)
