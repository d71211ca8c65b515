"""`mlx-backend connect CLIENT`: what a client needs to use the server, with its address and model; and writes it.

What is said stands in mlx_backend/clients.toml. With `--write` it is merged into the client's own file, in which all
else stays; where something would be lost, such as a comment in JSON, what to add is shown instead. Nothing is written
that was not shown before.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.clients import KEY_VARIABLE, KINDS, UNUSED, ServerAccess, known_clients
from mlx_backend.commands.errors import NO_SERVER, WRONG_USAGE, CommandError, resembling
from mlx_backend.commands.files import write_file
from mlx_backend.commands.running_server import RunningServer, add_server_options
from mlx_backend.commands.terminal import (
    add_json_option,
    confirmed,
    console,
    is_interactive,
    print_json,
    print_table,
    printable,
)
from mlx_backend.errors import first_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from mlx_backend.clients import ClientSetup, Snippet

_IDENTITIES = ("name", "id", "model_name")
"""Keys by which tables in a list are the same one."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Print what a client needs to use the server; with --write, put it into the client's own file. Without a "
        "client, list them."
    )
    parser.add_argument("client", nargs="?", metavar="CLIENT", help="which one; without it all are listed")
    parser.add_argument(
        "--model", metavar="NAME", help="the model that it is to use (default: the server's first)"
    )
    parser.add_argument(
        "--write", action="store_true", help="put it into the client's file, after showing the change"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask before writing")
    parser.add_argument(
        "--literal-key",
        action="store_true",
        help=f"put the key itself in, where otherwise the client is told to read ${KEY_VARIABLE}",
    )
    add_server_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print or write it."""
    if arguments.client is None:
        return _list(as_json=arguments.json)
    client = _client(arguments.client)
    with closing(RunningServer.of(arguments)) as server:
        access = _access_to(server, arguments)
    if arguments.write:
        return _write(client, access, is_agreed=arguments.yes)
    if arguments.json:
        print_json(
            {
                "client": client.title,
                "url": access.url,
                "model": access.model,
                "about": client.description(access),
                "snippets": [
                    {"file": each.file or None, "language": each.language, "text": each.filled(access)}
                    for each in client.snippets
                ],
                "more": client.remarks(access),
            }
        )
    else:
        _show(client, access)
    return 0


def _list(*, as_json: bool) -> int:
    clients = known_clients().items()
    if as_json:
        print_json([{"name": name, "title": client.title, "kind": client.kind} for name, client in clients])
        return 0
    rows = [
        (
            name,
            KINDS[client.kind],
            client.title,
            ", ".join(each.file for each in client.snippets if each.file),
        )
        for name, client in sorted(clients, key=lambda item: list(KINDS).index(item[1].kind))
    ]
    print_table(("CLIENT", "KIND", "", "--write PUTS IT INTO"), rows)
    return 0


def _client(name: str) -> ClientSetup:
    clients = known_clients()
    wanted = name.casefold().replace(" ", "-").replace("_", "-")
    known = {client.title.casefold().replace(" ", "-"): client for client in clients.values()} | {**clients}
    if wanted in known:
        return known[wanted]
    # As people say it: "claude", "webui", "codex-cli".
    begun = [
        each for each in clients if wanted and (each.startswith(wanted) or wanted.startswith(f"{each}-"))
    ]
    matches = begun or [each for each in clients if wanted and wanted in each]
    if len(matches) == 1:
        return clients[matches[0]]
    close = " or ".join(matches) or resembling(wanted, known)
    meant = f"; did you mean {close}?" if close else "; `mlx-backend connect` lists them all"
    raise CommandError(f"unknown client {name!r}{meant}", status=WRONG_USAGE)


def _access_to(server: RunningServer, arguments: argparse.Namespace) -> ServerAccess:
    """Return what a server is and has; what can be said without it if it does not run."""
    key = arguments.key or os.environ.get(KEY_VARIABLE) or None
    secret = UNUSED if key is None else key if arguments.literal_key else None
    access = ServerAccess(url=server.url, model=arguments.model or "MODEL", secret=secret)
    try:
        server.health()
    except CommandError as error:
        if error.status != NO_SERVER:
            raise
        if arguments.write and arguments.model is None:
            raise CommandError(f"{error} Or say which model the client is to use, with --model.") from None
        print(f"{error} What follows is for that address.", file=sys.stderr)
        return access
    wanted, effort = (None, None) if arguments.model is None else server.model_and_effort(arguments.model)
    listed = [each for each in server.models() if each.get("type") == "llm"]
    chosen = next((each for each in listed if wanted in (None, each["id"])), None)
    if chosen is None:
        raise CommandError(f"The server at {server.url} has no chat model{f' {wanted}' if wanted else ''}.")
    return replace(
        access,
        model=printable(f"{chosen['id']}:{effort}" if effort else chosen["id"]),
        context=chosen.get("context_length") or access.context,
        sees="vision" in chosen.get("capabilities", ()),
    )


def _show(client: ClientSetup, access: ServerAccess) -> None:
    console().print(client.title, style="bold")
    if about := client.description(access):
        console().print(_plain(about))
    for snippet in client.snippets:
        console().print()
        if snippet.file:
            console().print(f"{snippet.file}:", style="dim")
        print(snippet.filled(access), end="")  # as it is: somebody copies it
    if remarks := client.remarks(access):
        console().print(f"\n{_plain(remarks)}")
    if access.secret is None:
        console().print(
            f"\nThe key is read from ${KEY_VARIABLE}: set it where the client is started.", style="dim"
        )


def _plain(markdown: str) -> str:
    """Return a text without what only Markdown needs."""
    return re.sub(r"\*([^*]+)\*", r"\1", markdown)


def _write(client: ClientSetup, access: ServerAccess, *, is_agreed: bool) -> int:
    snippet = next((each for each in client.snippets if each.file), None)
    if snippet is None:
        _show(client, access)
        raise CommandError(f"{client.title} has no file that could be written: do what stands above.")
    file = Path(snippet.file).expanduser()
    text = snippet.filled(access)
    try:
        there = file.read_bytes().decode() if file.exists() else ""
        before = there.replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{snippet.file} cannot be read: {first_line(error)}.") from None
    try:
        other = snippet.filled(replace(access, secret=UNUSED if access.secret is None else None))
        after = merged(snippet, before, text, other)
    except ValueError as error:
        print(f"{snippet.file} is not changed: {error}. Add this to it:\n", file=sys.stderr)
        print(text, end="")
        return 1
    if after == before:
        print(f"{snippet.file} has it already.")
        return 0
    _show_change(snippet.file, before, after)
    if not is_agreed:
        if not is_interactive():
            raise CommandError("Nothing was written: this is no terminal on which to ask. Say -y to agree.")
        if not confirmed(f"Write {snippet.file}?"):
            print("Nothing was written.")
            return 1
    newline = "\n" if there == before else "\r\n"
    write_file(file, after, newline=newline, is_secret=access.secret not in (None, UNUSED))
    print(f"Written: {snippet.file}")
    if access.secret is None:
        print(f"The key is read from ${KEY_VARIABLE}: set it where {client.title} is started.")
    return 0


def _show_change(name: str, before: str, after: str) -> None:
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm=""):
        console().print(line, style=colours.get(line[:1], ""))


def merged(snippet: Snippet, before: str, text: str, other: str) -> str:
    """Return a file's text with a snippet's values in it. Raises ValueError, saying why, if something would be lost."""
    if not before.strip() or before == text:
        return text
    match snippet.language:
        case "toml":
            return _merged_toml(before, text, other)
        case "json":
            return _merged_json(before, json.loads(text))
    raise ValueError("what is in it cannot be kept")


def _merged_json(before: str, new: Mapping[str, Any]) -> str:
    try:
        values = json.loads(before)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON, or JSON with comments, which would be lost") from None
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    _merge(values, new)
    if values == json.loads(before):
        return before
    indent = re.search(r"^[ \t]+(?=\")", before, re.MULTILINE)
    return json.dumps(values, indent=indent[0] if indent else 2, ensure_ascii=False) + "\n"


def _merged_toml(before: str, text: str, other: str) -> str:
    """Merge; `other` is the snippet for a key that is given in the other way, whose names do not stay next to this."""
    import tomlkit

    try:
        document, expected = tomlkit.parse(before), tomllib.loads(before)
    except ValueError as error:
        raise ValueError(f"it is no TOML ({error})") from None
    for values in (document, expected):
        _forget(values, tomllib.loads(other), tomllib.loads(text))
    _merge(document, tomlkit.parse(text))
    _merge(expected, tomllib.loads(text))
    after = tomlkit.dumps(document)
    if tomllib.loads(after) != expected:  # as tomlkit 0.15 does with dotted keys
        raise ValueError("it is laid out in a way that cannot be kept")
    return after


def _forget(value: Any, other: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Take names out that are in the one and not in the other."""
    for name, old in other.items():
        if name not in wanted:
            value.pop(name, None)
        elif isinstance(old, dict) and isinstance(value.get(name), dict):
            _forget(value[name], old, wanted[name])


def _merge(value: Any, new: Mapping[str, Any]) -> None:
    """Put values into a table: tables are merged, lists of tables by what names their tables, all else is replaced."""
    for name, wanted in new.items():
        there = value.get(name)
        if isinstance(there, dict) and isinstance(wanted, dict):
            _merge(there, wanted)
        elif _is_tables(there) and _is_tables(wanted):
            _merge_tables(there, wanted)
        elif there != wanted:
            value[name] = wanted


def _merge_tables(there: list[Any], wanted: list[Any]) -> None:
    for table in wanted:
        same = [each for each in there if _identity(each) == _identity(table)]
        if same:
            _merge(same[0], table)
        else:
            there.append(table)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _identity(table: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(table.get(name) for name in _IDENTITIES)
