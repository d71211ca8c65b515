"""JSON as it is sent: compact, and not escaped to ASCII."""

from __future__ import annotations

import json
from typing import Any

_encoder = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Write JSON without spaces."""
    return _encoder.encode(value)


def body(value: Any) -> bytes:
    """Write the body of a JSON response: one line."""
    return (dumps(value) + "\n").encode()
