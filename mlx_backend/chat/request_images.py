"""The images of a request and its model: shown, refused in words, or, in earlier turns, named.

A model that cannot see refuses what a user asks about now. What a tool has shown it becomes a sentence: no user can
take that away. Images of turns that have been answered become the text `[image]`, so that a conversation can go on with
another model; so do the oldest of more images than a request may have, so that it can go on for as long as its text
fits. Knows no API: a message's part is an image's number.
"""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from mlx_backend.chat.prompt import ImagePlaces, image_numbers
from mlx_backend.conversation.message_parts import UNSEEN, has_images, is_image
from mlx_backend.conversation.result_media import unseen_image
from mlx_backend.engine.images import ImageSupport
from mlx_backend.errors import EngineRefused, RequestError
from mlx_backend.installation import vision_command
from mlx_backend.preparation import current

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mlx_backend.chat.request import ChatRequest
    from mlx_backend.engine.images import ImageProcessor, PreparedImage
    from mlx_backend.engine.threaded import Engine
    from mlx_backend.images import ImageSource
    from mlx_backend.images.loader import ImageLoader

log = logging.getLogger(__name__)

_REMEDY = "Remove the image, or choose a model with vision."
_REFUSALS: Mapping[ImageSupport, tuple[str, str]] = {
    ImageSupport.NONE: (f"This model cannot see images. {_REMEDY}", "unsupported_content"),
    ImageSupport.NOT_INSTALLED: (
        "This model can see images, but this server was installed without what that needs. Remove the image, or have "
        f"the server's operator install it: {vision_command()}.",
        "vision_not_installed",
    ),
    ImageSupport.UNKNOWN_FAMILY: (
        f"This server does not support images for models of this family yet, only text. {_REMEDY}",
        "unsupported_content",
    ),
    ImageSupport.NOT_HERE: (
        f"This model cannot see images as this server runs it: the server's log says why. {_REMEDY}",
        "unsupported_content",
    ),
}


@dataclass(frozen=True, slots=True)
class SeenImages:
    """The images of one request, prepared for its model, by their numbers."""

    processor: ImageProcessor
    images: Mapping[int, PreparedImage]

    def known(self) -> SeenImages:
        """Return them for a model that has seen them."""
        images = {number: image.known() for number, image in self.images.items()}
        return replace(self, images=images)

    def places(self, messages: Sequence[Mapping[str, Any]], stand_ins: Mapping[str, int]) -> ImagePlaces:
        """Return where they stand: as parts of the messages that are rendered, or as stand-ins in texts."""
        return ImagePlaces(
            images=self.images,
            parts=image_numbers(messages),
            stand_ins=stand_ins,
            part=self.processor.part,
            pad_token=self.processor.pad_token,
        )


class RequestImages:
    """The images of requests to one model. Safe to use from several threads."""

    def __init__(self, engine: Engine, loader: ImageLoader | None) -> None:
        self._engine = engine
        self._model_id = engine.model_id
        self._support = engine.image_support
        self._loader = loader

    @property
    def _means(self) -> tuple[ImageLoader, ImageProcessor] | None:
        """What shows images to the model as it is loaded now: an engine that broke has loaded another processor."""
        processor = self._engine.image_processor
        return (self._loader, processor) if self._loader is not None and processor is not None else None

    @property
    def are_seen(self) -> bool:
        """Whether the model is shown images."""
        return self._means is not None

    def visible(self, request: ChatRequest) -> ChatRequest:
        """Return the request as the model can be shown it. Raises RequestError for an image that it has to see."""
        if not request.images:
            return request
        asked = _current_turn(request.messages)
        if self._means is not None:
            return self._within_limit(request, asked, self._means[0].max_images)
        for message in request.messages[asked:]:
            if _holds_images(message) and not _is_result(message):
                raise self._refusal(request, message)
        messages = [
            _with_parts(message, lambda part: _unseen(part, request.images))
            if _is_result(message)
            else message
            for message in request.messages
        ]
        if earlier := sum(len(_images_of(message)) for message in messages):
            log.info(
                "%s cannot see images: those of earlier turns (%d) are the text %s.",
                *(self._model_id, earlier, UNSEEN),
            )
        return replace(request, messages=_named(messages, earlier), images=())

    def _within_limit(self, request: ChatRequest, asked: int, limit: int) -> ChatRequest:
        """Name the oldest images in answered turns and in earlier results of tools, if there are too many.

        Several at a time: with each one that is named, nothing of the prompt after its place is cached any more.
        """
        excess = len(request.images) - limit
        if excess <= 0:
            return request
        messages = list(request.messages)
        # The results after the last call are what the model has asked to see.
        newest = max((at for at, message in enumerate(messages) if not _is_result(message)), default=0)
        places = [at for at, each in enumerate(messages) if at < (newest if _is_result(each) else asked)]
        earlier = [messages[at] for at in places]
        if not (known := sum(len(_images_of(message)) for message in earlier)):
            return request
        together = max(1, limit // 4)
        count = min(ceil(excess / together) * together, known)
        log.info(
            "The conversation has %d images and a request at most %d: its oldest %d are the text %s.",
            *(len(request.images), limit, count, UNSEEN),
        )
        for at, message in zip(places, _named(earlier, count), strict=True):
            messages[at] = message
        return replace(request, messages=messages)

    def seen(
        self, sources: Sequence[ImageSource], messages: Sequence[Mapping[str, Any]]
    ) -> SeenImages | None:
        """Load and prepare the images that canonical messages number; None if there are none. Raises RequestError."""
        numbers = image_numbers(messages)
        if self._means is None or not numbers:
            return None
        loader, processor = self._means
        chosen = [sources[number] for number in numbers]
        images: dict[int, PreparedImage] = {}
        with closing(loader.load(chosen)) as pictures:
            for number in numbers:
                current().check()
                picture = next(pictures)
                try:
                    images[number] = processor.prepare(picture, list(images.values()))
                except EngineRefused as error:
                    raise RequestError(str(error), sources[number].where, "invalid_image") from error
                del picture  # before the next is loaded
        return SeenImages(processor, images)

    def _refusal(self, request: ChatRequest, message: Mapping[str, Any]) -> RequestError:
        first = next(part for part in message["content"] if is_image(part))
        support = ImageSupport.NOT_HERE if self._support is ImageSupport.AVAILABLE else self._support
        text, code = _REFUSALS[support]
        return RequestError(text, request.images[first["image"]].where, code)


def _current_turn(messages: Sequence[Any]) -> int:
    """Return the index after the last answer: what follows is asked now. A last message is not answered, but begun."""
    answers = [
        index
        for index, message in enumerate(messages[:-1])
        if isinstance(message, dict) and message.get("role") == "assistant" and not message.get("tool_calls")
    ]
    return answers[-1] + 1 if answers else 0


def _images_of(message: Any) -> list[Any]:
    return [part for part in message["content"] if is_image(part)] if _holds_images(message) else []


def _holds_images(message: Any) -> bool:
    return isinstance(message, dict) and has_images(message.get("content"))


def _is_result(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in ("tool", "function")


def _unseen(part: Any, images: Sequence[ImageSource]) -> Any:
    """Return a part of a result; of an image, what the model reads in its place: its tool cannot be asked again."""
    return {"type": "text", "text": unseen_image(images[part["image"]].url)} if is_image(part) else part


def _with_parts(message: Any, change: Callable[[Any], Any]) -> Any:
    return (
        {**message, "content": list(map(change, message["content"]))} if _holds_images(message) else message
    )


def _named(messages: Sequence[Any], count: int) -> list[Any]:
    """Return the messages with the text that names an image in place of the first `count` images."""
    named = iter(range(count))

    def shown(part: Any) -> Any:
        return {"type": "text", "text": UNSEEN} if is_image(part) and next(named, None) is not None else part

    return [_with_parts(message, shown) for message in messages]
