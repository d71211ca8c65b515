"""The Jinja environment in which chat templates run: a sandbox that also bounds how much text they put together.

Jinja's sandbox keeps a template from files and attributes, and `template_sandbox` stops one that loops, between two
lines of Python. Neither stops a single operation that runs in C and fills the memory: `'a' * 10 ** 10`,
`'%9999999999d' % 1`, a text joined to itself forty times. So every operation that can make something large says
beforehand how large, and one rendering has so many characters in all. Knows nothing of chats.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sized
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateError, nodes
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2.runtime import Context

MAX_WIDTH: Final = 1 << 16
"""Of a padded or indented text, in characters; for numbers, the most digits in binary."""

_WIDE: Final = re.compile(r"\d{5,}")  # in a format: a width, a precision
_TAKES_WIDTH: Final = re.compile(r"%[^%a-zA-Z]*\*|:[^{}]*\{")  # `%*d`, `{:{}}`
_PADDING: Final = frozenset({"center", "indent", "wordwrap", "tojson", "batch", "slice", "round"})
_PADDING_METHODS: Final = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_JOINED: Final = "joined by ~"  # no template can name a filter so


class BoundedEnvironment(SandboxedEnvironment):
    """A sandbox for one template at a time in each thread; `start` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(
        self, max_characters: int, filters: Mapping[str, Callable[..., Any]], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.filters |= filters
        self._max_characters = max_characters
        self._left = threading.local()
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded_filter(name, function)
        self.filters[_JOINED] = lambda values: self.concat(map(str, values))
        # Macros, blocks and the whole output are put together by this function.
        self.concat = self._concat  # type: ignore[method-assign]  # Jinja has a method of str there

    def start(self) -> None:
        """Begin a rendering in this thread."""
        self._left.characters = self._max_characters

    def bounded(self, tree: nodes.Template) -> nodes.Template:
        """Return a parsed template whose every `~` is counted too."""
        return _Joins().visit(tree)  # type: ignore[no-any-return]  # jinja2's visitors are not typed

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator if its result is not too large."""
        match operator:
            case "%" if isinstance(left, str | bytes):
                self._check_format(left, right)
            case "*" | "**" if isinstance(left, int) and isinstance(right, int):
                digits = (
                    left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
                )
                if digits > MAX_WIDTH:
                    raise TemplateError(f"The chat template makes a number of {digits:,} binary digits.")
            case "*":
                for text, times in ((left, right), (right, left)):
                    if isinstance(text, Sized) and isinstance(times, int):
                        self._spend(len(text) * times)
            case "+" if isinstance(left, Sized) and isinstance(right, Sized):
                self._spend(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method if its result is not too large."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | list | int):
            if name in _PADDING_METHODS:
                self._check_widths(args, kwargs)
            elif name == "replace":
                self._check_replace(owner, *args[:2])
            elif name in ("join", "extend") and args:
                args = (self._counted(args[0], owner if name == "join" else ""), *args[1:])
        elif name in ("format", "format_map"):  # the sandbox has wrapped it
            text = getattr(getattr(function, "__wrapped__", None), "__self__", "")
            self._check_format(text, (*args, *kwargs.values()))
        return super().call(context, function, *args, **kwargs)

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # Some filters are given the environment before the value.
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, rest = args[first], args[first + 1 :]
            if name in _PADDING:
                self._check_widths(rest, kwargs)
            elif name == "format":
                self._check_format(value, (*rest, *kwargs.values()))
            elif name == "replace":
                given = {"old": "", "new": "", **dict(zip(("old", "new"), rest, strict=False)), **kwargs}
                self._check_replace(str(value), str(given["old"]), str(given["new"]))
            elif name == "join":
                by = rest[0] if rest else kwargs.get("d", "")
                args = (*args[:first], self._counted(value, by), *rest)
            made = function(*args, **kwargs)
            if isinstance(made, str):
                self._spend(len(made))
            return made

        return bounded

    def _concat(self, parts: Iterable[str]) -> str:
        texts = []
        for part in parts:
            self._spend(len(part))
            texts.append(part)
        return "".join(texts)

    def _counted(self, values: Any, between: Any) -> list[Any]:
        """Return what is to be joined, as a list."""
        listed = list(values)
        gap = len(between) if isinstance(between, Sized) else len(str(between))
        self._spend(sum((len(each) if isinstance(each, Sized) else 1) + gap for each in listed))
        return listed

    def _check_replace(self, text: Any, old: Any = "", new: Any = "") -> None:
        if isinstance(text, str | bytes) and isinstance(new, Sized):
            self._spend(text.count(old) * len(new))

    def _check_format(self, text: Any, values: Any) -> None:
        written = text.decode("latin-1") if isinstance(text, bytes) else str(text)
        given = values if isinstance(values, tuple) else (values,)
        if _WIDE.search(written) or (_TAKES_WIDTH.search(written) and any(map(_is_wide, given))):
            raise TemplateError("The chat template formats a text with a width that is too large.")

    def _check_widths(self, args: Any, kwargs: dict[str, Any]) -> None:
        if any(map(_is_wide, (*args, *kwargs.values()))):
            raise TemplateError(f"The chat template pads a text to more than {MAX_WIDTH:,} characters.")

    def _spend(self, characters: int) -> None:
        left: int = getattr(self._left, "characters", self._max_characters) - characters
        if left < 0:
            raise TemplateError(
                f"The chat template puts together more than {self._max_characters:,} characters."
            )
        self._left.characters = left


class _Joins(NodeTransformer):
    """Makes a filter of every `~`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (Jinja's own naming)
        parts = nodes.List([self.visit(part) for part in node.nodes], lineno=node.lineno)
        joined = nodes.Filter(parts, _JOINED, [], [], None, None, lineno=node.lineno)
        joined.environment = node.environment
        return joined


def _is_wide(value: Any) -> bool:
    return isinstance(value, int) and abs(value) > MAX_WIDTH
