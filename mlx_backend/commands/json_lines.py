"""What `parse`, `render` and `sanitise` share: JSON on standard input, an object for each on standard output.

An input that cannot be used is answered by an object with `error`, which has the message, the field to blame (`param`)
and the line; the exit status is then 1. Knows nothing of what the objects mean.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.json_values import MAX_DEPTH, is_too_deep, json_type
from mlx_backend.errors import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path


class InputError(ValueError):
    """An input that cannot be used; the text says why, and `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def decode(data: bytes, *, errors: str = "strict") -> Any:
    """Decode JSON in UTF-8; `errors` is for bytes that are none, as for `bytes.decode`. Raises InputError."""
    too_deep = f"not JSON that can be read: nested too deeply, more than {MAX_DEPTH} levels"
    try:
        value = json.loads(data.decode("utf-8-sig", errors))
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise InputError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise InputError(too_deep) from error
    if is_too_deep(value):
        raise InputError(too_deep)
    return value


def chat_request(value: Any) -> dict[str, Any]:
    """Return a chat request: an object, or a bare list of its messages. Raises InputError."""
    if isinstance(value, list):
        return {"messages": value}
    if not isinstance(value, dict):
        raise InputError(f"a request is an object with `messages`, not {json_type(value)}")
    return value


def read_template(file: Path) -> str:
    """Return a chat template's text. Raises InputError."""
    from mlx_backend.models.templates import MAX_SOURCE

    if file.exists() and not file.is_file():
        raise InputError(f"cannot read {file}: it is not a file")
    try:
        with file.open(encoding="utf-8") as opened:
            return opened.read(MAX_SOURCE + 1)
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {file}: it is not text in UTF-8") from error
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise InputError(f"cannot read {file}: {first_line(error)}") from error


def answers(
    lines: Iterable[bytes], read: Callable[[bytes], dict[str, Any]], answer: Callable[[Any], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield an answer with the `id` of each line that is not blank. Both functions may raise InputError."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        identity: dict[str, Any] = {}
        try:
            request = read(line)
            if "id" in request:
                identity = {"id": request["id"]}
            result = answer(request)
        except InputError as error:
            param = {"param": error.param} if error.param else {}
            result = {"error": {"message": str(error), **param, "line": number}}
        yield identity | result


def answer_input(
    read: Callable[[bytes], dict[str, Any]], answer: Callable[[Any], dict[str, Any]], *, by_lines: bool
) -> int:
    """Print an answer for standard input, or for each of its lines; return 1 if any is an error, else 0."""
    source = sys.stdin.buffer
    has_failed, is_empty = False, not by_lines
    for result in answers(source if by_lines else [source.read()], read, answer):
        is_empty = False
        has_failed |= "error" in result
        write(result)
    if is_empty:
        write({"error": {"message": "there is nothing on standard input; JSON is expected", "line": 1}})
    return 1 if has_failed or is_empty else 0


def write(result: dict[str, Any]) -> None:
    """Print an object as a line of JSON. Raises OSError."""
    write_text(json.dumps(result, ensure_ascii=False) + "\n")


def write_text(text: str) -> None:
    """Print text in UTF-8, half of a surrogate pair as JSON's escape. Raises OSError."""
    sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
    sys.stdout.buffer.flush()
