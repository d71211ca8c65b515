"""A conversation with one model of a server: what was said, and how the next answer is asked for and shown."""

from __future__ import annotations

import base64
import mimetypes
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.errors import CommandError
from mlx_backend.commands.list import marked_levels
from mlx_backend.conversation.effort import EffortError, parse_effort

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlx_backend.commands.running_server import RunningServer

MAX_IMAGE_BYTES = 64 << 20
"""Bytes of a picture's file that is read to be shown; a server may take fewer, and says so."""
_PART = re.compile(r"messages\W+(\d+)\W+content\W+(\d+)")
"""Where the server's errors say that a part of a message is."""


@dataclass
class ChatSession:
    """A conversation with one model. `images` are shown with the next message; `failed` is one without an answer.

    `files` are those of all images, by their URLs.
    """

    server: RunningServer
    model: str
    effort: str | None = None
    system: str = ""
    images: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[str, Any] | None = None
    files: dict[str, str] = field(default_factory=dict)

    def show(self, file: str, image: dict[str, Any]) -> None:
        """Show the image of a file with the next message."""
        self.images.append(image)
        self.files[image["image_url"]["url"]] = file

    def message(self, text: str) -> dict[str, Any]:
        """Return a message of this text and the images."""
        content: Any = [*self.images, {"type": "text", "text": text}] if self.images else text
        return {"role": "user", "content": content}

    def body(self, message: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return the request for an answer to a message."""
        effort = {} if self.effort is None else {"reasoning_effort": self.effort}
        return {"model": self.model, "messages": [*self.history, message], **effort, **more}

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was said, the system prompt first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages]

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer to a message, as the server sends it."""
        body = self.body(message)
        with self._naming_files(body):
            return self.server.post("/v1/chat/completions", body)

    @contextmanager
    def _naming_files(self, body: dict[str, Any]) -> Iterator[None]:
        """Name the file of a picture that the server refuses: it knows only where in the request that is."""
        try:
            yield
        except CommandError as error:
            file = None
            if found := _PART.search(error.param):
                with suppress(LookupError, TypeError):  # blames something that is no picture
                    part = body["messages"][int(found[1])]["content"][int(found[2])]
                    file = self.files[part["image_url"]["url"]]
            raise (CommandError(f"{file}: {error}") if file else error) from None

    def send(self, message: dict[str, Any]) -> bool:
        """Show the answer to a message while it comes, and remember both; False if Ctrl-C ended it."""
        from mlx_backend.commands.chat_screen import Screen

        body = self.body(
            message, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
        )
        reasoning, content = "", ""
        self.images, self.failed = [], message
        screen = Screen()
        try:
            with screen, self._naming_files(body), self.server.stream("/v1/chat/completions", body) as events:
                for event in events:
                    for choice in event.get("choices", ()):
                        delta = choice["delta"]
                        reasoning += delta.get("reasoning_content") or ""
                        content += delta.get("content") or ""
                        screen.show(delta, event.get("usage") or {}, choice.get("finish_reason"))
                    if "timings" in event:
                        screen.finish(event)
            is_whole = True
        except KeyboardInterrupt:
            screen.stopped()
            is_whole = False
        self.failed = None
        said = {"role": "assistant", "content": content} | (
            {"reasoning_content": reasoning} if reasoning else {}
        )
        self.messages += [message, said]
        return is_whole

    def described(self) -> dict[str, Any]:
        """Return what the server says of the model."""
        return next((each for each in self.server.models() if each["id"] == self.model), {})

    def efforts(self) -> str:
        """Return the levels of the model in words."""
        reasoning = self.described().get("reasoning") or {}
        return marked_levels(reasoning.get("efforts", ()), reasoning.get("default"))

    def set_effort(self, word: str) -> None:
        """Have answers reasoned about so much from now on. Raises CommandError."""
        check_effort(word, self.model, self.efforts())
        self.effort = word


def check_effort(word: str, model: str, levels: str) -> None:
    """Raise CommandError, naming the model's own levels, if a word is no effort."""
    try:
        parse_effort(word)
    except EffortError:
        raise CommandError(f"{word!r} is no effort; {model} has {levels or 'no levels'}.") from None


def image_part(name: str) -> dict[str, Any]:
    """Return a picture in a file as a part of a message. Raises CommandError."""
    file = Path(name).expanduser()
    kind = mimetypes.guess_type(file.name)[0] or ""
    if not kind.startswith("image/"):
        raise CommandError(f"{file} is no picture, by its name.")
    try:
        if file.stat().st_size > MAX_IMAGE_BYTES:
            raise CommandError(
                f"{file} is larger than {MAX_IMAGE_BYTES >> 20} MB, which is too large to show."
            )
        data = base64.b64encode(file.read_bytes()).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"The picture {file} cannot be read: {reason}.") from None
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
