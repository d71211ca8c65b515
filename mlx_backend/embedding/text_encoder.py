"""Texts to tokens: with the special tokens a network was trained with, and user text never becoming one of them.

Needs only the `tokenizers` library, imported with the first model, and of that only its tokenizer.json. Thread-safe.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.foreign_calls import run_here
from mlx_backend.models.files import read_json_or_empty

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tokenizers import Encoding, Tokenizer

MIN_DOCUMENT_TOKENS = 16
"""A query that leaves a document fewer is refused."""

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Part of the prompt that Qwen3-Reranker was trained with (from its model card); its answer is one token, yes or no."""
_RERANK_PROMPT_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_RERANK_PROMPT_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text, or a query and a document, as tokens. `type_ids` are 1 for the second of a pair, None for all 0."""

    tokens: Sequence[int]
    type_ids: Sequence[int] | None = None


class TextEncoder:
    """Text to tokens, by a model's own tokenizer. Valid token ids are 0 … `vocabulary_size` - 1.

    `append_end_token` is for causal embedding models, whose vector is the state of that token; `rerank_prompt` for
    causal rerankers, which are asked a question about each document.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        vocabulary_size: int,
        *,
        append_end_token: bool = False,
        rerank_prompt: bool = False,
    ) -> None:
        from tokenizers import Tokenizer

        self.vocabulary_size = vocabulary_size
        spec = json.loads(_load_tokenizer(folder, name).to_str())
        spec["truncation"] = spec["padding"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(spec))
        # A second tokenizer, in which the markers of the rerank prompt are special tokens.
        self._prompt_tokenizer = Tokenizer.from_str(json.dumps(spec)) if rerank_prompt else None
        self._tokenizer.encode_special_tokens = True
        self._special_tokens = {
            token: added.content
            for token, added in self._tokenizer.get_added_tokens_decoder().items()
            if added.special
        }
        trailing = _count_trailing_special(self._encode("a"))
        self._end_tokens = self._end_token(folder) if append_end_token and not trailing else []
        self._trailing = trailing + len(self._end_tokens)
        """How many special tokens stand after every text."""

    def encode(
        self, text: str, max_tokens: int | None = None, *, add_special_tokens: bool = True
    ) -> EncodedText:
        """Tokenise one text, truncated to `max_tokens` if given; the special tokens after it are kept."""
        if not add_special_tokens:
            return EncodedText(self._encode(text, special=False).ids[:max_tokens])
        tokens = self._encode(text).ids + self._end_tokens
        if max_tokens is not None and len(tokens) > max_tokens:
            tokens = tokens[: max(0, max_tokens - self._trailing)] + tokens[len(tokens) - self._trailing :]
        return EncodedText(tokens)

    def encode_pair(
        self, query: str, document: str, instruction: str | None, max_tokens: int
    ) -> tuple[EncodedText, bool]:
        """Tokenise a query and a document to be ranked; return whether the document was truncated to fit.

        Raises EngineRefused if the query leaves no room for a document.
        """
        if self._prompt_tokenizer is not None:
            return self._encode_prompt(query, document, instruction or DEFAULT_INSTRUCTION, max_tokens)
        first, second = self._encode(query, special=False), self._encode(document, special=False)
        special = self._tokenizer.num_special_tokens_to_add(is_pair=True)
        room = max_tokens - special - len(first.ids)
        _check_room(room, len(first.ids), len(second.ids), max_tokens)
        truncated = len(second.ids) > room
        if truncated:
            second.truncate(room)
        both = self._tokenizer.post_process(first, second, True)
        return EncodedText(both.ids, both.type_ids), truncated

    def yes_no_tokens(self) -> tuple[int, int]:
        """Return the tokens for "yes" and "no". Raises EngineError if either word is not one token."""
        found = []
        for word in ("yes", "no"):
            tokens = self._encode(word, special=False).ids
            if len(tokens) != 1:
                raise EngineError(f"The model has no token for {word!r}, so it cannot rank.")
            found += tokens
        return found[0], found[1]

    def _encode_prompt(
        self, query: str, document: str, instruction: str, max_tokens: int
    ) -> tuple[EncodedText, bool]:
        """Encode Qwen3-Reranker's prompt."""
        question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
        start, end = self._encode_markers(_RERANK_PROMPT_START), self._encode_markers(_RERANK_PROMPT_END)
        # As one text, as in training: the space before a document belongs to the document's first token.
        tokens = self._encode(f"{question} {document}", special=False).ids
        question_length = len(self._encode(question, special=False).ids)
        room = max_tokens - len(start) - question_length - len(end)
        _check_room(room, question_length, len(tokens) - question_length, max_tokens)
        limit = question_length + room
        return EncodedText([*start, *tokens[:limit], *end]), len(tokens) > limit

    def _encode_markers(self, text: str) -> list[int]:
        assert self._prompt_tokenizer is not None  # only `_encode_prompt` calls this
        tokens: list[int] = self._prompt_tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def _encode(self, text: str, *, special: bool = True) -> Encoding:
        """Tokenise a user's text; `special` adds the special tokens around it."""
        text = text.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair
        encoding = self._encode_one(text, special)
        # A vocabulary may list special tokens among the ordinary ones.
        if self._spells_special_token(encoding):
            for marker in self._special_tokens.values():
                text = text.replace(marker, f"{marker[0]} {marker[1:]}")
            encoding = self._encode_one(text, special)
        return encoding

    def _encode_one(self, text: str, special: bool) -> Encoding:
        # The batch call releases the GIL during a long text; the single one does not.
        return run_here(lambda: self._tokenizer.encode_batch_fast([text], add_special_tokens=special)[0])

    def _spells_special_token(self, encoding: Encoding) -> bool:
        """Whether a special token other than "unknown" came from the text itself."""
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        unknown = self._tokenizer.token_to_id("<unk>"), self._tokenizer.token_to_id("[UNK]")
        return any(
            token in self._special_tokens and not mask and token not in unknown for token, mask in pairs
        )

    def _end_token(self, folder: Path) -> list[int]:
        """Return the end-of-text token, for a tokenizer that does not add it itself."""
        eos: Any = read_json_or_empty(folder / "tokenizer_config.json").get("eos_token")
        marker = eos.get("content") if isinstance(eos, dict) else eos
        for candidate in ("<|endoftext|>", marker):
            token = self._tokenizer.token_to_id(candidate) if isinstance(candidate, str) else None
            if token is not None:
                return [token]
        return []


def _count_trailing_special(encoding: Encoding) -> int:
    """Count the special tokens after a text."""
    mask = encoding.special_tokens_mask
    return mask[::-1].index(0) if 0 in mask else 0


def _check_room(room: int, query: int, document: int, max_tokens: int) -> None:
    """Raise EngineRefused if `room`, the tokens left for the document, is too small."""
    if room < min(document, MIN_DOCUMENT_TOKENS):
        raise EngineRefused(
            f"The query has {query} tokens; with a document the limit is {max_tokens}, and at least "
            f"{MIN_DOCUMENT_TOKENS} must be left for the document."
        )


def _load_tokenizer(folder: Path, name: str) -> Tokenizer:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        from transformers import AutoTokenizer

        tokenizer = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as error:
        raise EngineError(f"The tokenizer of {name!r} cannot be loaded: {error}.") from error
    if not isinstance(tokenizer, Tokenizer):
        raise EngineError(
            f"The tokenizer of {name!r} has no fast version: there is no tokenizer.json in {folder}. Convert it "
            "(transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)) and put it there."
        )
    return tokenizer
