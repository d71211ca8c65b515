"""One call of Dify for vectors: texts out in batches the server takes, vectors back in their order.

What a text is for (a question, or a passage of a document) is told to mlx-backend, which knows what its model wants
to have in front of it. For other servers the form has two fields for that.

A text that is too long is read from its beginning, as everybody does: a whole document is not to fail for one long
line. mlx-backend and vLLM are asked to cut it; for the others it is cut here, by an estimate, and again if they refuse.
"""

from __future__ import annotations

import base64
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream import discovery, sse
from dify_mlx_provider.upstream.errors import MIN_TRUNCATED_LENGTH, Refused, Unavailable
from dify_mlx_provider.upstream.requests import post_json
from dify_mlx_provider.upstream.server_kinds import ServerKind
from dify_mlx_provider.upstream.token_count import count_tokens, estimate_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dify_mlx_provider.upstream.credentials import Credentials


@dataclass(frozen=True, slots=True)
class Embeddings:
    """What came back. `tokens` is the server's count, or an estimate where it does not say."""

    vectors: list[list[float]]
    tokens: int


def embed(model: str, credentials: Credentials, texts: Sequence[str], *, query: bool) -> Embeddings:
    """Make a vector of each text. Raises a ServerError."""
    batch = credentials.max_chunks
    calling = _EmbeddingCall(model, credentials, query=query)
    vectors: list[list[float]] = []
    tokens = 0
    for begin in range(0, len(texts), batch):
        found = calling.batch([calling.fitting(text) for text in texts[begin : begin + batch]])
        vectors += found.vectors
        tokens += found.tokens
    return Embeddings(vectors, tokens)


def count_tokens_each(model: str, credentials: Credentials, texts: Sequence[str]) -> list[int]:
    """Count each text's tokens: by the server if it can, else an estimate. Never raises."""
    counts: list[int] = []
    asks = True
    for text in texts:
        count = count_tokens(credentials, {"model": model, "prompt": text}) if asks else None
        asks = count is not None
        counts.append(estimate_tokens(text) if count is None else count)
    return counts


class _EmbeddingCall:
    """How one server is asked for the vectors of one kind of text."""

    def __init__(self, model: str, credentials: Credentials, *, query: bool) -> None:
        self._model = model
        self._credentials = credentials
        self._prefix = credentials.query_prefix if query else credentials.document_prefix
        self._kind = discovery.find_server(credentials).kind
        self._fields: dict[str, Any] = {}
        size = credentials.context_size
        match self._kind:
            case ServerKind.MLX_BACKEND:
                # A quarter of the bytes, and numbers that need not be parsed.
                self._fields = {"truncate_prompt_tokens": size or -1, "encoding_format": "base64"}
                if not (credentials.query_prefix or credentials.document_prefix):
                    self._fields["input_type"] = "query" if query else "document"
            case ServerKind.VLLM:
                self._fields = {"truncate_prompt_tokens": size or -1}
        self._cuts = not self._fields
        if (
            self._cuts
            and size is None
            and (told := discovery.find_model(model, credentials, "embedding")) is not None
        ):
            size = told.context_size
        self._size = size

    def fitting(self, text: str) -> str:
        """Put the prefix before a text, and cut it where the server would not."""
        text = self._prefix + text
        if not self._cuts or self._size is None:
            return text
        estimate = estimate_tokens(text) + 2
        return text if estimate <= self._size else text[: max(1, len(text) * self._size // estimate)]

    def batch(self, texts: Sequence[str]) -> Embeddings:
        """Ask for a batch; if it is refused for being too long, for each text alone, and for less of it."""
        try:
            return self._ask(texts)
        except (Refused, Unavailable) as error:  # llama.cpp calls it an error of its own
            if not self._cuts or not error.is_length_error:
                raise
            if len(texts) > 1:
                parts = [self.batch([text]) for text in texts]
                return Embeddings([part.vectors[0] for part in parts], sum(part.tokens for part in parts))
            if len(texts[0]) <= MIN_TRUNCATED_LENGTH:
                raise
            return self.batch([texts[0][: len(texts[0]) * 2 // 3]])

    def _ask(self, texts: Sequence[str]) -> Embeddings:
        body = {"input": list(texts), "encoding_format": "float", **self._fields}
        answer = post_json(self._credentials, self._model, "/embeddings", body, "embedding")
        vectors = _vectors(answer, len(texts))
        if vectors is None:
            raise Refused(
                f"the server at {self._credentials.base_url} answered with something other than {len(texts)} vectors. "
                f"Is {self._model!r} an embedding model?"
            )
        usage = answer.get("usage")
        counted = usage.get("total_tokens") if isinstance(usage, dict) else None
        if not isinstance(counted, int) or isinstance(counted, bool) or counted < 1:
            counted = sum(map(estimate_tokens, texts))
        return Embeddings(vectors, counted)


def _vectors(answer: Any, count: int) -> list[list[float]] | None:
    """Read an answer's vectors in the texts' order; None if they are not all there."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(listed, list) or len(listed) != count:
        return None
    found: dict[int, list[float]] = {}
    for at, entry in enumerate(listed):
        if not isinstance(entry, dict) or (vector := _vector(entry.get("embedding"))) is None:
            return None
        index = entry.get("index", at)
        found[index if isinstance(index, int) else at] = vector
    if sorted(found) != list(range(count)) or len({len(vector) for vector in found.values()}) > 1:
        return None
    return [found[at] for at in range(count)]


def _vector(written: Any) -> list[float] | None:
    if isinstance(written, str):  # some servers send base64 whatever they are asked for
        try:
            packed = array("f", base64.b64decode(written, validate=True))
        except ValueError:
            return None
        if sys.byteorder == "big":
            packed.byteswap()
        written = packed.tolist()
    if not isinstance(written, list) or not written:
        return None
    numbers = [number for value in written if (number := sse.finite_number(value)) is not None]
    return numbers if len(numbers) == len(written) else None
