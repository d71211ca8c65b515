"""Validators for the fields of a request that have more than one form. Each raises what pydantic turns into a 400.

Knows what clients send and what the chat service calls it; nothing of whole requests or of HTTP.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from mlx_backend.api.errors import refuse
from mlx_backend.chat.request import AnswerFormat, ToolChoice
from mlx_backend.conversation.json_values import excerpt
from mlx_backend.models.spec import RESERVED_KWARGS
from mlx_backend.settings import ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_FORMAT_ALIASES = {"none": "raw", "auto": "separate", "deepseek": "separate", "parsed": "separate"}


def whole(value: Any) -> Any:
    """Accept 7.0 for 7: some languages write every number with a decimal point."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def limit(value: Any) -> Any:
    """Accept -1 for no limit, as several clients send it."""
    value = whole(value)
    return None if type(value) is int and value == -1 else value


def stop_strings(value: Any) -> Any:
    """Accept one stop string or several; empty ones are left out."""
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    return tuple(text for text in texts if text)


def logit_bias(value: Any) -> Any:
    """Return pairs of a token id and its bias."""
    if value in (None, ""):
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "must be an object: token id -> bias")
    pairs = []
    for token, bias in value.items():
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise PydanticCustomError(
                "logit_bias", "has the key {key}, which is not a token id", {"key": repr(token)}
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise PydanticCustomError("logit_bias", "must map to numbers from -100 to 100")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


def reasoning_format(value: Any) -> Any:
    """Accept our names of the formats and those of other servers."""
    if value is None:
        return None
    try:
        return ReasoningFormat(_FORMAT_ALIASES.get(value, value))
    except (ValueError, TypeError):
        words = ", ".join(ReasoningFormat)
        raise PydanticCustomError("reasoning_format", "must be one of {words}", {"words": words}) from None


def template_kwargs(value: Any) -> Any:
    """Accept further variables for the chat template, except those the server sets itself."""
    if isinstance(value, dict) and (reserved := sorted(RESERVED_KWARGS & value.keys())):
        raise PydanticCustomError(
            "chat_template_kwargs", "cannot replace {name}", {"name": ", ".join(reserved)}
        )
    return {} if value is None else value


def nested_budgets(
    written: Mapping[str, Any], template_kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield the thinking budgets inside other fields. Raises ApiError for what is not a number of tokens."""
    for outer, inner in (("reasoning", "max_tokens"), ("thinking", "budget_tokens")):
        holder = written.get(outer)
        value = holder.get(inner) if isinstance(holder, dict) else None
        if value is None or value == "":
            continue
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value.strip()):
            value = int(value)
        if type(value) is not int or value < 0:
            name = f"{outer}.{inner}"
            raise refuse(f"{name}: must be a whole number of tokens from 0 up, not {excerpt(value)}.", name)
        yield f"{outer}.{inner}", value
    value = template_kwargs.get("thinking_budget")
    if type(value) is int and value >= 0:  # some templates read it, and -1 means something to them
        yield "chat_template_kwargs.thinking_budget", value


def tool_choice(value: Any) -> Any:
    """Return which tool calls a reply has to make."""
    match value:
        case None | "auto" | "none":
            return value
        case "required" | "any":
            return ToolChoice(required=True)
        case {"function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolChoice(name=name)
    raise PydanticCustomError(
        "tool_choice",
        """must be "auto", "none", "required" or {form}""",
        {"form": '{"type": "function", "function": {"name": …}}'},
    )


def response_format(value: Any) -> Any:
    """Return the format the answer must have."""
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", **rest}:
            schema = rest.get("schema")
            if schema is None:
                return AnswerFormat(kind="json_object")
            if isinstance(schema, dict):
                return AnswerFormat(kind="json_schema", value=schema)
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **rest}}:
            return _schema_format(schema, rest)
        case {"type": "json_schema", "schema": dict(schema), **rest}:  # the Responses API's form
            return _schema_format(schema, rest)
        case {"type": "json_schema"}:
            raise PydanticCustomError(
                "response_format", "names no schema: send json_schema.schema, an object"
            )
    raise PydanticCustomError("response_format", 'must be of type "text", "json_object" or "json_schema"')


def _schema_format(schema: dict[Any, Any], rest: Mapping[Any, Any]) -> AnswerFormat:
    words = {name: text for name in ("name", "description") if isinstance(text := rest.get(name), str)}
    return AnswerFormat(kind="json_schema", value=schema, strict=rest.get("strict") is True, **words)


def json_schema(value: Any) -> Any:
    """Accept a schema as text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise PydanticCustomError("json_schema", "is not JSON") from None
    return value


def count_of_logprobs(value: Any) -> Any:
    """Accept false for no log probabilities, as older clients send it."""
    return None if value is False else value
