"""How Harmony tells a model the format of its answer: a section at the end of the developer message.

Source: OpenAI's description of the Harmony format, section "Structured output". It only informs; what holds the answer
to the schema is a grammar, which this module knows nothing of.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_NOT_IN_NAMES = re.compile(r"[^\w-]+")
_MAX_NAME = 64  # characters; OpenAI's limit for the names of schemas
_DEFAULT_NAME = "response"


def response_format(name: str, description: str, schema: Mapping[str, Any]) -> str:
    """Write the section for one schema. `name` and `description` may be empty."""
    heading = _NOT_IN_NAMES.sub("_", name.strip())[:_MAX_NAME] or _DEFAULT_NAME
    comment = "".join(f"// {line.strip()}\n" for line in description.splitlines() if line.strip())
    body = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return f"# Response Formats\n\n## {heading}\n\n{comment}{body}"
