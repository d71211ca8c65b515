"""What mlx-vlm's processor of a family makes of pictures: their text and tokens in a prompt, and the network's inputs.

Processors write images in ways of their own: one pad token for each place, a grid of tiles with markers between them,
one token for all. So a picture is shown to the processor between two filler tokens, and what it writes there is how
that picture is written in prompts. Filler tokens are control tokens, which no tokenizer merges with what is next to
them.

mlx-vlm's own generation wants all pictures of a prompt together, with inputs that fit it, of which some have a value
for each token. For that (`inputs`) the processor gets the pictures with as many filler tokens around them as the prompt
has tokens there.

Knows no requests. Processors are not made for several threads, and MLX's arrays belong to threads: each processor runs
on a thread of its own, and what it makes leaves that as numpy arrays.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import is_dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from mlx_backend.engine.images import PreparedImage, PromptImage, WrittenImage, bytes_of
from mlx_backend.engine.kv_cache_budget import RETRY_AFTER
from mlx_backend.engine.mlx.vision.image_memory import PreparedImages
from mlx_backend.engine.mlx.vision.whole import to_mlx
from mlx_backend.errors import EngineBusy, EngineError, EngineRefused, first_line
from mlx_backend.images import Picture
from mlx_backend.models.files import read_json_or_empty

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from mlx_backend.engine.mlx.tokenizer import MLXTokenizer

    # By the names that the network knows them by.
    type Inputs = dict[str, Any]

MAX_WRITTEN = 256
"""Number of pictures of which it is remembered how they are written: a large one takes some hundred kilobytes."""
AXES = 3
"""Of positions that are no numbers: time, row and column."""
PROBE_SIDE = 64
"""Sides in pixels of the picture that the processor is tried with."""
TRIED_TEXT = "The quick brown fox jumps over 12 dogs."
_NO_PART = "\uffffimage\uffff"
"""Stands for what templates write for an image where they write nothing; no text has these characters."""
_NUMBER = re.compile(r"(?<=image_)1(?=\W)")
"""An image's number in what processors read as the first one."""
MAX_FIRST = 4
"""Number of tokens that a processor may put before a prompt: more are a picture's, which is not left in its place.

Or a conversation's, which GOT's and Phi-4-SigLIP's put around each prompt; those cannot be used here for other reasons.
"""
_OF_TOKENS = ("input_ids", "attention_mask")
"""What processors make that is no input of a vision tower."""


class VLMProcessor:
    """Prepares pictures for one model. Safe to use from any thread.

    `whole` is mlx-vlm's network. The inputs of pictures of which it `is_seen`, by their digests, what the network makes
    of them are not held.
    """

    def __init__(
        self,
        folder: Path,
        whole: Any,
        tokenizer: MLXTokenizer,
        *,
        trust_remote_code: bool,
        is_seen: Callable[[bytes], bool] = lambda _digest: True,
    ) -> None:
        from mlx_vlm.utils import load_image_processor, load_processor

        with warnings.catch_warnings(), nullcontext() if trust_remote_code else without_code_of_models():
            warnings.simplefilter("ignore")  # about sounds, which the processors of some families read too
            self._processor = load_processor(folder, False, trust_remote_code=trust_remote_code)
        if (own := load_image_processor(folder)) is not None:
            self._processor.image_processor = own
        images = getattr(self._processor, "image_processor", None)
        _show_whole(images)
        _without_padding(images)
        self._image_token_index = getattr(whole.config, "image_token_index", None)
        self._rope_index = getattr(whole.language_model, "get_rope_index", None)
        self._is_seen = is_seen
        config = read_json_or_empty(folder / "config.json")
        self._named_pads = [
            config.get(name) for name in ("image_token_id", "image_token_index", "media_placeholder_token_id")
        ]
        self._tokenizer = tokenizer
        special = tokenizer.special_tokens
        self._filler = next(iter(sorted(tokenizer.end_tokens & special.keys())), None) or min(special)
        # By a picture's digest and number, and the bytes of its inputs.
        self._written = OrderedDict[tuple[bytes, int], tuple[WrittenImage, int]]()
        self.waiting = PreparedImages()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="images")
        try:
            self.pad_token, self.part, self._own_part, self._are_numbered = self._probed(config)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End its thread, and release the network: this object may outlive its model."""
        self._worker.submit(_clean_up)
        self._worker.shutdown()
        self._rope_index, self._is_seen = None, lambda _digest: True

    def prepare(self, picture: Picture, earlier: Sequence[PreparedImage] = ()) -> PreparedImage:
        """Return the picture with how it is written after its request's `earlier` ones.

        Raises EngineRefused for one that it cannot take, EngineBusy while too many of others wait to be seen.
        """
        digest, inputs = picture.digest, dict[str, Any]()
        number = len(earlier) if self._are_numbered else 0
        known = self._written.get((digest, number))
        if known is None or not self._is_seen(digest):
            written, inputs = self._on_worker(self._write, self._own_part, picture, self.pad_token)
            nbytes = bytes_of(inputs)
            if number:
                later, _ = self._on_worker(self._write, self._own_part, picture, self.pad_token, number)
                written = replace(later, positions=written.positions, shift=written.shift)
            known = self._written[digest, number] = written, nbytes
            while len(self._written) > MAX_WRITTEN:
                self._written.popitem(last=False)
        if self._is_seen(digest):
            inputs = {}
        image = PreparedImage(
            digest, known[0], inputs, None if inputs else picture, 0 if inputs else known[1]
        )
        self.waiting.add(image, sum(each.nbytes for each in earlier))
        return image

    def inputs_of(self, image: PreparedImage) -> Inputs:
        """Return the vision tower's inputs of an image, made again if it has none."""
        if image.inputs:
            return dict(image.inputs)
        assert image.picture is not None
        return self._on_worker(self._write, self._own_part, image.picture, self.pad_token)[1]

    def inputs(self, prompt: Sequence[int], images: Sequence[PromptImage]) -> Inputs:
        """Return the network's inputs for a prompt's images. Raises EngineRefused if they do not fit the prompt."""
        fillers: list[int] = []
        at = 0
        for each in images:
            fillers.append(each.start - each.image.written.before - at)
            at = each.end + each.image.written.after
        fillers.append(len(prompt) - at + 1)  # DeepSeek-OCR's takes the last token away
        pictures = [each.image.picture for each in images if each.image.picture is not None]
        made = self._on_worker(self._run, self._text(fillers, self._own_part), pictures)
        tokens = made["input_ids"]
        added = tokens.index(self.pad_token) - images[0].start if self.pad_token in tokens else 0
        inputs = _cut(made, added, added + len(prompt))  # some put a token of their own first
        if added < 0 or any(
            tuple(tokens[added + each.start : added + each.end]) != each.image.written.tokens
            for each in images
        ):
            raise EngineRefused(
                "The model's processor writes these images together in another way than each alone. Send them one by "
                "one, or with text between them.",
                "images",
            )
        return inputs

    def tried_prompt(self, images: Sequence[PreparedImage]) -> tuple[list[int], list[PromptImage]]:
        """Return a prompt that a network is tried with: a text, and after each image the same again."""
        text = self._tokenizer.encode(TRIED_TEXT, control_tokens=False)
        prompt, found = list(text), list[PromptImage]()
        for image in images:
            found.append(PromptImage(len(prompt) + image.written.before, image))
            prompt += [*self._tokenizer.encode(image.written.text, control_tokens=True), *text]
        return prompt, found

    def _on_worker[**P, T](self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Return what a call returns on the processor's thread. Raises EngineBusy after `close`."""
        try:
            found = self._worker.submit(call, *given, **named)
        except RuntimeError:  # the engine broke while a request was prepared
            raise EngineBusy("The model is being loaded again. Try again in a moment.", RETRY_AFTER) from None
        return found.result()

    def _probed(self, config: Mapping[str, Any]) -> tuple[int, str, str, bool]:
        """Return the pad token, what the template writes for an image, and what the processor reads as one.

        And whether images are written by their numbers in a prompt.
        """
        picture = _small_picture()
        errors: list[Exception] = []
        for part, is_in_template in self._parts(config):
            try:
                written, _ = self._on_worker(self._write, part, picture)
            except EngineRefused as error:
                errors.append(error)
                continue
            pad = written.tokens[0]
            are_numbered = False
            with suppress(EngineRefused):  # some take one
                second, _ = self._on_worker(self._write, part, picture, pad, 1)
                are_numbered = second.text != written.text
            return pad, part if is_in_template else _NO_PART, part, are_numbered
        raise EngineRefused(
            f"its processor reads no picture: {first_line(errors[0])}"
            if errors
            else "its chat template has no place for a picture",
            "images",
        )

    def _parts(self, config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
        """Yield what may stand for an image in a prompt, and whether the chat template writes it."""
        if (part := self._part_of_template()) is not None:
            yield part, True
        if (part := _part_of_format(str(config.get("model_type")))) is not None:
            yield part, False
        for owner in (self._processor, getattr(self._processor, "tokenizer", None)):
            if not isinstance(part := getattr(owner, "image_token", None), str):
                continue
            for name in ("vision", "image"):
                before, after = (
                    self._tokenizer.special_tokens.get(config.get(f"{name}_{end}_token_id", -1))
                    for end in ("start", "end")
                )
                if before and after:
                    yield f"{before}{part}{after}", False
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
        first, *others = (filler * count for count in fillers)
        parts = (_NUMBER.sub(str(number), part) for number in count(1))
        return first + "".join(each + after for each, after in zip(parts, others, strict=False))

    def _write(
        self, part: str, picture: Picture, pad: int | None = None, number: int = 0
    ) -> tuple[WrittenImage, Inputs]:
        """Return how a picture is written after as many others, and the vision tower's inputs. Raises EngineRefused.

        The others are small ones, which are soon prepared.
        """
        pictures = [_small_picture()] * number + [picture]
        made = self._run(self._text((*[1] * len(pictures), 2), part), pictures)
        tokens = made["input_ids"]
        inputs = {name: value for name, value in made.items() if name not in _OF_TOKENS}
        if not bytes_of(inputs):  # such as a tokenizer in place of a processor that could not be made
            raise EngineRefused("The model's processor makes nothing of a picture.", "images")
        fillers = [at for at, token in enumerate(tokens) if token == self._filler]
        if len(fillers) < 2 or fillers[0] > MAX_FIRST:
            raise EngineRefused("The model's processor does not keep the text around a picture.", "images")
        end = fillers[-1]  # DeepSeek-OCR's takes the last one away
        while end > fillers[0] and tokens[end - 1] == self._filler:
            end -= 1
        start = max((at for at in fillers if at < end), default=end) + 1
        body = tokens[start:end]
        if min(body, default=0) < 0:
            raise EngineRefused(
                "The model's processor gives pictures a token outside its vocabulary.", "images"
            )
        special = self._tokenizer.special_tokens
        if pad is None:
            counts = Counter(token for token in body if token in special)
            usual = counts.most_common(1)[0][0] if counts else None
            pad = next((token for token in self._named_pads if token in counts), usual)
        if pad is None or pad not in body:
            raise EngineRefused(
                f"An image of {picture.width} x {picture.height} pixels has no token in the prompt as this model's "
                "processor writes it. Send a larger one.",
                "images",
            )
        first, end = body.index(pad), len(body) - body[::-1].index(pad)
        text = self._tokenizer.decode(body)
        if self._tokenizer.encode(text, control_tokens=True) != body:
            raise EngineRefused("The text that stands for a picture cannot be read back.", "images")
        positions, shift = self._positions(body, first, end, made)
        written = WrittenImage(text, first, tuple(body[first:end]), len(body) - end, positions, shift)
        return written, _cut(made, start, start + len(body))

    def _positions(self, body: Sequence[int], first: int, end: int, made: Inputs) -> tuple[Any, int]:
        """Return the positions of an image's places, counted from the first, and by how much others move after it."""
        if self._rope_index is None:
            return None, 0
        known = inspect.signature(self._rope_index).parameters
        named = {
            name: to_mlx(value) for name, value in made.items() if name in known and name not in _OF_TOKENS
        }
        try:
            found, delta = self._rope_index(mx.array([list(body)]), **named)
        except Exception:  # of whatever kind: the family's network computes them elsewhere
            return None, 0
        positions = np.array(found).reshape(-1, len(body))
        if len(positions) != AXES:
            return None, 0
        return (positions[:, first:end] - first).astype(np.int32), int(np.array(delta).reshape(-1)[0])

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
            found = {name: _to_numpy(value) for name, value in made.items()}
            return {**found, "input_ids": np.asarray(found["input_ids"]).reshape(-1).tolist()}
        except Exception as error:
            raise EngineRefused(
                f"The image cannot be prepared for this model: {first_line(error)}.", "images"
            ) from error


def _show_whole(processor: Any) -> None:
    """Have Llama 4's processor show a picture also as a whole, after its tiles.

    mlx-vlm 0.7.10 writes tokens for that, as transformers does, but has it not among what the tower gets.
    """
    if (kind := type(processor)).__name__ != "Llama4ImageProcessor":
        return

    def split(self: Any, picture: Any, ratio: tuple[int, int]) -> list[Any]:
        tiles: list[Any] = kind._split_into_tiles(self, picture, ratio)
        return tiles if ratio == (1, 1) else [*tiles, *kind._split_into_tiles(self, picture, (1, 1))]

    processor.__class__ = type(kind.__name__, (kind,), {"_split_into_tiles": split})


def _without_padding(processor: Any) -> None:
    """Have an image processor that knows no padding leave it out.

    mlx-vlm 0.7.10's processor of LLaVA passes on what is for its tokenizer, and transformers refuses that.
    """
    kind = type(processor)
    known = getattr(getattr(kind, "valid_kwargs", None), "__annotations__", None)
    if known is None or "padding" in known:
        return

    def preprocess(self: Any, images: Any, *given: Any, padding: object = None, **named: Any) -> Any:
        return kind.preprocess(self, images, *given, **named)

    processor.__class__ = type(kind.__name__, (kind,), {"preprocess": preprocess})


def _small_picture() -> Picture:
    return Picture(PROBE_SIDE, PROBE_SIDE, bytes(range(256)) * (3 * PROBE_SIDE * PROBE_SIDE // 256))


def _cut(made: Inputs, start: int, end: int) -> Inputs:
    """Return what a processor has made without the tokens; of what has a value for each token, that from `start`."""
    shape = (1, len(made["input_ids"]))
    return {
        name: value[:, start:end]
        if getattr(value, "shape", ())[:2] == shape and "pixel" not in name
        else value
        for name, value in made.items()
        if name not in _OF_TOKENS
    }


def _to_numpy(value: Any) -> Any:
    """Return what a thread has computed with MLX for another thread."""
    if isinstance(value, list | tuple):
        return [_to_numpy(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: _to_numpy(each) for name, each in vars(value).items()})
    if isinstance(value, mx.array):
        return np.array(value.astype(mx.float32) if value.dtype == mx.bfloat16 else value)
    return value


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
        message = MessageFormatter(model_type).format_message("\0", num_images=1, num_audios=0)
    except Exception:  # of whatever kind: it has no such format
        return None
    content = message.get("content") if isinstance(message, dict) else message
    part = content.replace("\0", "").strip() if isinstance(content, str) else ""
    return part or None


def _clean_up() -> None:
    mx.synchronize()
    mx.clear_streams()
