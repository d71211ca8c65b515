"""`mlx-backend parse`: show what a model's raw output means. For bug reports, and for corpora of outputs.

Raw text comes on standard input and one JSON message goes out:

    $ printf '<|channel|>analysis<|message|>Easy.<|end|><|channel|>final<|message|>4' | mlx-backend parse
    {"reasoning": "Easy.", "content": "4", "tool_calls": [], "finish": "stop"}

With `--jsonl` every line is an object of its own: `raw_text`, or `tokens` (ids) with as many `token_texts`;
and optionally `id`, `dialect` (or `response_template`, as a tokenizer's configuration has it), `tools` (names, or
OpenAI's tool objects: with their schemas, arguments that a family writes as bare text get their types; with `[]` calls
are text), `opens_in` ("reasoning" where the prompt has opened it) and `ended_by`. Its result is one line with the same
`id`.
A line that cannot be parsed gives `{"id": …, "error": …}` in its place, and exit status 1 at the end. A call
that the token limit has cut is printed as far as it goes, with `"complete": false`.

`--model FOLDER` takes the dialect that the server would find by that model's files, its response template included.
`--list` shows the dialects, each with an example. With `--jsonl` its lines can be read by `parse --jsonl`.

Input and output are UTF-8 whatever the locale is. The text is taken as it is: `echo` adds a line break,
`printf` does not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.errors import WRONG_USAGE, CommandError, argument, did_you_mean, several
from mlx_backend.commands.json_lines import InputError, answer_input, decode, write, write_text
from mlx_backend.commands.local_models import LocalModels
from mlx_backend.conversation.json_values import json_type
from mlx_backend.declaration import text, whole
from mlx_backend.errors import first_line

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.events import Channel, EndedBy
    from mlx_backend.conversation.tools import ToolDefinition

DEFAULT_DIALECT = "harmony"
_ENDINGS: Mapping[str, EndedBy] = {
    **dict.fromkeys(("stop", "eos", "end", "return", "call", "tool_calls"), "stop"),
    **dict.fromkeys(("length", "max_tokens", "max_length"), "length"),
}


_OPENED = {
    **dict.fromkeys(("reasoning", "thinking", "analysis"), "analysis"),
    **dict.fromkeys(("answer", "content", "final"), "final"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RawOutput:
    """One output to be parsed: pieces of text, each with its token id or None."""

    dialect: Dialect
    pieces: Sequence[tuple[str, int | None]] = ()
    tools: Sequence[ToolDefinition] | None = None
    ended_by: EndedBy = "stop"
    opens_in: Channel | None = None


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Read a model's raw output on standard input; print reasoning, content and tool calls."
    )
    parser.add_argument("--dialect", help="how the model writes (default: harmony); --list names them all")
    parser.add_argument(
        "--model", metavar="MODEL", help="find out how this model writes: a name, or a folder"
    )
    parser.add_argument("--list", action="store_true", help="list the dialects, with an example of each")
    parser.add_argument(
        "--tools", metavar="A,B", type=several(text()), help="the names of the request's tools"
    )
    parser.add_argument(
        "--ended-by", choices=("stop", "length"), default="stop", help="what ended the output"
    )
    parser.add_argument(
        "--opens-in",
        choices=("reasoning", "answer"),
        help="what the prompt has opened already (default: nothing)",
    )
    parser.add_argument("--chunk", metavar="N", type=argument(whole(1)), help="feed N characters at a time")
    parser.add_argument("--jsonl", action="store_true", help="read one JSON object a line")
    parser.add_argument(
        "--by",
        choices=("text", "tokens"),
        help="with --jsonl: read raw_text or the tokens (default: the tokens, where a line has them)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command on standard input and output."""
    from mlx_backend.conversation.dialects import DIALECTS

    if arguments.dialect and arguments.model:
        arguments.refuse("--model finds the dialect: it cannot go with --dialect")
    if (arguments.dialect or DEFAULT_DIALECT) not in DIALECTS:
        arguments.refuse(f"--dialect: {_unknown(arguments.dialect)}")
    if arguments.by and not arguments.jsonl:
        arguments.refuse("--by is for --jsonl: plain input has no tokens")
    if arguments.by == "tokens" and arguments.chunk:
        arguments.refuse("--chunk cuts text: it cannot go with --by tokens")
    dialect = DIALECTS[arguments.dialect or DEFAULT_DIALECT]
    if arguments.model:
        try:
            dialect = _of_folder(LocalModels().folder(arguments.model))
        except (OSError, ValueError) as error:
            raise CommandError(
                f"{arguments.model} cannot be read: {first_line(error)}", status=WRONG_USAGE
            ) from None
    if arguments.list:
        return _list_dialects(as_lines=arguments.jsonl)
    defaults = RawOutput(
        dialect=dialect,
        tools=arguments.tools,
        ended_by=arguments.ended_by,
        opens_in=_opens_in(arguments.opens_in, None),
    )
    if arguments.jsonl:
        answer = partial(answer_row, defaults=defaults, chunk=arguments.chunk, by=arguments.by)
        return answer_input(read_row, answer, by_lines=True)
    raw_text = sys.stdin.buffer.read().decode("utf-8", errors="replace")
    write(_as_json(replace(defaults, pieces=_cut(raw_text, arguments.chunk))))
    return 0


def _of_folder(folder: Path) -> Dialect:
    """Return the dialect that the server finds for a model, by its files."""
    from mlx_backend.chat.response_template import recognise
    from mlx_backend.models import files

    template = files.chat_template(folder)
    return recognise(
        template,
        files.control_tokens(files.added_tokens(folder), template),
        files.response_template(folder),
        on_refused=lambda reason: CommandError(reason).show(),
    ).dialect


def answer_row(
    row: Mapping[str, Any], *, defaults: RawOutput, chunk: int | None = None, by: str | None = None
) -> dict[str, Any]:
    """Parse one line's object; `defaults` are for what it does not say itself. Raises InputError."""
    return _as_json(
        RawOutput(
            pieces=_pieces(row, chunk, by),
            dialect=_dialect(row, defaults.dialect),
            tools=_tools(row.get("tools"), defaults.tools),
            ended_by=_ended_by(row.get("ended_by"), defaults.ended_by),
            opens_in=_opens_in(row.get("opens_in"), defaults.opens_in),
        )
    )


def _as_json(output: RawOutput) -> dict[str, Any]:
    from mlx_backend.conversation.parser import ChannelParser, fold
    from mlx_backend.conversation.tools import ToolSet

    tools = ToolSet(output.tools, unwrapped=True)
    parser = ChannelParser(output.dialect, tools=tools, opens_in=output.opens_in)
    events = [event for text, token in output.pieces for event in parser.feed(text, token)]
    message = fold([*events, *parser.close(output.ended_by)])
    return {
        "reasoning": message.reasoning,
        "content": message.content,
        "tool_calls": [
            {"name": call.name, "arguments": call.arguments, "complete": call.complete}
            for call in message.tool_calls
        ],
        "finish": message.finish,
    }


def _cut(text: str, chunk: int | None) -> list[tuple[str, None]]:
    size = chunk or max(len(text), 1)
    return [(text[at : at + size], None) for at in range(0, len(text), size)]


def read_row(line: bytes) -> dict[str, Any]:
    """Decode a line's object. Raises InputError."""
    row = decode(line)
    if not isinstance(row, dict):
        raise InputError(f"an object is expected, not {json_type(row)}")
    return row


def _pieces(row: Mapping[str, Any], chunk: int | None, by: str | None) -> Sequence[tuple[str, int | None]]:
    tokens, texts, raw_text = row.get("tokens"), row.get("token_texts"), row.get("raw_text")
    if by == "tokens" and (tokens is None or texts is None):
        raise InputError("--by tokens: the line needs both tokens and token_texts")
    if by != "text" and chunk is None and tokens is not None and texts is not None:
        if not _is_list_of(tokens, int):
            raise InputError("tokens: a list of integers is expected")
        if not _is_list_of(texts, str):
            raise InputError("token_texts: a list of strings is expected")
        if len(tokens) != len(texts):
            raise InputError(f"there are {len(tokens)} tokens but {len(texts)} token_texts")
        return list(zip(_whole_characters(texts, raw_text), tokens, strict=True))
    if not isinstance(raw_text, str):
        missing = "is missing" if raw_text is None else f"must be a string, not {json_type(raw_text)}"
        raise InputError(f"raw_text {missing}")
    return _cut(raw_text, chunk)


def _whole_characters(texts: list[str], raw_text: Any) -> list[str]:
    """Repair texts that were decoded token by token: a token that ends inside a character gives U+FFFD.

    The text of a run of such tokens is taken from the line's raw text and given to the last token of the run. If
    the two disagree anywhere else, the tokens' own texts are used as they are.
    """
    if not isinstance(raw_text, str) or "\ufffd" not in "".join(texts):
        return texts
    repaired: list[str] = []
    position = 0
    while len(repaired) < len(texts):
        at = len(repaired)
        run = at
        while run < len(texts) and "\ufffd" in texts[run]:
            run += 1
        if run == at:
            if not raw_text.startswith(texts[at], position):
                return texts
            repaired.append(texts[at])
            position += len(texts[at])
            continue
        end = raw_text.find(texts[run], position + 1) if run < len(texts) else len(raw_text)
        if end < 0:
            return texts
        repaired += [""] * (run - at - 1) + [raw_text[position:end]]
        position = end
    return repaired


def _list_dialects(*, as_lines: bool) -> int:
    """Print every dialect: its names, and an example."""
    from mlx_backend.conversation.dialects import DIALECTS

    for dialect in DIALECTS.values():
        if as_lines:
            write({"dialect": dialect.name, "aliases": list(dialect.aliases), "raw_text": dialect.example})
            continue
        names = f"{dialect.name} ({', '.join(dialect.aliases)})" if dialect.aliases else dialect.name
        example = "".join(f"    {line}\n" for line in dialect.example.splitlines())
        write_text(f"{names}\n{example}\n")
    return 0


def _unknown(dialect: str) -> str:
    from mlx_backend.conversation.dialects import DIALECTS

    names = [name for each in DIALECTS.values() for name in (each.name, *each.aliases)]
    return f"{dialect!r} is not one of {', '.join(DIALECTS)}{did_you_mean(dialect.lower(), names)}"


def _dialect(row: Mapping[str, Any], default: Dialect) -> Dialect:
    from mlx_backend.chat.response_template import (
        ResponseTemplateError,
        response_template_dialect,
    )
    from mlx_backend.conversation.dialects import DIALECTS

    value, template = row.get("dialect"), row.get("response_template")
    if value is not None and template is not None:
        raise InputError("dialect and response_template say the same thing: one of them is expected")
    if template is not None:
        try:
            return response_template_dialect(template)
        except ResponseTemplateError as error:
            raise InputError(str(error)) from error
    if value is None:
        return default
    if not isinstance(value, str):
        raise InputError(f"dialect: a name is expected, not {json_type(value)}")
    if value not in DIALECTS:
        raise InputError(f"dialect: {_unknown(value)}")
    return DIALECTS[value]


def _opens_in(value: Any, default: Channel | None) -> Channel | None:
    from mlx_backend.conversation.events import Channel

    if value is None:
        return default
    if isinstance(value, str) and value in _OPENED:
        return Channel(_OPENED[value])
    raise InputError('opens_in: "reasoning" or "answer" is expected')


def _tools(tools: Any, default: Sequence[ToolDefinition] | None) -> Sequence[ToolDefinition] | None:
    if tools is None:
        return default
    if not isinstance(tools, list):
        raise InputError(f"tools: a list is expected, not {json_type(tools)}")
    return [_tool(tool, at) for at, tool in enumerate(tools)]


def _tool(tool: Any, at: int) -> ToolDefinition:
    match tool:
        case str() | {"function": {"name": str()}} | {"name": str()}:
            definition: ToolDefinition = tool
            return definition
    raise InputError(f"tools[{at}]: a name is expected, or an object with function.name")


def _ended_by(value: Any, default: EndedBy) -> EndedBy:
    if value is None:
        return default
    if isinstance(value, str) and value in _ENDINGS:
        return _ENDINGS[value]
    raise InputError('ended_by: "stop" (or "eos") or "length" (or "max_tokens") is expected')


def _is_list_of(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
