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
from typing import TYPE_CHECKING, Any

from mlx_backend.api.anthropic.tools import ClientTool
from mlx_backend.api.errors import refuse
from mlx_backend.api.reply_fields import offer
from mlx_backend.api.sealed_reasoning import NotSealedHere, unseal
from mlx_backend.api.sent import Sent
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.conversation.message_parts import REASONING_CONTENT
from mlx_backend.images import Detail, ImageSource

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.api.errors import ApiError

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""A line that a client adds to its instructions for its own server. It would differ from session to session."""


_BRIEF = "next_user_message"
"""When a system message is no longer shown that is for one turn."""


def system_text(system: Sent) -> str:
    """Return the instructions, without what is not meant for a model. Raises ApiError."""
    return "\n\n".join(filter(None, map(_instruction, _blocks(system))))


def _instruction(block: Sent) -> str:
    text = block["text"].value
    if not isinstance(text, str):
        raise block.refusal(f"must be a block with a text; got {excerpt(block.value)}.")
    return _BILLING.sub("", text)


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

    def add_all(self, messages: Sequence[Sent]) -> None:
        """Add messages. Raises the ApiError that says what is wrong with one of them."""
        last = max((at for at, each in enumerate(messages) if each["role"].value == "user"), default=-1)
        for at, message in enumerate(messages):
            is_brief = message["role"].value == "system" and message["clear_at"].value == _BRIEF
            if not is_brief or at > last:
                self.add(message)

    def add(self, message: Sent) -> None:
        """Add a message. Raises ApiError."""
        match message.checked_object("a message")["role"]:
            case Sent("assistant"):
                self._add_own(_blocks(message["content"]))
            case Sent("system"):
                self._add_system(message, _blocks(message["content"]))
            case Sent("user"):
                self._add_users(_blocks(message["content"]))
            case role:
                raise role.wrong_value("must be user, assistant or system.")

    def _add_system(self, message: Sent, blocks: Sequence[Sent]) -> None:
        if (clear_at := message["clear_at"]).value not in (None, "never", _BRIEF):
            raise clear_at.wrong_value(f"must be never or {_BRIEF}.")
        effort = message["output_config"].object_or_empty().get("effort")
        self.effort = self.effort if effort is None else effort
        texts = []
        for block in blocks:
            match _kind(block):
                case "tool_addition":
                    texts.append(self._addition(block["tool"]))
                case "tool_removal":
                    name = self._known_name(block["tool"]["name"])
                    self.removed.add(name)
                    texts.append(f"This tool cannot be called any more: {name}")
                case _:
                    texts.append(_instruction(block))
        if text := "\n\n".join(filter(None, texts)):
            self.messages.append({"role": "system", "content": text})

    def _addition(self, tool: Sent) -> str:
        match tool.value:
            case {"type": "tool_definition", "definition": _}:
                definition = tool["definition"]
                added = definition.parsed(ClientTool)
                if added.is_hosted:
                    raise definition["type"].wrong_value("this server runs no tools.")
                offer(self.tools, added.as_function(), definition, may_repeat=True)
                self.added.add(added.name)
                return self._definition(added.name)
            case _:
                return self._definition(self._known_name(tool["name"]))

    def _definition(self, name: str) -> str:
        """Return that a tool can be called; its definition once, or a short body would be a text of any length."""
        self.removed.discard(name)
        if name in self.defined:
            return f"This tool can be called now: {name}"
        self.defined.add(name)
        definition = json.dumps(self.tools[name]["function"], ensure_ascii=False)
        return f"This tool can be called now: {definition}"

    def _known_name(self, name: Sent) -> str:
        """Return the name of a tool that a block refers to. Raises ApiError where there is none of that name."""
        if not isinstance(name.value, str) or name.value not in self.tools:
            raise name.wrong_value("there is no such tool in this request's tools.")
        return name.value

    def _add_own(self, blocks: Sequence[Sent]) -> None:
        message: dict[str, Any] = {"role": "assistant"}
        texts: list[str] = []
        reasoning: list[str] = []
        for block in blocks:
            match _kind(block):
                case "text":
                    texts.append(block["text"].text())
                case "thinking" | "redacted_thinking":
                    reasoning.append(_reasoning(block))
                case "tool_use":
                    call = {"name": block["name"].text(), "arguments": _arguments(block["input"])}
                    written = {"id": block["id"].text(), "type": "function", "function": call}
                    message.setdefault("tool_calls", []).append(written)
                case _:
                    raise _unknown(block, "an assistant's message")
        if any(reasoning):
            message[REASONING_CONTENT] = "\n\n".join(filter(None, reasoning))
        if texts or "tool_calls" not in message:
            message["content"] = "".join(texts)
        self.messages.append(message)

    def _add_users(self, blocks: Sequence[Sent]) -> None:
        parts: list[dict[str, Any]] = []
        for block in blocks:
            if _kind(block) == "tool_result":
                content = self._result(block)
                call_id = block["tool_use_id"].text()
                self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
            else:
                parts += self._parts(block, "a user's message")
        if parts:
            self.messages.append({"role": "user", "content": _joined(parts)})

    def _result(self, block: Sent) -> Any:
        parts = self._all_parts(_blocks(block["content"]), "a tool's result")
        if block["is_error"].value is True and not _says_error(parts):
            parts = [_text("Error: "), *parts]
        return _joined(parts)

    def _all_parts(self, blocks: Sequence[Sent], holder: str) -> list[dict[str, Any]]:
        return [part for block in blocks for part in self._parts(block, holder)]

    def _parts(self, block: Sent, holder: str) -> list[dict[str, Any]]:
        match _kind(block):
            case "text":
                return [_text(block["text"].text())]
            case "image":
                return [self._image(block)]
            case "document":
                return self._document(block)
            case "search_result":
                found = (block["title"], *(each["text"] for each in block["content"].entries()))
                return [_text("\n".join(each.value for each in found if isinstance(each.value, str)))]
            case "tool_reference":
                return [_text(self._definition(self._known_name(block["tool_name"])))]
            case _:
                raise _unknown(block, holder)

    def _image(self, block: Sent) -> dict[str, Any]:
        match block["source"]:
            case Sent({"type": "base64", "data": str(data), **source}) if data:
                url = f"data:{source.get('media_type') or 'image/png'};base64,{data}"
            case Sent({"type": "url", "url": str(url)}) if url:
                pass
            case other:
                raise other.wrong_value(
                    "send "
                    '{"type": "base64", "media_type": "image/png", "data": …} or {"type": "url", "url": …}.',
                    "invalid_image",
                )
        self.images.append(ImageSource(where=block.path, url=url, detail=Detail.AUTO))
        return {"type": "image", "image": len(self.images) - 1}

    def _document(self, block: Sent) -> list[dict[str, Any]]:
        title, source = block["title"].value, block["source"]
        head = f"# {title}\n\n" if isinstance(title, str) else ""
        match source.value:
            case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
                return [_text(head + text)]
            case {"type": "content", "content": list()}:
                return self._all_parts(source["content"].entries(), "a document")
        raise refuse(
            "This model cannot open files. Send the document's text as a source of type text, or its pages as images.",
            source.path,
            "unsupported_content",
        )


def _blocks(content: Sent) -> Sequence[Sent]:
    """Return a content as blocks: a text is one."""
    match content.value:
        case None | str():
            return Sent([_text(content.value or "")], content.path).entries()
        case list():
            return content.entries()
    raise content.wrong_type("a text or a list of blocks")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _joined(parts: list[dict[str, Any]]) -> Any:
    """Return one text where there are no images."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _says_error(parts: Sequence[Mapping[str, Any]]) -> bool:
    return bool(parts) and str(parts[0].get("text", "")).lower().startswith("error")


def _kind(block: Sent) -> str:
    match block.checked_object("a block")["type"]:
        case Sent(str(kind)):
            return kind
        case other:
            raise other.wrong_type("a text")


def _unknown(block: Sent, holder: str) -> ApiError:
    remedy = f"there is no such block in {holder} here. Remove it."
    return block["type"].wrong_value(remedy, "unsupported_content")


def _reasoning(block: Sent) -> str:
    """Return the reasoning of a block: its text, or what its signature holds where that was left out."""
    kind = block["type"].value
    is_redacted = kind == "redacted_thinking"
    field = "data" if is_redacted else "signature"
    sealed, text = block[field], "" if is_redacted else block["thinking"].value
    if not isinstance(text, str):
        raise block["thinking"].wrong_type("a text")
    if sealed.value is None or sealed.value == "":  # a client that has not kept it
        return text
    if not isinstance(sealed.value, str):
        raise sealed.wrong_type("a text")
    try:
        return unseal(sealed.value, text)
    except NotSealedHere:
        # By these words a client knows that it has to leave such blocks out: another server has made them.
        raise refuse(
            f"Invalid `{field}` in `{kind}` block: it was not made by this server, or its text was "
            "changed. Leave the block out.",
            sealed.path,
            "invalid_signature",
        ) from None


def _arguments(given: Sent) -> str:
    if isinstance(given.value, str):
        return given.value
    return json.dumps(given.object_or_empty(), ensure_ascii=False)
