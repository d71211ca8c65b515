"""Items to messages: what a request sends as `input`, in the form that all of chat/ knows.

    message                                  a message, its parts as texts and images
    reasoning, message, function_call, …     what the model said until somebody else speaks: one message of its
    function_call_output, …                  the result of a call
    compaction                               the summary of what came before, as something that the user says

Reasoning comes back as its text, as `encrypted_content` that was sealed here, or as a summary that is its text. Knows
no tools but their names; raises the ApiError that names the item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from mlx_backend.api.errors import refuse, wrong_type, wrong_value
from mlx_backend.api.fields import text_of
from mlx_backend.api.openai.chat_body import IMAGE_PART_TYPES, image_source
from mlx_backend.api.sealed_reasoning import NotSealedHere, unseal
from mlx_backend.api.tools import flat_name, input_as_arguments
from mlx_backend.conversation.json_values import excerpt, json_type
from mlx_backend.conversation.message_parts import REASONING_CONTENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set

    from mlx_backend.images import ImageSource


_ROLES = ("user", "system", "developer", "assistant")
_SUMMARY = "The conversation before this was shortened. This is what you had written down of it:"
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class ItemConversation:
    """The messages of a conversation and its images; `add` items in their order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.images: list[ImageSource] = []
        self.is_last_complete = False
        """Whether the last item is one that was sent, whole: what has an id and is not said to be incomplete."""
        self._open: dict[str, Any] | None = None
        """The model's message that the next item may belong to."""

    def add(self, item: Any, where: str) -> None:
        """Add an item. Raises the ApiError that says what is wrong with it; `where` is its path."""
        if not isinstance(item, Mapping):
            raise refuse(f"{where}: an item must be an object, not {json_type(item)}.", where)
        self.is_last_complete = bool(item.get("id")) and item.get("status") in (None, "completed")
        match item.get("type") or "message":
            case "message":
                self._add_message(item, where)
            case "reasoning":
                if text := _reasoning(item, where):
                    message = self._own(after=("content", "tool_calls"))
                    message[REASONING_CONTENT] = _joined(message.get(REASONING_CONTENT), text)
            case "function_call":
                self._add_call(item, text_of(item, "arguments", where, default="{}"), where)
            case "custom_tool_call":
                written = text_of(item, "input", where, default="")
                self._add_call(item, input_as_arguments(written), where)
            case "function_call_output" | "custom_tool_call_output":
                call_id = text_of(item, "call_id", where)
                content = self._content(item.get("output"), f"{where}.output")
                self._other({"role": "tool", "tool_call_id": call_id, "content": content})
            case "compaction":
                text = _unsealed(text_of(item, "encrypted_content", where), where)
                self._other({"role": "user", "content": f"{_SUMMARY}\n\n{text}"})
            case unknown:
                raise wrong_value(
                    f"{where}.type",
                    unknown,
                    "there are no items of that type here. Send message, "
                    "reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output or "
                    "compaction.",
                    "unsupported_value",
                )

    def _add_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _ROLES:
            raise wrong_value(f"{where}.role", role, f"must be one of {', '.join(_ROLES)}.")
        content = self._content(item.get("content"), f"{where}.content", shows_images=role == "user")
        if role != "assistant":
            self._other({"role": role, "content": content})
            return
        message = self._own(after=("content", "tool_calls"))
        message["content"] = content

    def _add_call(self, item: Mapping[str, Any], arguments: str, where: str) -> None:
        name, call_id = text_of(item, "name", where), text_of(item, "call_id", where)
        flat = flat_name(name, text_of(item, "namespace", where, default=""))
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

    def _content(self, content: Any, where: str, *, shows_images: bool = True) -> Any:
        """Return a content as a text, or as parts where there are images."""
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise wrong_type(where, "a text or a list of parts", content)
        parts = [
            self._part(part, f"{where}[{at}]", shows_images=shows_images) for at, part in enumerate(content)
        ]
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts) if len(parts) == 1 else parts
        return parts

    def _part(self, part: Any, where: str, *, shows_images: bool) -> dict[str, Any]:
        if not isinstance(part, Mapping):
            raise refuse(f"{where}: a part must be an object, not {json_type(part)}.", where)
        kind = part.get("type")
        if kind in _TEXT_PARTS:
            return {"type": "text", "text": text_of(part, "refusal" if kind == "refusal" else "text", where)}
        if kind in IMAGE_PART_TYPES:
            if shows_images:
                self.images.append(image_source(part, where))
                return {"type": "image", "image": len(self.images) - 1}
            what = "Only users' messages and tools' results can show an image."
        elif kind == "input_file":
            what = "This model cannot open files. Send the file's text, or its pages as images."
        else:
            what = f"A message cannot have a part of type {excerpt(kind)} here. Remove that part."
        return _unsupported(where, what)


def resolved(
    items: Sequence[Any], stored: Callable[[Set[str]], Mapping[str, Mapping[str, Any]]]
) -> Iterator[Any]:
    """Yield the items, each reference as what it refers to.

    Raises the ApiError for one that is not stored, or that comes twice: a short body would be a text of any length.
    """
    references = {
        at: text_of(item, "id", f"input[{at}]")
        for at, item in enumerate(items)
        if isinstance(item, Mapping) and item.get("type") == "item_reference"
    }
    known = stored(set(references.values())) if references else {}
    used: set[str] = set()
    for at, item in enumerate(items):
        if at in references:
            where, identifier = f"input[{at}]", references[at]
            if identifier in used:
                raise refuse(
                    f"{where}.id: the item {excerpt(identifier)} is referred to twice. Send each reference once.",
                    f"{where}.id",
                )
            used.add(identifier)
            found = known.get(identifier)
            if found is None:
                raise refuse(
                    f"{where}.id: there is no item {excerpt(identifier)} any more. Send the item itself.",
                    f"{where}.id",
                    "item_not_found",
                )
            yield found
        else:
            yield item


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item. Raises the ApiError for an encrypted text that is not ours."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if not isinstance(parts, list | None):
            raise wrong_type(f"{where}.{name}", "a list of parts", parts)
        if name == "summary" and (sealed := text_of(item, "encrypted_content", where, default="")):
            return _unsealed(sealed, where)
        if isinstance(parts, list):
            texts = [part["text"] for part in parts if isinstance(part, Mapping) and _has_text(part)]
            if texts:
                return "\n\n".join(texts)
    return ""


def _unsealed(sealed: str, where: str) -> str:
    try:
        return unseal(sealed)
    except NotSealedHere:
        raise refuse(
            f"{where}.encrypted_content was not made by this server, or was changed: it cannot be read. Leave the item "
            "out.",
            f"{where}.encrypted_content",
            "invalid_encrypted_content",
        ) from None


def _has_text(part: Mapping[str, Any]) -> bool:
    return isinstance(part.get("text"), str) and bool(part["text"])


def _joined(first: str | None, second: str) -> str:
    return f"{first}\n\n{second}" if first else second


def _unsupported(where: str, message: str) -> NoReturn:
    raise refuse(message, where, "unsupported_content")
