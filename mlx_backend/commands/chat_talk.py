"""The line one types into, and what begins with a slash."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, InMemoryHistory

from mlx_backend.commands.chat_session import image_part
from mlx_backend.commands.errors import CommandError, did_you_mean
from mlx_backend.commands.terminal import console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History

    from mlx_backend.commands.chat_session import ChatSession

PROMPT, CONTINUED = ">>> ", "... "
QUOTES = '"""'


class Slash(NamedTuple):
    """What is done for a word that begins with a slash, and what the help says of it."""

    usage: str
    help: str
    do: Callable[[str], object]


class Talk:
    """Questions and answers until /bye."""

    def __init__(self, chat: ChatSession) -> None:
        self._chat = chat
        self._is_over = False
        self._commands: Mapping[str, Slash] = {
            "/effort": Slash("[LEVEL]", "reason so much from now on", self._effort),
            "/model": Slash("[NAME]", "go on with another model", self._model),
            "/system": Slash("[TEXT]", "set the system prompt", self._system),
            "/image": Slash("FILE", "show a picture with the next message", self._image),
            "/retry": Slash("", "have the last message answered again", self._retry),
            "/clear": Slash("", "forget what was said", self._clear),
            "/save": Slash("FILE", "write the conversation into a file: Markdown, or .json", self._save),
            "/help": Slash("", "show this", self._help),
            "/bye": Slash("", "end (Ctrl-D, too)", self._bye),
        }
        self._aliases = {"/?": "/help", "/exit": "/bye", "/quit": "/bye", "/think": "/effort"}
        self._session: PromptSession[str] = PromptSession(
            history=_history(), completer=_Commands(self._commands, chat), complete_while_typing=False
        )

    def run(self) -> int:
        """Talk; return the exit status."""
        efforts = self._chat.efforts()
        self._say(" · ".join([self._chat.model, *([f"effort {efforts}"] if efforts else []), "/? for help"]))
        while not self._is_over:
            try:
                if text := self._read().strip():
                    self._obey(text)
            except KeyboardInterrupt:
                self._say("/bye or Ctrl-D ends.")
            except EOFError:
                break
            except CommandError as error:
                console().print(str(error), style="red")
        return 0

    def _read(self) -> str:
        text = self._session.prompt(PROMPT, placeholder=FormattedText([("fg:ansibrightblack", "Message")]))
        if not text.lstrip().startswith(QUOTES):
            return text
        text = text.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + self._session.prompt(CONTINUED)
        return text.rstrip().removesuffix(QUOTES).strip("\n")

    def _obey(self, text: str) -> None:
        word, _, rest = text.partition(" ")
        name = self._aliases.get(word, word)
        if name in self._commands:
            self._commands[name].do(rest.strip())
        elif word.startswith("/") and "/" not in word[1:] and "\n" not in text:
            hint = did_you_mean(word, self._commands) or "; /? lists what there is."
            raise CommandError(f"There is no {word}{hint}")
        else:
            self._send(text)

    def _send(self, text: str) -> None:
        has_images = bool(self._chat.images)
        try:
            self._chat.send(self._chat.message(text))
        except CommandError as error:
            if not has_images:
                raise
            raise CommandError(
                f"{error} What is asked next goes without pictures; /retry sends this again with them."
            ) from None

    # -- what begins with a slash ----------------------------------------------------------------------------

    def _effort(self, word: str) -> None:
        if word:
            self._chat.set_effort(word)
        levels = self._chat.efforts()
        shown = f"levels: {levels}" if levels else f"{self._chat.model} has no levels"
        self._say(f"effort {self._chat.effort or 'as the model has it'} · {shown}")

    def _model(self, name: str) -> None:
        if not name:
            models = [each["id"] for each in self._chat.server.models() if each.get("type") == "llm"]
            self._say(" ".join(f"{each}*" if each == self._chat.model else each for each in models))
            return
        found, effort = self._chat.server.model_and_effort(name)
        with console().status(f"Loading {found} …"):
            self._chat.server.post_to_model(found, "load")
        self._chat.model = found
        self._chat.effort = effort or self._chat.effort
        efforts = self._chat.efforts()
        self._say(f"{found} · {f'effort {efforts}' if efforts else 'no levels of effort'}")

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = text.strip('"')
        self._say(f"system: {self._chat.system or 'nothing'}")

    def _image(self, file: str) -> None:
        if not file:
            raise CommandError("Which? /image FILE.")
        if "vision" not in self._chat.described().get("capabilities", ()):
            raise CommandError(f"{self._chat.model} does not see pictures here.")
        file = file.strip("'\"")
        self._chat.show(file, image_part(file))
        self._say(f"{len(self._chat.images)} with the next message")

    def _retry(self, _: str) -> None:
        chat = self._chat
        if chat.failed is not None:
            chat.send(chat.failed)
            return
        if len(chat.messages) < 2:
            raise CommandError("Nothing has been answered yet.")
        *before, message, answer = chat.messages
        chat.messages = before
        try:
            chat.send(message)
        except CommandError:
            chat.messages, chat.failed = [*before, message, answer], None
            raise

    def _clear(self, _: str) -> None:
        self._chat.messages, self._chat.images, self._chat.failed = [], [], None
        self._say("forgotten")

    def _save(self, name: str) -> None:
        if not name:
            raise CommandError("Where? /save FILE.")
        file = Path(name).expanduser()
        try:
            with file.open("x", encoding="utf-8") as opened:
                opened.write(_as_json(self._chat) if file.suffix == ".json" else _as_markdown(self._chat))
        except FileExistsError:
            raise CommandError(f"{file} is there already: choose another name.") from None
        except OSError as error:
            raise CommandError(f"{file} cannot be written: {error.strerror}.") from None
        self._say(f"saved in {file}")

    def _help(self, _: str) -> None:
        for name, slash in self._commands.items():
            self._say(f"  {f'{name} {slash.usage}':<16}{slash.help}")
        self._say(f"  {QUOTES}             begins and ends a message of several lines")
        self._say("  Ctrl-C          ends an answer")

    def _bye(self, _: str) -> None:
        self._is_over = True

    @staticmethod
    def _say(text: str) -> None:
        console().print(text, style="dim")


class _Commands(Completer):
    """Completes what begins with a slash, and the levels of /effort and names of /model."""

    def __init__(self, commands: Iterable[str], chat: ChatSession) -> None:
        self._commands = tuple(commands)
        self._chat = chat

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield what the line may go on with."""
        word, blank, rest = document.text_before_cursor.partition(" ")
        if not word.startswith("/"):
            return
        choices: Iterable[str] = () if blank else self._commands
        with suppress(CommandError):  # the server has gone: the next message says so
            if blank and word == "/effort":
                choices = (self._chat.described().get("reasoning") or {}).get("efforts", ())
            elif blank and word == "/model":
                choices = [each["id"] for each in self._chat.server.models()]
        begun = rest if blank else word
        for choice in choices:
            if choice.startswith(begun):
                yield Completion(choice, start_position=-len(begun))


def _history() -> History:
    """Return the lines of earlier talks, which nobody else may read."""
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        file = Path(root).expanduser() / "mlx-backend" / "chat_history"
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
    except (OSError, RuntimeError):  # no home folder, or one that is read-only
        return InMemoryHistory()
    return FileHistory(file)


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n\n".join(part.get("text", "(a picture)") for part in content)


def _as_markdown(chat: ChatSession) -> str:
    said = [f"## {message['role'].capitalize()}\n\n{_text_of(message)}\n" for message in chat.history]
    return "\n".join([f"# {chat.model}\n", *said])


def _as_json(chat: ChatSession) -> str:
    return json.dumps({"model": chat.model, "messages": chat.history}, ensure_ascii=False, indent=2)
