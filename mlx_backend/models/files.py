"""What a model's own files say of it: how long its context is, what its makers advise, its template, its tokens.

Small files only, and of a large tokenizer its beginning; never a weight. Knows no MLX: a model that is loaded and
one that is only listed are described alike. What is not said, or cannot be read, is None or empty.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import TypeGuard

# Where configurations write how many positions a model was made for.
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "seq_length")
_ADVICE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LARGEST = 16 << 20  # bytes of a file that is meant to be small
_BEGINNING = 1 << 20  # characters of tokenizer.json; the added tokens stand before the vocabulary
_ADDED = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises OSError or ValueError, which says what it holds instead."""
    if file.stat().st_size > _LARGEST:
        raise ValueError(f"{file.name} is larger than {_LARGEST >> 20} MiB")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file.name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    return value


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what concerns text on top: models that also see keep that apart."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model was made for.

    Positions stretched with YaRN count as stretched. Other ways to scale them are in the figure already.
    """
    config = of_text(config)
    lengths = (config.get(key) for key in _CONTEXT_KEYS)
    length = next((value for value in lengths if _is_count(value)), None)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if length is None or not isinstance(scaling, dict):
        return length
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn" and _is_count(original) and isinstance(factor, int | float) and 1 <= factor <= 1024:
        return max(length, int(original * factor))
    return length


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens a model knows."""
    size = config.get("vocab_size") or of_text(config).get("vocab_size")
    return size if _is_count(size) else None


def sampling_advice(folder: Path) -> dict[str, float]:
    """Read what the model's makers advise, by the names of `Sampling`; greedy if they say do_sample is false."""
    try:
        written = read_object(folder / "generation_config.json")
    except (OSError, ValueError):
        return {}
    advice = {
        name: written[name]
        for name in _ADVICE
        if isinstance(written.get(name), int | float) and not isinstance(written.get(name), bool)
    }
    if written.get("do_sample") is False:
        advice["temperature"] = 0.0
    return advice


def chat_template(folder: Path) -> str | None:
    """Return the source of the template a tokenizer would be loaded with: a file of its own, else its setting."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    written = _tokenizer_config(folder).get("chat_template")
    if isinstance(written, list):  # several, by name
        written = {
            entry.get("name"): entry.get("template") for entry in written if isinstance(entry, dict)
        }.get("default")
    return written if isinstance(written, str) else None


def added_tokens(folder: Path) -> dict[str, bool]:
    """Return the texts of the tokens that were added to the vocabulary, and whether they are marked special."""
    settings = _tokenizer_config(folder)
    found: dict[str, bool] = {}
    for entry in [*_from_tokenizer(folder), *_values(settings.get("added_tokens_decoder"))]:
        if isinstance(entry, dict) and isinstance(text := entry.get("content"), str):
            found[text] = found.get(text, False) or entry.get("special") is True
    for name in ("eos_token", "bos_token"):
        entry = settings.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str) and text:
            found[text] = True
    return found


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_object(file) if file.is_file() else {}


def _from_tokenizer(folder: Path) -> list[Any]:
    """Read the added tokens without the megabytes of vocabulary behind them."""
    try:
        with (folder / "tokenizer.json").open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(_BEGINNING)
    except OSError:
        return []
    found = _ADDED.search(beginning)
    if found is None:
        return []
    try:
        entries, _ = json.JSONDecoder().raw_decode(beginning, found.end())
    except (ValueError, RecursionError):
        return []
    return entries if isinstance(entries, list) else []


def _values(table: Any) -> list[Any]:
    return list(table.values()) if isinstance(table, dict) else []


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
