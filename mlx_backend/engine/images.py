"""Images on their way into an engine: prepared for its model, and where in a prompt they stand. Holds data alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlx_backend.images import Picture


@dataclass(frozen=True, slots=True)
class WrittenImage:
    """How a processor that writes images itself has written one: as `text`, which has these tokens.

    `tokens` begin and end with a pad token; `before` and `after` say how many more the text has on either side.
    """

    text: str
    before: int
    tokens: tuple[int, ...]
    after: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedImage:
    """An image as a model's vision tower takes it.

    `digest` tells it apart from every other image for this model. It stands in a prompt as `rows` times `columns` pad
    tokens, for some models with a token `row_break` between two rows; as it is `written`, if the model's processor has
    written it. `inputs` are numpy arrays, by the names that the model's processor gives them. An image that the engine
    has seen may be without: if it has to be seen again, they are made of `picture`, and take `bytes_to_make`.
    """

    digest: bytes
    rows: int
    columns: int
    inputs: Mapping[str, Any] = field(repr=False)
    row_break: int | None = None
    picture: Picture | None = field(default=None, repr=False)
    bytes_to_make: int = 0
    written: WrittenImage | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens of a prompt it takes."""
        if self.written is not None:
            return len(self.written.tokens)
        return self.rows * self.columns + (self.rows - 1 if self.row_break is not None else 0)

    def tokens(self, pad: int) -> list[int]:
        """Return the tokens as which it stands in a prompt."""
        if self.written is not None:
            return list(self.written.tokens)
        row = [pad] * self.columns
        between = [self.row_break] if self.row_break is not None else []
        return row + (between + row) * (self.rows - 1)

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
        return self.bytes_to_make or sum(value.nbytes for value in self.inputs.values())


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image in a prompt: its tokens begin at position `start`."""

    start: int
    image: PreparedImage

    @property
    def end(self) -> int:
        """The position after its tokens."""
        return self.start + self.image.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMarkup:
    """How an image is written in a prompt.

    `part` is what the family's chat templates write for an image, of which `placeholder` then becomes the image's pad
    tokens, with `before` and `after` them, and `between_rows` of its places.
    """

    part: str
    placeholder: str
    before: str = ""
    after: str = ""
    between_rows: str = ""

    def written(self, image: PreparedImage, pad: str) -> str:
        """Return what stands for an image where the placeholder was; `pad` is the text of a pad token."""
        if image.written is not None:
            return image.written.text
        rows = self.between_rows.join([pad * image.columns] * image.rows)
        return f"{self.before}{rows}{self.after}"


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
    def markup(self) -> ImageMarkup:
        """How an image is written in a prompt."""
        ...

    def prepare(self, picture: Picture, of_request: int = 0) -> PreparedImage:
        """Return the picture as the model takes it; `of_request` are the bytes of the same request's other images.

        Raises EngineRefused for one that it cannot take, EngineBusy while too many of others wait to be seen.
        """
        ...
