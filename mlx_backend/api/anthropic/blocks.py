"""Messages of content blocks to messages in the form that all of chat/ knows.

    text, image, document      parts of the message
    thinking                   the message's reasoning; its signature is ours or the block is refused
    tool_use                   a call
    tool_result                a message of the role `tool`, before what else the message says
    tool_reference             the definition of a deferred tool, where it stands: what came before it stays as it was
    tool_addition, _removal    the same in a message of the role `system`, also of a tool that is defined only there

`cache_control` is no part of a prompt. Raises the ApiError that names the block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_backend.api.anthropic.tools import ClientTool
from mlx_backend.api.errors import refuse, wrong_type, wrong_value
from mlx_backend.api.fields import text_of
from mlx_backend.api.reply_fields import offer
from mlx_backend.api.sealed_reasoning import NotSealedHere, unseal
from mlx_backend.conversation.json_values import excerpt, json_type
from mlx_backend.conversation.message_parts import REASONING_CONTENT
from mlx_backend.images import Detail, ImageSource

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROLES = ("user", "assistant", "system")
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""A line that a client adds to its instructions for its own server. It would differ from session to session."""


_BRIEF = "next_user_message"
"""When a system message is no longer shown that is for one turn."""


def as_object(holder: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """Return a field that is an object, or an empty one. Raises ApiError."""
    value = holder.get(name)
    if value is not None and not isinstance(value, Mapping):
        path = f"{where}.{name}" if where else name
        raise wrong_type(path, "an object", value)
    return value or {}


def system_text(system: str | Sequence[Any] | None) -> str:
    """Return the instructions, without what is not meant for a model. Raises ApiError."""
    blocks = [{"text": system}] if isinstance(system, str) else system or ()
    texts = [_instruction(block, f"system[{at}]") for at, block in enumerate(blocks)]
    return "\n\n".join(filter(None, texts))


def _instruction(block: Any, where: str) -> str:
    if not isinstance(block, Mapping) or not isinstance(block.get("text"), str):
        raise refuse(f"{where}: must be a block with a text; got {excerpt(block)}.", where)
    return _BILLING.sub("", block["text"])


class BlockConversation:
    """The messages of a conversation and its images.

    `tools` are the definitions of the request's tools by name, and of those that messages have `added`; `defined` are
    the names of those that the conversation defines where it names them, and `removed` of those that may not be called
    any more. `effort` is the last that a system message asks for.
    """

    def __init__(self, tools: Mapping[str, dict[str, Any]]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.images: list[ImageSource] = []
        self.tools = dict(tools)
        self.added: set[str] = set()
        self.defined: set[str] = set()
        self.removed: set[str] = set()
        self.effort: Any = None

    def add_all(self, messages: Sequence[Any]) -> None:
        """Add messages. Raises the ApiError that says what is wrong with one of them."""
        users = [
            at for at, each in enumerate(messages) if isinstance(each, Mapping) and each.get("role") == "user"
        ]
        last = max(users, default=-1)
        for at, message in enumerate(messages):
            is_brief = isinstance(message, Mapping) and message.get("clear_at") == _BRIEF
            if not (is_brief and message.get("role") == "system" and at < last):
                self.add(message, f"messages[{at}]")

    def add(self, message: Any, where: str) -> None:
        """Add a message; `where` is its path. Raises ApiError."""
        if not isinstance(message, Mapping):
            raise refuse(f"{where}: a message must be an object, not {json_type(message)}.", where)
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise wrong_value(f"{where}.role", role, "must be user, assistant or system.")
        place = f"{where}.content"
        blocks = _blocks(content, place)
        if role == "assistant":
            self._add_own(blocks, place)
        elif role == "system":
            self._add_system(message, blocks, where)
        else:
            self._add_users(blocks, place)

    def _add_system(self, message: Mapping[str, Any], blocks: Sequence[Any], where: str) -> None:
        if (clear_at := message.get("clear_at")) not in (None, "never", _BRIEF):
            raise wrong_value(f"{where}.clear_at", clear_at, f"must be never or {_BRIEF}.")
        effort = as_object(message, "output_config", where).get("effort")
        self.effort = self.effort if effort is None else effort
        texts = []
        for at, block in enumerate(blocks):
            place = f"{where}.content[{at}]"
            match _kind(block, place):
                case "tool_addition":
                    texts.append(self._addition(block.get("tool"), f"{place}.tool"))
                case "tool_removal":
                    name = self._known_name(block.get("tool"), "name", f"{place}.tool")
                    self.removed.add(name)
                    texts.append(f"This tool cannot be called any more: {name}")
                case _:
                    texts.append(_instruction(block, place))
        if text := "\n\n".join(filter(None, texts)):
            self.messages.append({"role": "system", "content": text})

    def _addition(self, tool: Any, where: str) -> str:
        match tool:
            case {"type": "tool_definition", "definition": definition}:
                place = f"{where}.definition"
                added = ClientTool.parse(definition, place)
                if added.is_hosted:
                    raise refuse(f"{place}.type = {excerpt(added.type)}: this server runs no tools.", place)
                offer(self.tools, added.as_function(), f"{place}.name")
                self.added.add(added.name)
                return self._definition(added.name)
            case _:
                return self._definition(self._known_name(tool, "name", where))

    def _definition(self, name: str) -> str:
        """Return that a tool can be called; its definition once, or a short body would be a text of any length."""
        self.removed.discard(name)
        if name in self.defined:
            return f"This tool can be called now: {name}"
        self.defined.add(name)
        definition = json.dumps(self.tools[name]["function"], ensure_ascii=False)
        return f"This tool can be called now: {definition}"

    def _known_name(self, reference: Any, field: str, where: str) -> str:
        """Return the name of a tool that a block refers to. Raises ApiError where there is none of that name."""
        name = reference.get(field) if isinstance(reference, Mapping) else None
        if not isinstance(name, str) or name not in self.tools:
            raise wrong_value(f"{where}.{field}", name, "there is no such tool in this request's tools.")
        return name

    def _add_own(self, blocks: Sequence[Any], where: str) -> None:
        message: dict[str, Any] = {"role": "assistant"}
        texts: list[str] = []
        reasoning: list[str] = []
        for at, block in enumerate(blocks):
            place = f"{where}[{at}]"
            match _kind(block, place):
                case "text":
                    texts.append(text_of(block, "text", place))
                case "thinking" | "redacted_thinking":
                    reasoning.append(_reasoning(block, place))
                case "tool_use":
                    call = {"name": text_of(block, "name", place), "arguments": _arguments(block, place)}
                    written = {"id": text_of(block, "id", place), "type": "function", "function": call}
                    message.setdefault("tool_calls", []).append(written)
                case kind:
                    _refuse_kind(kind, "an assistant's message", place)
        if any(reasoning):
            message[REASONING_CONTENT] = "\n\n".join(filter(None, reasoning))
        if texts or "tool_calls" not in message:
            message["content"] = "".join(texts)
        self.messages.append(message)

    def _add_users(self, blocks: Sequence[Any], where: str) -> None:
        parts: list[dict[str, Any]] = []
        for at, block in enumerate(blocks):
            place = f"{where}[{at}]"
            if _kind(block, place) == "tool_result":
                content = self._result(block, place)
                call_id = text_of(block, "tool_use_id", place)
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            else:
                parts += self._parts(block, place, "a user's message")
        if parts:
            self.messages.append({"role": "user", "content": _joined(parts)})

    def _result(self, block: Mapping[str, Any], where: str) -> Any:
        place = f"{where}.content"
        parts = [
            part
            for at, each in enumerate(_blocks(block.get("content"), place))
            for part in self._parts(each, f"{place}[{at}]", "a tool's result")
        ]
        if block.get("is_error") is True and not _says_error(parts):
            parts = [{"type": "text", "text": "Error: "}, *parts]
        return _joined(parts)

    def _parts(self, block: Any, where: str, holder: str) -> list[dict[str, Any]]:
        match _kind(block, where):
            case "text":
                return [{"type": "text", "text": text_of(block, "text", where)}]
            case "image":
                return [self._image(block, where)]
            case "document":
                return self._document(block, where)
            case "search_result":
                title, content = block.get("title"), block.get("content")
                found = content if isinstance(content, list) else []
                texts = [each.get("text") for each in found if isinstance(each, Mapping)]
                said = [text for text in (title, *texts) if isinstance(text, str)]
                return [{"type": "text", "text": "\n".join(said)}]
            case "tool_reference":
                text = self._definition(self._known_name(block, "tool_name", where))
                return [{"type": "text", "text": text}]
            case kind:
                _refuse_kind(kind, holder, where)
        return []

    def _image(self, block: Mapping[str, Any], where: str) -> dict[str, Any]:
        match block.get("source"):
            case {"type": "base64", "data": str(data), **source} if data:
                url = f"data:{source.get('media_type') or 'image/png'};base64,{data}"
            case {"type": "url", "url": str(url)} if url:
                pass
            case other:
                raise wrong_value(
                    f"{where}.source",
                    other,
                    "send "
                    '{"type": "base64", "media_type": "image/png", "data": …} or {"type": "url", "url": …}.',
                    "invalid_image",
                )
        self.images.append(ImageSource(where=where, url=url, detail=Detail.AUTO))
        return {"type": "image", "image": len(self.images) - 1}

    def _document(self, block: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        head = [f"# {block['title']}\n\n"] if isinstance(block.get("title"), str) else []
        match block.get("source"):
            case {"type": "text", "data": str(text)}:
                return [{"type": "text", "text": "".join([*head, text])}]
            case {"type": "content", "content": str(text)}:
                return [{"type": "text", "text": "".join([*head, text])}]
            case {"type": "content", "content": list(content)}:
                return [
                    part
                    for at, each in enumerate(content)
                    for part in self._parts(each, f"{where}.source.content[{at}]", "a document")
                ]
        raise refuse(
            "This model cannot open files. Send the document's text as a source of type text, or its pages as images.",
            f"{where}.source",
            "unsupported_content",
        )


def _blocks(content: Any, where: str) -> Sequence[Any]:
    """Return a content as blocks: a text is one."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content or ""}]
    if not isinstance(content, list):
        raise wrong_type(where, "a text or a list of blocks", content)
    return content


def _joined(parts: list[dict[str, Any]]) -> Any:
    """Return one text where there are no images."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _says_error(parts: Sequence[Mapping[str, Any]]) -> bool:
    return bool(parts) and str(parts[0].get("text", "")).lower().startswith("error")


def _kind(block: Any, where: str) -> str:
    if not isinstance(block, Mapping):
        raise refuse(f"{where}: a block must be an object, not {json_type(block)}.", where)
    kind = block.get("type")
    if not isinstance(kind, str):
        raise wrong_type(f"{where}.type", "a text", kind)
    return kind


def _refuse_kind(kind: str, holder: str, where: str) -> None:
    raise wrong_value(
        f"{where}.type", kind, f"there is no such block in {holder} here. Remove it.", "unsupported_content"
    )


def _reasoning(block: Mapping[str, Any], where: str) -> str:
    """Return the reasoning of a block: its text, or what its signature holds where that was left out."""
    is_redacted = block["type"] == "redacted_thinking"
    field = "data" if is_redacted else "signature"
    sealed, text = block.get(field), "" if is_redacted else block.get("thinking")
    if not isinstance(text, str):
        raise wrong_type(f"{where}.thinking", "a text", text)
    if sealed is None or sealed == "":  # a client that has not kept it
        return text
    if not isinstance(sealed, str):
        raise wrong_type(f"{where}.{field}", "a text", sealed)
    try:
        return unseal(sealed, text)
    except NotSealedHere:
        # By these words a client knows that it has to leave such blocks out: another server has made them.
        raise refuse(
            f"Invalid `{field}` in `{block['type']}` block: it was not made by this server, or its text was "
            "changed. Leave the block out.",
            f"{where}.{field}",
            "invalid_signature",
        ) from None


def _arguments(block: Mapping[str, Any], where: str) -> str:
    given = block.get("input")
    if given is None:
        return "{}"
    if isinstance(given, str):
        return given
    if not isinstance(given, Mapping):
        raise wrong_type(f"{where}.input", "an object", given)
    return json.dumps(given, ensure_ascii=False)
