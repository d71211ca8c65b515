"""Texts to rows of tokens: the special tokens a network was trained with around them, and text never read as such.

Works on the `tokenizers` library alone; the one file a model needs is its tokenizer.json. Safe from any thread.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from mlx_backend.embedding.base import Row
from mlx_backend.errors import EngineError, EngineRefused
from mlx_backend.models.files import read_json_or_empty

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Encoding

MIN_DOCUMENT = 16  # tokens; a query that leaves a document less is too long

# How Qwen3-Reranker was taught to be asked. Its answer is one token, yes or no.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_ASKING = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWERING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TextEncoder:
    """Implements `Encoder` over a model's own tokenizer. `asks` for a causal model that answers yes or no."""

    def __init__(self, folder: Path, name: str, vocabulary_size: int, *, ends: bool, asks: bool) -> None:
        self.vocabulary_size = vocabulary_size
        form = json.loads(_backend(folder, name).to_str())
        form["truncation"] = form["padding"] = None
        self._backend = Tokenizer.from_str(json.dumps(form))
        self._with_control = Tokenizer.from_str(json.dumps(form)) if asks else None
        self._backend.encode_special_tokens = True
        self._special = {
            token: added.content
            for token, added in self._backend.get_added_tokens_decoder().items()
            if added.special
        }
        first, last = self._around(self._encode("a"))
        self._around_text = (first, last)
        self._ending = self._end_of(folder) if ends and not last else []

    def text(self, text: str, most: int | None = None, *, around: bool = True) -> Row:
        """Tokenise one text; with `most`, its beginning only. `around`: with what stands around every text."""
        if not around:
            return Row(self._encode(text, special=False).ids[:most])
        tokens = self._encode(text).ids + self._ending
        if most is not None and len(tokens) > most:
            kept = self._around_text[1] + len(self._ending)
            tokens = tokens[: max(0, most - kept)] + tokens[len(tokens) - kept :]
        return Row(tokens)

    def pair(self, query: str, document: str, instruction: str | None, most: int) -> tuple[Row, bool]:
        """Tokenise what is ranked together, the document cut to fit; say whether it was cut."""
        if self._with_control is not None:
            return self._question(query, document, instruction or INSTRUCTION, most)
        one, other = self._encode(query, special=False), self._encode(document, special=False)
        around = self._backend.num_special_tokens_to_add(is_pair=True)
        room = self._room(most - around - len(one.ids), len(one.ids), len(other.ids), most)
        cut = len(other.ids) > room
        if cut:
            other.truncate(room)
        both = self._backend.post_process(one, other, True)
        return Row(both.ids, both.type_ids), cut

    def answers(self) -> tuple[int, int]:
        """Return the tokens that mean yes and no."""
        found = []
        for word in ("yes", "no"):
            tokens = self._encode(word, special=False).ids
            if len(tokens) != 1:
                raise EngineError(f"The model has no token for {word!r}, so it cannot rank.")
            found += tokens
        return found[0], found[1]

    def _question(self, query: str, document: str, instruction: str, most: int) -> tuple[Row, bool]:
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>:"
        begin, end = self._control(_ASKING), self._control(_ANSWERING)
        # In one piece, as it was taught: the blank before a document belongs to the document's first token.
        both = self._encode(f"{asked} {document}", special=False).ids
        one = len(self._encode(asked, special=False).ids)
        room = self._room(most - len(begin) - one - len(end), one, len(both) - one, most)
        return Row([*begin, *both[: one + room], *end]), len(both) > one + room

    @staticmethod
    def _room(room: int, query: int, document: int, most: int) -> int:
        if room < min(document, MIN_DOCUMENT):
            raise EngineRefused(
                f"The query has {query} tokens; with a document the model holds {most}, and at least "
                f"{MIN_DOCUMENT} must be left for that."
            )
        return room

    def _control(self, text: str) -> list[int]:
        assert self._with_control is not None  # only models that are asked come here
        ids: list[int] = self._with_control.encode(text, add_special_tokens=False).ids
        return ids

    def _encode(self, text: str, *, special: bool = True) -> Encoding:
        text = text.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair
        encoding = self._batch(text, special)
        if self._smuggled(encoding):  # a vocabulary that lists its special tokens among its words
            for marker in self._special.values():
                text = text.replace(marker, f"{marker[0]} {marker[1:]}")
            encoding = self._batch(text, special)
        return encoding

    def _batch(self, text: str, special: bool) -> Encoding:
        # The batch call lets other threads run while a long text is read; the single one does not.
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0]

    def _smuggled(self, encoding: Encoding) -> bool:
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        unknown = self._backend.token_to_id("<unk>"), self._backend.token_to_id("[UNK]")
        return any(token in self._special and not mask and token not in unknown for token, mask in pairs)

    @staticmethod
    def _around(encoding: Encoding) -> tuple[int, int]:
        """Count the special tokens before and after a text."""
        mask = encoding.special_tokens_mask
        first = mask.index(0) if 0 in mask else len(mask)
        return first, mask[::-1].index(0) if 0 in mask else 0

    def _end_of(self, folder: Path) -> list[int]:
        """Return the token that such models read a text's meaning from, where the tokenizer does not add it."""
        written: Any = read_json_or_empty(folder / "tokenizer_config.json").get("eos_token")
        end = written.get("content") if isinstance(written, dict) else written
        for marker in ("<|endoftext|>", end):
            token = self._backend.token_to_id(marker) if isinstance(marker, str) else None
            if token is not None:
                return [token]
        return []


def _backend(folder: Path, name: str) -> Tokenizer:
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        from transformers import AutoTokenizer

        backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as error:
        raise EngineError(f"The tokenizer of {name!r} cannot be read: {error}.") from error
    if not isinstance(backend, Tokenizer):
        raise EngineError(
            f"The tokenizer of {name!r} has no fast form: there is no tokenizer.json in {folder}. Convert it "
            "(transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)) and put it there."
        )
    return backend
