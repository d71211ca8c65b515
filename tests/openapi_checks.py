"""Compares what a server sends with its own /openapi.json: every key must be described there."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jsonschema_rs

if TYPE_CHECKING:
    from werkzeug.test import TestResponse

SCHEMAS = "#/components/schemas/"


def closed(schema: Any) -> Any:
    """The schema with no keys allowed beyond those it names."""
    match schema:
        case {"type": "object", "properties": _} if "additionalProperties" not in schema:
            return {**{key: closed(value) for key, value in schema.items()}, "additionalProperties": False}
        case dict():
            return {key: closed(value) for key, value in schema.items()}
        case list():
            return [closed(each) for each in schema]
        case _:
            return schema


@lru_cache
def _validator(schema: str, components: str) -> Any:
    definitions = json.loads(components.replace(SCHEMAS, "#/$defs/"))
    return jsonschema_rs.validator_for(
        {**json.loads(schema.replace(SCHEMAS, "#/$defs/")), "$defs": closed(definitions)}
    )


def validate(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    """Raise a ValidationError for a value that does not match, or has a key that is not described."""
    _validator(json.dumps(schema), json.dumps(document["components"]["schemas"])).validate(value)


def check(document: dict[str, Any], path: str, response: TestResponse) -> None:
    """Compare a response of any status with what is said of this path, event by event if it is streamed."""
    operation = document["paths"][path][response.request.method.lower()]
    status = str(response.status_code)
    described = operation["responses"].get(status) or operation["responses"][f"{status[0]}XX"]
    schema = described["content"][response.mimetype]["schema"]
    if response.mimetype == "application/x-ndjson":
        for line in response.get_data(as_text=True).splitlines():
            validate(document, schema, json.loads(line))
        return
    if response.mimetype != "text/event-stream":
        is_json = response.mimetype == "application/json"
        validate(document, schema, response.get_json() if is_json else response.get_data(as_text=True))
        return
    *events, nothing = response.get_data(as_text=True).split("\n\n")
    assert nothing == ""
    if not events[-1].startswith("event: "):  # as in the APIs whose events have names
        assert events.pop() == "data: [DONE]"
    for event in events:
        if not event.startswith(":"):  # a comment
            validate(document, schema, json.loads(event.partition("data: ")[2]))
