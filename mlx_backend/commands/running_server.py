"""A server of ours that is running: where it is, and how a command speaks to it.

Its address is that of --url, or what the variables of `serve` say ($MLX_BACKEND_HOST, $MLX_BACKEND_PORT), else the
default one; its key that of --key or $MLX_BACKEND_API_KEY. Knows JSON over HTTP, /health and names of models; what
else is asked of a server is the commands' own.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from mlx_backend.clients import KEY_VARIABLE, LOOPBACK
from mlx_backend.commands.errors import NO_SERVER, CommandError, did_you_mean
from mlx_backend.declaration import VARIABLE_PREFIX, variable_of
from mlx_backend.demo import DEMOS
from mlx_backend.errors import first_line
from mlx_backend.models.names import matching, split_effort

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    import httpx2

DEFAULT_PORT = 8080
URL_VARIABLE = f"{VARIABLE_PREFIX}URL"
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 600.0
"""Seconds for what may have to load a model; a stream sends something every few seconds."""
HEALTH_SECONDS = 30.0
"""Seconds for what a server of ours answers at once, and another program perhaps never."""
MAX_ANSWER_BYTES = 64 << 20
"""Bytes of an answer that is no stream."""
MAX_NAMES = 20
"""Names in an error message."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add --url and --key."""
    group = parser.add_argument_group("running server")
    group.add_argument(
        "--url", metavar="URL", help=f"address of the server (${URL_VARIABLE}; default: {default_url({})})"
    )
    group.add_argument("--key", metavar="KEY", help=f"API key that it asks for (${KEY_VARIABLE})")


def default_url(environment: Any = os.environ) -> str:
    """Return where a server is looked for."""
    if url := environment.get(URL_VARIABLE, "").strip():
        return str(url)
    host = environment.get(variable_of("--host"), "").strip()
    port = environment.get(variable_of("--port"), "").strip() or DEFAULT_PORT
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def names_meant(name: str, names: Sequence[str]) -> list[str]:
    """Return which of a server's names one may mean. A demonstration model's is never short for another's."""
    return [each for each in names if each == name] if name in DEMOS else matching(name, names)


class RunningServer:
    """One server. Its errors are CommandErrors, with the server's own words where it has some."""

    def __init__(self, url: str, key: str | None = None) -> None:
        import httpx2

        if key and not key.isascii():
            raise CommandError("An API key is sent in a header, and consists of ASCII characters.")
        self._has_key = bool(key)
        url = url.strip().rstrip("/").removesuffix("/v1")
        try:
            # What is before an @ is a password: it would be shown with the address, and sent in place of the key.
            address = httpx2.URL(url if "://" in url else f"http://{url}").copy_with(userinfo=b"")
            self.url = str(address).rstrip("/")
            is_here = address.host in LOOPBACK
            self._client = httpx2.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx2.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
                trust_env=not is_here,  # a proxy does not lead to this machine
            )
        except (httpx2.InvalidURL, ValueError) as error:
            raise CommandError(f"{url!r} is no address of a server: {first_line(error)}.") from None

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """Return the server that the options name, or the default one, whether it runs or not."""
        return cls(arguments.url or default_url(), arguments.key or os.environ.get(KEY_VARIABLE) or None)

    def is_running(self) -> bool:
        """Whether a server of ours answers there."""
        try:
            return bool(self.health())
        except CommandError as error:
            if error.status != NO_SERVER:
                raise
            return False

    def health(self) -> dict[str, Any]:
        """Return what /health says, also while it cannot serve. Raises CommandError if it is no server of ours."""
        _, said = self._answer("GET", "/health", seconds=HEALTH_SECONDS)
        if said.get("server") != "mlx-backend":
            raise CommandError(
                f"What answers at {self.url} is another program. Say where the server is with --url.",
                status=NO_SERVER,
            )
        return said

    def models(self) -> list[dict[str, Any]]:
        """Return what /v1/models says of each model, the default one first."""
        return list(self.get("/v1/models")["data"])

    def model_name(self, name: str) -> str:
        """Return the server's own name of a model, with the effort that it ends with. Raises CommandError."""
        found, effort = self.model_and_effort(name)
        return f"{found}:{effort}" if effort else found

    def model_and_effort(self, name: str) -> tuple[str, str | None]:
        """Return the server's own name of a model, and the effort that the given one ends with. Raises CommandError."""
        names = [str(model["id"]) for model in self.models()]
        found, effort = names_meant(name, names), None
        if not found:
            base, effort = split_effort(name)
            found = names_meant(base, names)
        if len(found) > 1:
            raise CommandError(f"{name!r} could be {' or '.join(found)}: name one of them.")
        if not found:
            hint = did_you_mean(name, names) or f": there is {', '.join(names[:MAX_NAMES]) or 'none'}."
            raise CommandError(f"The server at {self.url} has no model {name!r}{hint}")
        return found[0], effort

    def post_to_model(self, name: str, what: str) -> dict[str, Any]:
        """Have a model loaded or unloaded."""
        return self.post(f"/v1/models/{quote(name)}/{what}")

    def get(self, path: str) -> dict[str, Any]:
        """Return the object at a path."""
        return self._call("GET", path)

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        """Send an object, and return the one that answers it."""
        return self._call("POST", path, body)

    @contextmanager
    def stream(self, path: str, body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Send an object, and yield the events that answer it. Leaving the block ends the reply."""
        with self._explained(), self._client.stream("POST", path, **_sent(body)) as response:
            if response.is_error:
                self._refuse(response.status_code, self._object(response))
            yield self._events(response)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        status, said = self._answer(method, path, body)
        if status >= 400:
            self._refuse(status, said)
        return said

    def _answer(
        self, method: str, path: str, body: Any = None, *, seconds: float = ANSWER_SECONDS
    ) -> tuple[int, dict[str, Any]]:
        import httpx2

        timeout = httpx2.Timeout(seconds, connect=CONNECT_SECONDS)
        with (
            self._explained(),
            self._client.stream(method, path, **_sent(body), timeout=timeout) as response,
        ):
            return response.status_code, self._object(response)

    def _object(self, response: httpx2.Response) -> dict[str, Any]:
        """Return the object that an answer is; empty if it is none."""
        content = bytearray()
        for part in response.iter_bytes():
            content += part
            if len(content) > MAX_ANSWER_BYTES:
                raise CommandError(f"The answer of {self.url} is larger than {MAX_ANSWER_BYTES >> 20} MiB.")
        try:
            value = json.loads(content)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _events(self, response: httpx2.Response) -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if isinstance(event.get("error"), dict):
                raise CommandError(_message(event) or "The reply has failed.")
            yield event
        raise CommandError(f"The reply of {self.url} broke off.")

    def _refuse(self, status: int, said: dict[str, Any]) -> None:
        message = _message(said)
        if status == 401 and not self._has_key:
            message = f"The server at {self.url} wants an API key: give it with --key, or in ${KEY_VARIABLE}."
        error = said.get("error")
        raise CommandError(
            message or f"The server at {self.url} answered with HTTP status {status}.",
            param=str(error.get("param") or "") if isinstance(error, dict) else "",
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol) as error:
            raise CommandError(
                f"No server answers at {self.url} ({first_line(error)}). Start one with `mlx-backend serve MODEL`, or "
                f"say where it is with --url or ${URL_VARIABLE}.",
                status=NO_SERVER,
            ) from None
        except httpx2.ReadTimeout:
            raise CommandError(f"What is at {self.url} takes connections, but does not answer.") from None
        except httpx2.TransportError as error:
            raise CommandError(f"The connection to {self.url} broke: {first_line(error)}.") from None


def name_on_server(
    server: RunningServer, arguments: argparse.Namespace, source: Callable[[str], str]
) -> str | None:
    """Return a server's name of the chat model that is asked for, its first one if none is.

    None if it does not run, has not got it, or may not be asked; CommandError for that where the server is one that
    was named. `source` says what a name means on this machine.
    """
    model: str | None = arguments.model
    is_named = bool(arguments.url or os.environ.get(URL_VARIABLE))
    if is_named:
        server.health()
    elif not server.is_running():
        return None
    try:
        names = [str(each["id"]) for each in server.models() if each.get("type") == "llm"]
        if is_named and not names:
            raise CommandError(f"The server at {server.url} has no chat model.")
        if model is None:
            return names[0] if names else None
        found = names_meant(model, names)
        if len(found) != 1:
            with suppress(CommandError):
                found = names_meant(source(model), names)
    except CommandError:
        if is_named or model is None:
            raise
        return None  # that of somebody else, perhaps
    if len(found) != 1:
        return server.model_name(model) if is_named else None
    return found[0]


def _sent(body: Any) -> dict[str, Any]:
    """Return what has a body sent, as ASCII: a text may hold half of a surrogate pair."""
    if body is None:
        return {}
    return {"content": json.dumps(body).encode(), "headers": {"Content-Type": "application/json"}}


def _message(said: dict[str, Any]) -> str:
    error = said.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""
