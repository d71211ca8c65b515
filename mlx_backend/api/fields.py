"""How the fields of a body are checked and described, for every API.

    accepted       a field of the model; a wrong type or value is a 400 with its path
    refused        a field in `refused`: it would change the answer and is not supported, so it is a 400 by its
                   name, unless its value asks for nothing
    ignored        every other field; named in the log and in a reply header

`null` means absent everywhere. Knows no API and no endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Protocol,
    Self,
    get_args,
    is_typeddict,
    runtime_checkable,
)

from pydantic import BaseModel, ConfigDict, PrivateAttr, TypeAdapter

from mlx_backend.api.errors import refuse
from mlx_backend.api.sent import Sent
from mlx_backend.conversation.json_values import excerpt, json_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class OneOf:
    """The check whether a value is null or one of these, of the same type (true is not 1)."""

    values: tuple[Any, ...]

    def __call__(self, value: Any) -> bool:
        """Check a value."""
        return value is None or any(value == one and type(value) is type(one) for one in self.values)


def is_one_of(*values: Any) -> OneOf:
    """Return the check whether a value is null or one of these."""
    return OneOf(values)


is_empty = is_one_of(False, "", [], {})
"""Whether a value asks for nothing in any field."""

type Refusals = Mapping[str, tuple[OneOf, str]]
"""Field -> which values ask for nothing, and why all others are refused."""


@runtime_checkable
class HasUnknown(Protocol):
    """What was made of an object of a request, and knows which of its fields mean nothing."""

    @property
    def unknown(self) -> Sequence[str]:
        """Their names."""
        ...


class Lenient(BaseModel):
    """An object of a request.

    Types are not converted ("7" is not a number, true is not 1, but 7.0 is 7). Unknown fields are kept, so that
    they can be named.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, arbitrary_types_allowed=True)

    @property
    def unknown(self) -> list[str]:
        """The fields that were sent and are no fields of it, nor of the objects in it; in a list, without an index."""
        names = {name: None for name, value in (self.model_extra or {}).items() if value is not None}
        for name, value in self:
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, HasUnknown):
                    names.update(dict.fromkeys(f"{name}.{inner}" for inner in each.unknown))
        return list(names)


class Body(Lenient):
    """What the requests to every endpoint share."""

    refused: ClassVar[Refusals] = {}
    read_elsewhere: ClassVar[dict[str, Any]] = {}
    """The types of fields that are neither the model's nor ignored, as clients write them."""

    model: str | None = None
    _written: Mapping[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def written(self) -> Mapping[str, Any]:
        """The body as the client wrote it."""
        return self._written

    @property
    def is_streamed(self) -> bool:
        """Whether the reply is to be streamed."""
        return bool(getattr(self, "stream", None))

    @property
    def seconds_kept(self) -> float | None:
        """How long the model is to stay in memory; infinity: always; None: as before."""
        return None

    @classmethod
    def parse(cls, body: Any) -> Self:
        """Validate a decoded body. Raises the ApiError (400) that names what is wrong with it."""
        body = with_extra_body(body)
        if not isinstance(body, dict):
            raise refuse(f"The body must be a JSON object, not {json_type(body)}.")
        for name, (asks_for_nothing, reason) in cls.refused.items():
            if name in body and not asks_for_nothing(body[name]):
                raise refuse(
                    f"{name} = {excerpt(body[name])} is not supported: {reason}.", name, "unsupported_value"
                )
        parsed = Sent(body).parsed(cls)
        parsed._written = body
        return parsed

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the fields that are read elsewhere or refused, too."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described)["properties"]
        for name, kind in cls.read_elsewhere.items():
            properties[name] = handler(TypeAdapter(kind).core_schema)
        for name, (accepted, reason) in cls.refused.items():
            properties[name] = {
                "enum": [None, *accepted.values],
                "description": f"Not supported: {reason}.",
            }
        return described

    @property
    def ignored(self) -> list[str]:
        """The fields that were sent and have no meaning here."""
        known = self.read_elsewhere.keys() | self.refused.keys()
        inner = (
            f"{name}.{key}"
            for name, kind in self.read_elsewhere.items()
            if isinstance(value := getattr(self, name, None), dict)
            for key in value.keys() - _keys_of(kind)
            if value[key] is not None
        )
        return [*(name for name in self.unknown if name not in known), *sorted(inner)]


def with_extra_body(body: Any) -> Any:
    """Return a body with the fields of `extra_body` among its own, as the OpenAI SDK sends them.

    Other clients send the object as it is. Raises the ApiError for a field that says two things.
    """
    extra = body.get("extra_body") if isinstance(body, dict) else None
    if not isinstance(extra, dict):
        return body
    written = {name: value for name, value in body.items() if name != "extra_body"}
    for name, value in extra.items():
        if written.get(name) not in (None, value):
            raise refuse(
                f"extra_body.{name} and {name} say different things: send one of them.", f"extra_body.{name}"
            )
        written[name] = value
    return written


def _keys_of(kind: Any) -> set[str]:
    """Return the keys of an object's type, or of those in a union."""
    return {key for each in (kind, *get_args(kind)) if is_typeddict(each) for key in each.__annotations__}
