"""Parse what a client echoes as an assistant's text: what it was shown, or what it stored.

Clients send back raw Harmony, the model's own markup, `<think>` or `<details>` blocks, or any of these cut in half.
Each is restored to the beginning its dialect expects and then parsed as a model's output is. Calls that Open WebUI
displays cut an answer into segments. An answer that merely talks about markers or tags, in code, in quotation marks or
in a sentence, is left alone (`quoting`).
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.block_format import suffixed
from mlx_backend.conversation.dialects.families.shared import OPENERS
from mlx_backend.conversation.events import Channel, ToolCall
from mlx_backend.conversation.parser import ChannelParser, fold, parse_text
from mlx_backend.conversation.quoting import (
    CLAUSE_ENDS,
    HIDER,
    code_spans,
    hide,
    hide_quotations,
    is_mentioned,
    is_quoted,
    is_within,
    opens_quotation,
    reveal,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.tools import ToolSet

_MAX_WRAPPINGS = 16
_MAX_PARSED_AGAIN = 1 << 21
"""Characters, of one text and all its wrappings: what is longer than any answer is not taken apart again and again."""


@dataclass(frozen=True, slots=True)
class Display:
    """A finished call as Open WebUI displays it inside an answer."""

    call: ToolCall
    result: str | None
    """None: it never ended."""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Echo:
    """One segment of an assistant's text. `display` is a displayed call that follows it."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = field(default=())
    display: Display | None = None


def _join_paragraphs(texts: Iterable[str]) -> str:
    """Join texts with an empty line between them, leaving out empty ones."""
    return "\n\n".join(text for text in texts if text)


def parse_echo(text: str, tools: ToolSet | None = None, dialect: Dialect | None = None) -> list[Echo]:
    """Parse an assistant's text into its segments, in order (one, unless there are calls in between).

    `dialect` is the model's: its own markup is parsed, too. What was echoed twice is wrapped twice: an answer is parsed
    again until nothing comes off it.
    """
    return _parse_wrapped(text, tools, dialect, 0)


def parse_reasoning(text: str, dialect: Dialect | None = None) -> str:
    """Return the reasoning in the text of a reasoning field: servers leave the markup of the channel in it."""
    if not _may_hold_markup(text, dialect):
        return text
    for times in range(_MAX_WRAPPINGS):
        if times and not _may_parse_again(text, times):
            break
        if not (_is_raw_harmony(text) or _begins_with_block(text) or _begins_with_own_block(text, dialect)):
            break
        bare = _join_paragraphs(
            [part for echo in parse_echo(text, None, dialect) for part in (echo.reasoning, echo.content)]
        )
        if bare == text:
            break
        text = bare
    return text


def _may_hold_markup(text: str, dialect: Dialect | None) -> bool:
    """Whether a text has what any markup begins with, or Harmony without its markers."""
    if "<" in text or "◁" in text or "[THINK]" in text or _STRIPPED_SEAM in text:
        return True
    return dialect is not None and _own_markers(dialect).search(text) is not None


def _parse_wrapped(text: str, tools: ToolSet | None, dialect: Dialect | None, depth: int) -> list[Echo]:
    if not _may_hold_markup(text, dialect):  # nearly every text of a long history
        return [Echo(content=text.lstrip("\n"))]
    segments: list[Echo] = []
    for echo in _parse_once(text, tools, dialect):
        if echo.content in ("", text) or not _may_parse_again(echo.content, depth + 1):
            segments.append(echo)
            continue
        first, *rest = _parse_wrapped(echo.content, tools, dialect, depth + 1)
        inner = [replace(first, reasoning=_join_paragraphs([echo.reasoning, first.reasoning])), *rest]
        calls = (*inner[-1].tool_calls, *echo.tool_calls)
        segments += [*inner[:-1], replace(inner[-1], tool_calls=calls, display=echo.display)]
    return segments


def _may_parse_again(text: str, times: int) -> bool:
    """Whether a text that has been parsed so often is looked at once more."""
    return times <= _MAX_WRAPPINGS and times * len(text) <= _MAX_PARSED_AGAIN


def _parse_once(text: str, tools: ToolSet | None, dialect: Dialect | None) -> list[Echo]:
    text = _strip_end_markers(text)
    if _is_raw_harmony(text):
        return _parse_raw(text, tools)
    segments = _parse_shown(text)
    return segments if dialect is None else [_parse_own(echo, tools, dialect) for echo in segments]


# -- the model's own markup, as it writes it -----------------------------------------------------------------------


@lru_cache(maxsize=256)
def _own_markers(dialect: Dialect) -> re.Pattern[str]:
    """Return what a family's markup is found by."""
    spelt = {suffixed(marker, f":{suffix}") for marker in dialect.markers for suffix in dialect.suffixes}
    spelt |= dialect.markers
    # A fence is Markdown, too.
    longest_first = sorted((marker for marker in spelt if not marker.startswith("`")), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


_GOES_ON = re.compile(r" +[^\W\dA-Z]|[,.;:!?、。]")
"""What follows a marker that is part of a sentence."""


def _begins_with_own_block(text: str, dialect: Dialect | None) -> bool:
    return dialect is not None and text.lstrip().startswith(tuple(dialect.blocks) or "\0")


def _parse_own(echo: Echo, tools: ToolSet | None, dialect: Dialect) -> Echo:
    """Parse the family's own markup in an answer, by the grammar by which its output is."""
    text = echo.content
    pattern = _own_markers(dialect)
    if not pattern.search(text):
        return echo
    code = code_spans(text)
    open_until: str | None = (
        ""  # the closer of the open block; None: there was a call, and the parser knows its values
    )

    def hidden_if_quoted(match: re.Match[str]) -> str:
        nonlocal open_until
        marker, (start, end) = match[0], match.span()
        if open_until == "":
            goes_on = _GOES_ON.match(text, end) and is_mentioned(text, start, end)
            if goes_on or is_within(code, start) or opens_quotation(text[max(0, start - 2) : start]):
                return f"{marker[0]}{HIDER}{marker[1:]}"
            is_of_text = marker in dialect.blocks.values() or marker in chain(*dialect.answers.items())
            open_until = dialect.blocks.get(marker, "" if is_of_text else None)
        elif open_until == marker:
            open_until = ""
        return marker

    hidden = pattern.sub(hidden_if_quoted, text)
    first = pattern.search(hidden)
    if first is None:
        return echo
    is_lone_closer = first[0] in dialect.blocks.values()
    if is_lone_closer and HIDER in hidden[: first.start()]:
        return echo  # what it closes is talked about
    parser = ChannelParser(dialect, tools=tools, opens_in=Channel.ANALYSIS if is_lone_closer else None)
    message = fold([*parser.feed(hidden), *parser.close()])
    return replace(
        echo,
        reasoning=_join_paragraphs([echo.reasoning, reveal(message.reasoning).strip()]),
        content=reveal(message.content),
        tool_calls=tuple(replace(call, arguments=reveal(call.arguments)) for call in message.tool_calls),
    )


# -- raw Harmony: whole, cut at either end, with its markers removed, or several turns at once ---------------------


def _prefix_pattern(word: str) -> str:
    """Return a pattern for a word of which any number of letters may be missing at the end."""
    pattern = ""
    for letter in reversed(word):
        pattern = f"(?:{letter}{pattern})?"
    return pattern


_END_MARKERS = ("<|end|>", "<|return|>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>")
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
_STRIPPED_SEAM = "assistantfinal"
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


def _is_raw_harmony(text: str) -> bool:
    """Whether a text is raw Harmony (perhaps cut), rather than an answer that quotes a marker."""
    if _STRIPPED.match(text):
        return True
    text = _hide_quoted_markup(text)
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


def _parse_raw(text: str, tools: ToolSet | None) -> list[Echo]:
    """Parse raw Harmony: one segment for each generation and for each tool result between them.

    A generation ends with a call; what a client stored after it is the result and the generations that followed.
    """
    segments: list[Echo] = []
    for generation in _generations(_restore_beginning(_CUT_HEADER.sub("", _hide_quoted_markup(text)))):
        while segments and (result := _RESULT.match(generation)):
            generation = generation[result.end() :]
            _attach_result(segments, reveal(result["text"]))
        if generation.strip() and not _ANOTHER_ROLE.match(generation):
            message = parse_text(generation, "harmony", tools=tools)
            content = message.content.lstrip("\n") if _STRIPPED.match(text) else message.content
            calls = tuple(replace(call, arguments=reveal(call.arguments)) for call in message.tool_calls)
            segments.append(Echo(reveal(message.reasoning), reveal(content), calls))
    return segments or [Echo()]


def _strip_end_markers(text: str) -> str:
    """Take end markers off the end of a text, with the white space after them."""
    while (stripped := text.rstrip()).endswith(_END_MARKERS):
        text = stripped[: stripped.rindex("<|")]
    return text


def _hide_quoted_markup(text: str) -> str:
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
    """Put a result after the call it follows; one that follows no call is shown as it stands."""
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


# -- blocks as they were shown: reasoning at the beginning, or in Dify's exact form anywhere; displayed calls ------

_TAGS = r"think|thinking|thought|reason|reasoning"
_OPENER = re.compile(rf"\s*<({_TAGS})(?:\s[^<>]*)?>(?![,;:)])", re.IGNORECASE)
_MORE_OPENERS = re.compile(rf"(?:\s*<(?:{_TAGS})>)+", re.IGNORECASE)
_OTHER_OPENER = re.compile(r"\s*(?:<\|begin_of_thought\|>|◁think▷|\[THINK\])")
_ANY_CLOSER = re.compile(rf"</({_TAGS})\s*>", re.IGNORECASE)
# Exactly what Dify's own blocks look like; agents leave them between the texts of their rounds.
_INNER_BLOCK = re.compile(r"<think>\n(.*?)\n</think>\n?", re.DOTALL)

_DETAILS = re.compile(
    r"(?<![ \t])[ \t]*<details\b(?=[^<>]*\stype=([\"'])(?P<type>reasoning|tool_calls)\1)(?P<attributes>[^<>]*)>"
    # Lines after `>` may hold tags of their own: the block ends at the first line without it.
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


def _begins_with_block(text: str) -> bool:
    """Whether a text begins with an opened block of reasoning, in tags or in another spelling."""
    return bool(_OPENER.match(text) or _OTHER_OPENER.match(text))


def _parse_shown(text: str) -> list[Echo]:
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
        return Echo(_join_paragraphs([*reasoning, more_reasoning]), answer, (), display)

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
    # The result stands in an attribute, or, since some version, after the summary.
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
    return _join_paragraphs([*reasoning, *inner]), (
        answer.lstrip("\n") if reasoning or inner else answer.removeprefix("\n")
    )


def _take_leading_blocks(text: str) -> tuple[list[str], str]:
    """Return the reasoning of every block a text begins with, and what follows them."""
    reasoning: list[str] = []
    while match := _OLD_DETAILS.match(text):
        reasoning.append(_details_text(match["body"]))
        text = text[match.end() :]
    while _begins_with_block(text):
        blocks, text = _parse_blocks(text)
        reasoning += blocks
    return reasoning, text


def _take_inner_blocks(text: str) -> tuple[list[str], list[str]]:
    """Return the reasoning of Dify's blocks in a text, and the texts around them."""
    reasoning: list[str] = []
    answers: list[str] = []
    position = 0
    code = code_spans(text)
    # After the last closing tag no block ends: looking there would cost the square of the text.
    for match in _INNER_BLOCK.finditer(text, 0, text.rfind("\n</think>") + len("\n</think>\n")):
        if is_within(code, match.start()):
            continue
        reasoning.append(match[1].strip())
        answers.append(text[position : match.start()])
        position = match.end()
    return reasoning, [*answers, text[position:]]


def _parse_blocks(text: str) -> tuple[list[str], str]:
    """Parse the blocks a text begins with; return the reasoning of each, and the rest."""
    hidden, at = _hide_quoted_markup(text), 0
    blocks: list[str] = []
    while opener := _OPENER.match(hidden, at) or _OTHER_OPENER.match(hidden, at):
        word = opener[1] if opener.re is _OPENER else ""
        closer = _closer_of(word or opener[0].strip())
        at = opener.end()
        end = closer.search(hidden, at)
        if end is None:  # where every closing tag looks quoted, the first one is not
            hidden, at = reveal(hidden[at:]), 0
            end = closer.search(hidden)
        if more := _MORE_OPENERS.match(hidden, at):
            at = more.end()
        blocks.append(reveal(hidden[at : end.start() if end else None]).strip("\r\n"))
        at = end.end() if end else len(hidden)
    return blocks, reveal(hidden[at:]).lstrip("\r\n")


@lru_cache(maxsize=64)
def _closer_of(opener: str) -> re.Pattern[str]:
    """Return what closes the block of an opener, or of the word in its tag."""
    return re.compile(re.escape(OPENERS[opener]) if opener in OPENERS else rf"</{opener}\s*>", re.IGNORECASE)


def _join_answers(texts: list[str]) -> str:
    """Join the texts around blocks: with an empty line where two would run into each other, and never with several."""
    joined = ""
    for text in texts:
        if not joined or not text:
            joined += text
            continue
        before, after = joined.rstrip("\n"), text.lstrip("\n")
        breaks = len(joined) - len(before) + len(text) - len(after)
        runs_on = not breaks and not joined[-1].isspace() and not text[0].isspace()
        joined = f"{before}{'\n' * (2 if runs_on else min(breaks, 2))}{after}"
    return joined


def _find_lone_closer(text: str) -> re.Match[str] | None:
    """Find the `</think>` whose opening tag the template wrote, so that the client never saw it."""
    text = _hide_quoted_markup(text)
    closer = _ANY_CLOSER.search(text)
    if closer is None or re.search(rf"<{HIDER}?{closer[1]}\b", text[: closer.start()], re.IGNORECASE):
        return None
    if is_within(code_spans(text), closer.start()):
        return None
    after = text[closer.end() :]
    goes_on = after.lstrip()[:1].islower() or after.startswith(CLAUSE_ENDS)
    if is_quoted(text, closer.start()) or (goes_on and is_mentioned(text, *closer.span())):
        return None
    return closer
