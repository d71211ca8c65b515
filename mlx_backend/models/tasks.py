"""Whether a folder's model is one for a task that this server has: chat, embeddings or reranking; else what it is.

Goes by config.json, the names of files, and what is in the folders of mlx-lm and mlx-vlm, neither of which is imported.
mlx-vlm's own networks are run for what mlx-lm has no network of (engine/mlx/vision).
What is not recognised counts as servable, and loading it explains best what is wrong.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mlx_backend.installation import vision_command
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
        "Models of this kind that mlx-vlm has are served where that is installed",
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


_DRAFTER: Final = re.compile(r"(?:_mtp|_assistant|dflash2?|dspark|eagle3)$")
"""Ends of the families that mlx-vlm drafts with."""
_NO_CHAT: Final = re.compile(
    r"embed|(^|_)col(idefics|qwen|bert)|encoder|gliner|detr|^sam3|^clef|^d1|decider|privacy|diffusion|llada|florence|parse$"
    r"|perception|indic_ocr"
)
"""In the names of mlx-vlm's families that write no text token by token, or not in a conversation."""


_TEXT_FAMILIES: Final = {
    "glm4v_text": "glm4",
    "glm4v": "glm4",
    "glm_ocr_text": "glm4",
    "glm_ocr": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "glm4v_moe": "glm4_moe",
    "paddleocr_vl": "llama",
    "idefics3": "llama",
    "smolvlm": "llama",
    "dots_ocr": "qwen2",
    "aya_vision": "cohere2",
    **dict.fromkeys(("deepseekocr", "deepseekocr_2", "unlimited_ocr"), "deepseek"),
    "granite_vision": "granite",
}
"""The families of mlx-lm's whose networks the text parts of others are, by what those are called."""


def is_of_mlx_lm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-lm has a network for a model's family, or the model comes with one of its own."""
    return "model_file" in config or _family(config) in _families("mlx_lm")


def is_of_mlx_vlm(config: Mapping[str, Any]) -> bool:
    """Whether mlx-vlm is installed and has a network for a model's family that chats."""
    family = _family(config).lower()
    folder = _vlm_folder(_families("mlx_vlm").get(family, family))
    return folder is not None and "model_file" not in config


def text_family(config: Mapping[str, Any]) -> str | None:
    """Return the family of mlx-lm's that the text part of a model of mlx-vlm's is of; None if there is none.

    Whether it is the same network is tried when it is loaded.
    """
    parts = (config.get(name) for name in ("text_config", "llm_config", "language_config"))
    text = next((part for part in parts if isinstance(part, dict)), config)
    told = str(text.get("model_type") or _family(config))
    aliases = [_TEXT_FAMILIES[name] for name in (_family(config), told) if name in _TEXT_FAMILIES]
    names = [*aliases, told, told.removesuffix("_text")]
    return next((_families("mlx_lm")[name] for name in names if name in _families("mlx_lm")), None)


def sees(config: Mapping[str, Any]) -> bool:
    """Whether a model was made to see, as far as its config.json and mlx-vlm's folder of its family tell."""
    if isinstance(config.get("vision_config"), dict):
        return True
    if is_of_mlx_lm(config):  # a checkpoint without what sees
        return False
    family = _family(config).lower()
    folder = _vlm_folder(_families("mlx_vlm").get(family, family))
    return folder is not None and (folder / "vision.py").is_file()


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a folder holds no model but what drafts for one with that's hidden vectors, such as its MTP head.

    By the families that mlx-vlm has: an MTP head is what its `convert --mtp` writes.
    """
    return _DRAFTER.search(_family(config)) is not None


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    return family if isinstance(family, str) else ""


@cache
def _vlm_folder(family: str) -> Path | None:
    """Return the folder of mlx-vlm's network of a family; None if it has none that chats."""
    spec = find_spec("mlx_vlm")
    if not family or spec is None or _NO_CHAT.search(family):
        return None
    for root in spec.submodule_search_locations or ():
        folder = Path(root, "models", family)
        if any("LanguageModel" in each.read_text(encoding="utf-8") for each in folder.glob("*.py")):
            return folder
    return None


def why_not_served(name: str, config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Say what a model is for and what to do, if it cannot be served whatever its files; None if nothing says so.

    `names` are the files in its folder.
    """
    if "model_index.json" in names or "_diffusers_version" in config:
        return _sentence(name, "diffusers", _TASKS[1])
    family = _family(config)
    if is_drafter(config):
        return (
            f"The model {name!r} cannot be served: it is a part of another model ({family}), for which it drafts. "
            "Serve that one, with this as its --draft-model."
        )
    if family in ENCODERS or is_of_mlx_lm(config) or is_of_mlx_vlm(config):
        return None
    listed = config.get("architectures")
    architectures = [str(each) for each in listed] if isinstance(listed, list) else []
    told = " ".join([family, *architectures, str(config.get("target", ""))])[:_MAX_TOLD].casefold()
    if "istftnet" in config:  # Kokoro and its kin, which have no model_type
        told += " kokoro"
    if "n_mels" in config and "n_audio_ctx" in config:  # Whisper, as OpenAI wrote it
        told += " whisper"
    is_installed = find_spec("mlx_vlm") is not None
    missing = "" if is_installed or not sees(config) else f" If mlx-vlm has it, {vision_command()} adds that."
    for task in _TASKS:
        if task.words.search(told):
            return _sentence(name, family or next(iter(architectures), told.split()[-1]), task) + missing
    if family and (sees(config) or family in _families("mlx_vlm")):
        return (
            f"The model {name!r} cannot be served: {family!r} is a vision family that mlx-lm has not, and mlx-vlm as "
            f"it is here has no network of it that chats.{missing} Or choose a model of another family "
            "(docs/families.md)."
        )
    return None


def _sentence(name: str, family: str, task: _UnservedTask) -> str:
    return (
        f"The model {name!r} cannot be served: it is a model for {task.what} ({family}), and {_SERVED}. "
        f"{task.advice}."
    )


@cache
def _families(package: str) -> Mapping[str, str]:
    """Return the modules of mlx-lm's or mlx-vlm's architectures by model_type; none if it is not installed."""
    spec = find_spec(package)
    found: dict[str, str] = {}
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            found |= {each.stem: each.stem for each in Path(folder, "models").iterdir()}
            source = Path(folder, "utils.py").read_text(encoding="utf-8")
        except OSError:
            continue
        for table in re.findall(r"^MODEL_REMAPPING = \{(.*?)^\}", source, re.DOTALL | re.MULTILINE):
            found |= dict(re.findall(r'"([^"]+)": "([^"]+)"', table))
    return found
