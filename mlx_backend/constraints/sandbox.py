"""Whether llguidance accepts a grammar, and how much work one may be.

Its limits bound what a grammar costs, except where constraints intersect: the patterns of an `allOf` are multiplied
with each other before anything is counted, and a page of schema can keep a processor busy for hours. So such a grammar
is first validated in a process of its own, which yields the processor to the server: it has other clients.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mlx_backend.child_process import ChildProcesses, Overrun

if TYPE_CHECKING:
    from llguidance import LLParserLimits

MAX_SECONDS = 3
"""Seconds of processor time: on a busy machine the same schemas are taken."""
NICENESS = 5
"""By which it yields the processor to the server: next to one busy thread it gets a quarter of a processor.

With 19 it would get a hundredth, and on a busy machine a request's time would be over before `MAX_SECONDS` are.
"""
_MAX_PROCESSES = 2

_processes = ChildProcesses(
    "mlx_backend.constraints.sandbox:answer", at_once=_MAX_PROCESSES, niceness=NICENESS
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a grammar is refused ("" if it is not), and what of it is ignored."""

    error: str
    ignored: tuple[str, ...] = ()


def limits() -> LLParserLimits:
    """Return what one grammar may cost: tens of milliseconds a step, tens of megabytes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=200_000,
        max_items_in_row=5_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def validate(grammar: str) -> Verdict:
    """Validate a grammar with llguidance."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return Verdict(messages[0]) if failed else Verdict("", tuple(dict.fromkeys(messages)))


def validate_isolated(grammar: str) -> Verdict:
    """Validate a grammar in a process of its own. Raises what `ChildProcesses.call` raises, but no Overrun."""
    try:
        found = _processes.call(grammar.encode(), seconds=MAX_SECONDS)
    except Overrun as overrun:
        return Verdict(f"it is too complex: {overrun}")
    verdict = json.loads(found.data)
    return Verdict(verdict["error"], tuple(verdict["ignored"]))


def answer(grammar: bytes) -> bytes:
    """Validate a grammar; this is what the process runs."""
    return json.dumps(asdict(validate(grammar.decode()))).encode()
