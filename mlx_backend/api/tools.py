"""The tools of a request, of several kinds, as the functions that models know; and their calls as clients know them.

    function                 {"type": "function", "name": …, "parameters": …}
    namespace                functions and custom tools in a group: `ns` and `f` ─▶ the function `ns__f`
    custom                   a tool whose input is a text: a function with the one parameter `input`
    any other (web_search)   runs at OpenAI: it is left out, and named

This is how the Responses API writes them. Chat Completions has one level more, named after the type: {"type":
"function", "function": {"name": …}}. Both forms are read. A call goes back under the name and in the kind that the
client knows. Knows no items and no events.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from mlx_backend.api.fields import Lenient
from mlx_backend.api.reply_fields import offer
from mlx_backend.api.sent import Sent
from mlx_backend.chat.request import InputGrammar, ToolChoice
from mlx_backend.conversation.json_values import excerpt

if TYPE_CHECKING:
    from collections.abc import Iterator

INPUT = "input"
"""The one parameter of the function that a custom tool becomes."""
SEPARATOR = "__"
"""Between a namespace and the name of a tool in it."""

type Name = Annotated[str, Field(min_length=1, max_length=256)]


def unnested(written: Sent) -> Sent:
    """Return an object without the level that Chat Completions has below its type; any other value as it is."""
    if not isinstance(written.value, Mapping):
        return written
    kind = written["type"].value
    if kind is None and ("function" in written.value or "name" in written.value):
        kind = "function"
    inner = written[kind] if isinstance(kind, str) else written
    holder = inner if isinstance(inner.value, Mapping) else written
    return Sent({**holder.value, "type": kind}, holder.path)


def echoed(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a response repeats it: what a function does not have is null there."""
    tool = unnested(Sent(written)).value
    absent = ("description", "parameters", "strict") if tool["type"] == "function" else ()
    return {**dict.fromkeys(absent), **tool}


class GrammarFormat(Lenient):
    """What the input of a custom tool is held to."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(max_length=100_000)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _unnested(cls, written: Any) -> Any:
        return unnested(Sent(written)).value


class FunctionTool(Lenient):
    """A function."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Lenient):
    """A tool whose input is a text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: GrammarFormat | None = None


class NamespaceTool(Lenient):
    """Tools under a common name."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[Any]


type KnownTool = Annotated[FunctionTool | CustomTool | NamespaceTool, Field(discriminator="type")]

_KINDS: Mapping[str, type[FunctionTool | CustomTool | NamespaceTool]] = {
    "function": FunctionTool,
    "custom": CustomTool,
    "namespace": NamespaceTool,
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a client calls a tool, and of which kind it is."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def for_model(self) -> str:
        """The name of the function that the model knows."""
        return flat_name(self.name, self.namespace)

    @property
    def kind(self) -> str:
        """Its type."""
        return "custom" if self.is_custom else "function"

    @property
    def call_type(self) -> str:
        """The type of the items that are its calls."""
        return "custom_tool_call" if self.is_custom else "function_call"

    @property
    def call_event(self) -> str:
        """What the events with a call's text are called."""
        return f"{self.call_type}_{'input' if self.is_custom else 'arguments'}"

    def text(self) -> Arguments:
        """Return what reads the text that a call is given, as it grows."""
        return InputText() if self.is_custom else Arguments()


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that a tool in a namespace is to the model."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(SEPARATOR) else f"{namespace}{SEPARATOR}{name}"


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request: the functions, and the names that the client knows by the model's."""

    functions: Sequence[Mapping[str, Any]] = ()
    paths: Sequence[str] = ()
    """The request's fields that describe the functions."""
    names: Mapping[str, ToolName] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    grammars: Mapping[str, InputGrammar] = field(default_factory=dict)
    unknown: Sequence[str] = ()
    """What means nothing here: fields of tools, and types of tools that run at OpenAI."""

    @classmethod
    def parse(cls, written: Any) -> Self | None:
        """Check the `tools` of a request; of kinds that are not known only that they are tools. Raises ApiError."""
        return cls._of(written, leaves_out_others=True)

    @classmethod
    def parse_functions(cls, written: Any) -> Self | None:
        """The same where there are functions and custom tools only."""
        return cls._of(written, leaves_out_others=False)

    @classmethod
    def _of(cls, written: Any, *, leaves_out_others: bool) -> Self | None:
        if written is None:
            return None
        if not isinstance(written, list):
            raise PydanticCustomError("tools", "must be a list of tools")
        functions: dict[str, dict[str, Any]] = {}
        paths: dict[str, str] = {}
        names: dict[str, ToolName] = {}
        strict: set[str] = set()
        grammars: dict[str, InputGrammar] = {}
        unknown: dict[str, None] = {}
        for each in Sent(written, "tools").entries():
            tool, where = _parsed(each)
            if isinstance(tool, str | NamespaceTool) and not leaves_out_others:
                said = "only functions and custom tools can be called here."
                raise each["type"].wrong_value(said, "unsupported_value")
            if isinstance(tool, str):
                unknown[tool] = None
                continue
            unknown.update(dict.fromkeys(tool.unknown))
            for place, name, flat_tool in _flat(tool, where):
                unknown.update(dict.fromkeys(flat_tool.unknown))
                flat = name.for_model
                offer(functions, _function(name, flat_tool), place)
                if names.setdefault(flat, name) != name:
                    raise place["name"].refusal(
                        f"to the model this tool is {excerpt(flat)}, and so is {paths[flat]}. Each tool needs a name "
                        "of its own."
                    )
                paths.setdefault(flat, place.path)
                if isinstance(flat_tool, FunctionTool) and flat_tool.strict:
                    strict.add(flat)
                if isinstance(flat_tool, CustomTool) and (grammar := _grammar(flat_tool, place)) is not None:
                    grammars[flat] = grammar
        return cls(
            tuple(functions.values()),
            tuple(paths.values()),
            names,
            frozenset(strict),
            grammars,
            tuple(unknown),
        )

    def named(self, flat: str) -> ToolName:
        """Return what the client calls a function; of one that was not offered, the name that the model wrote."""
        return self.names.get(flat) or ToolName(flat)

    def choice(self, value: Any) -> ToolChoice:
        """Return which of the tools may be called, and which must, for a `tool_choice`. Raises ApiError."""
        held = ToolChoice(strict=self.strict, input_grammars=self.grammars)
        none = ToolChoice(forbidden=True)
        sent = Sent(value, "tool_choice")
        choice = unnested(sent)
        match choice.value:
            case None | "auto":
                return held
            case "none":
                return none
            case "required" | "any":
                return replace(held, required=True)
            case {"type": "function" | "custom" as kind, "name": str(name)}:
                return replace(held, name=self._flat(kind, name, Sent(choice.value, sent.path)))
            case {"type": "allowed_tools", "tools": list(), **rest}:
                if rest.get("mode", "auto") not in ("auto", "required"):
                    raise choice["mode"].wrong_value("send auto or required.")
                flat = frozenset(self._allowed(choice["tools"].entries()))
                is_required = rest.get("mode") == "required"
                return replace(held, required=is_required, allowed=flat) if flat or is_required else none
            case {"type": str(kind)} if kind not in (*_KINDS, "allowed_tools"):
                said = f"a tool of type {excerpt(kind)} is not run here. Only functions and custom tools can be called."
                raise sent.wrong_value(said, "unsupported_value")
        raise sent.wrong_value(
            'send "auto", "none", "required", a tool by its type and name, or a list '
            "of such as allowed_tools with a mode and tools."
        )

    def _allowed(self, allowed: Sequence[Sent]) -> Iterator[str]:
        for sent in allowed:
            match unnested(sent).value:
                case {"type": "function" | "custom" as kind, "name": str(name)} as each:
                    yield self._flat(kind, name, Sent(each, sent.path))
                case {"type": "namespace", "name": str(name)}:
                    yield from (flat for flat, tool in self.names.items() if tool.namespace == name)
                case {"type": str(kind)} if kind not in _KINDS:  # it runs at OpenAI, and is left out here
                    pass
                case _:
                    raise sent.refusal(f"must name a tool by its type and name; got {excerpt(sent.value)}.")

    def _flat(self, kind: str, name: str, written: Sent) -> str:
        """Return the name for the model of a tool that a choice names, with or without its namespace."""
        namespace = written["namespace"].value
        for flat, tool in self.names.items():
            is_meant = tool.name == name and (namespace is None or tool.namespace == namespace)
            if (is_meant or flat == name) and tool.is_custom == (kind == "custom"):
                return flat
        known = ", ".join(tool.name for tool in self.names.values()) or "none"
        raise written.refusal(
            f"there is no {kind} tool {excerpt(name)} to call; the request's tools: {known}."
        )


def _parsed(written: Sent) -> tuple[FunctionTool | CustomTool | NamespaceTool | str, Sent]:
    """Return a tool, of one that is not known its type; and what holds its fields. Raises ApiError."""
    if not isinstance(written.value, Mapping):
        raise written.wrong_type("an object")
    fields = unnested(written)
    kind = fields.value["type"]
    if not isinstance(kind, str):
        raise written["type"].wrong_type("a text")
    return (fields.parsed(_KINDS[kind]) if kind in _KINDS else kind), fields


def _flat(
    tool: FunctionTool | CustomTool | NamespaceTool, written: Sent
) -> Iterator[tuple[Sent, ToolName, FunctionTool | CustomTool]]:
    """Yield a tool, or those in a namespace, with what holds its fields."""
    if not isinstance(tool, NamespaceTool):
        yield written, ToolName(tool.name, None, isinstance(tool, CustomTool)), tool
        return
    for at, inner in enumerate(written["tools"].entries()):
        each, fields = _parsed(inner)
        if not isinstance(each, FunctionTool | CustomTool):
            raise inner.refusal("only functions and custom tools can be in a namespace.")
        if at == 0 and tool.description:
            said = "\n\n".join(filter(None, (tool.description, each.description)))
            each = each.model_copy(update={"description": said})
        yield fields, ToolName(each.name, tool.name, isinstance(each, CustomTool)), each


def _function(name: ToolName, tool: FunctionTool | CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name.for_model}
    written = tool.format if isinstance(tool, CustomTool) else None
    grammar = written.definition if written is not None and written.type == "grammar" else None
    said = (tool.description, f"The input has to match this grammar:\n{grammar}" if grammar else None)
    if description := "\n\n".join(filter(None, said)):
        function["description"] = description
    if isinstance(tool, FunctionTool):
        if tool.parameters is not None:
            function["parameters"] = tool.parameters
    else:
        function["parameters"] = {
            "type": "object",
            "properties": {INPUT: {"type": "string"}},
            "required": [INPUT],
            "additionalProperties": False,
        }
    return {"type": "function", "function": function}


def _grammar(tool: CustomTool, place: Sent) -> InputGrammar | None:
    written = tool.format
    if written is None or written.type == "text":
        return None
    if written.syntax is None or not written.definition:
        raise place["format"].refusal("a grammar needs syntax (lark or regex) and definition.")
    return InputGrammar(
        parameter=INPUT, syntax=written.syntax, definition=written.definition, field=place["format"].path
    )


# -- calls ----------------------------------------------------------------------------------------------------


def input_as_arguments(text: str) -> str:
    """Return the input of a custom tool's call as the arguments of the function that the model knows."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class Arguments:
    """`feed` a function's arguments, which go out as they are written."""

    name = "arguments"

    def __init__(self) -> None:
        self._written: list[str] = []

    def feed(self, arguments: str) -> str:
        """Return what more of the text is known."""
        self._written.append(arguments)
        return arguments

    def close(self) -> tuple[str, str]:
        """Return what more there is of the text, and the whole of it."""
        return "", "".join(self._written)


_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_TEXT = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class InputText(Arguments):
    """`feed` a custom tool's arguments, a JSON object with one text, and get that text as it grows."""

    name = "input"

    def __init__(self) -> None:
        super().__init__()
        self._shown: list[str] = []
        self._held = ""
        self._is_begun = self._is_over = False

    def feed(self, arguments: str) -> str:
        """Return what more of the text is known."""
        self._written.append(arguments)
        if self._is_over:
            return ""
        text = self._held + arguments
        if not self._is_begun:
            head = _HEAD.match(text)
            if head is None:
                self._held = text
                return ""
            self._is_begun, text = True, text[head.end() :]
        found = _TEXT.match(text)
        assert found is not None  # it may be empty
        end = found.end()
        self._is_over = text[end : end + 1] == '"'
        if not self._is_over and (half := _HIGH_SURROGATE.search(text, max(0, end - 6), end)):
            end = half.start()
        self._held = text[end:]
        more: str = json.loads(f'"{text[:end]}"', strict=False)
        self._shown.append(more)
        return more

    def close(self) -> tuple[str, str]:
        """Return what more there is of the text, and the whole of it: the arguments, if they are something else."""
        written, shown = "".join(self._written), "".join(self._shown)
        try:
            value = json.loads(written)
        except ValueError:
            value = None
        text = value.get(INPUT) if isinstance(value, dict) else None
        whole = text if isinstance(text, str) else written
        return (whole[len(shown) :] if whole.startswith(shown) else ""), whole
