"""/openapi.json: the server's addresses with what they take and answer, made from the routes and the types they name.

Knows OpenAPI's document; what an address takes is its handler's `Operation`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from mlx_backend import __version__
from mlx_backend.api.addresses import WEBSOCKET
from mlx_backend.server.handlers import json_response, own_route

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pydantic.json_schema import JsonSchemaMode, JsonSchemaValue
    from pydantic_core import core_schema

    from mlx_backend.api.addresses import Operation
    from mlx_backend.server.handlers import Handler, Route

VERSION = "3.1.0"
_PREFIX = "/v1"
_DESCRIPTION = (
    "Reasoning models on Apple's MLX. Addresses that begin with /v1 are found without it too. Fields that a "
    "request sends and that mean nothing here are accepted, and named in the header x-mlx-backend-ignored."
)
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key, where the server needs one."},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
}


def openapi_route(routes: Callable[[], Sequence[Route]]) -> Route:
    """Return the address of the routes' document, which is made once."""
    made = cache(lambda: document(routes()))
    return own_route("/openapi.json", "This document", dict[str, Any], lambda *_: json_response(made()))


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Describe the routes. One that is another without /v1 is not described again."""
    known = {(route.method, route.path) for route in routes}
    described = [route for route in routes if (route.method, _PREFIX + route.path) not in known]
    schemas, definitions = _schemas([route.handler for route in described])
    paths: dict[str, Any] = {}
    for route in described:
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.path)
        method = "get" if route.method == WEBSOCKET else route.method.lower()
        paths.setdefault(path, {})[method] = _operation(route, path, schemas)
    return {
        "openapi": VERSION,
        "info": {"title": "mlx-backend", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {"schemas": definitions, "securitySchemes": _SECURITY},
    }


type _Schemas = Mapping[tuple[Any, JsonSchemaMode], JsonSchemaValue]


def _operation(route: Route, path: str, schemas: _Schemas) -> dict[str, Any]:
    operation, error_type = route.handler.operation, route.handler.api.error_type
    refusal = {"application/json": {"schema": schemas[(id(error_type), "serialization")]}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", path)]),
        "responses": {
            **({} if route.method == WEBSOCKET else _answers(operation, schemas)),
            "4XX": {"description": "The request is refused, and why.", "content": refusal},
            "5XX": {"description": "The server cannot answer, and why.", "content": refusal},
        },
        "security": [{name: []} for name in _SECURITY] if route.needs_key else [],
    }
    if names := re.findall(r"{(\w+)}", path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if route.method == WEBSOCKET:  # which OpenAPI does not know
        described["responses"]["101"] = {"description": "The connection is a WebSocket from here on."}
        described["x-messages"] = {
            "sent": schemas[(id(operation.body), "validation")],
            "answered": schemas[(id(operation.answer), "serialization")],
        }
    elif operation.body is not None:
        body = {"application/json": {"schema": schemas[(id(operation.body), "validation")]}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _answers(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    content = {operation.media_type: {"schema": schemas[(id(operation.answer), "serialization")]}}
    if operation.event is not None:
        content[operation.stream_type] = {"schema": schemas[(id(operation.event), "serialization")]}
    answer = {"description": operation.summary, "content": content}
    return {str(status): answer for status in (200, *operation.also_answers)}


class _Generator(GenerateJsonSchema):
    """pydantic's, without a title for every field, and without defaults that say nothing."""

    def field_title_should_be_set(self, _schema: Any) -> bool:
        """Return False: a field's name says as much."""
        return False

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Leave out null and empty defaults: they mean that the field was not sent."""
        return (
            super().default_schema(schema) if schema.get("default") else self.generate_inner(schema["schema"])
        )


def _schemas(handlers: Sequence[Handler]) -> tuple[_Schemas, dict[str, JsonSchemaValue]]:
    """Return the schema of every type that the handlers name, by its identity, and what these refer to."""
    wanted: dict[tuple[Any, JsonSchemaMode], Any] = {}
    for handler in handlers:
        operation = handler.operation
        for kind in (operation.answer, operation.event, handler.api.error_type):
            wanted[(id(kind), "serialization")] = kind
        wanted[(id(operation.body), "validation")] = operation.body
    inputs = [(key, mode, TypeAdapter(kind)) for (key, mode), kind in wanted.items() if kind is not None]
    schemas, rest = TypeAdapter.json_schemas(
        inputs, ref_template="#/components/schemas/{model}", schema_generator=_Generator
    )
    definitions: dict[str, JsonSchemaValue] = rest.get("$defs", {})
    return schemas, definitions
