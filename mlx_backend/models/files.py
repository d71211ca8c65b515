"""What a model's own files say: what it is made for, its context length, sampling, chat template and added tokens.

Reads small files only, and just the beginning of a large tokenizer; never weights. Knows no MLX: a loaded model and one
that is only listed are described alike. What a file does not say, or cannot be read, is None or empty.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlx_backend.conversation.json_values import is_too_deep
from mlx_backend.declaration import declared, within
from mlx_backend.models.config_names import with_both_names
from mlx_backend.models.templates import stand_in
from mlx_backend.settings import SamplingSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO, TypeGuard

type ModelType = Literal["llm", "embedding", "rerank"]

TYPES: tuple[ModelType, ...] = ("llm", "embedding", "rerank")

ENCODERS = frozenset(
    [
        *("bert", "roberta", "xlm-roberta", "camembert", "modernbert"),  # these can be run here
        *("distilbert", "mpnet", "deberta", "deberta-v2", "electra", "albert", "nomic_bert", "new"),
        *("xlm-roberta-xl", "luke", "eurobert", "neobert"),
    ]
)
"""Encoder-only networks: they attend in both directions and generate nothing."""
_SENTENCE_TRANSFORMERS = ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json")
# The names under which configurations give a model's number of positions.
CONTEXT_KEYS = (
    *("max_position_embeddings", "max_seq_len", "max_sequence_length"),
    *("n_positions", "n_ctx", "seq_length", "model_max_length", "max_context_length"),
)
_MAX_CONTEXT = 1 << 31
"""Tokens. A larger number, as 10**30 in many a file, says that no limit is known."""
# Of one architecture: elsewhere the name says something else.
_OWN_CONTEXT_KEYS = {"lille-130m": "block_size"}
_ADVICE = {
    name: declared(SamplingSettings)[name].kind.limits
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}
"""What makers recommend, with the limits of each."""
_LARGEST = 1e9
MAX_JSON_BYTES = 16 << 20
"""Bytes of a file that should be small."""
_MAX_TEMPLATE_BYTES = 512 << 10
"""Bytes of a template; the longest that are published have about 20 KiB."""
_WITH_TOOLS = "tool_use"
"""The usual name of a second template, which is used when there are tools."""
_TOKENIZER_HEAD = 1 << 20
"""Bytes of tokenizer.json that are read; the added tokens come before the vocabulary."""
_REASONING_TOKENS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
"""Pairs that mlx-lm takes for a model's reasoning, whatever its template says."""
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')


def open_file(file: Path) -> BinaryIO:
    """Open a file of a model's folder. Raises OSError, or ValueError for what is no file.

    The folder is a stranger's: a pipe or a device may stand there, which has no end.
    """
    opened = open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), "rb")  # noqa: PTH123, SIM115
    if stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
        return opened
    opened.close()
    raise ValueError(f"{file.name} is no file, but a folder, a pipe or a device")


def read_small(file: Path, max_bytes: int) -> bytes:
    """Read a file. Raises OSError, or ValueError for what is no file or larger than that."""
    with open_file(file) as opened:
        data = opened.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{file.name} is larger than {max_bytes >> 10:,} KiB")
    return data


def read_json(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises OSError, or ValueError with what is wrong with the file."""
    data = read_small(file, MAX_JSON_BYTES)
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(f"{file.name} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} holds no JSON object")
    if is_too_deep(value):  # for those who follow it
        raise ValueError(f"{file.name} is nested too deeply")
    return value


def read_json_or_empty(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; return an empty one if it is missing or cannot be read."""
    try:
        return read_json(file)
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What a model's files say of themselves; empty and 0 for what is not known. `quantization` is as 4bit or MXFP4."""

    architecture: str = ""
    quantization: str = ""
    weight_bytes: int = 0


def quantization(config: Mapping[str, Any]) -> str:
    """Return how the weights are stored: 4bit, MXFP4, BF16; empty if the configuration does not say."""
    config = of_text(config)
    how = config.get("quantization") or config.get("quantization_config")
    if isinstance(how, dict):
        mode, bits = how.get("mode", how.get("quant_method")), how.get("bits")
        if isinstance(mode, str) and mode not in ("", "affine"):
            return mode.upper()
        return f"{bits}bit" if _is_count(bits) else ""
    kind = config.get("dtype") or config.get("torch_dtype")
    return {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(str(kind), "")


def detect_model_type(folder: Path | None, name: str) -> ModelType:
    """Detect a model's type from its files, and from its name where they do not tell.

    Conversions often lose the files that make a causal model an embedding model; only its name is left then. What
    cannot be read is taken for a language model, whose loader explains best what is wrong with it.
    """
    config = read_json_or_empty(folder / "config.json") if folder is not None else {}
    short_name = name.rpartition("/")[2].casefold()
    listed = config.get("architectures")
    architectures = [str(each) for each in listed] if isinstance(listed, list) else []
    if any(each.endswith("ForSequenceClassification") for each in architectures):
        return "rerank"
    if str(config.get("model_type")) in ENCODERS:
        return "embedding"
    if "rerank" in short_name:
        return "rerank"
    if config.get("use_bidirectional_attention") or "embed" in short_name:
        return "embedding"
    if folder is not None and any((folder / file).is_file() for file in _SENTENCE_TRANSFORMERS):
        return "embedding"
    return "llm"


def of_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with its `text_config` merged in: multimodal models keep the language model's apart."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens a model was trained for, None if unknown.

    Positions scaled with YaRN are counted as scaled; for other kinds of scaling the configured figure includes it.
    """
    config = of_text(with_both_names(config))
    own_key = _OWN_CONTEXT_KEYS.get(str(config.get("model_type")))
    lengths = (config.get(key) for key in (*CONTEXT_KEYS, *([own_key] if own_key else ())))
    length = next((value for value in lengths if _is_count(value) and value <= _MAX_CONTEXT), None)
    scaling = config.get("rope_scaling")
    if length is None or not isinstance(scaling, dict):
        return length
    original, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    scaling_type = scaling.get("rope_type", scaling.get("type"))
    if (
        scaling_type == "yarn"
        and _is_count(original)
        and isinstance(factor, int | float)
        and 1 <= factor <= 1024
    ):
        return max(length, int(original * factor))
    return length


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in a model's vocabulary, None if unknown."""
    size = config.get("vocab_size") or of_text(config).get("vocab_size")
    return size if _is_count(size) else None


def sampling_advice(folder: Path) -> dict[str, float]:
    """Return what generation_config.json recommends, by the names of `Sampling`; greedy if do_sample is false.

    A number that no request may have is left out: it would refuse them all.
    """
    config = read_json_or_empty(folder / "generation_config.json")
    advice = {name: config[name] for name in _ADVICE if _is_advice(config.get(name), _ADVICE[name])}
    if config.get("do_sample") is False:
        advice["temperature"] = 0.0
    return advice


def _is_advice(value: Any, limits: Mapping[str, Any]) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST and within(value, limits)


def chat_template(folder: Path) -> str | None:
    """Return the source of a model's template; where it names a function of mlx-lm's in place of one, its stand-in."""
    return own_chat_template(folder) or stand_in(_tokenizer_config(folder).get("chat_template_type"))


def own_chat_template(folder: Path) -> str | None:
    """Return the source of the template in a model's files: a file of its own, or tokenizer_config.json's.

    Where there is another for conversations with tools (`tool_use`), the two become one that chooses between them.
    """
    found = _named_templates(_tokenizer_config(folder).get("chat_template"))
    for file in (folder / "chat_template.json", folder / "processor_config.json"):  # of models that see
        if not found and file.is_file():
            found = _named_templates(read_json(file).get("chat_template"))
    for name, file in (
        ("default", folder / "chat_template.jinja"),
        (_WITH_TOOLS, folder / "additional_chat_templates" / f"{_WITH_TOOLS}.jinja"),
    ):
        if file.is_file():
            try:
                text = read_small(file, _MAX_TEMPLATE_BYTES).decode("utf-8")
                found[name] = text.replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file.name} cannot be read: {error}") from None
    for template in found.values():
        if len(template) > _MAX_TEMPLATE_BYTES:
            raise ValueError(f"the model's chat template is larger than {_MAX_TEMPLATE_BYTES >> 10} KiB")
    with_tools, without = found.get(_WITH_TOOLS), found.get("default")
    if with_tools is None or without is None or with_tools == without:
        return without or with_tools
    # Jinja drops a template's last line break; the empty texts keep white space that is next to a block.
    inner = (
        "{{ '' }}" + with_tools.removesuffix("\n") + "{{ '' }}",
        "{{ '' }}" + without.removesuffix("\n") + "{{ '' }}",
    )
    return "{% if tools %}" + inner[0] + "{% else %}" + inner[1] + "{% endif %}"


def _named_templates(given: Any) -> dict[str, str]:
    """Return templates by name, as transformers writes one, or a list of several."""
    if isinstance(given, str):
        return {"default": given}
    entries = given if isinstance(given, list) else []
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }


def response_template(folder: Path) -> Any:
    """Return what tokenizer_config.json says of the model's output, as it is; None if it says nothing."""
    return _tokenizer_config(folder).get("response_template")


def added_tokens(folder: Path) -> dict[str, bool]:
    """Return the text of each token added to the vocabulary, and whether it is special: marked so, or an end token."""
    found: dict[str, bool] = {}
    for _, text, is_special in _added_entries(folder):
        found[text] = found.get(text, False) or is_special
    bos = _named_token(folder, "bos_token")
    return found | dict.fromkeys([*end_tokens(folder), *([bos] if bos else [])], True)


def end_tokens(folder: Path) -> frozenset[str]:
    """Return the texts of the tokens that end a reply: as in mlx-lm, by the generation config or else the config.

    The tokenizer's own is one of them. Those that are part of the ordinary vocabulary are left out.
    """
    ids: Any = None
    for name in ("generation_config.json", "config.json"):
        ids = ids or read_json_or_empty(folder / name).get("eos_token_id")
    listed = {str(each) for each in (ids if isinstance(ids, list) else [ids])}
    own = _named_token(folder, "eos_token")
    found = {text for token, text, _ in _added_entries(folder) if token in listed}
    return frozenset(found | ({own} if own else set()))


def control_tokens(tokens: Mapping[str, bool], template: str | None) -> list[str]:
    """Return which of the added tokens are control tokens.

    They are those that are special, those that surround reasoning, and those that a template uses.
    """
    reasoning = next((pair for pair in _REASONING_TOKENS if all(text in tokens for text in pair)), ())
    return [
        text
        for text, special in tokens.items()
        if special or text in reasoning or (text.strip() and text in (template or ""))
    ]


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    file = folder / "tokenizer_config.json"
    return read_json(file) if file.is_file() else {}


def _named_token(folder: Path, name: str) -> str | None:
    entry = _tokenizer_config(folder).get(name)
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) and text else None


def _added_entries(folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Yield id, text and whether it is marked as special, of every token that either file of the tokenizer adds."""
    listed = [(e.get("id"), e) for e in _tokenizer_added_tokens(folder) if isinstance(e, dict)]
    decoder = _tokenizer_config(folder).get("added_tokens_decoder")
    for token, entry in [*listed, *(decoder.items() if isinstance(decoder, dict) else ())]:
        if isinstance(entry, dict) and isinstance(text := entry.get("content"), str):
            yield str(token), text, entry.get("special") is True


def _tokenizer_added_tokens(folder: Path) -> list[Any]:
    """Read the added tokens of tokenizer.json without the megabytes of vocabulary after them."""
    try:
        with open_file(folder / "tokenizer.json") as file:
            head = file.read(_TOKENIZER_HEAD).decode("utf-8", "replace")
    except (OSError, ValueError):
        return []
    found = _ADDED_TOKENS.search(head)
    if found is None:
        return []
    try:
        entries, _ = json.JSONDecoder().raw_decode(head, found.end())
    except (ValueError, RecursionError):
        return []
    return entries if isinstance(entries, list) else []


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
