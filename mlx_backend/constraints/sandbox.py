"""Whether llguidance takes a grammar, and how much work it may make of one.

Its limits bound what a grammar costs, except where constraints meet: the patterns of an `allOf` are multiplied
with each other before anything is counted, and a page of schema can keep a processor busy for hours. No thread
can be stopped while it does that, so such a grammar is first tried in a process of its own: this file, run as
a program, which imports nothing else of ours.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

SECONDS = 3
MAX_MEMORY = 4 << 30

_one_trial = Lock()  # whatever many clients ask for, one processor is enough


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a grammar is not taken ("" if it is), and what of it is ignored."""

    error: str
    ignored: tuple[str, ...] = ()


def limits() -> LLParserLimits:
    """Return what one grammar may cost: some tens of milliseconds a step, some tens of megabytes."""
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


def check(grammar: str) -> Verdict:
    """Let llguidance read a grammar."""
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    return Verdict(messages[0]) if failed else Verdict("", tuple(dict.fromkeys(messages)))


def try_out(grammar: str) -> Verdict:
    """Let llguidance read a grammar in a process of its own, for so long and no longer."""
    import subprocess

    with _one_trial:
        try:
            done = subprocess.run(
                [sys.executable, "-I", __file__],
                input=grammar.encode(),
                capture_output=True,
                timeout=SECONDS,
                check=True,
            )
        except subprocess.TimeoutExpired:
            return Verdict(f"it is too complex: after {SECONDS} seconds it was still being read")
        except (subprocess.CalledProcessError, OSError):
            return Verdict("it is too complex: reading it took more memory than it may")
    answer = json.loads(done.stdout)
    return Verdict(answer["error"], tuple(answer["ignored"]))


def main() -> None:
    """Read a grammar from the standard input, and write the verdict."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(ValueError, OSError):  # macOS does not limit it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, hard))
    verdict = check(sys.stdin.buffer.read().decode())
    print(json.dumps({"error": verdict.error, "ignored": verdict.ignored}))


if __name__ == "__main__":
    main()
