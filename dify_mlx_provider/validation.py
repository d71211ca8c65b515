"""Are these credentials good? Asked when a user saves a form; the answer is a sentence they can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_plugin.errors.model import CredentialsValidateFailedError

from .client import Client, ServerError
from .credentials import Credentials, CredentialsError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_NAMES = 12


def validate(form: Mapping[str, Any], model: str | None = None) -> None:
    """Ask the server for its models; with `model`, see that it is among them.

    Raises CredentialsValidateFailedError: Dify shows its text as it is.
    """
    try:
        served = Client(Credentials.read(form)).models()
    except (CredentialsError, ServerError) as error:
        text = str(error)
        raise CredentialsValidateFailedError(text[:1].upper() + text[1:]) from error
    if model is None or model == "default" or not served or _is_served(model, served):
        return
    names = ", ".join(served[:MOST_NAMES]) + (" …" if len(served) > MOST_NAMES else "")
    raise CredentialsValidateFailedError(
        f"The server does not serve {model!r}. It serves: {names}. Enter one of these names, or `default`."
    )


def _is_served(model: str, served: list[str]) -> bool:
    """A model is meant by its whole name or by the last part of it, as the server itself understands it."""
    return any(model == name or model.rpartition("/")[2] == name.rpartition("/")[2] for name in served)
