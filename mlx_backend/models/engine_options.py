"""How a model is loaded and run, each option declared once. Knows no MLX, so that importing it is free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from mlx_backend.declaration import (
    Kind,
    Setting,
    SettingError,
    one_of_numbers,
    one_of_words,
    path,
    seconds,
    size,
    switch,
    text,
    whole,
)

GROUP_SIZES = (32, 64, 128)
"""The groups of weights that MLX can quantise together."""

_GIBI = 1 << 30
_GIGABYTES = "a number of gigabytes"


def _template(text: str) -> str:
    """Return a chat template that is given as such or as a file."""
    if "{" in text or "\n" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{text!r} is neither a template nor a file with one: {error}") from None


def _blas(text: str) -> Literal["auto", "off"] | Path:
    """Return the choice of a BLAS; a library by its file."""
    match text:
        case "auto" | "off":
            return text
    library = Path(text).expanduser()
    if not library.is_file():
        raise SettingError(f"{text!r} is neither auto nor off, nor a file; give the path of a BLAS library")
    return library


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How one model is loaded and run. None leaves the choice to the engine."""

    # the model
    context_length: Annotated[
        int | None,
        Setting(
            of_one_model=True,
            kind=whole(1),
            help="use a shorter context than the model allows, or state its length where the model's files do not",
            group="model",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        Setting(
            of_one_model=True,
            kind=Kind(
                words="a file, or the template itself", metavar="FILE_OR_TEXT", type=str, parse=_template
            ),
            help="Jinja template in place of the model's own",
            group="model",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, Setting(kind=switch(), help="run Python code that comes with a model", group="model")
    ] = False
    allow_download: bool = True
    adapters: Annotated[
        Mapping[str, Path],
        Setting(
            kind=path("DIR", 'a table: { name = "folder" }'),
            help="LoRA adapters, by the names that requests use",
            option=None,
        ),
    ] = field(default_factory=dict)
    adapter: Annotated[
        str | None,
        Setting(kind=text(), help="the adapter for requests that name none", default="none", option=None),
    ] = None

    engine: Annotated[
        Literal["full", "plain"],
        Setting(
            kind=one_of_words("full", "plain"),
            help="plain: mlx-lm's batch generator alone, to compare with; without prompt cache, drafts, adapters, "
            "images or a limit on the memory of caches",
            group="memory and speed",
            in_file=False,
            hidden=True,
        ),
    ] = "full"

    # how many requests at once
    max_concurrent: Annotated[
        int,
        Setting(kind=whole(1), help="requests that this model generates at the same time", option=None),
    ] = 32
    max_waiting: int = 128
    prefill_chunk: Annotated[
        int | None,
        Setting(
            kind=whole(1),
            help="tokens of a prompt that are processed between two steps of running replies",
            group="memory and speed",
            default="adapts to the machine",
            in_file=False,
        ),
    ] = None

    warm_up_seconds: Annotated[
        float,
        Setting(
            kind=seconds(),
            help="how long a model that is loaded onto a GPU may run prompts of common lengths, which the first "
            "requests then find prepared; 0: not at all",
            group="memory and speed",
        ),
    ] = 8.0
    packing: Annotated[
        bool,
        Setting(
            kind=switch(),
            help="pack prompts and replies into one forward pass, with attention of our own",
            group="memory and speed",
            option="--no-packing",
        ),
    ] = True
    dequantize: Annotated[
        bool,
        Setting(
            kind=switch(),
            help="dequantise a layer's weights for long prompts, where timing at load shows that to be faster (Linux)",
            group="memory and speed",
            option="--no-dequantize",
        ),
    ] = True

    # memory, in bytes
    memory_bytes: Annotated[
        int | None,
        Setting(
            kind=size(_GIBI, "GB", f"{_GIGABYTES} above 0", above=True),
            help="memory for models, KV caches and cached prompts together, in gigabytes",
            group="memory and speed",
            default="90 % of what the device recommends",
            option="--memory-gb",
            in_file=False,
        ),
    ] = None
    wired: Annotated[
        Literal["auto", "on", "off"],
        Setting(
            kind=one_of_words("auto", "on", "off"),
            help="whether macOS must keep the models' weights resident; auto: if they are more than half of what "
            "it recommends",
            group="memory and speed",
            in_file=False,
        ),
    ] = "auto"
    blas: Annotated[
        Literal["auto", "off"] | Path,
        Setting(
            kind=Kind(
                words="auto, off or the file of a library", metavar="auto|off|FILE", type=Any, parse=_blas
            ),
            help="BLAS library for matrix products on a Linux CPU; auto: an optimised one if found; off: the slow one "
            "in MLX's wheel; FILE: a library with cblas_sgemm (if it fails its check, as with auto)",
            group="memory and speed",
            in_file=False,
        ),
    ] = "auto"
    cache_bytes: Annotated[
        int | None,
        Setting(
            kind=size(_GIBI, "GB", _GIGABYTES),
            help="how much memory cached prompts may use, in gigabytes; 0: no prompt cache",
            group="memory and speed",
            default="half of what the model leaves",
            option="--cache-gb",
            in_file=False,
        ),
    ] = None
    cache_folder: Annotated[
        Path | None,
        Setting(
            kind=path("DIR"),
            help="keep cached prompts across restarts, in this folder",
            group="memory and speed",
            default="not kept",
            option="--prompt-cache-dir",
            in_file=False,
        ),
    ] = None
    cache_folder_bytes: Annotated[
        int,
        Setting(
            kind=size(_GIBI, "GB", _GIGABYTES),
            help="how large that folder may grow, in gigabytes",
            group="memory and speed",
            option="--prompt-cache-dir-gb",
            in_file=False,
        ),
    ] = 20 << 30

    # KV caches and drafts
    kv_bits: Annotated[
        int | None,
        Setting(
            of_one_model=True,
            kind=one_of_numbers(2, 3, 4, 5, 6, 8),
            help="quantise the KV caches to this many bits: those of layers that attend to everything; sliding windows "
            "and states stay as they are",
            group="memory and speed",
            default="not quantised",
        ),
    ] = None
    kv_group_size: Annotated[
        int,
        Setting(
            of_one_model=True,
            kind=one_of_numbers(*GROUP_SIZES),
            help="group size of that quantisation",
            group="memory and speed",
        ),
    ] = 64
    max_kv_size: Annotated[
        int | None,
        Setting(
            of_one_model=True,
            kind=whole(16),
            help="limit the KV cache to this many tokens, the first 4 and the last ones, where the model allows it; "
            "prompts may not be longer, and replies are then decoded one after the other in each step, not batched",
            group="memory and speed",
            default="all",
        ),
    ] = None
    draft_model: Annotated[
        str | None,
        Setting(
            of_one_model=True,
            kind=text("PATH_OR_REPO", "a folder or a repository"),
            help="smaller model that drafts tokens for this one, or its MTP head in a folder of its own",
            group="model",
            default="none",
        ),
    ] = None
    draft_from_text: Annotated[
        bool,
        Setting(
            of_one_model=True,
            kind=switch(),
            help="draft tokens by repeating what the text already contains",
            group="model",
        ),
    ] = False
    draft_tokens: Annotated[
        int,
        Setting(
            of_one_model=True,
            kind=whole(0, 64),
            help="most tokens drafted at once; 0: none",
            group="model",
            option="--num-draft-tokens",
        ),
    ] = 4
