"""The models that one client may use: to it, there are no others.

Knows names; not who the client is.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mlx_backend.registry.errors import (
    InsufficientMemory,
    ModelError,
    ModelPinned,
    UnknownEffort,
    UnknownModel,
    WrongType,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mlx_backend.chat.service import Service
    from mlx_backend.embedding.embedder import Embedder
    from mlx_backend.models.description import ModelDescription
    from mlx_backend.models.files import ModelFiles, ModelType
    from mlx_backend.registry.base import Lease, ModelRegistry, ModelStatus

_MAX_NAMED = 20
_DEFAULT = (None, "", "default")
_DOES = {"llm": "generates text", "embedding": "computes embeddings", "rerank": "ranks documents"}


@contextmanager
def _without_other_names() -> Iterator[None]:
    try:
        yield
    except InsufficientMemory as error:
        raise error.without_names() from None


class AllowedModels:
    """Implements `ModelRegistry` for those models of another that match a pattern by their name or an alias.

    A model that is not allowed is an unknown one, in the same words: a client does not learn whether it is there. The
    default is the registry's own if it is allowed, and otherwise the first that is.
    """

    def __init__(self, models: ModelRegistry, patterns: Sequence[str]) -> None:
        self._models = models
        self._patterns = patterns

    def acquire(self, name: str | None, wait: float) -> Lease[Service]:
        with _without_other_names():
            return self._models.acquire(self._resolved(name, "llm"), wait)

    def acquire_embedder(self, name: str | None, wait: float, model_type: ModelType) -> Lease[Embedder]:
        with _without_other_names():
            return self._models.acquire_embedder(self._resolved(name, model_type), wait, model_type)

    def acquire_any(self, name: str | None, wait: float) -> Lease[Service | Embedder]:
        with _without_other_names():
            return self._models.acquire_any(self._resolved(name, None), wait)

    def statuses(self) -> Sequence[ModelStatus]:
        allowed = [status for status in self._models.statuses() if self._is_allowed(status)]
        names = {status.name for status in allowed}
        return [status if status.shares in names else replace(status, shares="") for status in allowed]

    def status(self, name: str) -> ModelStatus:
        return self._find(name)

    def describe(self, name: str) -> ModelDescription:
        self._find(name)
        return self._models.describe(name)

    def files(self, name: str) -> ModelFiles:
        return self._models.files(self._find(name).name)

    def keep(self, name: str | None, seconds: float) -> bool:
        return self._models.keep(self._resolved(name, None), seconds)

    def unload(self, name: str) -> str:
        """Unload a model once nothing uses it. Raises UnknownModel, or ModelPinned, also if others use its weights."""
        statuses = self._models.statuses()
        weights_of = {status.name: status.shares or status.name for status in statuses}
        weights = weights_of.get(self._find(name).name)
        if any(weights_of[each.name] == weights and not self._is_allowed(each) for each in statuses):
            raise ModelPinned(f"The model {name!r} stays in memory: others use its weights.")
        return self._models.unload(self._find(name).name)

    def _is_allowed(self, status: ModelStatus) -> bool:
        names = (status.name, *status.aliases)
        return any(fnmatchcase(name, pattern) for pattern in self._patterns for name in names)

    def _find(self, name: str) -> ModelStatus:
        try:
            status = self._models.status(name)
        except UnknownEffort as error:
            if self._is_allowed(self._models.status(error.name)):
                raise
            status = None
        except ModelError:  # the registry's own words name other models
            status = None
        if status is None or not self._is_allowed(status):
            raise UnknownModel(
                f"The model {name[:200]!r} does not exist, or your API key may not use it. {self._listed()}"
            )
        return status

    def _resolved(self, name: str | None, wanted: ModelType | None) -> str:
        """Return the name of the model that is meant. Raises UnknownModel, or WrongType."""
        if name in _DEFAULT and (name is None or not self._has(name)):
            for status in self.statuses():
                if wanted is None or self._models.describe(status.name).kind == wanted:
                    return status.name
            raise UnknownModel(f"Your API key may use no model that {_DOES[wanted or 'llm']}.")
        assert name is not None
        found = self._find(name).name
        kind = self._models.describe(name).kind
        if wanted is not None and kind != wanted:
            raise WrongType(
                f"The model {found!r} {_DOES[kind]}; this address is for one that {_DOES[wanted]}."
            )
        return name  # which may say more: an effort

    def _has(self, name: str) -> bool:
        """Whether a model is really called so."""
        return any(name in (status.name, *status.aliases) for status in self.statuses())

    def _listed(self) -> str:
        names = [status.name for status in self.statuses()]
        if not names:
            return "It may use none of those that are served."
        more = ", …" if len(names) > _MAX_NAMED else ""
        return f"It may use {', '.join(map(repr, names[:_MAX_NAMED]))}{more}."
