"""What a completion says, read strictly: any slip in its Harmony makes it malformed. Knows no model and no
tokens.

(The server's own parser forgives; here forgiving would hide what the evaluation wants to know.)
"""

import json
import re
from dataclasses import dataclass
from typing import Final

from mlx_backend.demo.skills import Call, Reply

_BODY: Final = r"((?:(?!<\|).)*)"
_NEXT: Final = r"<\|end\|><\|start\|>assistant"
_COMPLETION: Final = re.compile(
    rf"(?:<\|channel\|>analysis<\|message\|>{_BODY}{_NEXT})?"
    rf"(?:<\|channel\|>commentary<\|message\|>{_BODY}{_NEXT})?"
    rf"(?:<\|channel\|>final<\|message\|>{_BODY}<\|return\|>"
    rf"|<\|channel\|>commentary to=functions\.([A-Za-z0-9_.-]+) "
    rf"<\|constrain\|>json<\|message\|>{_BODY}<\|call\|>)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Completion:
    """One well-formed turn of the assistant; `answer` is None if it is a call."""

    thinking: str
    preamble: str
    answer: str | None
    call: Call | None


def read(text: str) -> Completion | None:
    """Return what a completion says, or None if it is not well-formed to the last token."""
    match = _COMPLETION.fullmatch(text)
    if match is None:
        return None
    thinking, preamble, answer, name, body = match.groups()
    call = None
    if name is not None:
        try:
            arguments = json.loads(body)
        except ValueError:
            return None
        if not isinstance(arguments, dict):
            return None
        call = Call(name, arguments)
    return Completion(thinking or "", preamble or "", answer, call)


def is_right(completion: Completion | None, wanted: Reply) -> bool:
    """Whether a completion says exactly what is wanted; the thoughts are free."""
    if completion is None or completion.preamble != wanted.preamble:
        return False
    if wanted.call is not None:
        return completion.call == wanted.call
    return completion.answer == wanted.answer
