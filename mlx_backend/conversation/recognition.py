"""Which dialect a model speaks, by all that its files say of it: template, control tokens, response template.

A known family's row (`dialects.detect`) says more than a response template can: what models of the family do wrong,
what stays in a history, which words are its scale. So the family stays, as long as it reads a turn that is written as
the response template says. Where it does not, the response template wins: markers are shared and inherited, and its
author knew what the model writes. One that cannot be used changes nothing.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects import detect
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.dialects.response_template import (
    ResponseTemplateError,
    response_template_dialect,
)
from mlx_backend.conversation.parser import parse_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlx_backend.conversation.dialects import Dialect

_TOOL = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}
_ARGUMENTS = {"city": "Paris, {right} now", "days": 3}


def recognise(
    chat_template: str | None,
    control_tokens: Iterable[str],
    response_template: Any = None,
    *,
    on_refused: Callable[[str], None] | None = None,
) -> Dialect:
    """Return the dialect of a model. `on_refused` gets the reason if its response template cannot be used."""
    family = detect(chat_template, control_tokens)
    if response_template is None or HARMONY.recognises(chat_template or "", frozenset()):
        return family  # Harmony has more than any response template can say
    try:
        described = response_template_dialect(response_template)
    except ResponseTemplateError as error:
        if on_refused is not None:
            on_refused(str(error))
        return family
    return family if reads_as(family, described) else described


@lru_cache(maxsize=256)
def reads_as(family: Dialect, described: Dialect) -> bool:
    """Whether two dialects are the same: each understands what the other writes just as that one does."""
    samples = [*_samples(described), *_samples(family)]
    return all(_meaning(family, sample) == _meaning(described, sample) for sample in samples)


def _samples(dialect: Dialect) -> list[str]:
    """Write turns with what the dialect has: reasoning and an answer, a call, both."""
    begun = dialect.continuation("A thought.", "An answer.", opened=None)
    answer = "".join(piece.text for piece in begun.pieces)
    if dialect.calls is None:
        return [answer]
    call = "".join(piece.text for piece in dialect.calls.encode("get_weather", _ARGUMENTS))
    return [answer, call, f"{answer}\n{call}"]


def _meaning(dialect: Dialect, text: str) -> Any:
    message = parse_text(text, dialect, tools=[_TOOL])
    calls = [(call.name, _value(call.arguments)) for call in message.tool_calls]
    return message.reasoning.strip(), message.content.strip(), calls


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
