"""How a setting is declared: its type, limits and help, once, where its value is kept.

    temperature: float | None = declare(None, number(0, 2), help="0 always takes the likeliest token")

From such fields of a dataclass follow an option of `mlx-backend serve` and its environment variable
(commands/options.py), a key of the models file (registry/config_file.py), a field of a request
(api/reply_fields.py), and a row of docs/settings.md (.ci/docs_reference.py).

Knows no setting, no argparse and no HTTP; pydantic is imported only when a type for it is asked for.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

type Network = IPv4Network | IPv6Network

VARIABLE_PREFIX = "MLX_BACKEND_"


class SettingError(ValueError):
    """A text is not a value of a setting. Says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What values a setting has. `words` says it to people: "'x' is not a number from 0 to 2".

    `parse` makes a value of an option's or a variable's text, `convert` one of a file's value; both raise ValueError.
    `show` writes a value as `parse` takes it. `limits` have the names of pydantic's Field.
    """

    words: str
    metavar: str
    type: Any
    parse: Callable[[str], Any]
    limits: Mapping[str, Any] = field(default_factory=dict)
    convert: Callable[[Any], Any] | None = None
    show: Callable[[Any], str] = str

    def from_text(self, text: str) -> Any:
        """Return the value that an option or a variable spells. Raises SettingError."""
        try:
            value = self.parse(text)
        except SettingError:
            raise
        except ValueError:
            raise SettingError(f"{text!r} is not {self.words}") from None
        if not within(value, self.limits):
            raise SettingError(f"{text!r} is not {self.words}")
        return value

    def annotation(self) -> Any:
        """Return the type for a field of a pydantic model."""
        from pydantic import BeforeValidator, Field

        if (convert := self.convert) is not None:
            # Not itself: pydantic passes more to a callable that takes more, and an Enum takes anything.
            return Annotated[self.type, BeforeValidator(lambda value: convert(value))]
        limits = {**self.limits, "allow_inf_nan": False} if self.type is float else self.limits
        return Annotated[self.type, Field(**limits)] if limits else self.type


def within(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a number keeps within limits. NaN keeps within none."""
    tests = {"ge": float.__ge__, "gt": float.__gt__, "le": float.__le__}
    return not limits or all(tests[name](float(value), float(limit)) for name, limit in limits.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting.

    `help` says what it sets, or, where its option turns it off, what is done without that option; `default` says in
    words what the field's own default does not. `group` is that of options in the help. `option` is the option on the
    command line: None for none, by its name if left empty; with `of_one_model` it holds for the model of --model alone.
    `in_file`: it is a key of the models file. What is `hidden` from --help and docs/settings.md is for this project's
    developers.
    """

    kind: Kind
    help: str
    group: str = "replies"
    default: str = ""
    option: str | None = ""
    of_one_model: bool = False
    in_file: bool = True
    repeatable: bool = False
    hidden: bool = False

    @property
    def is_switch(self) -> bool:
        """Whether its option takes no value."""
        return self.kind.type is bool

    @property
    def turns_off(self) -> bool:
        """Whether its option turns off what is on by default."""
        return (self.option or "").startswith("--no-")


_SETTING = "setting"


def declare[T](value: T, kind: Kind, /, *, is_secret: bool = False, **more: Any) -> T:
    """Declare a field of a dataclass as a setting. `value` is its default; `more` says the rest of it.

    What is secret is not shown with the others.
    """
    metadata = {_SETTING: Setting(kind=kind, **more)}
    if isinstance(value, dict):
        return field(default_factory=partial(copy, value), metadata=metadata)
    return field(default=value, repr=not is_secret, metadata=metadata)


class Declare(Protocol):
    """`declare`, with some of what it is given already."""

    def __call__[T](self, value: T, kind: Kind, /, **more: Any) -> T:
        """Declare a field."""
        ...


def declaring(**shared: Any) -> Declare:
    """Return what declares settings that share so much."""
    return partial(declare, **shared)


def declared(owner: type) -> dict[str, Setting]:
    """Return the settings that are declared in a dataclass, by the names of its fields, in their order."""
    return {
        name: each.metadata[_SETTING]
        for base in reversed(owner.__mro__)  # a subclass may narrow the type of a setting
        for name, each in getattr(base, "__dataclass_fields__", {}).items()
        if _SETTING in each.metadata
    }


def option_of(name: str, setting: Setting) -> str | None:
    """Return a setting's option, such as --max-tokens."""
    return f"--{name.replace('_', '-')}" if setting.option == "" else setting.option


def variable_of(option: str) -> str:
    """Return the environment variable that stands for an option, such as MLX_BACKEND_MAX_TOKENS."""
    return VARIABLE_PREFIX + option.removeprefix("--").replace("-", "_").upper()


# -- kinds ----------------------------------------------------------------------------------------------------


def number(
    minimum: float, maximum: float, *, above: bool = False, words: str = "", metavar: str = "X"
) -> Kind:
    """Return the kind of a number within limits; `above` leaves the minimum itself out."""
    start = f"above {minimum:g}, up to" if above else f"from {minimum:g} to"
    return Kind(
        words=words or f"a number {start} {maximum:g}",
        metavar=metavar,
        type=float,
        parse=float,
        limits={"gt" if above else "ge": minimum, "le": maximum},
        show=lambda value: f"{value:g}",
    )


def whole(minimum: int, maximum: int | None = None, *, words: str = "") -> Kind:
    """Return the kind of a whole number within limits."""
    end = "up" if maximum is None else f"to {maximum}"
    return Kind(
        words=words or f"a whole number from {minimum} {end}",
        metavar="N",
        type=int,
        parse=int,
        limits={"ge": minimum} | ({} if maximum is None else {"le": maximum}),
    )


def seconds(words: str = "a number of seconds from 0 up") -> Kind:
    """Return the kind of a duration. Beyond 1e9 the clocks of the system overflow."""
    return number(0, 1e9, words=words, metavar="S")


_MAX_SIZE = 1 << 20


def size(unit: int, metavar: str, what: str, *, above: bool = False) -> Kind:
    """Return the kind of a number of bytes that people write in larger units: `what`, such as gigabytes."""
    words = f"a number of {what} {'above 0' if above else 'from 0 up'}"

    def parse(text: str) -> int:
        value = float(text)
        if not 0 <= value <= _MAX_SIZE or (above and value * unit < 1):  # NaN is neither
            raise ValueError
        return int(value * unit)

    return Kind(words=words, metavar=metavar, type=int, parse=parse, show=lambda value: f"{value / unit:g}")


def one_of(*values: Any) -> Kind:
    """Return the kind of a value from a list: words, whole numbers, or all members of an enumeration."""
    known = {str(value): value for value in values}

    def parse(text: str) -> Any:
        if text not in known:
            raise ValueError
        return known[text]

    enumeration = type(values[0]) if isinstance(values[0], StrEnum) else None
    return Kind(
        words=f"one of {', '.join(known)}",
        metavar="{" + ",".join(known) + "}",
        type=enumeration or Literal[values],
        parse=parse,
        convert=enumeration,
    )


def switch() -> Kind:
    """Return the kind of what is on or off."""

    def parse(text: str) -> bool:
        if (word := text.strip().casefold()) not in _SWITCHES:
            raise SettingError(f"{text!r} is not true or false")
        return _SWITCHES[word]

    return Kind(
        words="true or false, without quotes",
        metavar="",
        type=bool,
        parse=parse,
        show=lambda value: "on" if value else "off",
    )


_SWITCHES = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


def text(metavar: str = "TEXT", words: str = "a text") -> Kind:
    """Return the kind of a text that is not empty."""
    return Kind(words=words, metavar=metavar, type=str, parse=_not_empty)


def network() -> Kind:
    """Return the kind of an IP address, or of all addresses of a network."""
    return Kind(
        words="an IP address or a network, such as 10.0.0.0/8",
        metavar="ADDRESS",
        type=Any,
        parse=lambda text: ip_network(text.strip(), strict=False),
    )


def path(metavar: str, words: str = "a folder") -> Kind:
    """Return the kind of a file or folder, relative to where the server is started."""
    return Kind(words=words, metavar=metavar, type=Path, parse=lambda text: Path(_not_empty(text)))


def _not_empty(text: str) -> str:
    if not text.strip():
        raise SettingError("is empty (an unset variable?)")
    return text
