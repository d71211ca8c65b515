"""Log probabilities in the two shapes OpenAI has for them: chat's objects and the older columns of text.

Knows those shapes and how a token is spelt; nothing of replies or engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mlx_backend.chat.logprobs import TokenLogprobs

LEAST = -9999.0  # what OpenAI writes for a token that is impossible; JSON has no infinity


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

    def whole(self, chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Fold the chunks of a reply."""
        return {"content": [entry for chunk in chunks for entry in chunk["content"]], "refusal": None}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        spelt = self._bytes_of(token)
        return {
            "token": spelt.decode("utf-8", "replace"),
            "logprob": max(value, LEAST),
            "bytes": list(spelt),
        }


class TextLogprobs:
    """`{"tokens": […], "token_logprobs": […], "top_logprobs": [{…}, …], "text_offset": […]}`."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._offset = 0

    def chunk(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Write the tokens of one piece of text; offsets count from the reply's beginning."""
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for each in tokens:
            spelt = self._spelt(each.token)
            columns["tokens"].append(spelt)
            columns["token_logprobs"].append(max(each.logprobs.chosen, LEAST))
            top = {self._spelt(token): max(value, LEAST) for token, value in each.logprobs.top}
            columns["top_logprobs"].append({spelt: max(each.logprobs.chosen, LEAST), **top} if top else None)
            columns["text_offset"].append(self._offset)
            self._offset += len(spelt)
        return columns

    def whole(self, chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
        """Fold the chunks of a reply."""
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        read = list(chunks)
        return {name: [value for chunk in read for value in chunk[name]] for name in names}

    def _spelt(self, token: int) -> str:
        spelt = self._bytes_of(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:  # OpenAI's way to write a piece of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


type LogprobsFormat = ChatLogprobs | TextLogprobs
