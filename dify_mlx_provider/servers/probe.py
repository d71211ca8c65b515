"""Small requests that find out about a server: answered soon, or given up. Never raises.

A chat may wait for minutes (`upstream.client`); these may not, because a page of Dify's is waiting for them.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import requests
from pydantic import BaseModel, ValidationError
from urllib3.exceptions import ReadTimeoutError

from dify_mlx_provider.upstream import client

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dify_mlx_provider.upstream.credentials import Credentials

# Seconds for the connection, between two packets, and for the whole answer.
CONNECT_TIMEOUT, READ_TIMEOUT, TOTAL_TIMEOUT = 2.0, 5.0, 10.0

MAX_RESPONSE_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """An answer: the header `Server`, the status, the body, and the body's JSON (None if it is none)."""

    server_header: str
    status: int
    body: bytes
    json: Any

    def parse_as[M: BaseModel](self, model: type[M]) -> M | None:
        """Return the JSON as one of our models; None if it is something else."""
        try:
            return model.model_validate(self.json)
        except ValidationError:
            return None


NO_RESPONSE = ProbeResponse("", 0, b"", None)


class Probe:
    """Asks one server; an answer that does not come is None.

    Once the server was silent for too long, or sent without end, it is asked nothing more.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._base = credentials.base_url
        self._root = re.sub(r"/v1$", "", credentials.base_url)
        self._key = credentials.api_key
        self._gave_up = False
        self.has_untrusted_certificate = False
        """Whether a server showed a certificate that is not trusted."""

    def get_models(self) -> ProbeResponse | None:
        """GET the list of models."""
        return self.send("GET", f"{self._base}/models")

    def get(self, path: str) -> ProbeResponse | None:
        """GET a path next to /v1."""
        return self.send("GET", self._root + path)

    def post(self, path: str, body: Mapping[str, Any]) -> ProbeResponse | None:
        """POST JSON to a path next to /v1."""
        return self.send("POST", self._root + path, body)

    def send(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> ProbeResponse | None:
        """Send any request; `url` is the whole address."""
        if self._gave_up:
            return None
        timeout = (CONNECT_TIMEOUT, READ_TIMEOUT)
        try:
            with client.send(method, url, key=self._key, timeout=timeout, json=body) as response:
                content = _bounded_body(response)
                header = response.headers.get("Server", "")
                return ProbeResponse(header, response.status_code, content, _json_or_none(content))
        except (requests.exceptions.Timeout, ReadTimeoutError, _EndlessResponse):
            self._gave_up = True
        except requests.exceptions.SSLError as error:
            self.has_untrusted_certificate = "CERTIFICATE_VERIFY_FAILED" in str(error)
        except Exception as error:  # whatever a server or a network does, Dify must be given a schema
            self._gave_up = client.is_endless(error)
        return None


class _EndlessResponse(Exception):
    """The answer takes too long or is too large."""


def _bounded_body(response: requests.Response) -> bytes:
    content = b""
    deadline = time.monotonic() + TOTAL_TIMEOUT
    for piece in client.iter_body(response):
        content += piece
        if len(content) > MAX_RESPONSE_BYTES or time.monotonic() > deadline:
            raise _EndlessResponse
    return content


def _json_or_none(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None
