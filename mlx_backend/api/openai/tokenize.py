"""The requests and answers of /v1/tokenize and /v1/detokenize, in vLLM's shapes; of several texts, in SGLang's.

A conversation is parsed as /v1/chat/completions parses it, with everything that shapes its prompt, so the count
equals `usage.prompt_tokens` of the same request. Nothing here waits for the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from mlx_backend.api.base import JsonAnswer, Operation
from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Body, BodyCall
from mlx_backend.api.json_text import decode_json
from mlx_backend.api.openai.base import OpenAIProtocol, with_extra_body
from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.api.openai.objects import Detokenized, Tokenized
from mlx_backend.conversation.json_values import excerpt, json_type
from mlx_backend.embedding.embedder import MAX_TEXTS, Embedder
from mlx_backend.settings import ReasoningFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mlx_backend.api.base import OnDisconnect
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient
    from mlx_backend.registry.base import Lease, ModelRegistry


MAX_DETOKENIZED = 1 << 20
"""Tokens of one request."""


class TokenizedText(Body):
    """A text or a list of texts, tokenised as /v1/completions does: markers in it are control tokens."""

    prompt: str | list[str]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def texts(self) -> Sequence[str]:
        """The texts, be it only one."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt

    def tokens(self, service: Service | Embedder, text: str) -> Sequence[int]:
        """Tokenise one of the texts."""
        special = self.add_special_tokens is not False
        if isinstance(service, Embedder):
            return service.tokenize(text, add_special_tokens=special)
        return service.text_tokens(text, bos=special)


class TokenizedChat(ChatBody):
    """A chat request of which only the prompt is built."""

    return_token_strs: bool | None = None

    def prompt_tokens(
        self, service: Service, written: Mapping[str, Any], client: QueueClient
    ) -> Sequence[int]:
        """Tokenise what the model would get. `written` is the request as the client wrote it."""
        return service.prompt(self.request(written, ReasoningFormat.SEPARATE), client).tokens


class DetokenizeBody(Body):
    """Token ids to be turned into text."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_DETOKENIZED)]

    def text(self, service: Service) -> str:
        """Return the text, control tokens included."""
        tokenizer = service.engine.tokenizer
        size = tokenizer.vocabulary_size
        if max(self.tokens, default=0) >= size:
            at, token = next((at, token) for at, token in enumerate(self.tokens) if token >= size)
            raise refuse(
                f"tokens[{at}]: {token} is not a token id of this model (0 to {size - 1}).", f"tokens[{at}]"
            )
        return tokenizer.decode(self.tokens)


class Tokenize(OpenAIProtocol):
    """Implements `JsonProtocol`: the tokens of a text, or of the prompt that a conversation becomes."""

    operation = Operation(
        summary="Count and list the tokens of a text or a conversation",
        body=TokenizedText | TokenizedChat,
        answer=Tokenized,
    )

    def parse(self, body: bytes) -> TokenizeCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        written = with_extra_body(decode_json(body))
        return TokenizeCall(self._parsed(written), written)

    @staticmethod
    def _parsed(body: Any) -> TokenizedText | TokenizedChat:
        if not isinstance(body, dict):
            raise refuse(f"The body must be a JSON object, not {json_type(body)}.")
        sent = [name for name in ("prompt", "messages") if body.get(name) is not None]
        if len(sent) != 1:
            text = "prompt and messages: send one of them." if sent else "prompt or messages is missing."
            raise refuse(text, "messages" if sent else "prompt")
        if sent == ["prompt"]:
            _check_prompt(body["prompt"])
            return TokenizedText.parse(body)
        return TokenizedChat.parse(body)


@dataclass(frozen=True)
class TokenizeCall(BodyCall[TokenizedText | TokenizedChat]):
    """Implements `JsonCall`. `written` is the body as the client wrote it."""

    waits_for_engine: ClassVar[bool] = False

    written: Mapping[str, Any]

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[Service | Embedder]:
        """Lease a model of any type."""
        return models.acquire_any(self.model, wait)

    def answer(
        self, service: Service | Embedder, client: QueueClient, _on_disconnect: OnDisconnect
    ) -> JsonAnswer:
        """Tokenise. An embedding model takes texts, not conversations."""
        body = self.body
        if isinstance(service, Embedder):
            _check_for_embedder(service, body)
        elif isinstance(body, TokenizedText):
            service.check_tokenizable(body.texts)
        if isinstance(body, TokenizedText):
            parts = [_tokenized(service, body.tokens(service, text), body) for text in body.texts]
        else:
            assert not isinstance(service, Embedder)  # refused above
            parts = [_tokenized(service, body.prompt_tokens(service, self.written, client), body)]
        found = parts[0]
        if isinstance(body, TokenizedText) and isinstance(body.prompt, list):
            found = {key: [part[key] for part in parts] for key in found}
        return JsonAnswer({"count": found["count"], "max_model_len": service.engine.context_length, **found})


class Detokenize(OpenAIProtocol):
    """Implements `JsonProtocol`: the text of token ids."""

    operation = Operation(summary="Return the text of tokens", body=DetokenizeBody, answer=Detokenized)

    def parse(self, body: bytes) -> DetokenizeCall:
        """Parse a request. Raises ApiError naming the field that is wrong."""
        return DetokenizeCall(DetokenizeBody.parse(decode_json(body)))


class DetokenizeCall(BodyCall[DetokenizeBody]):
    """Implements `JsonCall`."""

    waits_for_engine: ClassVar[bool] = False

    def acquire(self, models: ModelRegistry, wait: float) -> Lease[Service]:
        """Lease a language model."""
        return models.acquire(self.model, wait)

    def answer(self, service: Service, _client: QueueClient, _on_disconnect: OnDisconnect) -> JsonAnswer:
        """Decode the tokens."""
        return JsonAnswer({"prompt": self.body.text(service)})


def _check_prompt(prompt: Any) -> None:
    """Refuse what is neither a text nor a list of them, in a sentence that says where."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise refuse(f"prompt: must be a text or a list of texts, not {json_type(prompt)}.", "prompt")
    if not 0 < len(prompt) <= MAX_TEXTS:
        raise refuse(f"prompt: {len(prompt)} texts; send 1 to {MAX_TEXTS} in a request.", "prompt")
    for at, text in enumerate(prompt):
        if not isinstance(text, str):
            raise refuse(f"prompt[{at}]: must be a text, not {excerpt(text)}.", f"prompt[{at}]")


def _check_for_embedder(embedder: Embedder, body: TokenizedText | TokenizedChat) -> None:
    model = embedder.engine.model_id
    if not isinstance(body, TokenizedText):
        raise refuse(f"messages: {model!r} reads texts, not conversations; send prompt.", "messages")
    if body.return_token_strs:
        raise refuse(
            f"return_token_strs = true is not supported by {model!r}.",
            "return_token_strs",
            "unsupported_value",
        )


def _tokenized(
    service: Service | Embedder, tokens: Sequence[int], body: TokenizedText | TokenizedChat
) -> dict[str, Any]:
    """Return one text's number of tokens, the tokens and, if asked for, the text of each."""
    found: dict[str, Any] = {"count": len(tokens), "tokens": list(tokens)}
    if body.return_token_strs and not isinstance(service, Embedder):
        bytes_of = service.engine.tokenizer.bytes_of
        texts = {token: bytes_of(token).decode("utf-8", "replace") for token in set(tokens)}
        found["token_strs"] = [texts[token] for token in tokens]
    return found
