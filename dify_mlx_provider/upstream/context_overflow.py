"""Whether a server's error says that the prompt is longer than the context, and the numbers it gives.

mlx-backend and llama.cpp state both numbers in fields of the error; the others put them into a sentence, each into its
own. Knows no exceptions (`errors`) and no network.

    mlx-backend           code context_length_exceeded; prompt_tokens, max_model_len
    llama.cpp             type exceed_context_size_error; n_prompt_tokens, n_ctx
    OpenAI, older vLLM    … maximum context length is C tokens. However, you requested N tokens (P in the messages, …
    vLLM                  … maximum context length is C tokens and your request has P input tokens
    SGLang                … maximum context length of C tokens. You requested a total of N tokens: P tokens from the …
    LM Studio             Trying to keep the first P tokens when context the overflows. However, the model is loaded
                          with context length of only C tokens … or: … (n_keep: P >= n_ctx: C)
    llama-cpp-python      Requested tokens (P) exceed context window of C
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CODES = ("context_length_exceeded", "exceed_context_size")
_PROMPT_FIELDS = ("prompt_tokens", "n_prompt_tokens")
_CONTEXT_FIELDS = ("max_model_len", "n_ctx")

_CONTEXT = r"context[ _](?:length|size|window)|the context holds|n_ctx"
_SENTENCES = re.compile(
    rf"(?:{_CONTEXT}).{{0,80}}\b(?:requested|your (?:request|prompt|messages)|not enough)"
    rf"|\b(?:exceeds?|longer than|larger than|greater than|too (?:long|large))\b.{{0,40}}(?:{_CONTEXT})"
    rf"|(?:{_CONTEXT}) (?:was |is )?exceeded|when (?:the )?context (?:the )?overflows|prompt is too long",
    re.IGNORECASE | re.DOTALL,
)
_CONTEXT_NUMBER = re.compile(
    rf"(?:{_CONTEXT})(?:\s+(?:is|of|only))*[:\s(]*(\d+)|(\d+) maximum\b", re.IGNORECASE
)
_PROMPT_NUMBERS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(\d+) (?:tokens )?(?:in|from) the (?:input )?messages",
        r"(\d+) input tokens",
        r"\b(?:request|input|prompt|tokens)\s*\((\d+)",
        r"n_keep: (\d+)",
        r"keep the first (\d+) tokens",
        r"\bprompt (?:has|contains|is too long:) (\d+)",
        r"\brequested (\d+) tokens",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextOverflow:
    """A prompt that did not fit, in tokens; None is what the server did not say."""

    prompt_tokens: int | None = None
    context_length: int | None = None


def parse_context_overflow(message: str, error: Any = None) -> ContextOverflow | None:
    """Return what an error says of a prompt that is too long; None if it is another error.

    `error` is the server's error object, if it sent one.
    """
    fields = error if isinstance(error, Mapping) else {}
    kind = f"{fields.get('type', '')} {fields.get('code', '')}"
    if not any(code in kind for code in _CODES) and not _SENTENCES.search(message):
        return None
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", message)
    context = _CONTEXT_NUMBER.search(text)
    prompt = next(filter(None, (pattern.search(text) for pattern in _PROMPT_NUMBERS)), None)
    return ContextOverflow(
        prompt_tokens=_count_in(fields, _PROMPT_FIELDS) or (int(prompt[1]) if prompt else None),
        context_length=_count_in(fields, _CONTEXT_FIELDS)
        or (int(context[1] or context[2]) if context else None),
    )


def _count_in(fields: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    counts = (fields.get(name) for name in names)
    return next((count for count in counts if type(count) is int and count > 0), None)
