"""Requests for vectors and rankings, and their answers: OpenAI's embeddings, Jina's and Cohere's rerank.

Fields are read as `schemas` reads those of a chat: a wrong type is a 400 with its path, what is ignored is named.
"""

from __future__ import annotations

import base64
import sys
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mlx_backend.api.errors import refuse
from mlx_backend.api.openai.schemas import AnyBody
from mlx_backend.conversation.json_values import shown
from mlx_backend.embedding.service import MAX_TEXTS, RankingRequest, VectorsRequest

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from mlx_backend.embedding.recipe import Role

# What a text is for, in the words of those who ask: Cohere, Voyage, NVIDIA, Jina, sentence-transformers.
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
    """Read true and false, and the words for the same of Cohere and NVIDIA."""
    words = {"END": True, "NONE": False}
    if isinstance(value, str) and value.upper() in words:
        return words[value.upper()]
    if value is None or isinstance(value, bool):
        return value
    raise PydanticCustomError("truncate", 'must be true or false ("END" or "NONE")')


class EmbeddingsBody(AnyBody):
    """POST /v1/embeddings."""

    input: Any
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(gt=0)] | None = None
    user: str | None = None
    input_type: Annotated[str | None, BeforeValidator(_role)] = None
    task: Annotated[str | None, BeforeValidator(_role)] = None
    task_type: Annotated[str | None, BeforeValidator(_role)] = None
    prompt_name: Annotated[str | None, BeforeValidator(_role)] = None
    truncate: Annotated[bool | None, BeforeValidator(_truncate)] = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None

    def request(self) -> VectorsRequest:
        """Say it in the service's words."""
        words = [word for name in _ROLE_FIELDS if (word := getattr(self, name)) is not None]
        roles = {_ROLES[word] for word in words}
        if len(roles) > 1:
            raise refuse(f"{' and '.join(map(repr, words))}: a text is for one of them.", "input_type")
        return VectorsRequest(
            texts=_texts(self.input),
            role=next(iter(roles), None),
            dimensions=self.dimensions,
            most=self._most(),
        )

    def _most(self) -> int | None:
        """Return how many tokens of a text are read: 0 as many as the model can, None all or nothing."""
        if self.truncate_prompt_tokens == 0:
            raise refuse("truncate_prompt_tokens: must be at least 1, or -1 for as many as fit.")
        if self.truncate_prompt_tokens is not None:
            return max(0, self.truncate_prompt_tokens)
        return 0 if self.truncate else None

    def answer(self, model: str, vectors: Sequence[array[float]], tokens: int) -> dict[str, Any]:
        """Write OpenAI's list of embeddings."""
        write = _as_base64 if self.encoding_format == "base64" else list
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": at, "embedding": write(vector)}
                for at, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


class RerankBody(AnyBody):
    """POST /v1/rerank. Of a document that is too long its beginning is read, as everybody does."""

    query: str
    documents: Annotated[list[Any], Field(max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(gt=0)] | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None
    raw_scores: bool | None = None
    user: str | None = None

    def request(self) -> RankingRequest:
        """Say it in the service's words."""
        return RankingRequest(query=self.query, documents=self.texts, instruction=self.instruction)

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [_document(at, document) for at, document in enumerate(self.documents)]

    def answer(self, model: str, scores: Sequence[float], tokens: int) -> dict[str, Any]:
        """Write the results, best first; of two that are equal, the earlier one."""
        order = sorted(range(len(scores)), key=lambda at: -scores[at])[: self.top_n]
        texts = self.texts
        results: list[dict[str, Any]] = []
        for at in order:
            result: dict[str, Any] = {"index": at, "relevance_score": scores[at]}
            if self.return_documents:
                result["document"] = {"text": texts[at]}
            results.append(result)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "object": "list",
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }


def _texts(value: Any) -> list[str | list[int]]:
    """Read a text, several, a row of token ids, or several of those."""
    match value:
        case str():
            return [value]
        case [int(), *_] if all(type(token) is int for token in value):
            return [value]
        case [*several] if several:
            if len(several) > MAX_TEXTS:
                raise refuse(
                    f"input: {len(several)} texts are too many for a request; send {MAX_TEXTS} at most.",
                    "input",
                )
            return [_one(at, text) for at, text in enumerate(several)]
        case [] | None:
            raise refuse("input: must not be empty.", "input")
    raise refuse(f"input: must be a text, a list of texts or token ids, not {shown(value)}.", "input")


def _one(at: int, text: Any) -> str | list[int]:
    if isinstance(text, str):
        return text
    if isinstance(text, list) and text and all(type(token) is int for token in text):
        return text
    raise refuse(f"input[{at}]: must be a text or a list of token ids, not {shown(text)}.", f"input[{at}]")


def _document(at: int, document: Any) -> str:
    match document:
        case str() as text:
            return text
        case {"text": str() as text}:
            return text
    where = f"documents[{at}]"
    raise refuse(f'{where}: must be a text or {{"text": …}}, not {shown(document)}.', where)


def _as_base64(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode("ascii")
