"""Whether a folder's model is one for a task that this server has: chat, embeddings or reranking; else what it is.

Goes by config.json, the names of files, and what is in the folders of mlx-lm and mlx-vlm, neither of which is imported.
What is not recognised counts as servable, and loading it explains best what is wrong.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mlx_backend.models.files import ENCODERS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_MAX_TOLD: Final = 1000
"""Characters of names that are looked through."""
_SERVED: Final = "this server serves chat, embeddings and rerankers"


class _UnservedTask(NamedTuple):
    """A task, the words in a model_type or architecture that tell of it, and what runs its models."""

    words: re.Pattern[str]
    what: str
    advice: str


_TASKS: Final = (
    _UnservedTask(
        re.compile(
            r"whisper|parakeet|canary|kokoro|wav2vec|hubert|wavlm|speech|moonshine|voxtral|musicgen|encodec|audio|bark"
            r"|seamless|voice|ultravox|_tts|tts_|(?<![a-z])(tts|asr|csm|dia|vits|snac|mimi|dac)(?![a-z])|talker"
            r"|forctc|textto(waveform|spectrogram)|nemo\.collections\.(asr|tts)"
        ),
        "speech or sound",
        "Run it with mlx-audio",
    ),
    _UnservedTask(
        re.compile(
            r"stable.?diffusion|unet|autoencoder|transformer[23]dmodel|(?<![a-z])(flux\d?|sdxl|dit)(?![a-z])|z_image"
            r"|qwen_image|ideogram|textto(image|video)"
        ),
        "generating images",
        "Run it with mflux or mlx-vlm, which have some such models",
    ),
    _UnservedTask(
        re.compile(r"ocr|nougat|donut|layout|surya"),
        "reading text from images (OCR)",
        "Run it with mlx-vlm",
    ),
    _UnservedTask(
        re.compile(
            r"for(image\w*|object\w*|semantic\w*|instance\w*|universal|mask|depth|zeroshot|video)\w*"
            r"(classification|detection|segmentation|generation|estimation)|(?<![a-z])(clip|siglip2?|sam\d?|dinov\d|"
            r"detr|yolo\w*|vit|owlvit|depth_anything)(?![a-z])"
        ),
        "images alone",
        "Run it with mlx-vlm, which has some such models",
    ),
    _UnservedTask(
        re.compile(r"(?<![a-z])(mt5|t5\w*|bart|mbart|pegasus|marian|m2m_100|nllb\w*|fsmt)(?![a-z])"),
        "translating or summarising with an encoder and a decoder",
        "Run it with transformers, or choose a chat model",
    ),
)


def why_not_served(name: str, config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Say what a model is for and what to do, if it cannot be served whatever its files; None if nothing says so.

    `names` are the files in its folder.
    """
    if "model_index.json" in names or "_diffusers_version" in config:
        return _sentence(name, "diffusers", _TASKS[1])
    family = config.get("model_type")
    family = family if isinstance(family, str) else ""
    if "model_file" in config or family in ENCODERS | _families("mlx_lm"):
        return None
    listed = config.get("architectures")
    architectures = [str(each) for each in listed] if isinstance(listed, list) else []
    told = " ".join([family, *architectures, str(config.get("target", ""))])[:_MAX_TOLD].casefold()
    if "istftnet" in config:  # Kokoro and its kin, which have no model_type
        told += " kokoro"
    if "n_mels" in config and "n_audio_ctx" in config:  # Whisper, as OpenAI wrote it
        told += " whisper"
    for task in _TASKS:
        if task.words.search(told):
            return _sentence(name, family or next(iter(architectures), told.split()[-1]), task)
    sees = isinstance(config.get("vision_config"), dict)
    is_known = family.replace("-", "_") in _families("mlx_vlm")
    if family and (is_known or sees):
        has = "mlx-vlm has" if is_known else "mlx-vlm may have"
        return (
            f"The model {name!r} cannot be served: {family!r} is a {'vision ' if sees else ''}family that {has} and "
            "mlx-lm has not, which this server loads models with. Run it with mlx-vlm, try a newer mlx-lm, or "
            "choose a model of another family (docs/families.md)."
        )
    return None


def _sentence(name: str, family: str, task: _UnservedTask) -> str:
    return (
        f"The model {name!r} cannot be served: it is a model for {task.what} ({family}), and {_SERVED}. "
        f"{task.advice}."
    )


@cache
def _families(package: str) -> frozenset[str]:
    """Return the architectures of mlx-lm or mlx-vlm, by their model_type; none if it is not installed."""
    spec = find_spec(package)
    found: set[str] = set()
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            found |= {each.stem for each in Path(folder, "models").iterdir()}
            source = Path(folder, "utils.py").read_text(encoding="utf-8")
        except OSError:
            continue
        for table in re.findall(r"^MODEL_REMAPPING = \{(.*?)^\}", source, re.DOTALL | re.MULTILINE):
            found |= set(re.findall(r'"([^"]+)":', table))
    return frozenset(found)
