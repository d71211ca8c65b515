"""References in Markdown, made from the declarations: what pages of docs/ show between their markers.

    python .ci/docs_reference.py docs/*.md      # writes them there (make docs)

Knows how settings and model families are declared; what they mean is theirs to say.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.api.reply_fields import ALIASES
from mlx_backend.cli import COMMANDS, command_parser
from mlx_backend.clients import ServerAccess, known_clients
from mlx_backend.commands.errors import EXIT_CODES
from mlx_backend.commands.options import GROUPS, default_in_words, options_by_group
from mlx_backend.constraints import can_require_calls
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.declaration import declared
from mlx_backend.registry.config_file import ENGINE, MODEL_KEYS
from mlx_backend.server.api_keys import KEYS
from mlx_backend.settings import ReplySettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mlx_backend.clients import ClientSetup
    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.declaration import Setting

_BEGIN, _END = "<!-- {}:begin -->", "<!-- {}:end -->"

_EXAMPLE = ServerAccess()
# tests/e2e runs blocks of these languages as what they are elsewhere in docs/: models files and requests.
_FENCES = {"toml": "ini", "json": "jsonc"}

_INTRODUCTIONS = {
    "model": "For the model that `--model` names. In the models file they are keys of the model's own table.",
    "several models": "See [several models](models.md).",
    "replies": "A sampling setting that is not set has the value that the model's makers recommend, or no effect. "
    "Requests may also send {aliases}. `/v1/completions` takes the sampling settings and `max_tokens`.",
}


def settings_reference() -> str:
    """Return all settings: a table for each group of options, and one for the keys that only the models file has."""
    parts = []
    options = options_by_group()
    for group in GROUPS:
        parts.append(f"### {group.capitalize()}")
        if group in _INTRODUCTIONS:
            parts.append(_INTRODUCTIONS[group].format(aliases=_aliases()))
        keys = "models file, request" if group == "replies" else "models file"
        parts.append(_table(("option", keys, "value", "default", "what it does"), _rows(options[group])))
    parts += [
        "### Only in the models file",
        "Keys of a model's table. All but `model`, `aliases`, `pinned` and `type` may stand in `[defaults]` too, "
        "except those of embedding models.",
        _table(("models file", "value", "default", "what it does"), _file_rows(options)),
    ]
    return "\n\n".join(parts) + "\n"


def families_reference() -> str:
    """Return a table with a row for each dialect, in the order in which they are tried."""
    head = ("dialect", "other names", "reasoning", "a call of `f` with `a` = 1", "a call can be required")
    return _table(head, map(_family_row, DIALECTS.values())) + "\n"


def keys_reference() -> str:
    """Return a table of what the file of API keys may say of a key."""
    rows = [(f"`{name}`", *_cells(setting, None)) for name, setting in KEYS.items()]
    return _table(("key", "value", "default", "what it does"), rows) + "\n"


def clients_reference() -> str:
    """Return a table of the clients that are programs, and a section for each with what to set in it."""
    head = ("client", "`connect`", "version", "API", "what was tried", "seen before")
    programs = {name: client for name, client in known_clients().items() if client.kind != "sdk"}
    parts = [_table(head, (_client_row(name, client) for name, client in programs.items()))]
    return "\n\n".join([*parts, *map(_client_section, programs.values())]) + "\n"


def sdks_reference() -> str:
    """Return a table of SDKs: of each the line that says where the server is."""
    rows = []
    for name, client in known_clients().items():
        if client.kind == "sdk":
            [snippet] = client.snippets
            code = "below" if client.about else _code(snippet.filled(_EXAMPLE).rstrip().rpartition("\n")[2])
            title = f"{client.title} {client.version}".rstrip()
            rows.append((title, f"`{name}`", code, client.remarks(_EXAMPLE)))
    sections = [
        _client_section(client)
        for client in known_clients().values()
        if client.kind == "sdk" and client.about
    ]
    table = _table(("SDK", "`connect`", "what to set", "what to know"), rows)
    return "\n\n".join([table, *sections]) + "\n"


def _client_row(name: str, client: ClientSetup) -> tuple[str, ...]:
    anchor = re.sub(r"[^a-z0-9 -]", "", client.title.lower()).replace(" ", "-")
    title = f"[{client.title}]({client.page or f'#{anchor}'})"
    return title, f"`{name}`", client.version, client.apis, client.tried, client.seen_before


def _client_section(client: ClientSetup) -> str:
    level = "###" if client.kind == "sdk" else "##"
    parts = [f"{level} {client.title}", client.description(_EXAMPLE)]
    for snippet in client.snippets:
        if snippet.file:
            parts.append(f"In `{snippet.file}`:")
        fence = _FENCES.get(snippet.language, snippet.language)
        parts.append(f"```{fence}\n{snippet.filled(_EXAMPLE)}```")
    parts.append("" if client.kind == "sdk" else client.remarks(_EXAMPLE))
    return "\n\n".join(filter(None, parts))


def commands_reference() -> str:
    """Return every command with what it takes, and the exit codes."""
    parts = []
    for name, command in COMMANDS.items():
        called = " or ".join(f"`mlx-backend {each}`" for each in (name, *command.aliases))
        parts += [f"### {called}", *_command(name, command_parser(name))]
    codes = [(str(code), meaning) for code, meaning in EXIT_CODES.items()]
    return "\n\n".join([*parts, "### Exit codes", _table(("code", "meaning"), codes)]) + "\n"


class _Arguments(argparse.HelpFormatter):
    """Keeps the arguments whose help it is asked for."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self.kept: list[argparse.Action] = []

    def add_argument(self, action: argparse.Action) -> None:
        """Keep one."""
        if action.help is not argparse.SUPPRESS and action.dest != "help":
            self.kept.append(action)


def _command(name: str, parser: argparse.ArgumentParser) -> list[str]:
    parts = [(parser.description or "").rstrip()]
    if name == "serve":
        return [*parts, "Its options are the [settings](settings.md)."]
    arguments = _Arguments(parser.prog)
    parser.formatter_class = lambda prog: arguments
    parser.format_help()
    rows = [_argument_row(each) for each in arguments.kept if not isinstance(each.choices, dict)]
    if rows:
        parts.append(_table(("argument", "what it does"), rows))
    for each in arguments.kept:
        if isinstance(each.choices, dict):
            for action, below in each.choices.items():
                parts += [f"#### `mlx-backend {name} {action}`", *_command(action, below)]
    return list(filter(None, parts))


def _argument_row(action: argparse.Action) -> tuple[str, str]:
    choices = "|".join(map(str, action.choices or ()))
    value = "" if action.nargs == 0 else str(action.metavar or choices or action.dest.upper())
    words = [f"{option} {value}".rstrip() for option in action.option_strings] or [value]
    return ", ".join(map(_code, words)), (action.help or "").replace("%%", "%")


REFERENCES: Mapping[str, Callable[[], str]] = {
    "settings": settings_reference,
    "families": families_reference,
    "keys": keys_reference,
    "clients": clients_reference,
    "commands": commands_reference,
    "sdks": sdks_reference,
}


def replace_reference(page: str) -> str:
    """Return a page with the references of now between their markers. Raises ValueError if it has none."""
    has_any = False
    for name, render in REFERENCES.items():
        begin, end = _BEGIN.format(name), _END.format(name)
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if found and closed:
            has_any, page = True, f"{before}{begin}\n\n{render()}\n{end}{after}"
    if not has_any:
        raise ValueError(f"The page has no {_BEGIN.format('NAME')} and {_END.format('NAME')}.")
    return page


def _family_row(dialect: Dialect) -> tuple[str, ...]:
    blocks = [f"{_code(opener)} … {_code(closer)}" for opener, closer in dialect.blocks.items()]
    reasoning = blocks[0] if blocks else "its own channel" if dialect.has_reasoning else ""
    call = "".join(piece.text for piece in dialect.calls.encode("f", {"a": 1})) if dialect.calls else ""
    required = "yes" if can_require_calls(dialect) else "not yet"
    return _code(dialect.name), ", ".join(map(_code, dialect.aliases)), reasoning, _code(call), required


def _code(text: str) -> str:
    """Return a text as code on one line."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    padding = " " if len(fence) > 1 else ""
    return f"{fence}{padding}{' '.join(text.split())}{padding}{fence}" if text else ""


def _rows(options: Iterable[tuple[str, Setting, str, Any]]) -> Iterable[tuple[str, ...]]:
    for name, setting, option, default in options:
        if setting.hidden:
            continue
        in_file = name in MODEL_KEYS and (name in ENGINE or name in declared(ReplySettings) or name == "ttl")
        metavar = setting.kind.metavar.partition("{")[0]  # choices are in the next column
        yield f"`{f'{option} {metavar}'.strip()}`", f"`{name}`" if in_file else "", *_cells(setting, default)


def _file_rows(options: dict[str, list[tuple[str, Setting, str, Any]]]) -> Iterable[tuple[str, ...]]:
    with_option = {name for group in options.values() for name, *_ in group} - {"model", "adapter_path"}
    for name, setting in MODEL_KEYS.items():
        if name not in with_option:
            yield f"`{name}`", *_cells(setting, None)


def _cells(setting: Setting, default: Any) -> tuple[str, str, str]:
    words = "true or false" if setting.is_switch else setting.kind.words
    more = "; repeatable" if setting.repeatable else ""
    off = "on" if setting.turns_off else "off" if setting.is_switch and default is False else ""
    return words, off or default_in_words(setting, default), setting.help + more


def _aliases() -> str:
    *first, last = [f"`{alias}` for `{name}`" for alias, name in ALIASES.items()]
    return f"{', '.join(first)} and {last}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(words: Sequence[str]) -> int:
    """Write the reference into pages; return the exit status."""
    for word in words:
        page = Path(word)
        page.write_text(replace_reference(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
