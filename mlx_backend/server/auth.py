"""Who sends a request: the API key it carries, which is never repeated to anybody, and the address it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_backend.api.errors import ApiError
from mlx_backend.engine.base import QueueClient
from mlx_backend.server.client_address import network_of

if TYPE_CHECKING:
    from werkzeug import Request

    from mlx_backend.server.api_key_file import ApiKey
    from mlx_backend.server.api_keys import ApiKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The sender of a request. Without `is_allowed` a key is needed, and the right one was not sent."""

    address: str = ""
    key: ApiKey | None = None
    is_allowed: bool = True

    @property
    def key_name(self) -> str:
        """The key's name; empty without one."""
        return self.key.name if self.key is not None else ""

    @property
    def share(self) -> str:
        """What requests have in common that share one client's part of the server: a key of its own, or an address."""
        if self.key is None or self.key.is_shared:
            return f"address {network_of(self.address)}"
        return f"key {self.key.name}"

    @property
    def in_queue(self) -> QueueClient:
        """The client as engines know it."""
        has_own_key = self.key is not None and not self.key.is_shared
        return QueueClient(self.share, self.key.priority if self.key is not None and has_own_key else None)


def identify(request: Request, keys: ApiKeys, address: str) -> Client:
    """Return who sends a request, by its key: `Authorization: Bearer …` or `x-api-key`."""
    if not keys.are_required:
        return Client(address=address)
    # WSGI decodes header bytes as Latin-1; the key was typed, so its bytes are UTF-8.
    key = keys.find(_given_key(request).encode("latin-1", "replace"))
    return Client(address=address, key=key, is_allowed=key is not None)


def check(request: Request, client: Client) -> None:
    """Raise a 401 unless the client is allowed."""
    if client.is_allowed:
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
