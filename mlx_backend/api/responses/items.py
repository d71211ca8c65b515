"""Items to messages: what a request sends as `input`, in the form that all of chat/ knows.

    message                                  a message, its parts as texts and images
    reasoning, message, function_call, …     what the model said until somebody else speaks: one message of its
    function_call_output, …                  the result of a call
    compaction                               the summary of what came before, as something that the user says

Reasoning comes back as its text, as `encrypted_content` that was sealed here, or as a summary that is its text. Knows
no tools but their names; raises the ApiError that names the item.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mlx_backend.api.errors import refuse
from mlx_backend.api.openai.chat_body import IMAGE_PART_TYPES, image_source
from mlx_backend.api.sealed_reasoning import NotSealedHere, unseal
from mlx_backend.api.sent import Sent
from mlx_backend.api.tools import flat_name, input_as_arguments
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.conversation.message_parts import REASONING_CONTENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence, Set

    from mlx_backend.images import ImageSource


_ROLES = ("user", "system", "developer", "assistant")
_SUMMARY = "The conversation before this was shortened. This is what you had written down of it:"
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class ItemConversation:
    """The messages of a conversation and its images; `add` items in their order.

    Where it `goes_on` from a response that was made here, a result has to be that of a call in it. Elsewhere a client
    may have left the call out, to send less.
    """

    def __init__(self, *, goes_on: bool = False) -> None:
        self._call_ids: set[str] = set()
        self._goes_on = goes_on
        self.messages: list[dict[str, Any]] = []
        self.images: list[ImageSource] = []
        self.is_last_complete = False
        """Whether the last item is one that was sent, whole: what has an id and is not said to be incomplete."""
        self._open: dict[str, Any] | None = None
        """The model's message that the next item may belong to."""

    def add(self, item: Sent) -> None:
        """Add an item. Raises the ApiError that says what is wrong with it."""
        kind = item.checked_object("an item")["type"]
        self.is_last_complete = bool(item["id"].value) and item["status"].value in (None, "completed")
        match kind.value or "message":
            case "message":
                self._add_message(item)
            case "reasoning":
                if text := _reasoning(item):
                    message = self._own(after=("content", "tool_calls"))
                    message[REASONING_CONTENT] = _joined(message.get(REASONING_CONTENT), text)
            case "function_call":
                self._add_call(item, item["arguments"].text(default="{}"))
            case "custom_tool_call":
                self._add_call(item, input_as_arguments(item["input"].text(default="")))
            case "function_call_output" | "custom_tool_call_output":
                call_id, content = item["call_id"].text(), self._content(item["output"])
                if self._goes_on and call_id not in self._call_ids:
                    raise item["call_id"].wrong_value("no call before it has this id.")
                self._other({"role": "tool", "tool_call_id": call_id, "content": content})
            case "compaction":
                sealed = item["encrypted_content"]
                self._other({"role": "user", "content": f"{_SUMMARY}\n\n{_unsealed(sealed, sealed.text())}"})
            case _:
                raise kind.wrong_value(
                    "there are no items of that type here. Send message, "
                    "reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output or "
                    "compaction.",
                    "unsupported_value",
                )

    def _add_message(self, item: Sent) -> None:
        role = item["role"]
        if role.value not in _ROLES:
            raise role.wrong_value(f"must be one of {', '.join(_ROLES)}.")
        content = self._content(item["content"], shows_images=role.value == "user")
        if role.value != "assistant":
            self._other({"role": role.value, "content": content})
            return
        message = self._own(after=("content", "tool_calls"))
        message["content"] = content

    def _add_call(self, item: Sent, arguments: str) -> None:
        name, call_id = item["name"].text(), item["call_id"].text()
        self._call_ids.add(call_id)
        flat = flat_name(name, item["namespace"].text(default=""))
        call = {"id": call_id, "type": "function", "function": {"name": flat, "arguments": arguments}}
        self._own(after=()).setdefault("tool_calls", []).append(call)

    def _own(self, *, after: Sequence[str]) -> dict[str, Any]:
        """Return the model's message that an item belongs to: a new one, if the open one has any of the fields."""
        if self._open is None or any(field in self._open for field in after):
            self._open = {"role": "assistant"}
            self.messages.append(self._open)
        return self._open

    def _other(self, message: dict[str, Any]) -> None:
        self._open = None
        self.messages.append(message)

    def _content(self, content: Sent, *, shows_images: bool = True) -> Any:
        """Return a content as a text, or as parts where there are images."""
        if content.value is None or isinstance(content.value, str):
            return content.value or ""
        if not isinstance(content.value, list):
            raise content.wrong_type("a text or a list of parts")
        parts = [self._part(part, shows_images=shows_images) for part in content.entries()]
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        return parts[0]["text"] if is_text else parts

    def _part(self, part: Sent, *, shows_images: bool) -> dict[str, Any]:
        kind = part.checked_object("a part")["type"].value
        if kind in _TEXT_PARTS:
            return {"type": "text", "text": part["refusal" if kind == "refusal" else "text"].text()}
        if kind in IMAGE_PART_TYPES and shows_images:
            self.images.append(image_source(part))
            return {"type": "image", "image": len(self.images) - 1}
        if kind in IMAGE_PART_TYPES:
            what = "Only users' messages and tools' results can show an image."
        elif kind == "input_file":
            what = "This model cannot open files. Send the file's text, or its pages as images."
        else:
            what = f"A message cannot have a part of type {excerpt(kind)} here. Remove that part."
        raise refuse(what, part.path, "unsupported_content")


def resolved(
    items: Sequence[Sent], stored: Callable[[Set[str]], Mapping[str, Mapping[str, Any]]]
) -> Iterator[Sent]:
    """Yield the items, each reference as what it refers to.

    Raises the ApiError for one that is not stored, or that comes twice: a short body would be a text of any length.
    """
    references = {item.path: item["id"].text() for item in items if item["type"].value == "item_reference"}
    known = stored(set(references.values())) if references else {}
    used: set[str] = set()
    for item in items:
        if (identifier := references.get(item.path)) is None:
            yield item
            continue
        if identifier in used:
            said = f"the item {excerpt(identifier)} is referred to twice. Send each reference once."
            raise item["id"].refusal(said)
        if identifier not in known:
            said = f"there is no item {excerpt(identifier)} any more. Send the item itself."
            raise item["id"].refusal(said, "item_not_found")
        used.add(identifier)
        yield Sent(known[identifier], item.path)


def _reasoning(item: Sent) -> str:
    """Return the text of a reasoning item. Raises the ApiError for an encrypted text that is not ours."""
    for name in ("content", "summary"):
        parts, sealed = item[name], item["encrypted_content"]
        if not isinstance(parts.value, list | None):
            raise parts.wrong_type("a list of parts")
        if name == "summary" and (text := sealed.text(default="")):
            return _unsealed(sealed, text)
        texts = [text for part in parts.entries() if isinstance(text := part["text"].value, str) and text]
        if texts:
            return "\n\n".join(texts)
    return ""


def _unsealed(sealed: Sent, text: str) -> str:
    try:
        return unseal(text)
    except NotSealedHere:
        raise refuse(
            f"{sealed.path} was not made by this server, or was changed: it cannot be read. Leave the item out.",
            sealed.path,
            "invalid_encrypted_content",
        ) from None


def _joined(first: str | None, second: str) -> str:
    return f"{first}\n\n{second}" if first else second
