"""Parse a Harmony header, however badly it is written.

A header is everything in front of a message's body, its markers spelt out:

    assistant to=functions.f<|channel|>commentary <|constrain|>json

Models misspell, repeat, glue and forget each of these parts, so nothing is required and the order is free:
the last channel word that can be made out wins, the recipient is what follows `to=` anywhere and is matched
against the names of the request's tools. What stands after all of that and is not a content type is the
`rest`: noise, or the body of a message whose `<|message|>` was forgotten. The reader decides which.

Knows one header's text and the tools; keeps no state, and knows nothing of streams or events.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.tools import ToolSet, strip_glued

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN, END_OF_TEXT = "<|end|>", "<|call|>", "<|return|>", "<|endoftext|>"

HARMONY_TOKENS: Mapping[int, str] = {
    199998: "<|startoftext|>",
    199999: END_OF_TEXT,
    200002: RETURN,
    200003: CONSTRAIN,
    200005: CHANNEL,
    200006: START,
    200007: END,
    200008: MESSAGE,
    200012: CALL,
}
"""The control tokens of o200k_harmony, the vocabulary of gpt-oss."""


_MARKER = re.compile(r"<\|(start|channel|constrain)\|>")
_ROLE = re.compile(r"\s*(?:assistant\s*)*")
_WORD = re.compile(r"[^\W\d_]+")
_RECIPIENT = re.compile(r"to\s*=\s*[\"'`]?")
_NAMESPACE = re.compile(r"(?:functions?\.)+")
_NAME_END = re.compile(r"[\s<>{}\[\]\"'`(),;=]")
_CONTENT_TYPE = re.compile(r"(?:json|code|text|python|plain|markdown|yaml|xml)(?![\w.-])", re.IGNORECASE)
_ANY_CONTENT_TYPE = re.compile(r"\w+(?=\s*(?:$|[{\[]))")
_FOREIGN_ROLE = re.compile(r"\s*(?:user|system|developer|tool)(?![\w.])")
_THINKING = re.compile(r"\W*(?:think|thought|reason|reflect|scratch|monolog|cot\b)", re.IGNORECASE)

_NOT_TOOLS = frozenset({"", "assistant", "user", "all", "system", "developer", "functions"})
# Tools that gpt-oss was trained with: `browser.search` is none of the request's that is named `search`.
_BUILT_IN_NAMESPACES = frozenset({"browser", "container", "python"})
_STRIPPED_MESSAGE = re.compile(r"assistant(?=analysis|commentary)")
_QUOTES = "\"'`"
_RECIPIENT_MARK = "to="
# What stands between messages by mistake.
_NOISE = " \t\r\n0123456789.,:;-–—?!*#|<>"
# What follows a word in prose, so not a glued body's first character.
_AFTER_WORD = frozenset(" \t,.:;!?)-'’/")
_MAX_TYPO = 3
"""Letters glued to a channel's word: `finalx`."""
_MIN_WORD = 4
"""Letters of a cut-off channel word ("comment" is a token of its own)."""


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header. `recipient` is a tool's name; `is_foreign` says that the message is not the assistant's.

    `rest` is what follows everything understood, `is_glued` whether it is glued to the channel's word, and
    `is_constrained` whether it stands after `<|constrain|>`, where no prose belongs.
    """

    channel: Channel | None
    recipient: str | None
    is_foreign: bool
    rest: str
    is_glued: bool = False
    is_constrained: bool = False

    @property
    def is_junk(self) -> bool:
        """Whether the rest is noise rather than a body: no word in it, or a typo of the channel's word."""
        if self.channel is Channel.FINAL:
            typo = self.is_glued and self.rest.isalpha() and len(self.rest) <= _MAX_TYPO
            return typo or not any(map(str.isalnum, self.rest))
        rest = self.rest
        for word in Channel:
            rest = rest.replace(word, "")
        return not has_letters(rest)


class Beginning(Enum):
    """What text that no marker has opened may be."""

    UNDECIDED = auto()
    HEADER = auto()
    TEXT = auto()
    STRIPPED = auto()
    """`analysisWe…`: a whole turn whose markers were taken out."""
    STRIPPED_ANSWER = auto()
    """`assistantfinal…`: its answer."""


_UNKNOWN_TOOLS = ToolSet(None)


def parse_header(text: str, tools: ToolSet = _UNKNOWN_TOOLS) -> Header:
    """Parse a header. Anything parses: a text that says nothing is all rest."""
    channel: Channel | None = None
    thinking = foreign = glued = False
    recipients: list[str] = []
    rest = kind = ""
    for kind, segment in _segments(text):
        words, addressed, after = _take_recipients(segment, tools, recipients)
        if kind == "start":
            words = _ROLE.sub("", words, count=1)
            answers = addressed and not recipients and _NAMESPACE.match(words)  # `functions.f to=assistant`
            foreign = foreign or bool(_FOREIGN_ROLE.match(words) or answers)
        found, rest = (None, words) if kind == "constrain" else _channel_at(words)
        channel = found or channel
        thinking = thinking or (kind != "constrain" and bool(_THINKING.match(words)))
        glued = found is not None and not addressed and bool(_WORD.match(rest))
        if addressed:
            rest = after
        elif _NAMESPACE.match(rest.lstrip()):  # `to=` was forgotten
            *_, rest = _take_recipients("to=" + rest.lstrip(), tools, recipients)
        rest = _without_content_type(rest.lstrip(), bare=kind == "constrain" or bool(recipients))
    if channel is None and thinking:
        channel = Channel.ANALYSIS
    return Header(channel, _choose_recipient(recipients, tools), foreign, rest, glued, kind == "constrain")


def _segments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the text between markers, each with the marker before it; a turn begins after `<|start|>`."""
    kind, at = "start", 0
    for marker in _MARKER.finditer(text):
        if at or marker.start():
            yield kind, text[at : marker.start()]
        kind, at = marker[1], marker.end()
    yield kind, text[at:]


def _take_recipients(segment: str, tools: ToolSet, recipients: list[str]) -> tuple[str, bool, str]:
    """Take every `to=NAME` out; return the words before it, if there was one, and what follows the last."""
    words, addressed, rest = segment, False, segment
    while found := _RECIPIENT.search(rest):
        if not addressed:
            words = rest[: found.start()]
        addressed = True
        name, rest = _tool_name(rest[found.end() :], tools)
        if name is not None:
            recipients.append(name)
    return words, addressed, rest


def _tool_name(text: str, tools: ToolSet) -> tuple[str | None, str]:
    """Parse the recipient at the beginning of `text`; return its name (None: not a tool) and what follows."""
    namespace = _NAMESPACE.match(text)
    bare = text[namespace.end() :] if namespace else text
    for candidate in (text, bare):
        if (name := tools.find_prefix(candidate)) is not None:
            return name, strip_glued(candidate[len(name) :]).lstrip(_QUOTES)
    end = _NAME_END.search(bare)
    word, rest = (bare[: end.start()], bare[end.start() :].lstrip(_QUOTES)) if end else (bare, "")
    word = word.rstrip(".:")
    if not namespace and word.lower() in _NOT_TOOLS:
        return None, rest
    built_in = not namespace and word.partition(".")[0] in _BUILT_IN_NAMESPACES
    return tools.find_similar(word, in_namespace=not built_in) or word or None, rest


def _choose_recipient(recipients: list[str], tools: ToolSet) -> str | None:
    """The last recipient counts, a tool of the request before any other."""
    known = [name for name in recipients if name in tools.names]
    return next(reversed(known or recipients), None)


def _channel_at(words: str) -> tuple[Channel | None, str]:
    """Parse the channel's word at the beginning, after any noise without letters; return it and what follows.

    A longer word counts by its beginning, and so does a shorter one: `finalx`, `comment`.
    """
    word = _WORD.search(words)
    if word is None:
        return None, words
    lowered = word[0].lower()
    for channel in Channel:
        if lowered.startswith(channel):
            return channel, words[word.start() + len(channel) :]
        if len(lowered) >= _MIN_WORD and channel.startswith(lowered):
            return channel, words[word.end() :]
    return None, words


def _without_content_type(text: str, *, bare: bool) -> str:
    """Take a content type from the beginning. Only where one belongs (`bare`) may it be any word."""
    if bare and (word := _ANY_CONTENT_TYPE.match(text)):
        text = text[word.end() :].lstrip()
    if word := _CONTENT_TYPE.match(text):
        after = text[word.end() :].lstrip()
        if bare or after[:1] in ("", "{", "["):
            return after
    return text


def classify_beginning(text: str, *, of_turn: bool) -> Beginning:
    """Classify text that no marker has opened.

    At the beginning of a turn only `to=` proves a header, because an answer may begin with any word. Between
    messages the channel's word is enough, and noise may stand before it.
    """
    words = text.lstrip() if of_turn else text.lstrip(_NOISE)
    spoken = words
    while spoken.startswith("assistant"):
        spoken = spoken.removeprefix("assistant").lstrip()
    if "assistant".startswith(spoken) or _RECIPIENT_MARK.startswith(spoken):
        return Beginning.UNDECIDED
    if spoken.startswith(_RECIPIENT_MARK):
        return Beginning.HEADER
    for channel in Channel:
        if channel.startswith(spoken):
            return Beginning.UNDECIDED
        if spoken.startswith(channel):
            return _classify_after_channel(
                channel, spoken.removeprefix(channel), spoken is not words, of_turn
            )
    return Beginning.TEXT


def _classify_after_channel(channel: Channel, after: str, has_role: bool, of_turn: bool) -> Beginning:
    bare = after.lstrip()
    if not of_turn or bare.startswith(_RECIPIENT_MARK):
        return Beginning.HEADER
    if _RECIPIENT_MARK.startswith(bare):
        return Beginning.UNDECIDED
    if channel is Channel.ANALYSIS and after[0] not in _AFTER_WORD:
        return Beginning.STRIPPED
    if channel is Channel.FINAL and has_role:
        return Beginning.STRIPPED_ANSWER
    return Beginning.TEXT


def has_letters(text: str) -> bool:
    """Whether there is any letter, of whatever script."""
    return any(map(str.isalpha, text))


def is_prose(text: str) -> bool:
    """Whether there is more than one word: more than a header holds by mistake."""
    return len(text.split()) > 1 and has_letters(text)


def paragraph_break(before: str) -> str:
    """Return what is missing between a text with this end and a new paragraph; nothing after a blank."""
    if not before or (before[-1].isspace() and before[-1] != "\n"):
        return ""
    return "\n\n"[len(before) - len(before.rstrip("\n")) :]


def split_stripped(text: str) -> Iterator[tuple[Channel, str]]:
    """Yield the messages of a turn whose markers were removed, from `analysis` on: `analysisWe need…`."""
    for message in _STRIPPED_MESSAGE.split(text):
        channel = next(channel for channel in Channel if message.startswith(channel))
        yield channel, message.removeprefix(channel)
