"""The requests and answers of /v1/embeddings and /v1/rerank.

The first are OpenAI's, with the fields other servers have for roles and truncation; the others Jina's and Cohere's.
"""

from __future__ import annotations

import base64
import sys
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from mlx_backend.api.errors import refuse
from mlx_backend.api.openai.objects import DescribedAs, Document, EmbeddingList, Ranking, RankingResult, Texts
from mlx_backend.api.reading import ReadingBody
from mlx_backend.api.sent import Sent
from mlx_backend.embedding.embedder import MAX_TEXTS, EmbeddingRequest, RerankRequest

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from mlx_backend.embedding.embedder import PendingResult
    from mlx_backend.embedding.embedding_config import Role

# The words for a text's role that clients of Cohere, Voyage, NVIDIA, Jina and sentence-transformers send.
_ROLES: dict[str, Role | None] = {
    **dict.fromkeys(("query", "search_query", "retrieval.query", "question", "s2p_query"), "query"),
    **dict.fromkeys(("document", "passage", "search_document", "retrieval.passage"), "document"),
    **dict.fromkeys(("classification", "clustering", "text-matching", "separation", "none"), None),
}
_ROLE_FIELDS = ("input_type", "task", "task_type", "prompt_name")


def _role(value: Any) -> Any:
    if value is None:
        return None
    word = value.casefold() if isinstance(value, str) else ""
    if word not in _ROLES:
        raise PydanticCustomError("role", 'must be "query" or "document"')
    return word


def _truncate(value: Any) -> Any:
    """Accept true and false, and Cohere's and NVIDIA's words for them."""
    words = {"END": True, "NONE": False}
    if isinstance(value, str) and value.upper() in words:
        return words[value.upper()]
    if value is None or isinstance(value, bool):
        return value
    raise PydanticCustomError("truncate", 'must be true or false ("END" or "NONE")')


type RoleWord = Annotated[
    str | None, BeforeValidator(_role), WithJsonSchema({"enum": [None, *_ROLES]}, mode="validation")
]


class EmbeddingsBody(ReadingBody):
    """POST /v1/embeddings."""

    input: Annotated[Any, DescribedAs(Texts)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(gt=0)] | None = None
    user: str | None = None
    input_type: RoleWord = None
    task: RoleWord = None
    task_type: RoleWord = None
    prompt_name: RoleWord = None
    truncate: Annotated[bool | None, BeforeValidator(_truncate, json_schema_input_type=bool | None)] = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None

    def request(self) -> EmbeddingRequest:
        """Return the request for the embedding service."""
        words = [word for name in _ROLE_FIELDS if (word := getattr(self, name)) is not None]
        roles = {_ROLES[word] for word in words}
        if len(roles) > 1:
            raise refuse(f"{' and '.join(map(repr, words))}: a text is for one of them.", "input_type")
        return EmbeddingRequest(
            texts=as_texts(Sent(self.input, "input")),
            role=next(iter(roles), None),
            dimensions=self.dimensions,
            truncate_to=self._token_limit(),
        )

    def _token_limit(self) -> int | None:
        """Return how many tokens of a text are used: 0 as many as fit, None all (a longer text is refused)."""
        if self.truncate_prompt_tokens == 0:
            raise refuse("truncate_prompt_tokens: must be at least 1, or -1 for as many as fit.")
        if self.truncate_prompt_tokens is not None:
            return max(0, self.truncate_prompt_tokens)
        return 0 if self.truncate else None

    def answer(self, model: str, results: Sequence[array[float]], tokens: int) -> EmbeddingList:
        """Return OpenAI's list of embeddings."""
        encode = _as_base64 if self.encoding_format == "base64" else list
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(results)
            ],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def as_texts(sent: Sent) -> list[str | list[int]]:
    """Accept a text, several, a list of token ids, or several of those."""
    match sent.value:
        case str() as text:
            return [text]
        case [int(), *_] as tokens if all(type(token) is int for token in tokens):
            return [tokens]
        case [_, *_] as several if len(several) > MAX_TEXTS:
            said = f"{len(several)} texts are too many for a request; send {MAX_TEXTS} at most."
            raise sent.refusal(said)
        case [_, *_]:
            return [_one_text(text) for text in sent.entries()]
        case [] | None:
            raise sent.refusal("must not be empty.")
    raise sent.unlike("a text, a list of texts or token ids")


def _one_text(sent: Sent) -> str | list[int]:
    match sent.value:
        case str() as text:
            return text
        case list() as tokens if tokens and all(type(token) is int for token in tokens):
            return tokens
    raise sent.unlike("a text or a list of token ids")


def _as_base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode("ascii")


class RerankBody(ReadingBody):
    """POST /v1/rerank. A document that is too long is truncated, as other servers do."""

    kind = "rerank"

    query: str
    documents: Annotated[list[Annotated[Any, DescribedAs(Document)]], Field(max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(gt=0)] | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None
    raw_scores: bool | None = None
    user: str | None = None

    def request(self) -> RerankRequest:
        """Return the request for the embedding service."""
        return RerankRequest(query=self.query, documents=self.texts, instruction=self.instruction)

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return list(map(_document_text, Sent(self.documents, "documents").entries()))

    def results(self, pending: PendingResult) -> list[float] | None:
        """Wait for the scores."""
        return pending.scores(raw=self.raw_scores is True)

    def answer(self, model: str, results: Sequence[float], tokens: int) -> Ranking:
        """Return the results, best first; equal scores keep the order of the request."""
        order = sorted(range(len(results)), key=lambda i: -results[i])[: self.top_n]
        texts = self.texts
        ranked: list[RankingResult] = []
        for i in order:
            result: RankingResult = {"index": i, "relevance_score": results[i]}
            if self.return_documents:
                result["document"] = {"text": texts[i]}
            ranked.append(result)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": model,
            "results": ranked,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _document_text(document: Sent) -> str:
    match document.value:
        case str(text) | {"text": str(text)}:
            return text
    raise document.unlike('a text or {"text": …}')
