"""Chat templates as programs: parsed, and run in Jinja's sandbox for a limited time.

A template comes from whoever published the model. Here it is run on made-up messages to find out what it does with its
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
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables

from mlx_backend.models.template_limits import BoundedEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from jinja2.parser import Parser

MAX_SOURCE: Final = 1 << 20
"""Characters of a template; the longest that are published have about 20,000."""
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
            raise TemplateFault(
                f"The chat template has {len(source):,} characters, more than {MAX_SOURCE:,}."
            )
        self._environment = _environment(date, max_characters)
        try:
            tree = self._environment.parse(source)
            self.variables: frozenset[str] = frozenset(find_undeclared_variables(tree))
            """What a caller may give it; also names that are only set in some of its branches."""
            self.words: frozenset[str] = frozenset(
                text for constant in tree.find_all(nodes.Const) for text in _texts_in(constant.value)
            )
            """The texts in its expressions: what it compares something with, looks up, or takes by default."""
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
        """Render a conversation. `deadline` is a time of `time.monotonic`. Raises TemplateFault."""
        try:
            self._environment.start()
            with _Deadline(deadline):
                return self._template.render(
                    messages=deepcopy(messages),
                    tools=deepcopy(tools),
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **arguments,
                )
        except Exception as error:  # a template is a program from the model's makers
            raise TemplateFault(str(error) or type(error).__name__) from error


class _Deadline:
    """Raises TimeoutError in this thread once a time has come, between two lines of Python.

    Jinja compiles a template to Python, so a template that loops is interrupted. One operation that takes long in C is
    not; the sandbox bounds ranges.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, _frame: FrameType, _event: str, _argument: object) -> Callable[..., Any]:
        if time.monotonic() > self._deadline:
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


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts in a constant, which Jinja may have made of a whole list or table."""
    match value:
        case str():
            yield value
        case dict() | list() | tuple():
            for item in value:
                yield from _texts_in(item)
