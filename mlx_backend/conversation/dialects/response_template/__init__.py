"""A model's own description of its output: transformers' `response_template`, made a `Dialect` of ours.

    "response_template": {
        "start_anchor": "<|im_start|>assistant\\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<tool_call>", "close": "</tool_call>", "repeats": true, "content": "json",
                "transform": {"type": "function", "function": "{content}"}
            },
            "content": {"close": "<|im_end|>"}
        }
    }

It stands in a tokenizer's configuration, and says with which texts reasoning, answer and calls begin and end. Those
become a `BlockFormat`, so that everything reads and writes such a turn as it does a known family's: by token ids, in
pieces, with calls that were cut or forgotten closers. What a template cannot express there is refused with the reason
(`ResponseTemplateError`), and the model is recognised as one without a template.

The older `response_schema` (JSON Schema with regular expressions in `x-regex`) is not read: transformers itself drops
it, and its expressions may take any time.

`conversation/recognition.py` decides between such a dialect and a known family's.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.response_template.fields import dialect_of
from mlx_backend.conversation.dialects.response_template.patterns import ResponseTemplateError

if TYPE_CHECKING:
    from mlx_backend.conversation.dialects.base import Dialect

__all__ = ["ResponseTemplateError", "response_template_dialect"]

MAX_TEMPLATE = 65_536  # characters, as JSON


def response_template_dialect(template: Any) -> Dialect:
    """Return the dialect that a response template describes; always the same object for the same template.

    Raises ResponseTemplateError if it cannot be used, and says why.
    """
    try:
        source = json.dumps(template, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResponseTemplateError(f"response_template is not JSON: {error}") from error
    if len(source) > MAX_TEMPLATE:
        raise ResponseTemplateError(
            f"response_template has {len(source)} characters; {MAX_TEMPLATE} are allowed"
        )
    found = _of_source(source)
    if isinstance(found, ResponseTemplateError):
        raise found
    return found


@lru_cache(maxsize=256)
def _of_source(source: str) -> Dialect | ResponseTemplateError:
    try:
        return dialect_of(json.loads(source))
    except ResponseTemplateError as error:
        return error
