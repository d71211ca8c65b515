"""The HTTP client: one request to an OpenAI-compatible server, its answer as wire objects, its failures as sentences.

Knows neither Dify nor channels. An answer is always read as a stream of chunks; a server that answers with one
JSON object gives a stream of one. Closing the iterator closes the connection, which is how a server learns that
nobody listens any more.

    ServerError
    ├── Unreachable      nobody answers at the address
    ├── Unavailable      a server answers, but cannot serve now (5xx, silent, broken off in mid-answer)
    ├── Overloaded       it asks us to wait (429)
    ├── KeyRefused       it does not take our key (401, 403)
    └── Refused          it does not take the request (other 4xx), or does not speak OpenAI's protocol
        └── ModelNotFound
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import requests
from urllib3.exceptions import HTTPError, ReadTimeoutError

if TYPE_CHECKING:
    from .credentials import Credentials

CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection; how long a silent server is waited for is the user's setting."""

LONGEST_QUOTE = 500
"""Characters of a server's own words that are passed on."""

_A_MODEL = re.compile(r"\bmodel\b", re.IGNORECASE)


class ServerError(Exception):
    """Something went wrong between us and the server; the text is for people."""


class Unreachable(ServerError):
    """Nobody answers at the address."""


class Unavailable(ServerError):
    """A server answers, but cannot serve now."""


class Overloaded(ServerError):
    """The server asks us to wait."""


class KeyRefused(ServerError):
    """The server does not take our key."""


class Refused(ServerError):
    """The server does not take the request."""


class ModelNotFound(Refused):
    """The server does not serve the model."""


class Client:
    """Talks to one server."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def models(self) -> list[str]:
        """Return the ids of the models the server serves."""
        response = self._send("GET", "/models")
        with response:
            try:
                listed = response.json()["data"]
                return [str(model["id"]) for model in listed]
            except (ValueError, KeyError, TypeError) as error:
                raise self._not_openai() from error

    def chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Send a chat request; return its chunks. What is wrong before the first chunk is raised here, not later.

        The model `default` means whatever the server serves: a server that does not know the word is asked for
        its list and sent its first model.
        """
        try:
            response = self._send("POST", "/chat/completions", body)
        except ModelNotFound:
            served = self.models() if body.get("model") == "default" else []
            if not served:
                raise
            response = self._send("POST", "/chat/completions", {**body, "model": served[0]})
        return self._chunks(response)

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> requests.Response:
        url = self._credentials.base_url + path
        headers = {"Accept": "text/event-stream, application/json"}
        if self._credentials.api_key:
            headers["Authorization"] = f"Bearer {self._credentials.api_key}"
        try:
            response = requests.request(
                method,
                url,
                json=body,
                headers=headers,
                stream=True,
                timeout=(CONNECT_TIMEOUT, self._credentials.timeout),
                allow_redirects=False,
            )
        except requests.exceptions.ConnectTimeout as error:
            raise self._nobody_there() from error
        except requests.exceptions.Timeout as error:
            raise self._silent() from error
        except (requests.exceptions.ConnectionError, requests.exceptions.InvalidURL) as error:
            raise self._nobody_there() from error
        except requests.exceptions.RequestException as error:
            raise Unreachable(f"{url} cannot be used: {type(error).__name__}.") from error
        if response.status_code >= 300:
            with response:
                raise self._status_error(response)
        return response

    # -- reading -----------------------------------------------------------------------------------

    def _chunks(self, response: requests.Response) -> Generator[dict[str, Any], None, None]:
        with response:
            try:
                if "text/event-stream" in response.headers.get("Content-Type", ""):
                    yield from self._events(response)
                else:
                    yield _as_chunk(self._whole(response))
            except (ReadTimeoutError, requests.exceptions.Timeout) as error:
                raise self._silent() from error
            except (HTTPError, requests.exceptions.RequestException, OSError) as error:
                raise self._broken_off() from error

    def _events(self, response: requests.Response) -> Iterator[dict[str, Any]]:
        finished = False
        for line in lines(_arriving(response)):
            if not line.startswith("data:"):
                continue  # comments keep the connection alive; other fields say nothing to us
            data = line[5:].strip()
            if data == "[DONE]":
                return
            try:
                chunk = json.loads(data)
            except ValueError:
                if finished:
                    return
                raise self._broken_off() from None
            if not isinstance(chunk, dict):
                raise self._not_openai()
            if chunk.get("error"):
                raise _stated_error(chunk["error"])
            finished = finished or any(
                isinstance(choice, dict) and choice.get("finish_reason")
                for choice in chunk.get("choices") or ()
            )
            yield chunk
        if not finished:
            raise self._broken_off()

    def _whole(self, response: requests.Response) -> dict[str, Any]:
        try:
            answer = json.loads(response.content)
        except ValueError as error:
            raise self._not_openai() from error
        if isinstance(answer, dict) and answer.get("error"):
            raise _stated_error(answer["error"])
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise self._not_openai()
        return answer

    # -- sentences ---------------------------------------------------------------------------------

    def _nobody_there(self) -> Unreachable:
        return Unreachable(
            f"no server at {self._credentials.base_url}: start it with `mlx-backend`. From Dify in Docker the address "
            "is http://host.docker.internal:8080/v1, and the server must be started with --host 0.0.0.0."
        )

    def _silent(self) -> Unavailable:
        return Unavailable(
            f"the server at {self._credentials.base_url} said nothing for {self._credentials.timeout:g} seconds. "
            "If the model needs longer, raise the timeout in the credentials."
        )

    def _broken_off(self) -> Unavailable:
        return Unavailable(
            f"the answer of the server at {self._credentials.base_url} broke off. Its own log says why."
        )

    def _not_openai(self) -> Refused:
        return Refused(
            f"what answers at {self._credentials.base_url} is not an OpenAI-compatible server. Check the address; "
            "it usually ends in /v1."
        )

    def _status_error(self, response: requests.Response) -> ServerError:
        status = response.status_code
        words, code = _stated(response)
        if status in (401, 403):
            return KeyRefused(
                f"the server at {self._credentials.base_url} refused the API key{_quote(words)} "
                "Enter the key the server was started with."
            )
        if code == "model_not_found" or (status == 404 and _A_MODEL.search(words)):
            return ModelNotFound(words)
        if status == 429:
            return Overloaded(words or "the server is busy; try again in a moment.")
        if status >= 500:
            return Unavailable(words or f"the server answered with status {status}.")
        if status < 400 or (
            status in (404, 405) and words.lower() in ("", "not found", "method not allowed")
        ):
            return self._not_openai()
        if words:
            return Refused(words)
        return Refused(f"the server answered with status {status}.")


def _arriving(response: requests.Response) -> Iterator[bytes]:
    """Yield the body as it arrives, whatever its framing: requests would wait for the end of a body of known size."""
    while piece := response.raw.read1(65_536, decode_content=True):
        yield piece


def lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Cut a byte stream into lines; a last line without its end is given too."""
    held = b""
    for piece in pieces:
        *whole, held = (held + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r").decode("utf-8", "replace")
    if held:
        yield held.decode("utf-8", "replace")


def _as_chunk(answer: Mapping[str, Any]) -> dict[str, Any]:
    """A whole completion as the one chunk of a stream."""
    choices = [
        {**choice, "delta": choice.get("message") or {}}
        for choice in answer["choices"]
        if isinstance(choice, dict)
    ]
    return {**answer, "choices": choices}


def _stated(response: requests.Response) -> tuple[str, str]:
    """The server's own message and error code, in any of the shapes servers use."""
    try:
        body = json.loads(response.content[:65_536])
    except (ValueError, requests.exceptions.RequestException):
        return "", ""
    if not isinstance(body, dict):
        return "", ""
    error = body.get("error", body.get("detail", body.get("message")))
    if isinstance(error, Mapping):
        return str(error.get("message") or "")[:LONGEST_QUOTE], str(error.get("code") or "")
    return (str(error)[:LONGEST_QUOTE] if error else ""), ""


def _stated_error(error: Any) -> ServerError:
    """An error that came inside a stream, where no status says of which kind it is."""
    if not isinstance(error, Mapping):
        return Unavailable(str(error)[:LONGEST_QUOTE])
    words = str(error.get("message") or "the server reported an error.")[:LONGEST_QUOTE]
    kind = f"{error.get('type', '')} {error.get('code', '')}"
    if "invalid_request" in kind:
        return Refused(words)
    if "rate_limit" in kind or "429" in kind:
        return Overloaded(words)
    return Unavailable(words)


def _quote(words: str) -> str:
    return f": {words.rstrip('.')}." if words else "."
