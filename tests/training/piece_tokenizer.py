"""Makes a tokenizer from the pieces of texts: some are tokens as they are, byte-level BPE handles the others.

Knows neither what splits texts into pieces nor which pieces a model wants whole.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

_TO_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def in_bytes(piece: str) -> str:
    """Return a piece in the byte alphabet, in which a vocabulary has its entries."""
    return _TO_BYTES.pre_tokenize_str(piece)[0][0]


def count_pieces(texts: Iterable[str], pattern: str) -> Counter[str]:
    """Return how often each piece occurs, in the byte alphabet; `pattern` matches one."""
    split = _splitter(pattern)
    return Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))


def make_tokenizer(
    pattern: str,
    pieces: Mapping[str, int],
    whole: Iterable[str],
    *,
    size: int,
    special: Sequence[str],
    reserved: int,
) -> Tokenizer:
    """Return a tokenizer of exactly `size` ids, the special tokens last.

    `pieces` says how often each occurs and `whole` which are tokens as they are, both in the byte alphabet; `reserved`
    is how many ids at least are left over, before the special ones. Raises ValueError if there are too many.
    """
    kept = dict.fromkeys(whole)
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(special) - reserved - len(kept),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # the byte alphabet has no spaces
    left = {piece: count for piece, count in sorted(pieces.items()) if piece not in kept}
    bpe.train_from_iterator((" ".join([piece] * count) for piece, count in left.items()), trainer)
    learned = json.loads(bpe.to_str())["model"]
    vocabulary: dict[str, int] = dict(learned["vocab"])
    for piece in kept:
        vocabulary.setdefault(piece, len(vocabulary))
    if len(vocabulary) > size - len(special) - reserved:
        raise ValueError("the vocabulary is too large")

    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _splitter(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    unused = size - len(special) - len(vocabulary)
    names = [*(f"<|reserved_{number}|>" for number in range(unused)), *special]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def _splitter(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _TO_BYTES])
