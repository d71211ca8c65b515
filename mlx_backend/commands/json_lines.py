"""Commands that read JSON on standard input and print JSON: one value, or one a line.

An object with `error` stands for an input that could not be used; its line's number is added. Knows nothing of what the
values mean.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def answer_input(answer: Callable[[bytes], dict[str, Any]], *, by_lines: bool) -> int:
    """Print an answer for the whole input, or for each line that is not blank; return 1 if any is an error, else 0."""
    read = sys.stdin.buffer.read()
    failed = False
    for number, request in enumerate(read.split(b"\n") if by_lines else [read], start=1):
        if by_lines and not request.strip():
            continue
        result = answer(request)
        if "error" in result:
            failed = True
            result["error"]["line"] = number
        printed = json.dumps(result, ensure_ascii=False)
        sys.stdout.buffer.write(printed.encode("utf-8", "backslashreplace") + b"\n")
    sys.stdout.buffer.flush()
    return 1 if failed else 0
