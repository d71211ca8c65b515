"""JSON as it is received and sent: a body is decoded, or refused with where it stops being JSON. Knows no fields."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from mlx_backend.api.errors import refuse
from mlx_backend.conversation.json_values import MAX_DEPTH, is_too_deep

_TOO_DEEP = f"The body is nested too deeply: more than {MAX_DEPTH} levels."


def decode_json(data: bytes) -> Any:
    """Decode a body. Raises ApiError (400)."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise refuse(f"The body is not UTF-8: byte {error.start} cannot be decoded.") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise refuse(f"The body is not JSON: {error.msg} at {where}.") from None
    except RecursionError:
        raise refuse(_TOO_DEEP) from None
    except ValueError as error:  # NaN, or a number of thousands of digits
        what = "a number has thousands of digits" if "digits" in str(error) else str(error)
        raise refuse(f"The body is not JSON that can be read: {what}.") from None
    if is_too_deep(value):
        raise refuse(_TOO_DEEP)
    # Clients that cut a text in the middle of an emoji send half a surrogate pair.
    return _repair_surrogates(value) if re.search(r"\\u[dD][89a-fA-F]", text) else value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _repair_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        case list():
            return [_repair_surrogates(item) for item in value]
        case dict():
            return {_repair_surrogates(key): _repair_surrogates(item) for key, item in value.items()}
        case _:
            return value


_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def dumps(value: Any) -> str:
    """Write JSON without spaces, in one line: for many clients some characters end one that JSON has as they are."""
    text = _encoder.encode(value)
    return text if text.isascii() else _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def body(value: Any) -> bytes:
    """Write the body of a JSON response: one line."""
    return (dumps(value) + "\n").encode()


def arguments_object(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, for an API that wants one."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
