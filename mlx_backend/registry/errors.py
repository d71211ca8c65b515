"""The errors between a model's name and the loaded model. Their messages are sent to clients.

ModelError
├── UnknownModel         no model here has that name
│   └── UnknownEffort    the model has it, but no such level as its name asks for
├── ModelNotAllowed      a path outside the folders that clients may read from
├── WrongType            the model exists, but is of another type
├── ModelLoading         not in memory yet: retry after `retry_after` seconds
├── ModelPinned          a pinned model cannot be unloaded
└── InsufficientMemory   does not fit next to the models that must stay; `retry_after` is None if that is permanent

A failed load raises its own EngineError instead. ConfigurationError is for the person who starts the server.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from mlx_backend.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence


class ModelError(Exception):
    """The requested model cannot be used."""


class UnknownModel(ModelError):
    """No model here has that name; the message lists those there are."""


class UnknownEffort(UnknownModel):
    """A name such as `NAME:high`, of a model that has no such level."""

    def __init__(self, name: str, word: str, efforts: Sequence[str]) -> None:
        listed = ", ".join(f"{name}:{effort}" for effort in efforts)
        there = f"There is {listed}" if efforts else "It does not reason"
        super().__init__(
            f"The model {name!r} has no reasoning effort {word[:60]!r}. {there}, and {name} itself."
        )
        self.name = name


class ModelNotAllowed(ModelError):
    """A request named a path outside the served folders."""


class WrongType(ModelError):
    """A model was asked to do what another type of model does."""


class ModelLoading(ModelError):
    """The model is being loaded, or downloaded first."""

    def __init__(self, name: str, percent: int, retry_after: int, *, stage: str = "loading") -> None:
        doing = "downloaded" if stage == "downloading" else "loaded"
        super().__init__(f"The model {name!r} is being {doing} ({percent} %); try again in {retry_after} s.")
        self.name = name
        self.percent = percent
        self.retry_after = retry_after


class ModelPinned(ModelError):
    """A pinned model was to be unloaded."""


class InsufficientMemory(ModelError):
    """The model does not fit in memory next to those that must stay, which `staying` names in a sentence."""

    def __init__(self, message: str, retry_after: int | None = None, *, staying: str = "") -> None:
        super().__init__(f"{message} {staying}".rstrip())
        self.retry_after = retry_after
        self._message = message

    def without_names(self) -> InsufficientMemory:
        """Return the error for a client that may not know of the others."""
        return InsufficientMemory(f"{self._message} Others must stay in memory.", self.retry_after)


class ConfigurationError(Exception):
    """What is wrong with a configuration: one line per mistake."""


def copy_error(error: Exception) -> Exception:
    """Return an equal error without traceback or cause, for another thread to raise."""
    try:
        return copy.copy(error)
    except Exception:  # its constructor does not accept its own `args`
        return EngineError(str(error))
