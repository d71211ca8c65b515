"""A value that a client has sent and the path at which it stands, so that an error can name it. Knows no API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from mlx_backend.api.errors import refuse
from mlx_backend.conversation.json_values import excerpt, json_type

if TYPE_CHECKING:
    from mlx_backend.api.errors import ApiError

_TYPE_NAMES = frozenset({"str", "int", "float", "bool", "list[any]", "dict[str,any]"})
"""Pydantic's, in the path of a value that may be of several types."""
MAX_ENTRIES = 100_000
"""Of a list whose entries are looked at one by one: millions of them keep the interpreter from all other requests."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A value of any type. Its fields and entries are values with their own paths."""

    value: Any
    path: str = ""

    def __getitem__(self, name: str) -> Sent:
        """Return a field of an object; None if it has none of that name, or is no object."""
        value = self.value.get(name) if isinstance(self.value, Mapping) else None
        return Sent(value, f"{self.path}.{name}" if self.path else name)

    def entries(self) -> list[Sent]:
        """Return the entries of a list; none of any other value. Raises the ApiError of one with too many."""
        values = self.value if isinstance(self.value, list) else ()
        if len(values) > MAX_ENTRIES:
            raise self.refusal(f"{len(values):,} entries are too many; send at most {MAX_ENTRIES:,}.")
        return [Sent(value, f"{self.path}[{at}]") for at, value in enumerate(values)]

    # -- checks: each raises ApiError -------------------------------------------------------------------------

    def checked_object(self, what: str) -> Sent:
        """Return it if it is an object, as `what` it is has to be."""
        if not isinstance(self.value, Mapping):
            raise self.refusal(f"{what} must be an object, not {json_type(self.value)}.")
        return self

    def object_or_empty(self) -> Mapping[str, Any]:
        """Return an object; of null an empty one."""
        if not isinstance(self.value, Mapping | None):
            raise self.wrong_type("an object")
        return self.value or {}

    def text(self, default: str | None = None) -> str:
        """Return a text; of null the `default`, if there is one."""
        if self.value is None and default is not None:
            return default
        if not isinstance(self.value, str):
            what = "is missing" if self.value is None else f"must be a text, not {json_type(self.value)}"
            raise refuse(f"{self.path} {what}.", self.path)
        return self.value

    def parsed[M: BaseModel](self, model: type[M]) -> M:
        """Return it as what a model makes of it."""
        try:
            return model.model_validate(self.value)
        except ValidationError as error:
            raise self._invalid(error) from None

    # -- errors: the 400 for this value -----------------------------------------------------------------------

    def refusal(self, sentence: str, code: str | None = None) -> ApiError:
        """Make the 400 that says, after its path, what is wrong with it."""
        return refuse(f"{self.path}: {sentence}", self.path, code)

    def wrong_type(self, wanted: str) -> ApiError:
        """Make the 400 for a value of a type that is not `wanted`."""
        return self.refusal(f"must be {wanted}, not {json_type(self.value)}.")

    def unlike(self, wanted: str, code: str | None = None) -> ApiError:
        """Make the 400 for a value that is not what is `wanted`, and says what it is."""
        return self.refusal(f"must be {wanted}, not {excerpt(self.value)}.", code)

    def wrong_value(self, remedy: str, code: str | None = None) -> ApiError:
        """Make the 400 for a value that a field cannot have."""
        return refuse(f"{self.path} = {excerpt(self.value)}: {remedy}", self.path, code)

    def _invalid(self, error: ValidationError) -> ApiError:
        """Make the 400 for the first of the errors."""
        first, where = error.errors(include_url=False)[0], self.path
        for step in first["loc"]:
            if step in _TYPE_NAMES:  # it says which of the types was tried, and is no part of the path
                continue
            where += f"[{step}]" if isinstance(step, int) else f".{step}" if where else str(step)
        if first["type"] == "missing":
            return refuse(f"{where} is missing.", where)
        message = "must be an object" if first["type"] in ("model_type", "dict_type") else first["msg"]
        message = message[:1].lower() + message[1:]
        return refuse(f"{where}: {message}; got {excerpt(first['input'])}.", where)
