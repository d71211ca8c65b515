"""`mlx-backend chat [MODEL]`: talk with a model, or ask it one thing.

A running server that has the model answers; where there is none, this process serves the model itself, on a port of
its own and with a key that nobody else knows, until the talk ends. Both are spoken to in the same way, over HTTP.

With -p, a prompt after the model, or text on standard input there is one answer and no talk. Where the output is no
terminal it is the answer alone.
"""

from __future__ import annotations

import sys
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from mlx_backend.commands.chat_session import ChatSession, check_effort, image_part
from mlx_backend.commands.errors import INTERRUPTED, CommandError
from mlx_backend.commands.local_models import LocalModels
from mlx_backend.commands.running_server import RunningServer, add_server_options, name_on_server
from mlx_backend.commands.stop_signals import raise_interrupts
from mlx_backend.commands.terminal import add_json_option, is_interactive, print_json
from mlx_backend.demo import DEMOS, MODEL_NAME

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


MAX_PIPED_BYTES = 64 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "mlx-backend chat [MODEL] [PROMPT] [option …]"
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a name or folder; gpt-oss:20b will do, and gpt-oss:20b:high",
    )
    parser.add_argument("words", metavar="PROMPT", nargs="?", help="the same as -p PROMPT")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="ask this, print the answer and end")
    parser.add_argument("--effort", metavar="E", help="reasoning effort: one of the model's own levels")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="show it this picture; repeatable"
    )
    add_server_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Talk, or print one answer."""
    raise_interrupts()
    asked = _asked(arguments)
    images = [(file, image_part(file)) for file in arguments.image]
    with answering(arguments) as (server, model):
        chat = ChatSession(server, model, system=arguments.system)
        for file, image in images:
            chat.show(file, image)
        if arguments.effort is not None:
            chat.set_effort(arguments.effort)
        if asked is None:
            from mlx_backend.commands.chat_talk import Talk

            return Talk(chat).run()
        if arguments.json:
            print_json(chat.answer(chat.message(asked)))
            return 0
        return 0 if chat.send(chat.message(asked)) else INTERRUPTED


def _asked(arguments: argparse.Namespace) -> str | None:
    """Return what is asked once: the prompt, and what was piped in after it; None for a talk."""
    if arguments.prompt is not None and arguments.words is not None:
        arguments.refuse("the prompt is there twice, with -p and without")
    prompt = arguments.words if arguments.prompt is None else arguments.prompt
    piped = "" if sys.stdin is None or sys.stdin.isatty() else _piped()
    asked = "\n\n".join(part for part in (prompt, piped.strip("\n")) if part)
    if asked:
        return asked
    if prompt is not None or not is_interactive():
        raise CommandError("There is nothing to ask: give it with -p TEXT, or on standard input.")
    if arguments.json:
        raise CommandError("--json is for one answer: say what to ask with -p.")
    return None


def _piped() -> str:
    """Return standard input. Raises CommandError for what is no text, or too long for any model."""
    content = sys.stdin.buffer.read(MAX_PIPED_BYTES + 1)
    if len(content) > MAX_PIPED_BYTES:
        raise CommandError(
            f"Standard input holds more than {MAX_PIPED_BYTES >> 20} MiB, which is too long to ask."
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"Standard input is not text in UTF-8: byte {error.start + 1} is not.") from None


# -- who answers ----------------------------------------------------------------------------------------------


@contextmanager
def answering(arguments: argparse.Namespace) -> Iterator[tuple[RunningServer, str]]:
    """Yield a server that has the model, and its name there: one that runs, else one of this process."""
    local = LocalModels()
    if arguments.model:
        arguments.model, effort = local.without_effort(arguments.model)
        arguments.effort = arguments.effort or effort
    with closing(RunningServer.of(arguments)) as server:
        if (name := name_on_server(server, arguments, local.source)) is not None:
            yield server, name
            return
    from mlx_backend.commands.list import efforts
    from mlx_backend.commands.serve import serving

    source = local.source(arguments.model) if arguments.model else _picked(local)
    if arguments.effort is not None and (model := local.named(source)) is not None:
        check_effort(arguments.effort, source, efforts(model.description))  # before it is loaded
    with serving(source) as (server, name):
        yield server, name


def _picked(local: LocalModels) -> str:
    """Return the model to talk with where none is named: the only real one, or the one that is chosen from a list."""
    chats = [each for each in local.all if each.description.kind == "llm"]
    real = [each.name for each in chats if each.name not in DEMOS]
    if len(real) <= 1:
        return real[0] if real else MODEL_NAME
    if not is_interactive():
        raise CommandError(f"There are several models here: name one of {', '.join(real)}.")
    from mlx_backend.commands.list import print_models

    print_models(chats, local, numbered=True)
    try:
        answer = input(f"Which one? [1-{len(chats)}] ").strip() or "1"
    except EOFError:
        raise KeyboardInterrupt from None
    if answer.isdecimal() and 1 <= int(answer) <= len(chats):
        return chats[int(answer) - 1].name
    return local.source(answer)
