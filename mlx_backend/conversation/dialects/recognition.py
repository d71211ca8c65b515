"""Which family a model belongs to: the signs of every family, looked for in its chat template and its control tokens.

A sign is a set of texts that stand together. Signs are weighed over all families; the strongest kind that any family
has decides, and within a kind the sign of most texts:

    1. OWN     in the template: what only this family opens a call or reasoning with; control tokens before plain text
    2. FORMAT  in the template: how a call is written, where several families write parts of it
    3.         the family reads the markers of reasoning that stand in the template
    4.         an OWN or a FORMAT sign among the control tokens, which the template does not have
    5. LAYOUT  in the template: how turns begin
    6. COMMON  in the template: a marker that belongs to nobody
    7.         a LAYOUT or a COMMON sign among the control tokens

Vocabularies are inherited, and hold markers that a model was never trained to write. So the template comes first, and
control tokens that speak for several families say nothing (4). A tie goes to the first in the registry, and is told.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import SignKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence, Set

    from mlx_backend.conversation.dialects.base import Dialect, Sign


@dataclass(frozen=True, slots=True)
class Recognition:
    """The family of a model, and what told it."""

    dialect: Dialect
    reason: str
    """`the template has <function=, <parameter=`"""
    is_by_template: bool = False
    rivals: tuple[str, ...] = ()
    """Families for which as much speaks."""

    @property
    def told(self) -> str:
        """What told it, and what else it may be."""
        return f"{self.reason} (as much speaks for {', '.join(self.rivals)})" if self.rivals else self.reason


@dataclass(frozen=True, slots=True)
class _Found:
    """A sign that was found: what it looked like, and where. `is_control`: it has a control token."""

    kind: SignKind
    texts: tuple[str, ...]
    in_template: bool
    is_control: bool

    @property
    def weight(self) -> tuple[bool, int]:
        return self.is_control and self.kind is SignKind.OWN, len(self.texts)

    def __str__(self) -> str:
        return f"{'the template has' if self.in_template else 'control tokens'} {', '.join(self.texts)}"


def recognise(dialects: Sequence[Dialect], template: str, control_tokens: Iterable[str]) -> Recognition:
    """Weigh the signs of all dialects; the last dialect is for a model that shows none."""
    tokens = sorted({*control_tokens})
    found = {
        dialect: signs
        for dialect in dialects
        if (signs := [*filter(None, (_find(sign, template, tokens) for sign in dialect.signs))])
    }
    if not found:
        return Recognition(
            dialects[-1], "no family's markers are in its template or among its control tokens"
        )
    reasoning = {
        text
        for dialect, signs in found.items()
        for each in signs
        if each.in_template and each.kind is SignKind.COMMON
        for text in _markers(dialect) & {*each.texts}
    }
    told = _by_tokens(found)
    evidence = {
        dialect: _evidence(signs, told.get(dialect), reads=reasoning <= _markers(dialect))
        for dialect, signs in found.items()
    }
    strongest = max([*map(_weights, evidence.values())])
    dialect, *rivals = [dialect for dialect, each in evidence.items() if _weights(each) == strongest]
    decisive = next((each for each in evidence[dialect] if isinstance(each, _Found)), None)
    if decisive is None:  # control tokens of several families
        return Recognition(dialects[-1], f"{found[dialect][0]} and others'")
    return Recognition(
        dialect, str(decisive), decisive.in_template, tuple(sorted(rival.name for rival in rivals))
    )


def _find(sign: Sign, template: str, tokens: Sequence[str]) -> _Found | None:
    """Look for a sign: in the template, or with texts among the control tokens that the template lacks."""
    texts: list[str] = []
    in_template, is_control = True, False
    for text in sign.texts:
        pattern = re.compile(re.escape(text)) if isinstance(text, str) else text
        is_whole = isinstance(text, str)
        token = next((each for each in tokens if (each == text if is_whole else pattern.search(each))), None)
        written = pattern.search(template)
        if written is None and (token is None or sign.in_template):
            return None
        in_template = in_template and written is not None
        is_control = is_control or token is not None
        texts.append(written[0] if written else token or "")
    return _Found(sign.kind, tuple(texts), in_template, is_control)


def _by_tokens(found: Mapping[Dialect, Sequence[_Found]]) -> dict[Dialect, _Found]:
    """Return what control tokens show of calls, if all of it speaks for one family."""
    for kind in (SignKind.OWN, SignKind.FORMAT):
        shown = [
            (dialect, each)
            for dialect, signs in found.items()
            for each in signs
            if each.kind is kind and not each.in_template
        ]
        if shown:
            most = max((each for _, each in shown), key=lambda each: len(each.texts))
            if any(not {*each.texts} <= {*most.texts} for _, each in shown):
                return {}
            return {dialect: each for dialect, each in shown if len(each.texts) == len(most.texts)}
    return {}


def _evidence(
    signs: Iterable[_Found], by_tokens: _Found | None, *, reads: bool
) -> tuple[_Found | bool | None, ...]:
    """Return what speaks for a family, the strongest kind first."""
    strongest: dict[tuple[SignKind, bool], _Found] = {}
    for each in signs:
        known = strongest.get((each.kind, each.in_template))
        if known is None or each.weight > known.weight:
            strongest[each.kind, each.in_template] = each
    return (
        strongest.get((SignKind.OWN, True)),
        strongest.get((SignKind.FORMAT, True)),
        reads,
        by_tokens,
        strongest.get((SignKind.LAYOUT, True)),
        strongest.get((SignKind.COMMON, True)),
        strongest.get((SignKind.LAYOUT, False)),
        strongest.get((SignKind.COMMON, False)),
    )


def _weights(evidence: Iterable[_Found | bool | None]) -> list[tuple[bool, int]]:
    return [each.weight if isinstance(each, _Found) else (False, int(bool(each))) for each in evidence]


def _markers(dialect: Dialect) -> Set[str]:
    return {*dialect.blocks.keys(), *dialect.blocks.values()}
