"""The requests and answers of /v1/tokenize and /v1/detokenize, in vLLM's shapes; of several texts, in SGLang's.

A conversation is parsed as /v1/chat/completions parses it, with everything that shapes its prompt, so the count
equals `usage.prompt_tokens` of the same request. Nothing here waits for the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from mlx_backend.api.errors import refuse
from mlx_backend.api.fields import Body, with_extra_body
from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.api.openai.objects import Detokenized, Tokenized
from mlx_backend.api.sent import Sent
from mlx_backend.conversation.json_values import json_type
from mlx_backend.embedding.embedder import MAX_TEXTS, Embedder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.api.addresses import Addresses
    from mlx_backend.chat.service import Service
    from mlx_backend.engine.base import QueueClient


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


def add_to(api: Addresses) -> None:
    """Add the addresses."""
    api.json(
        "/v1/tokenize",
        tokenize,
        TokenizedText | TokenizedChat,
        Tokenized,
        lambda models, name, wait: models.acquire_any(name, wait),
        parse=parse,
    )
    api.json("/v1/detokenize", detokenize, DetokenizeBody, Detokenized)


def parse(body: Any) -> TokenizedText | TokenizedChat:
    """Check a body: it has a text, several, or a conversation. Raises ApiError."""
    body = with_extra_body(body)
    if not isinstance(body, dict):
        raise refuse(f"The body must be a JSON object, not {json_type(body)}.")
    sent = [name for name in ("prompt", "messages") if body.get(name) is not None]
    if len(sent) != 1:
        text = "prompt and messages: send one of them." if sent else "prompt or messages is missing."
        raise refuse(text, "messages" if sent else "prompt")
    if sent == ["messages"]:
        return TokenizedChat.parse(body)
    _check_prompt(Sent(body["prompt"], "prompt"))
    return TokenizedText.parse(body)


def tokenize(
    body: TokenizedText | TokenizedChat, service: Service | Embedder, client: QueueClient
) -> dict[str, Any]:
    """Count and list the tokens of a text or a conversation."""
    if isinstance(service, Embedder):
        _check_for_embedder(service, body)
    elif isinstance(body, TokenizedText):
        service.check_tokenizable(body.texts)
    if isinstance(body, TokenizedText):
        parts = [_tokenized(service, body.tokens(service, text), body) for text in body.texts]
    else:
        assert not isinstance(service, Embedder)  # refused above
        parts = [_tokenized(service, service.prompt(body.request(), client).tokens, body)]
    found = parts[0]
    if isinstance(body, TokenizedText) and isinstance(body.prompt, list):
        found = {key: [part[key] for part in parts] for key in found}
    return {"count": found["count"], "max_model_len": service.engine.context_length, **found}


def detokenize(body: DetokenizeBody, service: Service, _client: QueueClient) -> Detokenized:
    """Return the text of tokens."""
    return {"prompt": body.text(service)}


def _check_prompt(prompt: Sent) -> None:
    """Refuse what is neither a text nor a list of them, in a sentence that says where."""
    if isinstance(prompt.value, str):
        return
    if not isinstance(prompt.value, list):
        raise prompt.wrong_type("a text or a list of texts")
    if not 0 < (count := len(prompt.value)) <= MAX_TEXTS:
        raise prompt.refusal(f"{count} texts; send 1 to {MAX_TEXTS} in a request.")
    for text in prompt.entries():
        if not isinstance(text.value, str):
            raise text.unlike("a text")


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
