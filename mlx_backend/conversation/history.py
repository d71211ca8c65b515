"""Make a client's history safe to render again: one canonical form of everything clients send.

The canonical form is OpenAI's: the system messages at the beginning as one, later ones in their places, texts as
strings (as parts where there are images), `tool_calls` with string arguments and unique ids, each tool result after
its call. Reasoning stays, as `reasoning_content`, in a tool loop that has not ended in an answer and on a last
assistant message that is to be continued; that of answered turns, as the family's policy says.
Knows no template: `template.py` takes the next step. Nothing is changed in place, and only what cannot be a
conversation at all is refused.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.base import HistoryPolicy
from mlx_backend.conversation.echo import Display, Echo, parse_echo, parse_reasoning
from mlx_backend.conversation.json_arguments import repair_arguments
from mlx_backend.conversation.json_values import excerpt, json_type
from mlx_backend.conversation.message_parts import (
    MESSAGE_FIELDS,
    PART_TYPES,
    REASONING_CONTENT,
    SEALED_PART_TYPES,
    has_images,
    is_image,
)
from mlx_backend.conversation.result_media import result_text, with_media_as_parts
from mlx_backend.conversation.tools import ToolSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mlx_backend.conversation.dialects import Dialect


class CallResults:
    """The calls of a history, by our ids, and their results.

    Clients give calls the ids they like, several times the same, or none; a result may name an id, a tool or neither. A
    result belongs after its call, whatever came between. Every answer takes constant time, so that a history of many
    calls is read in time proportional to its length.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._results: dict[str, list[dict[str, Any]]] = {}  # by call: those of its message, in their order
        self._latest: dict[str, str] = {}  # a client's id -> the last call that had it
        self._unanswered: set[str] = set()
        self._by_client_id: defaultdict[str, deque[str]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[str]] = defaultdict(deque)
        self._in_order: deque[str] = deque()

    def begin_message(self) -> list[dict[str, Any]]:
        """Begin a message with calls: those before it are not waited for. Return where its results will be."""
        self._unanswered.clear()
        self._by_client_id.clear()
        self._by_name.clear()
        self._in_order.clear()
        return []

    def new_id(self, wanted: str) -> str:
        """Return an id that no call has: the client's, if it is one."""
        unique, count = wanted, len(self._names)
        while not unique or unique in self._names:
            count += 1
            unique = f"call_{count}"
        return unique

    def add_call(self, identifier: str, client_id: str, name: str, results: list[dict[str, Any]]) -> None:
        """Note a call; `results` is what `begin_message` returned for its message."""
        self._names[identifier] = name
        self._results[identifier] = results
        self._unanswered.add(identifier)
        self._by_name[name].append(identifier)
        self._in_order.append(identifier)
        if client_id:
            self._latest[client_id] = identifier
            self._by_client_id[client_id].append(identifier)

    def call_of(self, client_id: str, name: str) -> str:
        """Return the call that a result answers: by id, else by name, else the first without a result; "" for none."""
        return (
            (self._first(self._by_client_id, client_id) or self._latest.get(client_id, ""))
            or self._first(self._by_name, name)
            or self._first_of(self._in_order)
        )

    def add_result(self, identifier: str, name: str, content: Any) -> None:
        """Put a result after the message of its call."""
        self._unanswered.discard(identifier)
        named = self._names[identifier] or name
        result = {"role": "tool", "tool_call_id": identifier, "name": named, "content": content}
        self._results[identifier].append(result)

    def with_results(self, messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield messages, each with the results that belong after it, in the order of its calls."""
        for message in messages:
            yield message
            if calls := message.get("tool_calls"):
                places = {call["id"]: place for place, call in enumerate(calls)}
                yield from sorted(
                    self._results[calls[0]["id"]], key=lambda each: places[each["tool_call_id"]]
                )

    def _first(self, queues: defaultdict[str, deque[str]], key: str) -> str:
        return self._first_of(queues[key]) if key in queues else ""

    def _first_of(self, queue: deque[str]) -> str:
        while queue and queue[0] not in self._unanswered:
            queue.popleft()
        return queue[0] if queue else ""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles a message may have; `function` is the old name of `tool`."""

_TEXT_PARTS = ("text", "input_text", "output_text")


class HistoryError(ValueError):
    """What was sent is not a conversation. `param` names the field."""

    def __init__(self, param: str, problem: str) -> None:
        self.param = param
        super().__init__(f"{param}: {problem}")


DEFAULT_POLICY = HistoryPolicy(keeps_answered_turns=False)
"""For readers of whom nothing is known: what every model can do without is dropped."""


def sanitise(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    policy: HistoryPolicy | None = None,
    dialect: Dialect | None = None,
) -> list[dict[str, Any]]:
    """Bring a history to its canonical form. Raises HistoryError; changes nothing in place.

    `tools` are the request's tools (OpenAI's objects): raw calls in echoed text are matched against their names.
    `dialect` is the model's: its own markup is read, too. Which reasoning stays is its policy, or the one given.
    """
    _check(messages)
    known = ToolSet(tools or ())
    policy = policy or (dialect.history if dialect is not None else DEFAULT_POLICY)
    history = _History(known if known.names else ToolSet(None), policy, dialect)
    for message in with_media_as_parts(messages):
        history.add(message)
    return history.finish()


def _check(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise HistoryError("messages", f"must be a list of messages, not {json_type(messages)}")
    if not messages:
        raise HistoryError("messages", "is empty; send at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise HistoryError(f"messages[{index}]", f"must be an object, not {json_type(message)}")
        role = message.get("role")
        if role not in ROLES:
            known = ", ".join(ROLES)
            given = "is missing" if role is None else f"{excerpt(role)} is not a role"
            raise HistoryError(f"messages[{index}].role", f"{given}; use one of {known}")


class _History:
    """The canonical history being built, message by message."""

    def __init__(self, tools: ToolSet, policy: HistoryPolicy, dialect: Dialect | None) -> None:
        self.tools = tools
        self.dialect = dialect
        self.policy = policy
        self.system: dict[str, None] = {}  # the texts, each once
        self.messages: list[dict[str, Any]] = []  # without results
        self.reasoning: list[str] = []  # of assistant messages just now that hold nothing else
        self.calls = CallResults()

    def add(self, message: Mapping[str, Any]) -> None:
        if message["role"] != "assistant":
            self._append_reasoning()
        match message["role"]:
            case "system" | "developer":
                text = text_of(message.get("content"))
                if not text.strip() or text in self.system:
                    return
                if self.messages:
                    self.messages.append({"role": "system", "content": text})
                else:
                    self.system[text] = None
            case "user":
                self._add_user(message.get("content"))
            case "assistant":
                self._add_assistant(message)
            case _:
                self._add_result(
                    _result_content(message.get("content")),
                    _identifier(message.get("tool_call_id")),
                    tool_name(message.get("name")),
                )

    def _add_user(self, content: Any) -> None:
        results, rest = _take_parts(content, "tool_result")
        for result in results:
            self._add_result(text_of(result.get("content")), _identifier(result.get("tool_use_id")), "")
        if rest or not results:
            self.messages.append({"role": "user", "content": _user_content(rest)})

    # -- assistant -------------------------------------------------------------------------------

    def _add_assistant(self, message: Mapping[str, Any]) -> None:
        posted, content = _take_parts(message.get("content"), "tool_use")
        calls = list(_posted_calls(message, posted))
        text = text_of(content) or text_of(message.get("refusal"))
        segments = _without_displays_of(calls, parse_echo(text, self.tools, self.dialect))
        stated = _stated_reasoning(message, self.dialect)
        for index, segment in enumerate(segments):
            last = index == len(segments) - 1
            reasoning = _join_distinct(
                [stated if index == 0 else "", parse_reasoning(segment.reasoning, self.dialect)]
            )
            if segment.display is not None:
                self._add_display(reasoning, segment.content, segment.display)
            else:
                echoed = [(call.id, call.name, _arguments(call.arguments)) for call in segment.tool_calls]
                self._append_assistant(reasoning, segment.content, (calls or echoed) if last else echoed)

    def _append_assistant(self, reasoning: str, content: str, calls: Sequence[tuple[str, str, str]]) -> None:
        if reasoning:
            self._note_reasoning(reasoning)
        if not content and not calls:
            return  # some clients send reasoning as a message of its own, before what it led to
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message[REASONING_CONTENT] = "\n\n".join(self.reasoning)
            self.reasoning = []
        if calls:
            message["tool_calls"] = self._calls(calls)
        if _has_substance(message):
            self.messages.append(message)

    def _note_reasoning(self, reasoning: str) -> None:
        """Note reasoning, once: clients send it again with what it led to."""
        last = self.reasoning[-1] if self.reasoning else None
        if last is not None and last in reasoning:
            self.reasoning[-1] = reasoning
        elif last is None or reasoning not in last:
            self.reasoning.append(reasoning)

    def _append_reasoning(self) -> None:
        """Append reasoning that led to nothing, as a message of its own."""
        if self.reasoning:
            reasoning = "\n\n".join(self.reasoning)
            self.messages.append({"role": "assistant", "content": "", REASONING_CONTENT: reasoning})
            self.reasoning = []

    def _calls(self, calls: Iterable[tuple[str, str, str]]) -> list[dict[str, Any]]:
        """Make the calls of one message, with ids that no other call has."""
        results = self.calls.begin_message()
        made: list[dict[str, Any]] = []
        for client_id, written, arguments in calls:
            name = tool_name(written) or "tool"
            if name not in self.tools.names:
                name = self.tools.find_prefix(name) or name  # a content type is glued to it
            identifier = self.calls.new_id(client_id)
            self.calls.add_call(identifier, client_id, name, results)
            function = {"name": name, "arguments": arguments}
            made.append({"id": identifier, "type": "function", "function": function})
        return made

    def _add_display(self, reasoning: str, content: str, display: Display) -> None:
        """Add a call that was displayed inside an answer, and its result."""
        self._append_assistant(reasoning, content, [(display.id, display.call.name, display.call.arguments)])
        if display.result is not None:
            self._add_result(result_text(display.result), display.id, display.call.name)

    # -- tool results ----------------------------------------------------------------------------

    def _add_result(self, content: Any, client_id: str, name: str) -> None:
        """Put a result after its call."""
        identifier = self.calls.call_of(client_id, name)
        if not identifier:
            # A result without a call (the client cut the history): the call it answers is put back before it.
            calls = self._calls([(client_id, name, "{}")])
            self.messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            identifier = calls[0]["id"]
        self.calls.add_result(identifier, name, content)

    # -- the end ---------------------------------------------------------------------------------

    def finish(self) -> list[dict[str, Any]]:
        """Apply the policy to reasoning and put the first system message before everything else."""
        self._append_reasoning()
        messages = list(self.calls.with_results(self.messages))
        last = len(messages) - 1
        answered = -1
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and "tool_calls" not in message and index != last:
                answered = index
        remaining: list[dict[str, Any]] = []
        for index, message in enumerate(messages):
            if index <= answered and not (
                self.policy.keeps_answered_turns and (message["content"] or "tool_calls" in message)
            ):
                message.pop(REASONING_CONTENT, None)
            if message["role"] == "assistant" and not _has_substance(message):
                continue  # it held nothing but reasoning
            remaining.append(message)
        # What stood before a system message may be gone: then it belongs to the first one.
        others = (at for at, message in enumerate(remaining) if message["role"] != "system")
        first = next(others, len(remaining))
        self.system |= dict.fromkeys(message["content"] for message in remaining[:first])
        joined = "\n\n".join(self.system)
        repeated = {*self.system, joined}
        remaining = [
            message
            for message in remaining[first:]
            if message["role"] != "system" or message["content"] not in repeated
        ]
        system = [{"role": "system", "content": joined}] if self.system else []
        # Templates cannot render an empty list: where only empty messages were sent, there is an empty question.
        return [*system, *remaining] or [{"role": "user", "content": ""}]


def _has_substance(message: Mapping[str, Any]) -> bool:
    return bool(message["content"].strip() or message.get(REASONING_CONTENT) or message.get("tool_calls"))


# -- texts, names, calls: every shape a client may use ---------------------------------------------


def text_of(content: Any) -> str:
    """Return the text of a message's content: a string, a list of parts, null, or anything else as JSON."""
    match content:
        case None:
            return ""
        case str():
            return content
        case list() | tuple():
            return "\n".join(text for text in map(_part_text, content) if text)
        case Mapping() if isinstance(content.get("text"), str):
            return _part_text(content)
        case _:
            return json.dumps(content, ensure_ascii=False, default=str)


def _part_text(part: Any) -> str:
    match part:
        case None:
            return ""
        case str():
            return part
        case {"type": str(kind)} if kind in PART_TYPES or kind in SEALED_PART_TYPES:
            return ""  # reasoning is collected elsewhere
        case {"text": str(text)}:
            return text
        case {"refusal": str(text)}:
            return text
        case _:
            return json.dumps(part, ensure_ascii=False, default=str)


def _user_content(content: Any) -> Any:
    """Return a user's content: as text, or as a list of parts if one of them is not text."""
    if isinstance(content, list) and any(map(_is_medium, content)):
        return _as_parts(content, _is_medium)
    return text_of(content)


def _is_medium(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") not in _TEXT_PARTS and "text" not in part


def _result_content(content: Any) -> Any:
    """Return a tool's result: as text, or as a list of parts if images are among them."""
    return _as_parts(content, is_image) if has_images(content) else text_of(content)


def _as_parts(content: Sequence[Any], is_kept: Callable[[Any], bool]) -> list[Any]:
    """Return a content as parts: those that are kept as they are, all else as texts."""
    parts: list[Any] = []
    for part in content:
        if is_kept(part):
            parts.append(part)
        elif text := _part_text(part):
            parts.append({"type": "text", "text": text})
    return parts


def _stated_reasoning(message: Mapping[str, Any], dialect: Dialect | None) -> str:
    """Return the reasoning a message has in a field of its own, whatever the field is called."""
    found = [_reasoning_text(message.get(field)) for field in MESSAGE_FIELDS]
    details = message.get("reasoning_details")
    if isinstance(details, list):
        found.append("".join(_reasoning_text(detail) for detail in details))
    content = message.get("content")
    if isinstance(content, list):
        parts = (p for p in content if isinstance(p, Mapping) and p.get("type") in PART_TYPES)
        found.append("\n\n".join(_reasoning_text(part) for part in parts))
    return _join_distinct(parse_reasoning(text, dialect) for text in found)


def _reasoning_text(value: Any) -> str:
    match value:
        case str():
            return value
        case (
            {"text": str(text)} | {"thinking": str(text)} | {"reasoning": str(text)} | {"content": str(text)}
        ):
            return text
        case {"summary": str(text)}:
            return text
        case list():
            return "".join(map(_reasoning_text, value))
        case _:
            return ""


def _join_distinct(texts: Iterable[str]) -> str:
    """Join texts, each only once: clients send the same reasoning under several names."""
    kept: list[str] = []
    for text in texts:
        stripped = text.strip()
        if stripped and not any(stripped in other for other in kept):
            kept = [other for other in kept if other not in stripped] + [stripped]
    return "\n\n".join(kept)


def _take_parts(content: Any, kind: str) -> tuple[list[Mapping[str, Any]], Any]:
    """Split the parts of one type from a content: Anthropic's clients put calls and results among the texts."""
    if not isinstance(content, list):
        return [], content
    taken: list[Mapping[str, Any]] = []
    others: list[Any] = []
    for part in content:
        (taken if isinstance(part, Mapping) and part.get("type") == kind else others).append(part)
    return taken, others if taken else content


def _without_displays_of(calls: Iterable[tuple[str, str, str]], segments: list[Echo]) -> list[Echo]:
    """Drop the displays of calls that the message holds as calls too (older versions of Open WebUI)."""
    posted = {identifier for identifier, _, _ in calls}
    kept: list[Echo] = []
    for segment in segments:
        if kept and kept[-1].display is not None and kept[-1].display.id in posted:
            before = kept.pop()
            reasoning = "\n\n".join(filter(None, (before.reasoning, segment.reasoning)))
            content = "\n\n".join(filter(None, (before.content, segment.content)))
            segment = replace(segment, reasoning=reasoning, content=content)
        kept.append(segment)
    return kept


def _posted_calls(
    message: Mapping[str, Any], parts: Iterable[Mapping[str, Any]]
) -> Iterable[tuple[str, str, str]]:
    """Yield (id, name, arguments) of a message's calls: today's shape, a flat one, the old `function_call`, parts."""
    posted = message.get("tool_calls")
    entries: list[Any] = (
        [posted] if isinstance(posted, Mapping) else posted if isinstance(posted, list) else []
    )
    entries = [*entries, *({**part, "arguments": part.get("input")} for part in parts)]
    if isinstance(message.get("function_call"), Mapping):
        entries.append({"function": message["function_call"]})
    for entry in entries:
        if not isinstance(entry, Mapping):
            continue
        function = entry.get("function")
        if not isinstance(function, Mapping):
            function = entry
        name = tool_name(function.get("name"))
        if name or function.get("arguments"):
            yield _identifier(entry.get("id")), name, _arguments(function.get("arguments"))


def _identifier(value: Any) -> str:
    return str(value) if isinstance(value, str | int) and value != "" else ""


def _arguments(arguments: Any) -> str:
    """Return arguments as JSON text, as on the wire; what cannot be repaired stays as the model wrote it."""
    written = (
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    )
    return repair_arguments(written)


def tool_name(name: Any) -> str:
    """Return a tool's bare name, without `functions.` and without what a model glued to its end."""
    if not isinstance(name, str):
        return ""
    *_, addressed = name.rpartition("to=")
    if addressed != name:  # a whole header was taken for the name
        name = addressed.strip().partition(" ")[0]
    return re.sub(r"^(?:functions\.)*", "", name.strip()).partition("<|")[0].strip()
