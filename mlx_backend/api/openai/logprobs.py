"""Log probabilities in OpenAI's two formats: the objects of chat, and the older columns of text completions.

Knows these formats and a token's bytes; nothing of replies or engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.chat.reply import TokenLogprobs

MIN_LOGPROB = -9999.0  # what OpenAI sends for an impossible token; JSON has no infinity


class ChatLogprobs:
    """`{"content": [{token, logprob, bytes, top_logprobs}, …], "refusal": null}`."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of

    def chunk(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the tokens of one delta."""
        content = [
            {
                **self._entry(each.token, each.logprobs.chosen),
                "top_logprobs": [self._entry(token, value) for token, value in each.logprobs.top],
            }
            for each in tokens
        ]
        return {"content": content, "refusal": None}

    def fold(self, chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Fold the chunks of a reply."""
        return {"content": [entry for chunk in chunks for entry in chunk["content"]], "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        data = self._bytes_of(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": max(value, MIN_LOGPROB),
            "bytes": list(data),
        }


class TextLogprobs:
    """`{"tokens": […], "token_logprobs": […], "top_logprobs": [{…}, …], "text_offset": […]}`."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._offset = 0

    def chunk(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the tokens of one delta; offsets count characters from the beginning of the reply."""
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in tokens:
            text = self._text(each.token)
            columns["tokens"].append(text)
            columns["token_logprobs"].append(max(each.logprobs.chosen, MIN_LOGPROB))
            top = {self._text(token): max(value, MIN_LOGPROB) for token, value in each.logprobs.top}
            columns["top_logprobs"].append(
                {text: max(each.logprobs.chosen, MIN_LOGPROB), **top} if top else None
            )
            columns["text_offset"].append(self._offset)
            self._offset += len(text)
        return columns

    def fold(self, chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Fold the chunks of a reply."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns = list(chunks)
        return {name: [value for chunk in columns for value in chunk[name]] for name in names}

    def _text(self, token: int) -> str:
        data = self._bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # part of a character, as OpenAI writes it
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


type LogprobsFormat = ChatLogprobs | TextLogprobs
