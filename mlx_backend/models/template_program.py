"""What becomes of a chat template in the process that runs it (child_process): parsed, looked through, rendered.

A template is a program by the model's publisher. Jinja's sandbox keeps it from files and from Python's attributes; what
it takes of time and memory, the process is held to. The environment has what transformers gives templates
(`raise_exception`, `strftime_now`, `tojson` that leaves HTML alone, `generation` blocks, loop controls), and it lets
them change lists, as Kimi K2's does with its own. Knows nothing of efforts, tools or dialects.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jinja2 import Template
    from jinja2.parser import Parser

_MAX_REASON: Final = 2000
"""Characters of a template's own error."""
_NAMES_OF_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


def answer(request: bytes) -> bytes:
    """Do what a request of templates.py asks for: "=" and the result, or "!" and why the template cannot."""
    asked = json.loads(request)
    try:
        result = _examined(asked["source"]) if asked["examine"] else _rendered(asked)
    except MemoryError:
        raise  # which ends the process
    except Exception as error:  # whatever a program of somebody else's does
        reason = str(error) or type(error).__name__
        return b"!" + reason[:_MAX_REASON].encode("utf-8", "replace")
    return b"=" + result.encode("utf-8", "surrogatepass")


def _rendered(asked: dict[str, Any]) -> str:
    messages = [
        {key: value for key, value in message.items() if value is not None} for message in asked["messages"]
    ]
    template = _compiled(asked["source"], asked["any_day"])
    given = {"documents": None, "add_generation_prompt": asked["add_generation_prompt"], **asked["arguments"]}
    text = template.render(messages=messages, tools=asked["tools"], **given)
    if len(text) > asked["max_characters"]:
        raise TemplateError(f"The chat template writes more than {asked['max_characters']:,} characters.")
    return text


@lru_cache(maxsize=16)
def _compiled(source: str, any_day: bool) -> Template:
    environment = _environment()
    # What is found out about a template must not depend on the day.
    environment.globals["strftime_now"] = _on_any_day if any_day else _now
    return environment.from_string(_parsed(source))


@lru_cache(maxsize=1)
def _parsed(source: str) -> nodes.Template:
    return _environment().parse(source)


def _examined(source: str) -> str:
    """Return what stands in a template, as JSON, after it has rendered one conversation of every kind in time."""
    tree = _parsed(source)
    template = _compiled(source, any_day=True)
    for messages, tools in _CONVERSATIONS:
        try:
            template.render(messages=messages, tools=tools, add_generation_prompt=True)
        except MemoryError:
            raise
        except Exception:
            pass
    variables = find_undeclared_variables(tree)
    defaults = {id(default): default for default in _defaults_in(tree)}
    # A default often comes before the words that it is one of: these tell its place among them.
    in_order = sorted(tree.find_all(nodes.Const), key=lambda constant: id(constant) in defaults)
    constants = [value for constant in in_order for value in _values_in(constant.value)]
    is_number = [isinstance(value, int | float) and not isinstance(value, bool) for value in constants]
    found = {
        "variables": sorted(variables),
        "words": list(dict.fromkeys(value for value in constants if isinstance(value, str))),
        "numbers": [value for value, is_one in zip(constants, is_number, strict=True) if is_one],
        "defaults": sorted({default.value for default in defaults.values()}),
        "parts": sorted(_parts_in(tree, variables)),
    }
    return json.dumps(found)


_USER: Final = {"role": "user", "content": "Hi"}
_CALL: Final = {"name": "f", "arguments": {"a": 1}}
_CONVERSATIONS: Final[tuple[tuple[list[Any], list[Any] | None], ...]] = (
    ([_USER], None),
    (
        [
            {"role": "system", "content": "Answer."},
            _USER,
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Why?",
                "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _CALL}],
            },
            {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "1"},
        ],
        [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
            }
        ],
    ),
    ([{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}], None),
    ([_USER, {"role": "assistant", "content": "Hello " * 100}] * 50 + [_USER], None),
)


class _Generation(Extension):
    """`{% generation %}`, which marks for training what the assistant wrote: here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Takes no attributes that begin as Python's own do, as in transformers: Jinja's sandbox does not look at them."""

    def __init__(*args: Any, **attributes: Any) -> None:  # one of which may be called self
        self, *given = args
        values = dict(*given, **attributes)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"The chat template gives a namespace the attribute {name!r}.")


def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.filters["random"] = _first
    environment.globals["raise_exception"] = _refuse
    environment.globals["namespace"] = _PlainNamespace
    # A model's own tokenizer knows them; templates join them with texts.
    environment.globals |= dict.fromkeys(_NAMES_OF_TOKENS, "")
    return environment


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _on_any_day(_form: str) -> str:
    return "2026-01-01"


def _refuse(message: object) -> None:
    raise TemplateError(str(message))


def _first(values: Sequence[Any]) -> Any:
    """Stand for Jinja's `random`: a prompt must not depend on chance."""
    return values[0]


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _values_in(value: object) -> Iterator[object]:
    """Yield the values in a constant, which Jinja may have made of a whole list or table."""
    match value:
        case dict():
            yield from _values_in([*value.keys(), *value.values()])
        case list() | tuple():
            for item in value:
                yield from _values_in(item)
        case _:
            yield value


def _defaults_in(tree: nodes.Template) -> Iterator[nodes.Const]:
    """Yield the constants of `x | default('a')`, `x or 'a'`, `'a' if …`, and `set x = 'a'`."""
    kinds = (nodes.Filter, nodes.Or, nodes.CondExpr, nodes.Assign)
    for node in tree.find_all(kinds):
        given: Sequence[nodes.Node | None]
        match node:
            case nodes.Filter(name="default" | "d"):
                given = node.args
            case nodes.Or():
                given = [node.right]
            case nodes.CondExpr():
                given = [node.expr1, node.expr2]
            case nodes.Assign():
                given = [node.node]
            case _:
                given = []
        yield from (each for each in given if isinstance(each, nodes.Const) and isinstance(each.value, str))


def _parts_in(tree: nodes.Template, variables: set[str]) -> Iterator[str]:
    """Yield `variable.part` for every part that is read of a variable by its name, also through another name for it."""
    stands_for = {name: name for name in variables}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            read = [name.name for name in assignment.node.find_all(nodes.Name)]
            if isinstance(assignment.node, nodes.Name):
                read.append(assignment.node.name)
            if len(set(read)) == 1 and read[0] in variables:
                stands_for.setdefault(assignment.target.name, read[0])

    def named(node: nodes.Node) -> str | None:
        return stands_for.get(node.name) if isinstance(node, nodes.Name) else None

    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)):
        owner: str | None = None
        part: object = None
        match node:
            case nodes.Call(node=nodes.Getattr(attr="get") as method, args=[nodes.Const() as key, *_]):
                owner, part = named(method.node), key.value
            case nodes.Getattr():
                owner, part = named(node.node), node.attr
            case nodes.Getitem(arg=nodes.Const() as key):
                owner, part = named(node.node), key.value
        if owner is not None and isinstance(part, str) and part != "get":
            yield f"{owner}.{part}"
