"""Everything that can go wrong between a model's name and the model, on one screen. The texts are for people.

ModelError
├── UnknownModel      nothing here has that name
├── ModelNotAllowed   a path to somewhere that no client may read from
├── WrongType         it is there, and made for something else
├── ModelLoading      not in memory yet: come back in `retry_after` seconds
├── ModelPinned      it was to be unloaded, and stays
└── NoRoom            memory is full of models that have to stay; `retry_after` is None if that will not change

A load that fails raises its own EngineError instead. ConfigurationError is for whoever starts the server.
"""

from __future__ import annotations


class ModelError(Exception):
    """The model that was asked for is not to be had."""


class UnknownModel(ModelError):
    """Nothing here has that name; the text says what there is."""


class ModelNotAllowed(ModelError):
    """A request named a place outside of the folders that are served."""


class WrongType(ModelError):
    """A model was asked for what another type of model does."""


class ModelLoading(ModelError):
    """The model is on its way."""

    def __init__(self, name: str, percent: int, retry_after: int) -> None:
        super().__init__(f"The model {name!r} is being loaded ({percent} %); try again in {retry_after} s.")
        self.name = name
        self.percent = percent
        self.retry_after = retry_after


class ModelPinned(ModelError):
    """The model was to be unloaded, and stays."""


class NoRoom(ModelError):
    """The model does not fit beside those that have to stay."""

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConfigurationError(Exception):
    """What is wrong with a configuration: one line for each mistake."""
