"""The table of a family that writes blocks: how reasoning, answer and calls are marked. `block_reader` reads by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.base import CallCodec, Continuation, Piece
from mlx_backend.conversation.events import Channel

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Set

    from mlx_backend.conversation.dialects.calls.base import CallSyntax, JsonSpan, PythonSpan


class CallsInReasoning(Enum):
    """What a call within a block of reasoning means."""

    CLOSE = auto()
    """The block has ended without its closer. What looks like a call of no offered tool is part of the reasoning."""
    STAY = auto()
    """It is a call, and the block goes on after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallBlock:
    """One call, or more where the syntax has lists."""

    opener: str = ""
    """The marker before it. "" for calls without: they begin the answer, with what `head` says."""
    closers: tuple[str, ...] = ()
    """The markers after it. None: it ends with its text's last bracket (`span`), or with the turn."""
    syntax: CallSyntax
    is_text: bool = False
    """The opener is no control token but part of the call's text, and does not begin a call within reasoning."""
    head: re.Pattern[str] | None = None
    """What a call without an opener begins with (see `CallSyntax.head`)."""
    is_anywhere: bool = False
    """A call without an opener may also begin in the middle of the answer, outside of fenced code."""
    is_alone: bool = False
    """It is a call only if nothing else is in the answer (`calls/unwrapped`)."""
    span: type[JsonSpan] | type[PythonSpan] | None = None
    """What finds the end of a call without a closer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSection:
    """Markers around calls: around `CallBlock`s, or around the text of a call (`syntax`)."""

    openers: tuple[str, ...]
    """The first is how it is written."""
    closer: str
    more_closers: tuple[str, ...] = ()
    syntax: CallSyntax | None = None

    @property
    def closers(self) -> tuple[str, ...]:
        """Every closer."""
        return self.closer, *self.more_closers


@dataclass(frozen=True, slots=True)
class AnswerBlock:
    """Markers around the answer; text without them is an answer, too."""

    opener: str
    """"" for text without one, of which only the end is marked."""
    closer: str
    has_layout: bool = False
    """Line breaks before the closer are not part of the answer."""


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """How one family's turns are written."""

    reasoning: Mapping[str, str] = field(default_factory=dict)
    """Every way to open a block of reasoning, with its closer. The first is how it is written."""
    words: frozenset[str] = frozenset()
    """Openers that people write, too: in the answer they are text, unless they are control tokens."""
    answers: tuple[AnswerBlock, ...] = ()
    sections: tuple[CallSection, ...] = ()
    """The first is how calls are written."""
    blocks: tuple[CallBlock, ...] = ()
    """In and outside of sections. The first that has an opener is how calls are written."""
    calls_in_reasoning: CallsInReasoning = CallsInReasoning.CLOSE
    separators: str = ""
    """Characters between calls, other than blanks; also brackets too many, after calls that have no closer."""
    ends: frozenset[str] = frozenset()
    """Control tokens that end a turn, and are looked for by their spelling where there are no ids."""
    controls: tuple[str, ...] = ()
    """What markers begin with that no text does: where the output ends within a marker, it is not shown."""
    noise: frozenset[str] = frozenset()
    """Parts of markers, and markers of older versions: alone they mean nothing in a turn."""
    suffixes: tuple[str, ...] = ()
    """What may stand in a marker after a colon, `<think:…>`: each of the family's checkpoints has its own."""

    @cached_property
    def markers(self) -> frozenset[str]:
        """Every marker but those that end a turn."""
        return frozenset(
            {
                *self.reasoning.keys(),
                *self.reasoning.values(),
                *(marker for block in self.answers for marker in (block.opener, block.closer) if marker),
                *(marker for section in self.sections for marker in (*section.openers, *section.closers)),
                *(marker for block in self.blocks for marker in (block.opener, *block.closers) if marker),
            }
        )

    @cached_property
    def between_calls(self) -> frozenset[str]:
        """What means nothing after a call: a closer written twice, and what means nothing anywhere."""
        return self.noise.union(*(block.closers for block in self.blocks if not block.is_text))

    @property
    def telling_markers(self) -> frozenset[str]:
        """The markers that tell that a text is a turn as it was written: people may write what closes `words`."""
        return self.markers.difference(self.reasoning[word] for word in self.words)

    def suffixed_markers(self, control: Set[str]) -> dict[str, str]:
        """Return the markers that have a suffix, a known one or one of these control tokens', with those they mean."""
        if not self.suffixes:
            return {}
        spelt = {
            token[1:-1].rpartition(":")[2]
            for token in control
            if token[:1] == "<" and token[-1:] == ">" and ":" in token
        }
        return {
            suffixed(marker, f":{suffix}"): marker
            for marker in self.markers
            for suffix in {*self.suffixes, *spelt}
            if suffixed(marker, f":{suffix}") != marker
        }

    @property
    def answer_markers(self) -> dict[str, str]:
        """What opens an answer, with its closer, where there is both."""
        return {block.opener: block.closer for block in self.answers if block.opener and block.closer}

    @property
    def openers(self) -> tuple[str, ...]:
        """The markers with which calls begin as they are written."""
        section = self.sections[0].openers[:1] if self.sections else ()
        return (*section, *(block.opener for block in self.blocks if block.opener))

    def opens_in(self, prompt_tail: str) -> Channel | None:
        """From the end of a rendered prompt: ANALYSIS in an opened block, FINAL after one or in an opened answer."""
        text = prompt_tail.rstrip()
        endings = {
            **dict.fromkeys(self.reasoning.values(), Channel.FINAL),
            **dict.fromkeys((block.opener for block in self.answers if block.opener), Channel.FINAL),
            **dict.fromkeys(self.reasoning, Channel.ANALYSIS),
        }
        for suffix in ("", *(f":{suffix}" for suffix in self.suffixes)):
            for marker, channel in endings.items():
                if text.endswith(suffixed(marker, suffix) if suffix else marker):
                    return channel
        return None

    def continuation(
        self,
        reasoning: str,
        content: str,
        *,
        opened: Channel | None = None,
        closes_reasoning: bool = False,
    ) -> Continuation:
        """Write a begun answer after the generation prompt, or after the block that the prompt has opened."""
        pieces: list[Piece] = []
        opener, closer = next(iter(self.reasoning.items()), ("", ""))
        if reasoning and opener:
            if opened is not Channel.ANALYSIS:
                pieces += [Piece(opener, marker=True), Piece("\n")]
            pieces.append(Piece(reasoning))
            opened = Channel.ANALYSIS
        if (content or closes_reasoning) and opened is Channel.ANALYSIS:
            pieces += [Piece("\n"), Piece(closer, marker=True), Piece("\n\n")]
            opened = None
        if content:
            if self.answers and self.answers[0].opener and opened is not Channel.FINAL:
                pieces.append(Piece(self.answers[0].opener, marker=True))
            pieces.append(Piece(content))
            opened = Channel.FINAL
        return Continuation(tuple(pieces), opened)


class BlockCalls(CallCodec):
    """Writes the calls of a format. `foreign` are what templates teach that write others between the same markers."""

    def __init__(
        self, form: BlockFormat, *, taught_by: tuple[str, ...] = (), foreign: tuple[str, ...] = ()
    ) -> None:
        self._foreign = foreign
        self._section = section = form.sections[0] if form.sections else None
        own = section.syntax if section else None
        self._block = None if own else next((block for block in form.blocks if block.opener), None)
        # With a suffix, a marker goes on after its name.
        self._taught_by = (*taught_by, *(opener[:-1] + ":" for opener in form.openers if form.suffixes))
        self.syntax = own or (self._block or form.blocks[0]).syntax
        self.markers = form.markers
        """Where one is no control token, a value written as bare text cannot hold it."""
        self.around = (section.openers[0], section.closer) if section and not own else ("", "")
        """The markers around all calls of a turn, where each call has its own inside of them."""

    def is_taught_by(self, template: str) -> bool:
        """Whether a template holds what its calls begin with."""
        if any(each in template for each in self._foreign):
            return False
        openers = [
            *(self._section.openers if self._section else ()),
            self._block.opener if self._block else "",
        ]
        return any(opener in template for opener in (*openers, *self._taught_by) if opener)

    def encode(self, name: str, arguments: Mapping[str, Any]) -> tuple[Piece, ...]:
        """Write a call in its block, and that in its section."""
        section, block = self._section, self._block
        pieces = [*self.syntax.encode(name, arguments)]
        if block is not None and not block.is_text:
            closing = [Piece(block.closers[0], marker=True)] if block.closers else []
            pieces = [Piece(block.opener, marker=True), *pieces, *closing]
        if section is not None:
            pieces = [Piece(section.openers[0], marker=True), *pieces, Piece(section.closer, marker=True)]
        return tuple(pieces)


def suffixed(marker: str, suffix: str) -> str:
    """Put a suffix into a marker: `<think>` -> `<think:suffix>`. Other markers have none."""
    return f"{marker[:-1]}{suffix}>" if marker.startswith("<") and marker.endswith(">") else marker
