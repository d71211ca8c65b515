"""Checks credentials when a user saves a form: they work, or there is a sentence that says what to change.

The client's error messages are true of any call. Here a user sits at the form and waits, so a little more is tried:
the other scheme, the usual paths, and a look at what kind of service answers.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from html import unescape
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dify_plugin.errors.model import CredentialsValidateFailedError

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.base import ListedModel, parse_entries
from dify_mlx_provider.servers.mlx_backend import incompatibility
from dify_mlx_provider.servers.probe import Probe
from dify_mlx_provider.upstream.client import OpenAIClient
from dify_mlx_provider.upstream.credentials import Credentials, CredentialsError
from dify_mlx_provider.upstream.errors import (
    Overloaded,
    Refused,
    ServerError,
    Unavailable,
    Unreachable,
    join_names,
    shortened_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dify_mlx_provider.servers.base import ServerInfo
    from dify_mlx_provider.servers.probe import ProbeResponse

LIST_TIMEOUT = 30.0
"""Seconds a server may take for its list of models; a page of Dify's waits for it."""

TRIAL_TIMEOUT = 120.0
"""Seconds a model may take for one word, loading included."""

_USUAL_PATHS = ("/v1", "/api/v1", "/openai/v1", "")
_LOADING = re.compile(r"\bload(?:s|ed|ing)?\b", re.IGNORECASE)
_TITLE = re.compile(rb"<title[^>]*>\s*([^<]{1,80})", re.IGNORECASE)


def validate(form: Mapping[str, Any], model: str | None = None) -> None:
    """Check that the server lists its models; with `model`, that this one is among them and chats.

    Raises CredentialsValidateFailedError; Dify shows its text as it is. A server that is still loading passes. The
    model `?` never does: it is how people ask for the list of names.
    """
    discovery.forget_servers()
    try:
        credentials = Credentials.from_form(form)
        served = _served_models(credentials)
    except (CredentialsError, ServerError) as error:
        raise _failed(str(error)) from error
    server = discovery.find_server(credentials)
    if sentence := incompatibility(server.version):
        raise _failed(sentence)
    if model is None or model.strip() == "default":
        return
    if _is_question(model):
        raise _listed(credentials, server.names() if server.models else served, "llm")
    _check_model(model.strip(), served, server, credentials)


def validate_by_trial(
    form: Mapping[str, Any], model: str, kind: str, trial: Callable[[Credentials], object]
) -> None:
    """Use a model once for what it is meant for; if that fails, explain it as `validate` does.

    For models that answer at once: only a vector proves that a model embeds. `kind` is "embedding" or "rerank".
    Raises CredentialsValidateFailedError.
    """
    discovery.forget_servers()
    try:
        credentials = Credentials.from_form(form)
        if _is_question(model):
            served = _served_models(credentials)
            server = discovery.find_server(credentials)
            raise _listed(credentials, server.names(kind) if server.models else served, kind)
        trial(credentials.model_copy(update={"timeout": min(credentials.timeout, TRIAL_TIMEOUT)}))
    except CredentialsError as error:
        raise _failed(str(error)) from error
    except ServerError as error:
        if isinstance(error, Unreachable | Refused) and not discovery.find_server(credentials).answered:
            validate(form)  # the address is wrong, and this finds out how
        raise _failed(str(error)) from error


def _served_models(credentials: Credentials) -> list[str]:
    """The names of the models; empty if the server cannot list them now. Raises ServerError with what is wrong."""
    hurried = credentials.model_copy(update={"timeout": min(credentials.timeout, LIST_TIMEOUT)})
    try:
        return OpenAIClient(hurried).models()
    except Unreachable as error:
        raise Unreachable(_scheme_hint(credentials) or f"{error}{_docker_hint(credentials)}") from error
    except (Unavailable, Overloaded) as error:
        if isinstance(error, Overloaded) or _LOADING.search(str(error)):
            return []
        raise
    except Refused as error:
        server = discovery.find_server(credentials)
        if server.answered and not discovery.PROFILES[server.kind].lists_all_models:
            return []  # without a folder of downloads mlx_lm.server has no list
        raise Refused(_address_hint(credentials) or str(error)) from error


def _is_question(model: str) -> bool:
    return model.strip() in ("?", "？")


def _listed(credentials: Credentials, names: list[str], kind: str) -> CredentialsValidateFailedError:
    """The answer to `?`: which names a model can be saved under."""
    models = {"llm": "models", "embedding": "embedding models", "rerank": "rerank models"}[kind]
    if not names:
        return _failed(f"The server at {credentials.base_url} lists no {models}.")
    return _failed(
        f"The server at {credentials.base_url} has these {models}: {join_names(names)}. Enter one of these names."
    )


def _check_model(model: str, served: list[str], server: ServerInfo, credentials: Credentials) -> None:
    found = server.model(model)
    if found is not None and found.type not in (None, "llm"):
        model_type = {"embedding": "Text Embedding", "rerank": "Rerank"}.get(found.type, found.type)
        raise _failed(f"{model!r} does not chat. Add it as a model of the type {model_type}.")
    if found is not None or not served or model in served:
        return
    if not discovery.PROFILES[server.kind].lists_all_models:
        return
    chat_models = server.names() or served
    close = get_close_matches(model, chat_models, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise _failed(
        f"The server at {credentials.base_url} does not have the model {shortened_name(model)!r}.{hint} It has: "
        f"{join_names(chat_models)}. Enter one of these names."
    )


# -- what else the user may have meant ---------------------------------------------------------------


def _scheme_hint(credentials: Credentials) -> str | None:
    """A sentence, if the server speaks http where the address says https, or the reverse."""
    scheme, _, rest = credentials.base_url.partition("://")
    other = "http" if scheme == "https" else "https"
    # Without the key: what was to be encrypted is not sent in the clear.
    probe = Probe(credentials.model_copy(update={"api_key": ""}))
    if probe.send("GET", f"{other}://{rest}/models") is None and not probe.has_untrusted_certificate:
        return None
    trust = ""
    if probe.has_untrusted_certificate:
        trust = " and see that Dify trusts its certificate, which it does not yet"
    return f"The server at {rest} speaks {other}, not {scheme}. Enter {other}://{rest}{trust}"


def _address_hint(credentials: Credentials) -> str | None:
    """A sentence on a server that answers, but lists no models: the right address, or what service this is."""
    parts = urlsplit(credentials.base_url)
    probe = Probe(credentials)
    for path in dict.fromkeys((f"{parts.path}/v1", *_USUAL_PATHS)):
        address = f"{parts.scheme}://{parts.netloc}{path}"
        if address == credentials.base_url:
            continue
        response = probe.send("GET", f"{address}/models")
        if response is not None and response.status < 300 and parse_entries(response.json, ListedModel):
            return f"No models are listed at {credentials.base_url}, but at {address}. Enter {address}"
    if parts.scheme == "http" and (sentence := _scheme_hint(credentials)):
        return sentence
    # Without the key: a page needs none, and what it says of itself is shown.
    anonymous = Probe(credentials.model_copy(update={"api_key": ""}))
    service = _service_name(anonymous.send("GET", f"{parts.scheme}://{parts.netloc}/"))
    if not service:
        return None
    return (
        f"What answers at {credentials.base_url} is not an OpenAI-compatible server but {service}. Check the port and "
        "the path; mlx-backend listens on port 8080 by default, and its address ends in /v1."
    )


def _service_name(response: ProbeResponse | None) -> str:
    """What an unknown service calls itself, on its page or in its header."""
    if response is None:
        return ""
    if (title := _TITLE.search(response.body[:65_536])) is not None:
        return f"a web page, {unescape(title[1].decode('utf-8', 'replace')).strip()!r}"
    product = re.sub(r"[^\w./ ()-]", "", response.server_header)[:60].strip()
    return f"another service ({product})" if product else ""


def _docker_hint(credentials: Credentials) -> str:
    host = urlsplit(credentials.base_url).hostname or ""
    if host != "localhost" and host != "::1" and not host.startswith("127."):
        return ""
    return f" Inside a container, {host} is the container itself."


def _failed(sentence: str) -> CredentialsValidateFailedError:
    return CredentialsValidateFailedError(sentence[:1].upper() + sentence[1:])
