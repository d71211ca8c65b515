"""The tokenizer: Unigram pieces of words, kana, and Chinese characters, for texts in lower case without spaces."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Final

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from collections.abc import Sequence

SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MIN_CHARACTER_COUNT: Final = 24  # a rarer character is unknown
_PIECES: Final = (
    r"\p{Han}+|[\p{Hiragana}ー]+|[\p{Katakana}ー]+|\p{Hangul}+|[\p{Latin}\p{M}]+|\p{N}|[^\s\p{L}\p{N}]"
)


def learn_tokenizer(texts: Sequence[str], size: int) -> Tokenizer:
    """Return a tokenizer of at most `size` pieces, learned from these texts."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), behavior="removed"),
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
        ]
    )
    normal = [normalizer.normalize_str(text) for text in texts]
    counts = Counter(chain.from_iterable(normal))
    rare = {ord(character): " " for character, count in counts.items() if count < MIN_CHARACTER_COUNT}
    trainer = trainers.UnigramTrainer(
        vocab_size=size,
        special_tokens=list(SPECIAL),
        unk_token="[UNK]",
        max_piece_length=12,
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.translate(rare) for text in normal], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A [SEP] $B:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer
