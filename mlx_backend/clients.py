"""How each client is set up to use this server: what `connect`, docs/clients.md and the server's page show.

A snippet is a text with placeholders: `{{url}}` (without /v1), `{{container_url}}` (the same, as a container sees it),
`{{model}}`, `{{context}}`, `{{output}}`, `{{sees}}` and `{{key}}`. The clients stand in clients.toml; here is what
they consist of, and how placeholders are filled. Writes no files and asks no server.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

type Language = Literal["sh", "toml", "json", "yaml", "python", "javascript", "text"]

type Kind = Literal["agent", "app", "sdk"]

KINDS: Final[Mapping[Kind, str]] = {"agent": "coding agent", "app": "app", "sdk": "SDK"}
"""Every kind of client, in the order of lists, in words."""
KEY_VARIABLE: Final = "MLX_BACKEND_API_KEY"
UNUSED: Final = "unused"
"""What clients that ask for a key are given where the server has none."""
MAX_OUTPUT: Final = 32_000
"""Tokens that clients are told to leave for an answer."""
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_READ_VARIABLE: Final = {
    "python": f'os.environ["{KEY_VARIABLE}"]',
    "javascript": f"process.env.{KEY_VARIABLE}",
}
"""What stands for `{{key}}` where nothing else is said."""
_PLACEHOLDER = re.compile(r"\{\{(url|container_url|model|context|output|sees|key|secret|shell_secret)\}\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """What a client is to use. `secret` is written where a key goes; None: clients read it from KEY_VARIABLE."""

    url: str = "http://127.0.0.1:8080"
    model: str = "mlx-demo"
    context: int = 131_072
    sees: bool = False
    """Whether the model is shown images."""
    secret: str | None = UNUSED

    @property
    def container_url(self) -> str:
        """The address as a container on the server's machine sees it."""
        parts = urlsplit(self.url)
        if parts.hostname not in LOOPBACK:
            return self.url
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://host.docker.internal{port}{parts.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A piece of configuration or code. `file`: where it belongs, if it is a file's that every user has in one place.

    `key` is what stands for `{{key}}` with a literal key: `{{secret}}` in it, or `{{shell_secret}}` for a word of a
    shell; `key_variable` where the client reads the variable.
    """

    language: Language
    text: str
    file: str = ""
    key: str = '"{{secret}}"'
    key_variable: str = ""

    def filled(self, access: ServerAccess) -> str:
        """Return the text for a server; values are quoted as its language has it, inside the quotes that are there."""
        secret = access.secret
        # Some files take no literal key, only a variable's name.
        is_literal = secret is not None and (secret == UNUSED or "secret}}" in self.key)
        text = self.text.replace("{{key}}", self.key if is_literal else self.key_variable)
        if "os.environ[" in text:
            text = f"import os\n\n{text}"
        return _fill(text, access, self.language)


def _fill(text: str, access: ServerAccess, language: Language = "text") -> str:
    values = {
        "url": access.url,
        "container_url": access.container_url,
        "model": access.model,
        "context": str(access.context),
        "output": str(min(MAX_OUTPUT, access.context // 4)),
        "sees": "true" if access.sees else "false",
        "secret": access.secret or "",
        "shell_secret": shlex.quote(access.secret or ""),
    }
    return _PLACEHOLDER.sub(lambda found: _quoted(values[found[1]], language), text)


def _quoted(value: str, language: Language) -> str:
    if language == "sh":
        return shlex.quote(value)
    return value if language == "text" else json.dumps(value, ensure_ascii=False)[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSetup:
    """One program or library. `about` and `more` are Markdown, before and after the snippets.

    `apis`, `tried` and `seen_before` are the cells of the table of clients; `page` is its own page in docs/.
    """

    title: str
    kind: Kind = "agent"
    version: str = ""
    apis: str = ""
    tried: str = ""
    seen_before: str = ""
    page: str = ""
    about: str = ""
    snippets: tuple[Snippet, ...]
    more: str = ""

    def description(self, access: ServerAccess) -> str:
        """Return `about`, filled."""
        return _fill(self.about, access)

    def remarks(self, access: ServerAccess) -> str:
        """Return `more`, filled."""
        return _fill(self.more, access)


@cache
def known_clients() -> Mapping[str, ClientSetup]:
    """Return every client, by the name that `connect` takes."""
    file = Path(__file__).with_suffix(".toml")
    tables = tomllib.loads(file.read_text(encoding="utf-8").replace("{{variable}}", KEY_VARIABLE))
    return {
        name: ClientSetup(**table | {"snippets": tuple(map(_snippet, table["snippets"]))})
        for name, table in tables.items()
    }


def _snippet(table: Mapping[str, Any]) -> Snippet:
    return Snippet(**{"key_variable": _READ_VARIABLE.get(table["language"], ""), **table})
