"""Whether llguidance accepts a grammar, and how much work one may be.

Its limits bound what a grammar costs, except where constraints intersect: the patterns of an `allOf` are multiplied
with each other before anything is counted, and a page of schema can keep a processor busy for hours. A thread cannot
be stopped while it does that, so such a grammar is first validated in a process of its own: this file, run as a
program, which imports nothing else of the project. It yields the processor to the server, which has other clients.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from math import isinf
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

    from mlx_backend.preparation import Preparation, Turns

MAX_SECONDS = 3  # of processor time: on a busy machine the same schemas are taken
MAX_MEMORY = 1 << 30  # bytes
NICENESS = 5
"""By which it yields the processor to the server: beside one busy thread it gets a quarter of a processor.

With 19 it would get a hundredth, and on a busy machine a request's time would be over before `MAX_SECONDS` are.
"""

MAX_PROCESSES = 2  # however many clients ask
_guard = Lock()
_turns: Turns | None = None  # made when first needed: the program below knows nothing of requests


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
    """Validate a grammar in a process of its own, with at most `MAX_SECONDS` and `MAX_MEMORY`.

    Raises what `Preparation.check` raises once the request that needs it has no time left, or nobody waits for it.
    """
    from mlx_backend.preparation import Turns, current

    global _turns
    with _guard:
        turns = _turns = _turns or Turns(MAX_PROCESSES)
    preparation = current()
    with turns.turn_of(preparation, preparation.seconds_left):
        preparation.check()
        return _validate_in_process(grammar, preparation)


def _validate_in_process(grammar: str, preparation: Preparation) -> Verdict:
    import subprocess
    from signal import SIGXCPU

    seconds = preparation.seconds_left
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return Verdict("it is too complex: there are no resources left to validate it")
    with process, preparation.cancelled_by(process.kill):
        try:
            output, _ = process.communicate(grammar.encode(), timeout=None if isinf(seconds) else seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    preparation.check()
    if process.returncode == -SIGXCPU:
        return Verdict(f"it is too complex: after {MAX_SECONDS} seconds it was still being validated")
    if process.returncode:
        return Verdict("it is too complex: validating it takes too much memory")
    answer = json.loads(output)
    return Verdict(answer["error"], tuple(answer["ignored"]))


def main() -> None:
    """Validate the grammar on standard input; write the verdict to standard output."""
    import os
    import resource

    os.nice(NICENESS)
    bounds = {resource.RLIMIT_CPU: MAX_SECONDS, resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: MAX_MEMORY}
    for kind, value in bounds.items():
        _, hard = resource.getrlimit(kind)
        with suppress(ValueError, OSError):  # macOS does not limit memory
            resource.setrlimit(kind, (value, hard))
    verdict = validate(sys.stdin.buffer.read().decode())
    print(json.dumps({"error": verdict.error, "ignored": verdict.ignored}))


if __name__ == "__main__":
    main()
