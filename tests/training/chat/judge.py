"""Parses a completion strictly and compares it with the expected reply: any slip in its Harmony makes it malformed.

The server's own parser is lenient; here that would hide what the evaluation measures. Knows no model and no tokens.
"""

import json
import re
from dataclasses import dataclass
from typing import Final

from training.chat.exchange import Call, Reply

MIN_REPEATED: Final = 100  # characters of a long result that an answer repeats at least
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
_BLOCK: Final = re.compile(r"```json\n(.*)\n```", re.DOTALL)


@dataclass(frozen=True)
class Completion:
    """One well-formed turn of the assistant; `answer` is None if it is a call."""

    analysis: str
    preamble: str
    answer: str | None
    call: Call | None


def parse_completion(text: str) -> Completion | None:
    """Return the parts of a completion, or None if it is not well-formed to the last token."""
    match = _COMPLETION.fullmatch(text)
    if match is None:
        return None
    analysis, preamble, answer, name, body = match.groups()
    call = None
    if name is not None:
        try:
            arguments = json.loads(body)
        except ValueError:
            return None
        if not isinstance(arguments, dict):
            return None
        call = Call(name, arguments)
    return Completion(analysis or "", preamble or "", answer, call)


def is_correct(completion: Completion | None, expected: Reply) -> bool:
    """Whether a completion's answer or call is exactly the expected one; its analysis does not matter."""
    if completion is None or completion.preamble != expected.preamble:
        return False
    if expected.call is not None:
        return completion.call == expected.call
    if expected.whole and completion.answer is not None:
        stem = completion.answer.removesuffix(" …")
        is_beginning = (
            completion.answer != stem and len(stem) >= MIN_REPEATED and expected.whole.startswith(stem)
        )
        return is_beginning or completion.answer == expected.whole
    if expected.unjudged:
        return _without(completion.answer, expected.unjudged) == _without(expected.answer, expected.unjudged)
    return completion.answer == expected.answer


def _without(answer: str | None, key: str) -> object:
    """Return whether a JSON answer is in a whole block, and its object without a key; else the answer itself."""
    block = _BLOCK.fullmatch(answer or "")
    try:
        value = json.loads(block[1] if block else answer or "")
    except ValueError:
        return answer
    if not isinstance(value, dict):
        return answer
    return block is not None, {name: each for name, each in value.items() if name != key}
