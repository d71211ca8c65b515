"""The model's tokenizer, safe to use from any thread.

Knows how text becomes tokens and back; nothing of the model or of any dialect. The tokenizers underneath hold
settings, one of which is whether markers in the text become control tokens. So two of them are made, set up once and
never changed again.
"""

from __future__ import annotations

import json
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerBase

from mlx_backend.engine.mlx.detokenizer import (
    ByteDetokenizer,
    TokenBytes,
    WindowDetokenizer,
    decode_byte_level,
    decode_sentencepiece,
)
from mlx_backend.engine.mlx.text_cache import TextCache
from mlx_backend.errors import EngineError, EngineRefused, RequestError
from mlx_backend.models import files as model_files
from mlx_backend.models import templates
from mlx_backend.models.templates import TemplateOverrun, stand_in
from mlx_backend.preparation import PreparationCancelled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.engine.mlx.detokenizer import Detokenizer


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
        inner = wrapper._tokenizer
        # Some models have a Python function of mlx-lm's in place of a Jinja template, others a tokenizer of their own.
        self._is_function = template is None and wrapper._chat_template is not None
        self._own_renderer: Callable[..., str] | None = None
        if self._is_function:
            self._own_renderer = wrapper._chat_template
        elif type(inner).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
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
        self._end_tokens = frozenset(token for token in wrapper.eos_token_ids if token < vocabulary_size)
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
            listed.insert(0, {"role": "system", "content": ""})  # with which it tells the tools
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
        texts: list[str] = self._with_control.decode_batch([list(tokens)], skip_special_tokens=False)
        return texts[0]

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for; they need not be whole characters."""
        marker = self._special.get(token)
        return marker.encode() if marker is not None else self._bytes_of(token)

    def detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one generation."""
        return self._detokenizer()

    def _ids(self, backend: Backend, text: str) -> list[int]:
        # The batch call releases the interpreter lock during a long text; the single one does not.
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

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
    """Whether no added token takes the whitespace beside it."""
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
