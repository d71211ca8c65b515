"""What a model is told of its tools where its chat template tells it nothing: definitions, and how a call is written.

    any family      each tool as JSON, and a call as the family's own codec writes it
    Phi-4-mini      JSON between control tokens of its own
    Gemma 3         Python functions with types and descriptions, called in a block ```tool_code

Whatever a definition says is in the text: what Python has no word for stands as JSON Schema next to the parameter.
Knows no templates: where the text goes is the prompt's matter.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.conversation.argument_values import resolve
from mlx_backend.conversation.dialects.base import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.conversation.dialects.base import CallCodec

type Tool = Mapping[str, Any]
"""A tool in OpenAI's nested form."""


def json_tool_prompt(tools: Sequence[Tool], calls: CallCodec) -> tuple[Piece, ...]:
    """Describe the tools as JSON, one per line, and show a call as `calls` writes it."""
    lines = [json.dumps(tool["function"], ensure_ascii=False, default=str) for tool in tools]
    before = (
        "You can call tools. These are described as JSON, one in each line:\n"
        f"<tools>\n{'\n'.join(lines)}\n</tools>\n\n"
        "To call a tool, write the call in exactly this form, with the name of the tool and its own arguments, and "
        "nothing after it:\n"
    )
    after = "\n\nThe next message then holds its result. Answer without a call where you need no tool."
    return Piece(before), *calls.encode("tool_name", {"argument_name": "value"}), Piece(after)


def phi_tool_prompt(tools: Sequence[Tool], calls: CallCodec) -> tuple[Piece, ...]:
    """Describe the tools as Phi-4-mini's own template does where the system message has them."""
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False, default=str)
    return Piece("<|tool|>", marker=True), Piece(listed), Piece("<|/tool|>", marker=True)


_PYTHON: Final = """\
You can call the Python functions below. To call one, or several, write them in a block of code and nothing after it:

```tool_code
function_name(argument_name="value")
```

Give each argument by its name, and use no other functions. What they return is in a block ```tool_output in the next \
message: use it to call more functions, or to answer. Answer without a call where you need no function.

```python
"""


def python_tool_prompt(tools: Sequence[Tool], calls: CallCodec) -> tuple[Piece, ...]:
    """Describe the tools as Python functions, as Google's guide to Gemma 3 does."""
    functions = "\n\n".join(python_signature(tool["function"]) for tool in tools)
    return (Piece(f"{_PYTHON}{functions}\n```"),)


def python_signature(function: Mapping[str, Any]) -> str:
    """Write a tool as a Python function without a body."""
    root = function.get("parameters")
    root = root if isinstance(root, Mapping) else {}
    schema = resolve(root, root)
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    required = [*required] if isinstance(required, list) else []
    words: list[str] = []
    notes: list[str] = []
    has_default = False
    for name, written in properties.items():
        own = resolve(written, root)
        word, is_optional = python_word(name), name not in required
        if has_default and not is_optional and "*" not in words:
            words.append("*")  # only so may a parameter without a default stand after one that has it
        has_default = has_default or is_optional
        default = f" = {own.get('default')!r}" if is_optional else ""
        words.append(f"{word}: {_type(own, root)}{default}")
        notes += _parameter_notes(word, str(name), own)
    doc = [str(function.get("description") or "").strip()]
    if notes:
        doc.append("\n".join(["Args:", *notes]))
    if left := {key: value for key, value in root.items() if key not in _SHOWN_OF_ALL}:
        doc.append(f"JSON Schema of all arguments together: {_json(left)}")
    text = "\n\n".join(filter(None, doc)).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    head = f"def {function['name']}({', '.join(words)}) -> Any:"
    if not text:
        return f"{head}\n    ..."
    ending = "\n" if "\n" in text or text.endswith('"') else ""
    return "\n".join([head, *_indented(f'"""{text}{ending}"""')])


def python_word(name: Any) -> str:
    """Return the Python identifier for a parameter: its name, if that is one."""
    word = re.sub(r"\W", "_", str(name)) or "_"
    if not word.isidentifier():
        word = f"_{word}"
    return f"{word}_" if keyword.iskeyword(word) else word


_TYPES: Final = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "null": "None",
    "array": "list",
    "object": "dict",
}
_SHOWN: Final = {"type", "description", "default", "enum", "const", "title"}
_SHOWN_OF_ALL: Final = {"type", "properties", "required", "title", "description", "$schema"}
_SCALARS: Final = {"string", "integer", "number", "boolean", "null"}
_MAX_DEPTH: Final = 4


def _parameter_notes(word: str, name: str, schema: Mapping[str, Any]) -> list[str]:
    """Describe a parameter: what the signature cannot say of it."""
    said = [str(schema.get("description") or schema.get("title") or "").strip()]
    if word != name:
        said.append(f"(called {name!r})")
    left = {key: value for key, value in schema.items() if key not in _SHOWN}
    items = left.get("items")
    if isinstance(items, Mapping) and items.keys() <= {"type"} and items.get("type") in _SCALARS:
        del left["items"]
    if left:
        said.append(f"JSON Schema: {_json(left)}")
    text = " ".join(filter(None, said))
    return _indented(f"{word}: {text}") if text else []


def _type(schema: Mapping[str, Any], root: Any, depth: int = 0) -> str:
    """Write a schema's type as Python's."""
    members = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(members, list) and members and all(isinstance(each, str | int | None) for each in members):
        return f"Literal[{', '.join(map(repr, members))}]"
    parts = next((schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list)), None)
    if parts and depth < _MAX_DEPTH:
        return " | ".join(dict.fromkeys(_type(resolve(part, root), root, depth + 1) for part in parts))
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    written = [_one_type(name, schema, root, depth) for name in names]
    return " | ".join(dict.fromkeys(written)) or "Any"


def _one_type(name: Any, schema: Mapping[str, Any], root: Any, depth: int) -> str:
    items = schema.get("items")
    if name == "array" and isinstance(items, Mapping) and depth < _MAX_DEPTH:
        return f"list[{_type(resolve(items, root), root, depth + 1)}]"
    if name is None and "properties" in schema:
        return "dict"
    return _TYPES.get(name, "Any") if isinstance(name, str) else "Any"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _indented(text: str) -> list[str]:
    first, *rest = text.split("\n")
    return [f"    {first}", *(f"    {line}" if line.strip() else "" for line in rest)]
