"""How many tokens an answer may have, and how many of them are kept from the reasoning.

The setting *Max tokens* says it, or the extra body, or else the server's own default. Where none of them does there is
a limit all the same, because a reply that nobody reads must end (`server_kinds`). Of every limit a part is kept for the
answer, so that a small one does not end in the middle of the reasoning: what *Tokens kept for the answer* says, but at
most half. Background requests keep more. Servers other than mlx-backend keep nothing: `server_kinds` leaves it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_mlx_provider.chat.extra_body import parse_extra_body
from dify_mlx_provider.servers.mlx_backend import DEFAULT_ANSWER_RESERVE
from mlx_backend.conversation.background_requests import answer_reserve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dify_mlx_provider.servers.base import ServedModel

# Any of them in the extra body is the user's own limit.
_LIMIT_FIELDS = ("max_completion_tokens", "max_tokens", "n_predict", "num_predict")


def limit_tokens(
    parameters: Mapping[str, Any],
    model: ServedModel | None,
    default: int | None,
    *,
    is_background: bool = False,
) -> dict[str, Any]:
    """Return the parameters with a limit, and with what is kept of it for the answer.

    `default` is sent where neither the user nor `model`, which is what the server says of it, has a limit. Raises
    ValueError for an extra body that cannot be used.
    """
    limited = dict(parameters)
    reserve = limited.pop("answer_reserve", None)
    own_default = model.default_max_tokens if model is not None else None
    limit = chosen_limit(limited)
    if limit is None and own_default is None and default is not None:
        limit = limited["max_tokens"] = default
    limit = own_default if limit is None else limit
    if limit is None or limit < 1:  # -1 in an extra body: no limit
        return limited
    share = (
        answer_reserve(limit) if is_background else min(_number(reserve, DEFAULT_ANSWER_RESERVE), limit // 2)
    )
    return {**limited, "answer_reserve": share}


def chosen_limit(parameters: Mapping[str, Any]) -> int | None:
    """Return the limit that the user has set; one below 1 means none. Raises ValueError for a bad extra body."""
    extra = parameters.get("extra_body")
    fields = parse_extra_body(extra) if extra not in (None, "") else {}
    named = next((fields[name] for name in _LIMIT_FIELDS if name in fields), parameters.get("max_tokens"))
    return None if named is None else _number(named, 0)


def _number(value: Any, default: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
