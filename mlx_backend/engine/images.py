"""Images on their way into an engine: prepared for its model, and where in a prompt they stand. Holds data alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mlx_backend.images import Picture


@dataclass(frozen=True, slots=True)
class WrittenImage:
    """How an image is written in prompts: as `text`, of whose tokens these are its places.

    `tokens` begin and end with a pad token, and may have others between them; `before` and `after` say how many more
    the text has on either side. `positions` are those of the places by time, row and column, counted from the first
    ([3, places]), for models that have such; what follows then goes on `shift` later than the number of tokens says.
    """

    text: str
    before: int
    tokens: tuple[int, ...]
    after: int = 0
    positions: Any = field(default=None, repr=False)
    shift: int = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedImage:
    """An image as a model's vision tower takes it.

    `digest` tells it apart from every other image for this model. `inputs` are numpy arrays, by the names that the
    model's network knows them by. An image that the engine has seen may be without: if it has to be seen again, they
    are made of `picture`, and take `bytes_to_make`.
    """

    digest: bytes
    written: WrittenImage
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    picture: Picture | None = field(default=None, repr=False)
    bytes_to_make: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens of a prompt it takes."""
        return len(self.written.tokens)

    def known(self) -> PreparedImage:
        """Return it without what it takes to see it, which is large: for an engine that has."""
        return replace(self, inputs=MappingProxyType({}), picture=None, bytes_to_make=0)

    @property
    def can_be_seen(self) -> bool:
        """Whether it holds what the vision tower takes, or what that is made of."""
        return bool(self.inputs) or self.picture is not None

    @property
    def nbytes(self) -> int:
        """The bytes of its inputs, be they yet to be made."""
        return self.bytes_to_make or bytes_of(self.inputs)


def bytes_of(inputs: Any) -> int:
    """Return the bytes of the arrays in a dictionary, and in lists and records in it."""
    if is_dataclass(inputs):
        return bytes_of(vars(inputs))
    if isinstance(inputs, Mapping | list | tuple):
        return sum(map(bytes_of, inputs.values() if isinstance(inputs, Mapping) else inputs))
    return int(getattr(inputs, "nbytes", 0))


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt: its tokens begin at position `start`."""

    start: int
    image: PreparedImage

    @property
    def end(self) -> int:
        """The position after its tokens."""
        return self.start + self.image.num_tokens


class ImageSupport(Enum):
    """Whether a model can be shown images here, or why not."""

    AVAILABLE = auto()
    NONE = auto()
    """It was not made to see."""
    NOT_INSTALLED = auto()
    """What reads images is an extra of the package."""
    UNKNOWN_FAMILY = auto()
    """Only what it writes is supported of its family."""
    NOT_HERE = auto()
    """Processes share it, or what it sees with could not be loaded: the log says it."""


class ImageProcessor(Protocol):
    """Prepares images for one model. Safe to use from any thread."""

    @property
    def pad_token(self) -> int:
        """The token that stands in a prompt once for each of an image's places."""
        ...

    @property
    def part(self) -> str:
        """What the model's chat template writes for an image, in whose place its text stands then."""
        ...

    def prepare(self, picture: Picture, earlier: Sequence[PreparedImage] = ()) -> PreparedImage:
        """Return the picture as the model takes it after the same request's `earlier` ones.

        Raises EngineRefused for one that it cannot take, EngineBusy while too many of others wait to be seen.
        """
        ...
