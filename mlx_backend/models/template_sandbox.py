"""Chat templates as programs: parsed, and run in Jinja's sandbox for a limited time.

A template comes from the model's publisher. Here it is run on made-up messages to find out what it does with its
arguments, before any weights are loaded, and on a request by `mlx-backend render --template`; the prompts of requests
that are answered are rendered by the model's own tokenizer. What it may put together is bounded (template_limits).

The environment has what transformers gives templates (`raise_exception`, `strftime_now`, `tojson` that leaves HTML
alone, `generation` blocks, loop controls). It also lets them change lists, as Kimi K2's does with its own: they get
copies. Knows nothing of efforts, tools or dialects.
"""

from __future__ import annotations

import json
import sys
import time
from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables

from mlx_backend.models.template_limits import BoundedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from jinja2.parser import Parser

MAX_SOURCE: Final = 1 << 17
"""Characters of a template; the longest that are published have about 20,000. Parsing each thousand takes some ms."""
MAX_CHARACTERS: Final = 1 << 26
"""That one rendering may put together, with everything in between."""
MAX_PROBE_CHARACTERS: Final = 1 << 20
"""The same of a rendering of made-up messages; with a tool, published templates write less than 20,000."""


def _any_day(_form: str) -> str:
    """Return a fixed date: what is found out about a template must not depend on the day."""
    return "2026-01-01"


_NAMES_OF_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


class TemplateFault(Exception):
    """A template that cannot be parsed, refused what it was given, failed, or ran for too long."""


class ChatTemplate:
    """One parsed template. Raises TemplateFault if it cannot be parsed.

    `date` writes the date in a form of `strftime`.
    """

    def __init__(
        self,
        source: str,
        *,
        date: Callable[[str], str] = _any_day,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateFault(f"The chat template has more than {MAX_SOURCE:,} characters.")
        self._environment = _environment(date, max_characters)
        try:
            tree = self._environment.parse(source)
            self.variables: frozenset[str] = frozenset(find_undeclared_variables(tree))
            """What a caller may give it; also names that are only set in some of its branches."""
            constants = [
                value for constant in tree.find_all(nodes.Const) for value in _values_in(constant.value)
            ]
            self.words: frozenset[str] = frozenset(value for value in constants if isinstance(value, str))
            """The texts in its expressions: what it compares something with, looks up, or takes by default."""
            self.numbers: frozenset[float] = frozenset(
                value for value in constants if isinstance(value, int | float) and not isinstance(value, bool)
            )
            """The numbers in its expressions."""
            self.defaults: frozenset[str] = frozenset(_defaults_in(tree))
            """Those of its words that stand where a variable is given a value of its own."""
            self.parts: frozenset[str] = frozenset(_parts_in(tree, self.variables))
            """What it reads of a variable that holds an object: `reasoning.effort`."""
            self._template = self._environment.from_string(self._environment.bounded(tree))
        except (TemplateError, RecursionError, MemoryError) as error:
            raise TemplateFault(f"The chat template cannot be parsed: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        *,
        deadline: float,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation, which a template that changes lists leaves as it was.

        `deadline` is a time of `time.thread_time`, this thread's own: what else the machine does makes no difference.
        Raises TemplateFault.
        """
        try:
            self._environment.start()
            with _Deadline(deadline):
                return self._template.render(
                    messages=deepcopy(messages),
                    tools=deepcopy(tools),
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **deepcopy(dict(arguments)),
                )
        except Exception as error:  # a template is a program from the model's makers
            raise TemplateFault(str(error) or type(error).__name__) from error


@lru_cache(maxsize=16)
def parsed_for_probing(source: str) -> ChatTemplate:
    """Parse a template, or return it as parsed a moment ago: effort and history are found out one after the other."""
    return ChatTemplate(source, max_characters=MAX_PROBE_CHARACTERS)


_LINES_BETWEEN_LOOKS: Final = 50  # at the clock, which takes longer than most lines


class _Deadline:
    """Raises TimeoutError in this thread once it has used its time, between two lines of Python.

    Jinja compiles a template to Python, so a template that loops is interrupted. One operation that takes long in C is
    not; the sandbox bounds ranges.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._before: Callable[..., Any] | None = None
        self._lines = 0

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, _frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
        self._lines += 1
        if self._lines % _LINES_BETWEEN_LOOKS == 1 and time.thread_time() > self._deadline:
            raise TimeoutError("The chat template ran for too long.")
        return self._trace


class _Generation(Extension):
    """`{% generation %}`, which marks for training what the assistant wrote: here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(date: Callable[[str], str], max_characters: int) -> BoundedEnvironment:
    environment = BoundedEnvironment(
        max_characters,
        {"tojson": _tojson, "random": _first},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = date
    # A model's own tokenizer knows them; templates join them with texts.
    environment.globals |= dict.fromkeys(_NAMES_OF_TOKENS, "")
    return environment


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


def _defaults_in(tree: nodes.Template) -> Iterator[str]:
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
        yield from (
            each.value for each in given if isinstance(each, nodes.Const) and isinstance(each.value, str)
        )


def _parts_in(tree: nodes.Template, variables: frozenset[str]) -> Iterator[str]:
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
