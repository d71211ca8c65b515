"""The model's tokenizer, safe to use from any thread: text to tokens, tokens to text, and chat templates to text.

The tokenizers underneath hold settings, one of which is whether markers in the text become control tokens. So two of
them are made, set up once and never changed again.

Tokenising 65,000 tokens took 0.12 seconds of a processor, many times what a decode step takes. So the tokens of long
texts are remembered (`TextCache`), and a conversation's next turn tokenises what is new in it. A text may be cut in
front of a control token: tokenizers split there before they do anything else, so both parts have the tokens that they
have together.

A reply is turned into text token by token (`Detokenizer`). A character that is still incomplete is held back. A special
token is exactly its own marker, and an incomplete character before it is dropped. Nothing is sent twice. A leading
space is kept: what precedes it is the prompt, and only the parser knows whether a space belongs there.

Knows nothing of the model or of any dialect.
"""

from __future__ import annotations

import codecs
import json
import re
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from inspect import signature
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Protocol

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase

from mlx_backend.byte_cache import ByteCache
from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.engine.mlx.mlx_lm_patches.wrapped_tokenizer import python_template, wrapped_tokenizer
from mlx_backend.errors import EngineError, EngineRefused, RequestError
from mlx_backend.foreign_calls import ForeignCalls, run_here
from mlx_backend.models import files as model_files
from mlx_backend.models import templates
from mlx_backend.models.templates import TemplateOverrun, stand_in
from mlx_backend.preparation import PreparationCancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_backend.byte_cache import CacheBudget

MIN_LENGTH = 4096
"""Characters of a text from which on it is remembered."""
MIN_LEFT_LENGTH = 1024
"""Characters of a text from which on a request may end before it is tokenised."""
MAX_TEXTS = 32
"""Number of texts that are remembered. Each is compared with every new one."""
_INT = "I"
"""The type of packed tokens, 4 bytes each; a list of integers takes ten times as much."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    text: str
    tokens: array[int]
    starts: array[int]  # of the control tokens' markers in the text, ascending
    positions: array[int]  # of those control tokens among the tokens

    @property
    def nbytes(self) -> int:
        return sum(map(getsizeof, (self.text, self.tokens, self.starts, self.positions)))


class TextCache:
    """Tokenises texts with `encode`. `control_tokens` are their ids by their markers; without any nothing is cached."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        control_tokens: Mapping[str, int],
        caches: CacheBudget | None = None,
    ) -> None:
        self._encode = encode
        self._control_tokens = control_tokens
        self._ids = frozenset(control_tokens.values())
        markers = sorted(control_tokens, key=len, reverse=True)
        self._longest = len(markers[0]) if markers else 0
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._known: ByteCache[str, _Known] = ByteCache(caches)

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        if not self._control_tokens or len(text) < MIN_LENGTH:
            return self._encode(text)
        # A text that begins alike, and how many of its control tokens can be taken over.
        known: _Known | None = None
        count = 0
        for each in self._known.values():
            # After a marker, what is in common has to go on for long enough that it cannot be part of a longer one.
            common = common_prefix_length(each.text, text) - self._longest
            if (found := bisect_right(each.starts, common)) > count:
                known, count = each, found
        if known is None:
            tokens = self._encode(text)
            self._remember(_Known(text, array(_INT, tokens), array(_INT), array(_INT)), tokens, 0, 0)
            return tokens
        start, position = known.starts[count - 1], known.positions[count - 1]
        before, new = known.tokens[:position], self._encode(text[start:])
        tokens = before.tolist() + new
        packed = before + array(_INT, new)  # packing all tokens once more would take milliseconds
        shared = _Known(text, packed, known.starts[: count - 1], known.positions[: count - 1])
        self._remember(shared, tokens, start, position)
        if text != known.text and text.startswith(known.text) and self._known.find(text) is not None:
            self._known.drop(known.text)  # what continues it is enough
        else:
            self._known.find(known.text)  # which counts as a use
        return tokens

    def _remember(self, known: _Known, tokens: list[int], start: int, position: int) -> None:
        """Cache a text once its control tokens are found; those before `start`, or `position`, are already."""
        matches = list(self._pattern.finditer(known.text, start))
        found = [at for at in range(position, len(tokens)) if tokens[at] in self._ids]
        if [self._control_tokens[match.group()] for match in matches] != [tokens[at] for at in found]:
            return  # the tokenizer finds others than are written, so they cannot be matched
        known.starts.extend(match.start() for match in matches)
        known.positions.extend(found)
        self._known.put(known.text, known, known.nbytes)
        for oldest in self._known.values()[:-MAX_TEXTS]:
            self._known.drop(oldest.text)


REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
"""The bytes of a character in UTF-8, and so the tokens, that it can take at most."""


class Detokenizer(Protocol):
    """Turns the tokens of one request into text."""

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens are byte strings: exact, with one dictionary look-up per token."""

    def __init__(self, special: Mapping[int, str], bytes_of: Callable[[int], bytes]) -> None:
        self._special = special
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        marker = self._special.get(token)
        if marker is not None:
            self._utf8.reset()
            return marker
        return self._utf8.decode(self._bytes_of(token))


class WindowDetokenizer:
    """For every other vocabulary: decodes the last tokens again and returns what is new."""

    def __init__(self, special: Mapping[int, str], decode: Callable[[Sequence[int]], str]) -> None:
        self._special = special
        self._decode = decode
        self._window: list[int] = []  # the tokens returned last, as context, and then those held back
        self._num_returned = 0

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        marker = self._special.get(token)
        if marker is not None:
            self._window.clear()
            self._num_returned = 0
            return marker
        self._window.append(token)
        before = self._decode(self._window[: self._num_returned])
        text = self._decode(self._window)
        num_held_back = len(self._window) - self._num_returned
        if text.endswith(REPLACEMENT) and num_held_back < MAX_CHARACTER_BYTES:
            return ""
        self._window = self._window[self._num_returned :]
        self._num_returned = len(self._window)
        return text[len(before) :]


class TokenBytes:
    """Maps each token to its bytes, decoding its name once."""

    def __init__(self, backend: Any, decode_name: Callable[[str], bytes]) -> None:
        self._backend = backend
        self._decode_name = decode_name
        # Added tokens are named by their text, whatever the rest of the vocabulary does.
        self._known = {
            token: added.content.encode() for token, added in backend.get_added_tokens_decoder().items()
        }

    def __call__(self, token: int) -> bytes:
        """Return the token's bytes; b"" for an id that only pads the vocabulary."""
        known = self._known.get(token)
        if known is None:
            name = self._backend.id_to_token(token)
            known = self._known[token] = b"" if name is None else self._decode_name(name)
        return known


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's bytes by letter: printable bytes look like themselves, the rest start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(rest)
    }


_ALPHABET = _byte_alphabet()


def decode_byte_level(name: str) -> bytes:
    """Return the bytes that the name of a byte-level BPE token stands for."""
    try:
        return bytes(_ALPHABET[letter] for letter in name)
    except KeyError:  # a token that was added to the vocabulary as plain text
        return name.encode()


def decode_sentencepiece(name: str) -> bytes:
    """Return the bytes that the name of a SentencePiece token stands for."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    return name.replace("\u2581", " ").encode()


# Arguments of the renderer, not of the template; one of them would even replace the template.
_RENDERER_ARGUMENTS = frozenset(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    "documents"
}


class MLXTokenizer:
    """Implements the `Tokenizer` protocol over what mlx-lm loads."""

    def __init__(
        self, wrapper: TokenizerWrapper, vocabulary_size: int, caches: CacheBudget | None = None
    ) -> None:
        backend = getattr(wrapper, "backend_tokenizer", None)
        if not isinstance(backend, Backend):
            raise EngineError(
                "The model's tokenizer has no fast form. Convert it to a tokenizer.json (transformers: "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…)) and put that into the model's folder."
            )
        template = wrapper.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        self._wrapper = wrapper
        self._calls = ForeignCalls()
        # Some models have a Python function of mlx-lm's in place of a Jinja template, others a tokenizer of their own.
        self._own_renderer = python_template(wrapper) if template is None else None
        self._is_function = self._own_renderer is not None
        renderer = type(wrapped_tokenizer(wrapper)).apply_chat_template
        if not self._is_function and renderer is not PreTrainedTokenizerBase.apply_chat_template:
            self._own_renderer = partial(wrapper.apply_chat_template, tokenize=False)
        described = stand_in(wrapper.init_kwargs.get("chat_template_type")) if self._is_function else None
        self._chat_template: str | None = template or described
        self._vocabulary_size = vocabulary_size
        # transformers adds tokens that a family usually has; the model cannot write those it has no embedding for.
        self._special = {
            token: text
            for token, text in _control_tokens(backend, wrapper, self._chat_template).items()
            if token < vocabulary_size
        }
        known = range(vocabulary_size)  # a file may say anything
        self._end_tokens = frozenset(token for token in wrapper.eos_token_ids if token in known)
        self._with_control, self._without_control = _make_pair(backend, self._special)
        self._bytes_of, self._detokenizer = self._byte_lookup_and_detokenizer()
        self._texts = TextCache(
            partial(self._ids, self._with_control),
            {text: token for token, text in self._special.items()} if _splits_plainly(backend) else {},
            caches,
        )
        bos = wrapper.bos_token_id
        added = self._with_control.encode("", add_special_tokens=True).ids
        self._bos_tokens = (bos,) if bos is not None and added[:1] == [bos] else ()

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the model's chat template; None if it has none."""
        return self._chat_template

    @property
    def response_template(self) -> Any:
        """What tokenizer_config.json says of the model's output; None if it says nothing."""
        return getattr(self._wrapper, "response_template", None)

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """Every control token: id -> its text."""
        return self._special

    @property
    def end_tokens(self) -> Set[int]:
        """The tokens with which a reply ends, by the generation config or else the config, and the tokenizer."""
        return self._end_tokens

    @property
    def vocabulary_size(self) -> int:
        """Valid token ids are 0 … vocabulary_size - 1."""
        return self._vocabulary_size

    @property
    def bos_tokens(self) -> Sequence[int]:
        """What a prompt begins with where no chat template writes it: the BOS token, for a model that needs one."""
        return self._bos_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render the chat template to text. A template's own refusal is raised as EngineRefused."""
        if not self._wrapper.has_chat_template:
            raise EngineRefused(
                "This model has no chat template; it can only continue text (POST /v1/completions)."
            )
        if taken := sorted(_RENDERER_ARGUMENTS & template_kwargs.keys()):
            raise EngineRefused(f"A chat template cannot be given {', '.join(taken)}.")
        given = tools or None
        try:
            if self._own_renderer is not None:
                return self._render_by_own(messages, given, add_generation_prompt, template_kwargs)
            return templates.render(
                self._chat_template or "",
                messages,
                {**self._wrapper.special_tokens_map, **template_kwargs},
                tools=given,
                add_generation_prompt=add_generation_prompt,
            )
        except TemplateOverrun as overrun:
            raise EngineRefused(
                f"The model's chat template cannot render this conversation: {overrun}."
            ) from overrun
        except (PreparationCancelled, RequestError, EngineError):
            raise
        except Exception as error:  # whatever a template's makers, or those of a renderer, thought of
            words = str(error) or type(error).__name__
            raise EngineRefused(f"The model's chat template refused the conversation: {words}") from error

    def _render_by_own(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Render with a function that is installed, or was trusted (--trust-remote-code)."""
        assert self._own_renderer is not None
        listed = [dict(message) for message in messages]
        if tools and self._is_function and not (listed and listed[0]["role"] == "system"):
            listed.insert(0, {"role": "system", "content": ""})  # the tools are told with it
        text: str = self._own_renderer(
            listed,
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return text

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        """Tokenise. Without `control_tokens`, a marker spelt in the text becomes ordinary text tokens."""
        text = text.encode("utf-8", "replace").decode()  # JSON can hold half a surrogate pair
        if control_tokens:
            return self._texts.encode(text)
        tokens = self._ids(self._without_control, text)
        if self._special.keys().isdisjoint(tokens):
            return tokens
        return [plain for token in tokens for plain in self._spell_out(token)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        # As with encoding: the batch call releases the interpreter lock.
        texts: list[str] = run_here(
            lambda: self._with_control.decode_batch([list(tokens)], skip_special_tokens=False)
        )
        return texts[0]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for; they need not be whole characters."""
        marker = self._special.get(token)
        return marker.encode() if marker is not None else self._bytes_of(token)

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one generation."""
        return self._detokenizer()

    def _ids(self, backend: Backend, text: str) -> list[int]:
        def encoded() -> list[int]:
            # The batch call releases the interpreter lock during a long text; the single one does not.
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return ids

        return self._calls.run(encoded) if len(text) >= MIN_LEFT_LENGTH else run_here(encoded)

    def _spell_out(self, token: int) -> list[int]:
        """Tokenise a control token's marker as text, for vocabularies that list the marker among their words too."""
        if token not in self._special:
            return [token]
        return [
            plain for letter in self._special[token] for plain in self._ids(self._without_control, letter)
        ]

    def _byte_lookup_and_detokenizer(self) -> tuple[Callable[[int], bytes], Callable[[], Detokenizer]]:
        match self._wrapper.detokenizer:
            case BPEStreamingDetokenizer():
                bytes_of = TokenBytes(self._with_control, decode_byte_level)
            case SPMStreamingDetokenizer():
                bytes_of = TokenBytes(self._with_control, decode_sentencepiece)
            case _:
                return lambda token: self.decode([token]).encode(), lambda: WindowDetokenizer(
                    self._special, self.decode
                )
        return bytes_of, lambda: ByteDetokenizer(self._special, bytes_of)


def _control_tokens(backend: Backend, wrapper: TokenizerWrapper, template: str | None) -> dict[int, str]:
    """Return every control token, by id: by the rule for files, and those that mlx-lm knows for reasoning and calls."""
    markers = {wrapper.think_start, wrapper.think_end, wrapper.tool_call_start, wrapper.tool_call_end}
    added = sorted(backend.get_added_tokens_decoder().items())
    marked = {
        each.content: each.special or token in wrapper.eos_token_ids or each.content in markers
        for token, each in added
    }
    control = set(model_files.control_tokens(marked, template))
    return {token: each.content for token, each in added if each.content in control}


def _splits_plainly(backend: Backend) -> bool:
    """Whether no added token takes the whitespace next to it."""
    return not any(each.lstrip or each.rstrip for each in backend.get_added_tokens_decoder().values())


def _make_pair(backend: Backend, special: Mapping[int, str]) -> tuple[Backend, Backend]:
    """Return a tokenizer that turns markers into control tokens, and one that treats them as text."""
    form = json.loads(backend.to_str())
    form["truncation"] = form["padding"] = None
    for added in form["added_tokens"]:
        added["special"] = added["id"] in special
    text = json.dumps(form)
    with_control, without_control = Backend.from_str(text), Backend.from_str(text)
    without_control.encode_special_tokens = True
    return with_control, without_control
