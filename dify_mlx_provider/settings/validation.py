"""Are these credentials good? Asked when a user saves a form; the answer is a sentence they can act on.

What the client says of a failure is true of any call; here a user is at the form and waits, so a little more is
tried: the other scheme, the usual paths, and who it is that answers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import get_close_matches
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dify_plugin.errors.model import CredentialsValidateFailedError

from dify_mlx_provider.upstream import discovery, versions
from dify_mlx_provider.upstream.client import Client
from dify_mlx_provider.upstream.credentials import Credentials, CredentialsError
from dify_mlx_provider.upstream.errors import (
    Overloaded,
    Refused,
    ServerError,
    Unavailable,
    Unreachable,
    listed,
)
from dify_mlx_provider.upstream.probe import Asker
from dify_mlx_provider.upstream.server_kinds import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dify_mlx_provider.upstream.discovery import Server
    from dify_mlx_provider.upstream.probe import Answer

PATIENCE = 30.0
"""Seconds a server may take for its list of models; a page of Dify's waits for it."""

LONGEST_TRIAL = 120.0
"""Seconds a model may take for a word, loading included."""

_PATHS = ("/v1", "/api/v1", "/openai/v1", "")
_LOADING = re.compile(r"\bload(?:s|ed|ing)?\b", re.IGNORECASE)
_TITLE = re.compile(rb"<title[^>]*>\s*([^<]{1,80})", re.IGNORECASE)


def validate(form: Mapping[str, Any], model: str | None = None) -> None:
    """Ask the server for its models; with `model`, see that it is among them and that it chats.

    Raises CredentialsValidateFailedError: Dify shows its text as it is. A server that is still loading is fine.
    """
    discovery.ask_again()
    try:
        credentials = Credentials.read(form)
        served = _served(credentials)
    except (CredentialsError, ServerError) as error:
        raise _failure(str(error)) from error
    server = discovery.server(credentials)
    if server.kind is Kind.MLX_BACKEND and (complaint := versions.complaint(server.version)):
        raise _failure(complaint)
    if model is not None and model.strip() != "default":
        _look_up(model.strip(), served, server)


def validate_by_use(form: Mapping[str, Any], use: Callable[[Credentials], object]) -> None:
    """Do with the credentials what they are for; if that fails, say why as `validate` does.

    For models that answer at once: embedding a word is the only proof that a model makes vectors. Raises
    CredentialsValidateFailedError.
    """
    discovery.ask_again()
    try:
        credentials = Credentials.read(form)
        use(replace(credentials, timeout=min(credentials.timeout, LONGEST_TRIAL)))
    except CredentialsError as error:
        raise _failure(str(error)) from error
    except ServerError as error:
        if isinstance(error, Unreachable | Refused) and not discovery.server(credentials).answered:
            validate(form)  # it is the address
        raise _failure(str(error)) from error


def _served(credentials: Credentials) -> list[str]:
    """The names of the models; empty if the server cannot say now. Raises ServerError with what is wrong."""
    patient = replace(credentials, timeout=min(credentials.timeout, PATIENCE))
    try:
        return Client(patient).models()
    except Unreachable as error:
        raise Unreachable(_other_scheme(credentials) or f"{error}{_inside_docker(credentials)}") from error
    except (Unavailable, Overloaded) as error:
        if isinstance(error, Overloaded) or _LOADING.search(str(error)):
            return []
        raise
    except Refused as error:
        if discovery.server(credentials).kind is Kind.MLX_LM:
            return []  # without a folder of downloads mlx_lm.server has no list
        raise Refused(_who_answers(credentials) or str(error)) from error


def _look_up(model: str, served: list[str], server: Server) -> None:
    told = server.model(model)
    if told is not None and told.type not in (None, "llm"):
        kind = {"embedding": "Text Embedding", "rerank": "Rerank"}.get(told.type, told.type)
        raise _failure(f"{model!r} does not chat. Add it as a model of the type {kind}.")
    if told is not None or not served or any(model == name for name in served):
        return
    if server.kind is Kind.MLX_LM:
        return  # it lists a part of what it has, and fetches what it is asked for
    close = get_close_matches(model, served, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise _failure(
        f"The server does not serve {model!r}.{hint} It serves: {listed(served)}. Enter one of these names, "
        "or `default`."
    )


# -- what else could be meant ------------------------------------------------------------------------


def _other_scheme(credentials: Credentials) -> str | None:
    """A sentence, if the server speaks http where the address says https, or the reverse."""
    scheme, _, rest = credentials.base_url.partition("://")
    other = "http" if scheme == "https" else "https"
    # Without the key: what was to be encrypted is not sent in the clear.
    asker = Asker(replace(credentials, api_key=""))
    if asker.send("GET", f"{other}://{rest}/models") is None and not asker.untrusted:
        return None
    trust = " and see that Dify trusts its certificate, which it does not yet" if asker.untrusted else ""
    return f"The server at {rest} speaks {other}, not {scheme}. Enter {other}://{rest}{trust}"


def _who_answers(credentials: Credentials) -> str | None:
    """A sentence on a server that answers, but not as one of ours: where the right one is, or who this is."""
    parts = urlsplit(credentials.base_url)
    asker = Asker(credentials)
    for path in dict.fromkeys((f"{parts.path}/v1", *_PATHS)):
        address = f"{parts.scheme}://{parts.netloc}{path}"
        if address == credentials.base_url:
            continue
        answer = asker.send("GET", f"{address}/models")
        if answer is not None and answer.status < 300 and discovery.entries(answer.data):
            return f"No models are listed at {credentials.base_url}, but at {address}. Enter {address}"
    if parts.scheme == "http" and (sentence := _other_scheme(credentials)):
        return sentence
    name = _name(asker.send("GET", f"{parts.scheme}://{parts.netloc}/"))
    if not name:
        return None
    return (
        f"What answers at {credentials.base_url} is not an OpenAI-compatible server but {name}. Check the port and the "
        "path; mlx-backend listens on 8080 unless it was told otherwise, and its address ends in /v1."
    )


def _name(answer: Answer | None) -> str:
    """What a server that is none of ours calls itself, on its page or in its header."""
    if answer is None:
        return ""
    if (title := _TITLE.search(answer.text[:65_536])) is not None:
        return f"a web page, {unescape(title[1].decode('utf-8', 'replace')).strip()!r}"
    product = re.sub(r"[^\w./ ()-]", "", answer.header)[:60].strip()
    return f"another service ({product})" if product else ""


def _inside_docker(credentials: Credentials) -> str:
    host = urlsplit(credentials.base_url).hostname or ""
    if host != "localhost" and host != "::1" and not host.startswith("127."):
        return ""
    return f" Inside a container, {host} is the container itself."


def _failure(words: str) -> CredentialsValidateFailedError:
    return CredentialsValidateFailedError(words[:1].upper() + words[1:])
