"""The tools of a request, which are of several kinds here, as the functions that models know; and back.

    function                 {"type": "function", "name": …, "parameters": …}
    namespace                functions and custom tools in a group: `ns` and `f` ─▶ the function `ns__f`
    custom                   a tool whose input is a text: a function with the one parameter `input`
    any other (web_search)   runs at OpenAI: it is left out, and named

A call goes back under the name and in the kind that the client knows. Knows no items and no events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Lenient, refuse_invalid
from mlx_backend.api.reply_fields import offer
from mlx_backend.chat.request import InputGrammar, ToolChoice
from mlx_backend.conversation.json_values import excerpt, json_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

INPUT = "input"
"""The one parameter of the function that a custom tool becomes."""
SEPARATOR = "__"
"""Between a namespace and the name of a tool in it."""

type Name = Annotated[str, Field(min_length=1, max_length=256)]


class GrammarFormat(Lenient):
    """What the input of a custom tool is held to."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Annotated[str, Field(max_length=100_000)] | None = None


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


def parsed_tool(tool: Any, where: str) -> Any:
    """Return a tool of a kind that is known, and any other as it is. Raises the ApiError for what is no tool."""
    if not isinstance(tool, Mapping):
        raise refuse(f"{where}: must be an object, not {json_type(tool)}.", where)
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise refuse(f"{where}.type: must be a text, not {json_type(kind)}.", f"{where}.type")
    if kind == "function" and isinstance(tool.get("function"), Mapping):  # as Chat Completions writes it
        tool = {"type": "function", **tool["function"]}
    if kind not in _KINDS:
        return tool
    try:
        parsed = _KINDS[kind].model_validate(tool)
    except ValidationError as error:
        refuse_invalid(error, where)
    if isinstance(parsed, NamespaceTool):
        inner = [parsed_tool(each, f"{where}.tools[{at}]") for at, each in enumerate(parsed.tools)]
        for at, each in enumerate(inner):
            if not isinstance(each, FunctionTool | CustomTool):
                raise refuse(
                    f"{where}.tools[{at}]: only functions and custom tools can be in a namespace.",
                    f"{where}.tools[{at}]",
                )
        return parsed.model_copy(update={"tools": inner})
    return parsed


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
    left_out: Sequence[str] = ()
    """Tools that run at OpenAI, as `tools[8].web_search`."""

    @classmethod
    def of(cls, tools: Sequence[FunctionTool | CustomTool | NamespaceTool | Mapping[str, Any]]) -> Tools:
        """Build them. Raises the ApiError for two of one name that differ."""
        functions: dict[str, dict[str, Any]] = {}
        paths: dict[str, str] = {}
        names: dict[str, ToolName] = {}
        strict: set[str] = set()
        grammars: dict[str, InputGrammar] = {}
        left_out: list[str] = []
        for at, tool in enumerate(tools):
            if not isinstance(tool, FunctionTool | CustomTool | NamespaceTool):
                left_out.append(f"tools[{at}].{tool.get('type')}")
                continue
            for where, name, each in _flat(tool, f"tools[{at}]"):
                flat = name.for_model
                offer(functions, _function(name, each), f"{where}.name")
                names[flat] = name
                paths.setdefault(flat, where)
                if isinstance(each, FunctionTool) and each.strict:
                    strict.add(flat)
                if isinstance(each, CustomTool) and (grammar := _grammar(each, where)) is not None:
                    grammars[flat] = grammar
        return cls(
            tuple(functions.values()),
            tuple(paths.values()),
            names,
            frozenset(strict),
            grammars,
            tuple(left_out),
        )

    def named(self, flat: str) -> ToolName:
        """Return what the client calls a function; of one that was not offered, the name that the model wrote."""
        return self.names.get(flat) or ToolName(flat)

    def choice(self, value: Any) -> tuple[Tools, ToolChoice]:
        """Return the tools that may be called, and which call is required, for a `tool_choice`. Raises ApiError."""
        held = ToolChoice(strict=self.strict, input_grammars=self.grammars)
        match value:
            case None | "auto":
                return self, held
            case "none":
                return Tools(names=self.names, left_out=self.left_out), ToolChoice()
            case "required":
                return self, replace(held, required=True)
            case {"type": "function" | "custom" as kind, "name": str(name)}:
                return self, replace(held, name=self._flat(kind, name, value, "tool_choice"))
            case {"type": "allowed_tools", "tools": list(allowed)}:
                mode = value.get("mode", "auto")
                if mode not in ("auto", "required"):
                    raise refuse(
                        f"tool_choice.mode = {excerpt(mode)}: send auto or required.", "tool_choice.mode"
                    )
                flat = frozenset(self._allowed(allowed))
                return self, replace(held, required=mode == "required", allowed=flat)
            case {"type": str(kind)}:
                raise refuse(
                    f"tool_choice = {excerpt(value)}: a tool of type {excerpt(kind)} is not run here. Only functions "
                    "and custom tools can be called.",
                    "tool_choice",
                    "unsupported_value",
                )
        raise refuse(
            f'tool_choice = {excerpt(value)}: send "auto", "none", "required", {{"type": "function", "name": …}} or '
            '{"type": "allowed_tools", "mode": …, "tools": […]}.',
            "tool_choice",
        )

    def _allowed(self, allowed: Sequence[Any]) -> Iterator[str]:
        for at, each in enumerate(allowed):
            where = f"tool_choice.tools[{at}]"
            match each:
                case {"type": "function" | "custom" as kind, "name": str(name)}:
                    yield self._flat(kind, name, each, where)
                case {"type": "namespace", "name": str(name)}:
                    yield from (flat for flat, tool in self.names.items() if tool.namespace == name)
                case {"type": str()}:  # one that runs at OpenAI, and is left out here
                    pass
                case _:
                    raise refuse(
                        f"{where}: must name a tool by its type and name; got {excerpt(each)}.", where
                    )

    def _flat(self, kind: str, name: str, written: Mapping[str, Any], where: str) -> str:
        """Return the name for the model of a tool that a choice names, with or without its namespace."""
        namespace = written.get("namespace")
        for flat, tool in self.names.items():
            is_meant = tool.name == name and (namespace is None or tool.namespace == namespace)
            if (is_meant or flat == name) and tool.is_custom == (kind == "custom"):
                return flat
        known = ", ".join(tool.name for tool in self.names.values()) or "none"
        raise refuse(
            f"{where}: there is no {kind} tool {excerpt(name)} to call; the request's tools: {known}.", where
        )


def _flat(
    tool: FunctionTool | CustomTool | NamespaceTool, where: str
) -> Iterator[tuple[str, ToolName, FunctionTool | CustomTool]]:
    namespace = None
    inner: Iterable[tuple[str, FunctionTool | CustomTool]]
    if isinstance(tool, NamespaceTool):
        namespace = tool.name
        inner = ((f"{where}.tools[{at}]", each) for at, each in enumerate(tool.tools))
    else:
        inner = [(where, tool)]
    for at, (place, each) in enumerate(inner):
        if at == 0 and isinstance(tool, NamespaceTool) and tool.description:
            said = "\n\n".join(filter(None, (tool.description, each.description)))
            each = each.model_copy(update={"description": said})
        yield place, ToolName(each.name, namespace, isinstance(each, CustomTool)), each


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


def _grammar(tool: CustomTool, where: str) -> InputGrammar | None:
    written = tool.format
    if written is None or written.type == "text":
        return None
    if written.syntax is None or not written.definition:
        raise refuse(
            f"{where}.format: a grammar needs syntax (lark or regex) and definition.", f"{where}.format"
        )
    return InputGrammar(
        parameter=INPUT,
        syntax=written.syntax,
        definition=written.definition,
        field=f"{where}.format.definition",
    )
