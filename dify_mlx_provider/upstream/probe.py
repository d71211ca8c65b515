"""Small questions to a server, asked on the way to something else: soon answered, or not at all. Never raises.

Where a chat may wait for minutes (`client`), these may not: Dify's pages wait for them.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import requests
from urllib3.exceptions import ReadTimeoutError

from dify_mlx_provider.upstream.client import Bearer, arriving

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dify_mlx_provider.upstream.credentials import Credentials

CONNECTING, READING, WHOLE = 2.0, 5.0, 10.0
"""Seconds for a connection, for a sign of life, and for a whole answer."""

LONGEST_ANSWER = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer: what the server calls itself, the status, the body, and the body's JSON or None."""

    header: str
    status: int
    text: bytes
    data: Any


class Asker:
    """Sends the small questions; an answer that does not come is None.

    To a server that is silent, or goes on for ever, no further question is sent.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._base = credentials.base_url
        self._root = re.sub(r"/v1$", "", credentials.base_url)
        self._key = Bearer(credentials.api_key)
        self._given_up = False
        self.untrusted = False
        """Whether a server showed a certificate that is not trusted."""

    def models(self) -> Answer | None:
        """Ask for the list of models."""
        return self.send("GET", f"{self._base}/models")

    def get(self, path: str) -> Answer | None:
        """Ask for something that stands beside /v1."""
        return self.send("GET", self._root + path)

    def post(self, path: str, body: Mapping[str, Any]) -> Answer | None:
        """Ask for something beside /v1 that wants to be told more."""
        return self.send("POST", self._root + path, body)

    def send(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Answer | None:
        """Ask for anything; `url` is whole."""
        if self._given_up:
            return None
        try:
            with requests.request(
                method,
                url,
                json=body,
                headers={"Accept": "application/json"},
                auth=self._key,
                timeout=(CONNECTING, READING),
                allow_redirects=False,
                stream=True,
            ) as response:
                text = _body(response)
                return Answer(response.headers.get("Server", ""), response.status_code, text, _json(text))
        except (requests.exceptions.Timeout, ReadTimeoutError, _TooMuch):
            self._given_up = True
            return None
        except requests.exceptions.SSLError as error:
            self.untrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
            return None
        except Exception:  # whatever a server or a network does, a schema must be given
            return None


class _TooMuch(Exception):
    """An answer that does not end."""


def _body(response: requests.Response) -> bytes:
    text = b""
    until = time.monotonic() + WHOLE
    for piece in arriving(response):
        text += piece
        if len(text) > LONGEST_ANSWER or time.monotonic() > until:
            raise _TooMuch
    return text


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
