"""The fields of a request that are settings: their types, with the limits that hold for the setting everywhere.

Knows how OpenAI's clients write a setting (7.0 for 7, -1 for no limit, other names for the same); the settings
themselves are declared in `mlx_backend.settings`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, create_model

from mlx_backend.api.openai import fields
from mlx_backend.chat.request import UNLIMITED
from mlx_backend.declaration import declared
from mlx_backend.settings import ReasoningFormat, ReplySettings

if TYPE_CHECKING:
    from collections.abc import Callable

type Limit = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(fields.limit)]

_SETTINGS = declared(ReplySettings)

# Where a request accepts more than a file: -1 is no limit, and a seed is any 64-bit number.
_TYPES: dict[str, Any] = {
    "max_tokens": Limit,
    "top_k": Annotated[int, Field(ge=-1), BeforeValidator(fields.whole)],
    "seed": Annotated[int, Field(ge=-(2**63), lt=2**64), BeforeValidator(fields.whole)],
    "thinking_budget": Annotated[int, Field(ge=UNLIMITED), BeforeValidator(fields.whole)],
    "reasoning_format": Annotated[
        Any, BeforeValidator(fields.reasoning_format, json_schema_input_type=ReasoningFormat)
    ],
}


ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking_budget",
    "thinking_budget_tokens": "thinking_budget",
}
"""Other names of settings in requests, as other servers and clients have them."""


def accepts[B: BaseModel](*names: str) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds settings to a body, by their names or their aliases."""

    def add(body: type[B]) -> type[B]:
        added: dict[str, Any] = {name: (_field(ALIASES.get(name, name)), None) for name in names}
        return create_model(
            body.__name__, __base__=body, __doc__=body.__doc__, __module__=body.__module__, **added
        )

    return add


def _field(name: str) -> Any:
    return Annotated[_type(name) | None, Field(description=_SETTINGS[name].help)]


def _type(name: str) -> Any:
    setting = _SETTINGS[name]
    if name in _TYPES:
        return _TYPES[name]
    return (
        Annotated[int, Field(**setting.kind.limits), BeforeValidator(fields.whole)]
        if setting.kind.type is int
        else setting.kind.annotation()
    )
