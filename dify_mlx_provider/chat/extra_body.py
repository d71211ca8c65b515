"""The setting Extra body: a user's own request fields, as JSON. Knows no SDK."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from dify_mlx_provider.servers.requests import PROTECTED_FIELDS


def parse_extra_body(value: Any) -> dict[str, Any]:
    """Parse the setting Extra body. Raises ValueError with a sentence for the user."""
    fields = value
    if isinstance(value, str):
        try:
            fields = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the setting Extra body is not valid JSON ({error}). Write an object such as "
                '{"logit_bias": {"42": -100}}, or leave it empty.'
            ) from error
    if not isinstance(fields, Mapping):
        raise ValueError(
            f'the setting Extra body must be a JSON object such as {{"top_k": 20}}, not {str(value)[:60]!r}.'
        )
    for name in PROTECTED_FIELDS:
        if name in fields:
            raise ValueError(f"the setting Extra body may not hold {name!r}: Dify sets it. Remove it.")
    return dict(fields)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
