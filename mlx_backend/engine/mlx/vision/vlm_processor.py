"""What mlx-vlm's processor of a family makes of pictures: their text and tokens in a prompt, and the network's inputs.

Processors write images in ways of their own: one pad token for each place, a grid of tiles with markers between them,
one token for all. So a picture is shown to the processor between two filler tokens, and what it writes there is how
that picture is written in prompts. When a prompt is about to be run, the processor gets all its pictures with as many
filler tokens around them as the prompt has tokens there: its inputs then fit the prompt, also those that have a value
for each token. Filler tokens are control tokens, which no tokenizer merges with what is next to them.

Knows no requests. MLX's arrays belong to threads: what is asked from other threads is done on one of its own.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_backend.engine.images import ImageMarkup, PreparedImage, WrittenImage
from mlx_backend.engine.mlx.vision.image_memory import PreparedImages
from mlx_backend.errors import EngineError, EngineRefused, first_line
from mlx_backend.images import Picture

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mlx_backend.engine.images import PromptImage
    from mlx_backend.engine.mlx.tokenizer import MLXTokenizer

    # By the names that the network knows them by.
    type Inputs = dict[str, Any]

MAX_WRITTEN = 256
"""Number of pictures of which it is remembered how they are written: a large one takes some hundred kilobytes."""
PROBE_SIDE = 64
"""Sides in pixels of the picture that the processor is tried with."""
_STAND_IN = "\uffffimage\uffff"
"""Stands for an image where the template writes none; no text has these characters."""


class VLMProcessor:
    """Prepares pictures for one model. Safe to use from any thread, but for `inputs`, which is the engine's."""

    def __init__(
        self, folder: Path, network: Any, tokenizer: MLXTokenizer, *, trust_remote_code: bool
    ) -> None:
        from mlx_vlm.utils import load_image_processor, load_processor

        with warnings.catch_warnings(), nullcontext() if trust_remote_code else without_code_of_models():
            warnings.simplefilter("ignore")  # about sounds, which the processors of some families read too
            self._processor = load_processor(folder, False, trust_remote_code=trust_remote_code)
        if (own := load_image_processor(folder)) is not None:
            self._processor.image_processor = own
        self._image_token_index = getattr(network.config, "image_token_index", None)
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens
        self._filler = next(iter(sorted(tokenizer.end_tokens & special.keys())), None) or min(special)
        self._written: OrderedDict[bytes, tuple[WrittenImage, int]] = OrderedDict()
        self.waiting = PreparedImages()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="images")
        try:
            self.pad_token, self.markup, self._part = self._probed(network.config.model_type)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End its thread."""
        self._worker.submit(_clean_up)
        self._worker.shutdown()

    def prepare(self, picture: Picture, of_request: int = 0) -> PreparedImage:
        """Return the picture with how it is written; `of_request` are the bytes of its request's other images.

        Raises EngineRefused for one that it cannot take, EngineBusy while too many of others wait to be seen.
        """
        digest = picture.digest
        if (known := self._written.get(digest)) is None:
            known = self._worker.submit(self._write, self._part, picture, self.pad_token).result()
            self._written[digest] = known
            while len(self._written) > MAX_WRITTEN:
                self._written.popitem(last=False)
        written, nbytes = known
        image = PreparedImage(digest, 1, len(written.tokens), {}, None, picture, nbytes, written)
        self.waiting.add(image, of_request)
        return image

    def inputs(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> Inputs:
        """Return the network's inputs for a prompt's images. Raises EngineRefused if they do not fit the prompt."""
        fillers: list[int] = []
        at = lead = 0
        for each in images:
            assert each.image.written is not None
            fillers.append(each.start - each.image.written.before - at)
            at = each.end + each.image.written.after
        fillers.append(len(prompt) - at)
        pictures = [each.image.picture for each in images if each.image.picture is not None]
        for _ in range(2):  # once more if the processor puts a token of its own first
            made = self._run(self._text([fillers[0] - lead, *fillers[1:]], self._part), pictures)
            tokens = made["input_ids"]
            starts = [at for at, token in enumerate(tokens) if token == self.pad_token]
            lead += starts[0] - images[0].start if starts else 0
            if not starts or not lead or starts[0] == images[0].start:
                break
        if any(tokens[each.start : each.end] != each.image.tokens(self.pad_token) for each in images):
            raise EngineRefused(
                "The model's processor writes these images together in another way than each alone. Send them one by "
                "one, or with text between them.",
                "images",
            )
        return {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}

    def _probed(self, model_type: str) -> tuple[int, ImageMarkup, str]:
        """Return the pad token, how images are written, and what the processor reads as an image."""
        picture = Picture(PROBE_SIDE, PROBE_SIDE, bytes(range(256)) * (3 * PROBE_SIDE * PROBE_SIDE // 256))
        errors: list[Exception] = []
        for part, is_in_template in self._parts(model_type):
            try:
                written, _ = self._worker.submit(self._write, part, picture).result()
            except EngineRefused as error:
                errors.append(error)
                continue
            markup = ImageMarkup(part=part, placeholder=part)
            if not is_in_template:
                markup = ImageMarkup(part=_STAND_IN, placeholder=_STAND_IN)
            return written.tokens[0], markup, part
        raise EngineRefused(
            f"its processor reads no picture: {first_line(errors[0])}"
            if errors
            else "its chat template has no place for a picture",
            "images",
        )

    def _parts(self, model_type: str) -> Iterator[tuple[str, bool]]:
        """Yield what may stand for an image in a prompt, and whether the chat template writes it."""
        if (part := self._part_of_template()) is not None:
            yield part, True
        if (part := _part_of_format(model_type)) is not None:
            yield part, False
        for owner in (self._processor, getattr(self._processor, "tokenizer", None)):
            if isinstance(part := getattr(owner, "image_token", None), str):
                yield part, False

    def _part_of_template(self) -> str | None:
        """Return what the chat template writes for each image of a message; None if it writes nothing."""
        first, between, last = "firstwords", "inbetween", "lastwords"
        image = {"type": "image"}
        texts = [{"type": "text", "text": text} for text in (first, between, last)]
        content = [texts[0], image, texts[1], image, texts[2]]
        try:
            text = self._tokenizer.render([{"role": "user", "content": content}], None)
            _, _, rest = text.partition(first)
            one, _, rest = rest.partition(between)
            other, found, _ = rest.partition(last)
        except EngineRefused:
            return None
        part = one.strip()
        return part if found and part and part == other.strip() and "'type'" not in part else None

    def _text(self, fillers: Sequence[int], part: str) -> str:
        """Return images with so many filler tokens before each, and after the last."""
        filler = self._tokenizer.special_tokens[self._filler]
        return part.join(filler * max(0, count) for count in fillers)

    def _write(self, part: str, picture: Picture, pad: int | None = None) -> tuple[WrittenImage, int]:
        """Return how a picture is written, and the bytes of what the network takes. Raises EngineRefused."""
        made = self._run(self._text((1, 1), part), [picture])
        tokens = made.pop("input_ids")
        nbytes = sum(
            value.nbytes
            for name, value in made.items()
            if name != "attention_mask" and isinstance(value, mx.array)
        )
        if not nbytes:  # such as a tokenizer in place of a processor that could not be made
            raise EngineRefused("The model's processor makes nothing of a picture.", "images")
        fillers = [at for at, token in enumerate(tokens) if token == self._filler]
        if len(fillers) < 2:
            raise EngineRefused("The model's processor does not keep the text around a picture.", "images")
        start, end = fillers[0] + 1, fillers[-1]
        while tokens[start] == self._filler:  # it has put one first, or last
            start += 1
        while tokens[end - 1] == self._filler:
            end -= 1
        body = tokens[start:end]
        special = self._tokenizer.special_tokens
        if pad is None:
            counts = Counter(token for token in body if token in special)
            pad = counts.most_common(1)[0][0] if counts else None
        if pad is None or pad not in body:
            raise EngineRefused("The model's processor writes no token for a picture.", "images")
        first, end = body.index(pad), len(body) - body[::-1].index(pad)
        text = self._tokenizer.decode(body)
        if self._tokenizer.encode(text, control_tokens=True) != body:
            raise EngineRefused("The text that stands for a picture cannot be read back.", "images")
        return WrittenImage(text, first, tuple(body[first:end]), len(body) - end), nbytes

    def _run(self, text: str, pictures: Sequence[Picture]) -> Inputs:
        """Run the processor; its tokens are a list. Raises EngineRefused for what it does not take."""
        from mlx_vlm.utils import prepare_inputs
        from PIL import Image

        pixels = (np.frombuffer(each.rgb, np.uint8).reshape(each.height, each.width, 3) for each in pictures)
        try:
            made = prepare_inputs(
                self._processor,
                images=[Image.fromarray(each) for each in pixels],
                prompts=text,
                image_token_index=self._image_token_index,
            )
            return {**made, "input_ids": np.asarray(made["input_ids"]).reshape(-1).tolist()}
        except Exception as error:
            raise EngineRefused(
                f"The image cannot be prepared for this model: {first_line(error)}.", "images"
            ) from error


@contextmanager
def without_code_of_models() -> Iterator[None]:
    """Have transformers run no Python code that comes with a model, though some processors of mlx-vlm's tell it to."""
    name = "get_class_from_dynamic_module"
    places = [
        each for key, each in sys.modules.items() if key.startswith("transformers.") and name in vars(each)
    ]
    own = [vars(each)[name] for each in places]
    for each in places:
        setattr(each, name, _refuse_code)
    try:
        yield
    finally:
        for each, function in zip(places, own, strict=True):
            setattr(each, name, function)


def _refuse_code(*_: Any, **__: Any) -> Any:
    raise EngineError(
        "it comes with Python code of its own; --trust-remote-code runs it, if you trust its makers"
    )


def _part_of_format(model_type: str) -> str | None:
    """Return what mlx-vlm writes into a message's text for an image, for families whose templates write nothing."""
    from mlx_vlm.prompt_utils import MessageFormatter

    try:
        message = MessageFormatter(model_type).format_message("\0", num_images=1)
    except Exception:  # of whatever kind: it has no such format
        return None
    content = message.get("content") if isinstance(message, dict) else message
    part = content.replace("\0", "").strip() if isinstance(content, str) else ""
    return part or None


def _clean_up() -> None:
    mx.synchronize()
    mx.clear_streams()
