"""Where the images of a conversation stand in its prompt.

    numbered parts ─place─▶ parts without numbers, stand-ins in texts ─template─▶ text ─shown─▶ text with pad tokens

A chat template writes the same placeholder for every image, so images are told apart by their order. What people write
cannot change it: a placeholder that they spell is no marker (prompt.py). Where a template takes no parts, a stand-in is
put into the text, of a character that occurs nowhere else; it becomes what the family's templates write for an image.

Knows no files and no engine: an image is its number, and how many tokens it takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlx_backend.chat.markers import unused_character
from mlx_backend.conversation.image_parts import has_images, is_image
from mlx_backend.engine.images import PromptImage
from mlx_backend.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mlx_backend.conversation.template import TemplateTraits
    from mlx_backend.engine.images import ImageMarkup, PreparedImage

    type Messages = Sequence[Mapping[str, Any]]


def image_numbers(messages: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the numbers of the images in messages, in their order."""
    return [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if is_image(part)
    ]


def with_stand_ins(messages: Messages, traits: TemplateTraits) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return messages with texts in place of images that the template does not write, and whose numbers these are."""
    numbers: dict[str, int] = {}
    changed: list[dict[str, Any]] = []
    character = ""
    for message in messages:
        copy = dict(message)
        changed.append(copy)
        is_taken = traits.takes_result_parts if message["role"] == "tool" else traits.takes_parts
        if is_taken or not has_images(message["content"]):
            continue
        texts: list[str] = []
        for part in message["content"]:
            if not is_image(part):
                texts.append(part["text"])
                continue
            character = character or unused_character(messages)
            texts.append(f"{character}{part['image']}{character}")
            numbers[texts[-1]] = part["image"]
        copy["content"] = "\n".join(texts)
    return changed, numbers


def without_numbers(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with images as templates take them."""
    return [
        {**message, "content": [{"type": "image"} if is_image(part) else part for part in message["content"]]}
        if has_images(message["content"])
        else dict(message)
        for message in messages
    ]


@dataclass(frozen=True, slots=True)
class ShownImages:
    """A rendered text in which each image has its pad tokens, and the images in their order there."""

    text: str
    images: Sequence[PreparedImage] = ()
    pad_token: int = -1

    def found(self, tokens: Sequence[int]) -> tuple[PromptImage, ...]:
        """Return where the images are among the text's tokens."""
        found: list[PromptImage] = []
        for image in self.images:
            at = found[-1].end if found else 0
            found.append(PromptImage(tokens.index(self.pad_token, at), image))
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlaces:
    """The images of one conversation by their numbers, and how the model's family writes them.

    `parts` are the numbers of those that the template writes, in order; `stand_ins` those that stand in texts. `pad` is
    the text of the pad token.
    """

    images: Mapping[int, PreparedImage]
    parts: Sequence[int]
    stand_ins: Mapping[str, int]
    markup: ImageMarkup
    pad_token: int
    pad: str

    def shown(self, text: str) -> ShownImages:
        """Give each image in a rendered text its pad tokens. Raises RequestError if one is not written there."""
        markup = self.markup
        parts = iter(self.parts)
        images: list[PreparedImage] = []

        def places(number: int | None) -> str:
            if number is None:
                raise self._not_written()
            images.append(self.images[number])
            return markup.written(images[-1], self.pad)

        def write(found: re.Match[str]) -> str:
            if found[0] in self.stand_ins:
                return markup.part.replace(markup.placeholder, places(self.stand_ins[found[0]]))
            return places(next(parts, None))

        texts = [*self.stand_ins, markup.placeholder]
        written = re.sub("|".join(map(re.escape, texts)), write, text)
        if len(images) != len(self.parts) + len(self.stand_ins):
            raise self._not_written()
        return ShownImages(written, images, self.pad_token)

    def _not_written(self) -> RequestError:
        return RequestError(
            f"The model's chat template does not write each of the request's images as {self.markup.placeholder}. "
            "Start the server with the model's own template (without --chat-template), or send no images.",
            "messages",
        )
