"""The API key: one for all clients, compared in constant time, never repeated to anybody."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from mlx_backend.api.errors import ApiError

if TYPE_CHECKING:
    from werkzeug import Request


def is_allowed(request: Request, key: str | None) -> bool:
    """Return whether the request carries the key as `Authorization: Bearer …` or `x-api-key`, or none is needed."""
    # WSGI decodes header bytes as Latin-1; the key was typed, so its bytes are UTF-8.
    return key is None or hmac.compare_digest(_given_key(request).encode("latin-1", "replace"), key.encode())


def check(request: Request, key: str | None) -> None:
    """Raise a 401 unless the request is allowed."""
    if is_allowed(request, key):
        return
    given = _given_key(request)
    raise ApiError(
        401,
        "The API key is wrong." if given else "An API key is needed: send it as 'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers=(("WWW-Authenticate", "Bearer"),),
    )


def _given_key(request: Request) -> str:
    # Not request.authorization: of a key with "=" inside it makes parameters, and the key is lost.
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    return given.strip()
