"""A tool of a request, or one that a message adds. Those that run at Anthropic are known by their type."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from mlx_backend.api.fields import Lenient, refuse_invalid


class ClientTool(Lenient):
    """A tool of the client's own."""

    type: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: dict[str, Any] | None = None
    """All is cached, and arguments are always streamed as they are written."""
    eager_input_streaming: bool | None = None

    @classmethod
    def parse(cls, definition: Any, where: str) -> Self:
        """Validate a definition. Raises the ApiError that names what is wrong with it."""
        try:
            return cls.model_validate(definition)
        except ValidationError as error:
            refuse_invalid(error, where)

    @property
    def is_hosted(self) -> bool:
        """Whether it is one that only Anthropic's models know."""
        return self.type not in (None, "custom")

    @property
    def unknown(self) -> list[str]:
        """The fields that mean nothing here; of a tool that runs at Anthropic its type."""
        return [str(self.type)] if self.is_hosted else super().unknown

    def as_function(self) -> dict[str, Any]:
        """Return it as a function."""
        said = {"description": self.description, "parameters": self.input_schema}
        sent = {key: value for key, value in said.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **sent}}
