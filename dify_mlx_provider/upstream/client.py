"""The HTTP client: one request to an OpenAI-compatible server, its answer as wire objects, its failures as sentences.

Knows neither Dify nor channels, and no kinds of servers; failures are `server_errors`. The answer to a chat is always
read as a stream of chunks; a server that answers with one JSON object gives a stream of one. Closing the iterator
closes the connection, which is how a server learns that nobody listens any more.

A server that says when to come again (`Retry-After`: it is loading the model, or its queue is full) is asked again,
for as long as a silent one would be waited for.
"""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http.client import HTTPException, RemoteDisconnected
from itertools import chain
from typing import TYPE_CHECKING, Any

import requests
from urllib3.exceptions import HTTPError, NameResolutionError, ReadTimeoutError

from dify_mlx_provider.upstream import sse
from dify_mlx_provider.upstream.errors import (
    NoSuchAddress,
    Refused,
    ServerError,
    Unavailable,
    Unreachable,
    from_status,
    stated,
    unknown_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping

    from dify_mlx_provider.upstream.credentials import Credentials

LONGEST_WAIT = 300.0
"""Seconds a server that asks us to come again is asked; Dify gives a call up after 600."""

SHORTEST_PAUSE = 0.5

LONGEST_ERROR = 65_536
"""Bytes of an error's body that are looked at."""


class Bearer(requests.auth.AuthBase):
    """Our key and no other: without an `auth` of its own, requests would take one from the user's .netrc."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Sign a request."""
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request


class Client:
    """Talks to one server. `pause` waits some seconds."""

    def __init__(self, credentials: Credentials, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._credentials = credentials
        self._pause = pause

    def models(self) -> list[str]:
        """Return the ids of the models the server serves."""
        try:
            return [str(model["id"]) for model in self._read(self._send("GET", "/models"))["data"]]
        except (KeyError, TypeError) as error:
            raise self._not_openai() from error

    def compute(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request whose answer is one JSON value that a model has to make; return the value."""
        return self._read(self._patiently(path, body))

    def chat(self, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Send a chat request; return its chunks. What is wrong before the first chunk is raised here, not later."""
        return self._chunks(self._patiently("/chat/completions", body))

    def _patiently(self, path: str, body: Mapping[str, Any]) -> requests.Response:
        """Send a request; while the server asks us to come again, do so. The response's body is not read yet."""
        patience = min(self._credentials.timeout, LONGEST_WAIT)
        while True:
            try:
                return self._send("POST", path, body)
            except ServerError as error:
                wait = max(error.retry_after or 0.0, SHORTEST_PAUSE)
                if error.retry_after is None or wait > patience:
                    raise
            patience -= wait
            self._pause(wait)

    def _read(self, response: requests.Response) -> Any:
        with response:
            try:
                return sse.whole(arriving(response))
            except sse.Malformed as error:
                raise self._not_openai() from error
            except (ReadTimeoutError, requests.exceptions.Timeout) as error:
                raise self._silent() from error
            except (HTTPError, requests.exceptions.RequestException, OSError) as error:
                raise self._broken_off() from error

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> requests.Response:
        url = self._credentials.base_url + path
        try:
            response = requests.request(
                method,
                url,
                json=body,
                headers={"Accept": "text/event-stream, application/json"},
                auth=Bearer(self._credentials.api_key),
                stream=True,
                timeout=(self._credentials.connect_timeout, self._credentials.timeout),
                allow_redirects=False,
            )
        except requests.exceptions.ConnectTimeout as error:
            raise self._nobody_there() from error
        except requests.exceptions.Timeout as error:
            raise self._silent() from error
        except requests.exceptions.SSLError as error:
            raise self._no_tls() from error
        except (requests.exceptions.ConnectionError, requests.exceptions.InvalidURL) as error:
            raise self._not_connected(error) from error
        except (requests.exceptions.RequestException, HTTPError, ValueError) as error:
            raise Unreachable(f"{url} cannot be used: {type(error).__name__}.") from error
        if response.status_code >= 300:
            with response:
                raise self._status_error(response)
        return response

    # -- reading -----------------------------------------------------------------------------------

    def _chunks(self, response: requests.Response) -> Generator[dict[str, Any], None, None]:
        with response:
            pieces = arriving(response)
            try:
                beginning = b""
                if "text/event-stream" not in response.headers.get("Content-Type", ""):
                    beginning = next((piece for piece in pieces if piece.strip()), b"")
                    if not sse.is_event_stream(beginning):
                        yield self._as_chunk(sse.whole(chain([beginning], pieces)))
                        return
                yield from self._events(chain([beginning], pieces))
            except (ReadTimeoutError, requests.exceptions.Timeout) as error:
                raise self._silent() from error
            except sse.Malformed as error:
                if "text/event-stream" not in response.headers.get("Content-Type", ""):
                    raise self._not_openai() from error
                raise self._broken_off() from error
            except (HTTPError, requests.exceptions.RequestException, OSError) as error:
                raise self._broken_off() from error

    def _events(self, pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
        finished = False
        try:
            for chunk in sse.objects(pieces):
                if chunk is sse.DONE:
                    return
                if not isinstance(chunk, dict):
                    raise self._not_openai()
                if error := _error_in(chunk):
                    raise stated(error)
                choices = chunk.get("choices")
                finished = finished or any(
                    isinstance(choice, dict) and choice.get("finish_reason")
                    for choice in (choices if isinstance(choices, list) else ())
                )
                yield chunk
                # Dify's SDK runs all calls in one thread, by gevent. One whose server is faster than the plugin would
                # never wait by itself, and the others would not get on.
                time.sleep(0)
        except (sse.Malformed, HTTPError, requests.exceptions.RequestException, OSError):
            if finished:
                return  # nothing was missing but a farewell
            raise
        if not finished:
            raise self._broken_off()

    def _as_chunk(self, answer: Any) -> dict[str, Any]:
        """A whole completion as the one chunk of a stream."""
        if isinstance(answer, dict) and (error := _error_in(answer)):
            raise stated(error)
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise self._not_openai()
        choices = [
            {**choice, "delta": choice.get("message") or {}}
            for choice in answer["choices"]
            if isinstance(choice, dict)
        ]
        return {**answer, "choices": choices}

    def _not_connected(self, error: Exception) -> ServerError:
        """What it means that there was no answer: nobody is there, or whoever is there does not answer."""
        for cause in _causes(error):
            match cause:
                case NameResolutionError():
                    return unknown_name(self._credentials.base_url)
                case RemoteDisconnected() | ConnectionResetError() | BrokenPipeError():
                    return Unreachable(
                        f"no answer at {self._credentials.base_url}: the connection was closed instead. See whether "
                        "`mlx-backend` runs there, and what its log says."
                    )
                case HTTPException():
                    return self._not_openai()
        return self._nobody_there()

    # -- sentences ---------------------------------------------------------------------------------

    def _nobody_there(self) -> Unreachable:
        return Unreachable(
            f"no server at {self._credentials.base_url}: start it with `mlx-backend`. From Dify in Docker the address "
            "is http://host.docker.internal:8080/v1, and the server must be started with --host 0.0.0.0."
        )

    def _no_tls(self) -> Unreachable:
        return Unreachable(
            f"no secure connection to {self._credentials.base_url}: the server does not speak https there, or its "
            "certificate is not trusted. An mlx-backend without a certificate is reached with http://."
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
        beginning = b""
        with suppress(HTTPError, requests.exceptions.RequestException, OSError):
            for piece in arriving(response):
                beginning += piece
                if len(beginning) > LONGEST_ERROR:
                    break
        error = from_status(
            response.status_code,
            sse.parsed(beginning.decode("utf-8", "replace")),
            address=self._credentials.base_url,
            location=response.headers.get("Location"),
        )
        error = error or NoSuchAddress(str(self._not_openai()))
        return error.again_in(_seconds(response.headers.get("Retry-After")))


def arriving(response: requests.Response) -> Iterator[bytes]:
    """Yield the body as it arrives, whatever its framing: requests would wait for the end of a body of known size."""
    while piece := response.raw.read1(65_536, decode_content=True):
        yield piece


def _error_in(chunk: Mapping[str, Any]) -> Any:
    """The error a chunk tells of: in its field, or as the chunk itself, where an event is called one."""
    if chunk.get("error"):
        return chunk["error"]
    if "choices" not in chunk and isinstance(chunk.get("message"), str):
        return chunk
    return None


def _causes(error: BaseException) -> Iterator[object]:
    """Yield an error and what is wrapped in it."""
    yield error
    for inner in (*error.args, getattr(error, "reason", None)):
        if isinstance(inner, BaseException):
            yield from _causes(inner)


def _seconds(retry_after: str | None) -> float | None:
    """Read a Retry-After header: seconds, or a date."""
    if not retry_after:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if seconds == seconds else None
