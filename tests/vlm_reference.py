"""A family's model in our engine, compared with mlx-vlm's own generation on a set of pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from seeing import noise, plain
from vlm_families import OWN, write

from mlx_backend.engine.base import GenerationRequest, TokenDelta
from mlx_backend.engine.images import PreparedImage, PromptImage
from mlx_backend.engine.mlx import load_engine
from mlx_backend.errors import EngineError
from mlx_backend.images import Picture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from mlx_backend.engine.jobs import Generation
    from mlx_backend.engine.mlx.vision.vlm_processor import VLMProcessor
    from mlx_backend.engine.threaded import Engine

TOKENS = 12
LAYOUTS: tuple[tuple[str | Picture, ...], ...] = (
    ("What is this? ", noise(1, 80, 40), " Say."),
    (noise(2, 64, 36), " the cat"),
    ("one ", noise(3, 33, 57), " two ", plain((200, 10, 10), 48, 48), " three"),
    ("a text alone",),
)


class NotShownError(Exception):
    """A model that answers text only; a warning says why."""


def compare(folder: Path, family: str) -> tuple[bool, bool]:
    """Assert that prompts and replies are mlx-vlm's, and what is refused fails there.

    Return whether any is refused, and whether the model runs in the batch. Raises NotShownError, and EngineError if it
    cannot be loaded.
    """
    write(folder, family)
    own = OWN.get(family, {})
    first = own.get("first", "")  # without which its processor writes a token of its own there
    layouts = [(first, *layout) for layout in LAYOUTS]
    with load_engine(folder, prefill_chunk=16) as engine:
        if engine.image_processor is None:
            raise NotShownError
        is_batched = not engine.status().unbatched
        count = own.get("tokens", TOKENS)
        requests = [_or_none(_request, engine, layout, count) for layout in layouts]
        ours = [_or_none(_said, engine.generate(each)) if each is not None else None for each in requests]
        crowd = [engine.generate(each) if each is not None else None for each in requests]
        assert [_or_none(_said, each) if each is not None else None for each in crowd] == ours
        part = processor_of(engine)._own_part
    assert "audio" not in part
    for request, reply, expected in zip(requests, ours, _theirs(folder, part, layouts, count), strict=True):
        if expected is None:
            continue  # it reads no pictures of several sizes
        assert request is not None
        assert (list(request.prompt), reply) == expected
    assert ours[0] is not None
    assert len({tuple(each) for each in ours if each is not None}) > 1
    return None in ours, is_batched


def processor_of(engine: Engine) -> VLMProcessor:
    """What prepares pictures for an engine's model."""
    processor: Any = engine.image_processor
    return processor  # type: ignore[no-any-return]  # the engine has no other


def _or_none[T](call: Callable[..., T], *given: Any) -> T | None:
    try:
        return call(*given)
    except (EngineError, ValueError):  # ours, and theirs
        return None


def _said(generation: Generation) -> list[int]:
    return [item.token for item in generation if isinstance(item, TokenDelta)]


def _request(engine: Engine, layout: Sequence[str | Picture], count: int) -> GenerationRequest:
    text, images = "", list[PreparedImage]()
    for each in layout:
        if isinstance(each, Picture):
            assert engine.image_processor is not None
            images.append(engine.image_processor.prepare(each, images))
            text += images[-1].written.text
        else:
            text += each
    prompt = engine.tokenizer.encode(text, control_tokens=True)
    found: list[PromptImage] = []
    for image in images:
        pad = image.written.tokens[0]
        found.append(PromptImage(prompt.index(pad, found[-1].end if found else 0), image))
    return GenerationRequest(prompt=prompt, images=found, max_tokens=count)


def _theirs(
    folder: Path, part: str, layouts: Sequence[Sequence[str | Picture]], count: int
) -> list[tuple[list[int], list[int]] | None]:
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.utils import load, prepare_inputs
    from PIL import Image

    network, processor = load(str(folder), trust_remote_code=False)
    own = OWN.get(network.config.model_type, {})
    if "mend" in own:
        own["mend"](network)
    if "mend_processor" in own:
        own["mend_processor"](processor)
    stop = set(
        network.config.eos_token_id
        if isinstance(network.config.eos_token_id, list)
        else [network.config.eos_token_id]
    )

    def reply(layout: Sequence[str | Picture]) -> tuple[list[int], list[int]]:
        text = "".join(part if isinstance(each, Picture) else each for each in layout)
        pictures = [
            Image.fromarray(np.frombuffer(each.rgb, np.uint8).reshape(each.height, each.width, 3))
            for each in layout
            if isinstance(each, Picture)
        ]
        is_framed = "taken" in own and pictures
        if is_framed:
            text += own["taken"]
        inputs: dict[str, Any] = dict(
            prepare_inputs(
                processor,
                images=pictures or None,
                prompts=text,
                image_token_index=getattr(network.config, "image_token_index", None),
            )
        )
        if is_framed:
            shape = inputs["input_ids"].shape
            inputs = {
                name: value[:, 1:] if getattr(value, "shape", None) == shape else value
                for name, value in inputs.items()
            }
        tokens, mask = inputs.pop("input_ids"), inputs.pop("attention_mask", None)
        steps = generate_step(
            tokens,
            network,
            inputs.pop("pixel_values", None),
            mask,
            max_tokens=count,
            temperature=0.0,
            **inputs,
        )
        said: list[int] = []
        for token, _ in steps:
            said.append(int(token))
            if said[-1] in stop:
                break
        return np.asarray(tokens).reshape(-1).tolist(), said

    return [_or_none(reply, layout) for layout in layouts]
