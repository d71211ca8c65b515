"""How a model is loaded and run, each option declared once. Knows no MLX, so that importing it is free."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_backend.declaration import (
    Kind,
    SettingError,
    declare,
    declared,
    declaring,
    one_of,
    option_of,
    path,
    seconds,
    size,
    switch,
    text,
    whole,
)

GROUP_SIZES = (32, 64, 128)
"""The groups of weights that MLX can quantise together."""

REMOVED = {
    "max_kv_size": "was removed: --context-length limits what a request takes, and --kv-bits makes KV caches smaller"
}
"""Options of earlier versions, by the names of their fields, and what to do without them."""

_GIBI = 1 << 30


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


_of_model = declaring(group="model", of_one_model=True)
_of_speed = declaring(group="memory and speed")
_of_caches = declaring(group="memory and speed", of_one_model=True)
_of_device = declaring(group="memory and speed", in_file=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How one model is loaded and run. None leaves the choice to the engine."""

    # the model
    context_length: int | None = _of_model(
        None,
        whole(1),
        help="use a shorter context than the model allows, or state its length where the model's files do not",
    )
    chat_template: str | None = _of_model(
        None,
        Kind(words="a file, or the template itself", metavar="FILE_OR_TEXT", type=str, parse=_template),
        help="Jinja template in place of the model's own",
    )
    trust_remote_code: bool = declare(
        False, switch(), help="run Python code that comes with a model", group="model"
    )
    allow_download: bool = True
    adapters: Mapping[str, Path] = declare(
        {},
        path("DIR", 'a table: { name = "folder" }'),
        help="LoRA adapters, by the names that requests use",
        option=None,
    )
    adapter: str | None = declare(
        None, text(), help="the adapter for requests that name none", default="none", option=None
    )

    engine: Literal["full", "plain"] = _of_device(
        "full",
        one_of("full", "plain"),
        help="plain: mlx-lm's batch generator alone, to compare with; without prompt cache, drafts, adapters, "
        "images or a limit on the memory of caches",
        hidden=True,
    )

    # how many requests at once
    max_concurrent: int = declare(
        32, whole(1), help="requests that this model generates at the same time", option=None
    )
    max_waiting: int = 128
    prefill_chunk: int | None = _of_device(
        None,
        whole(1),
        help="tokens of a prompt that are processed between two steps of running replies",
        default="adapts to the machine",
    )

    warm_up_seconds: float = _of_speed(
        8.0,
        seconds(),
        help="how long a model that is loaded onto a GPU may run prompts of common lengths, which the first "
        "requests then find prepared; 0: not at all",
    )
    packing: bool = _of_speed(
        True,
        switch(),
        help="pack prompts and replies into one forward pass, with attention of our own; without it replies are "
        "decoded one after the other in each step, by mlx-lm's code alone",
        option="--no-packing",
    )
    dequantize: bool = _of_speed(
        True,
        switch(),
        help="dequantise a layer's weights where that is faster, as for long prompts (Linux)",
        option="--no-dequantize",
    )

    # memory, in bytes
    memory_bytes: int | None = _of_device(
        None,
        size(_GIBI, "GB", "gigabytes", above=True),
        help="memory for models, KV caches and cached prompts together, in gigabytes",
        default="90 % of what the device recommends",
        option="--memory-gb",
    )
    wired: Literal["auto", "on", "off"] = _of_device(
        "auto",
        one_of("auto", "on", "off"),
        help="whether macOS must keep the models' weights resident; auto: if they are more than half of what "
        "it recommends",
    )
    blas: Literal["auto", "off"] | Path = _of_device(
        "auto",
        Kind(words="auto, off or the file of a library", metavar="auto|off|FILE", type=Any, parse=_blas),
        help="BLAS library for matrix products on a Linux CPU; auto: an optimised one if found; off: the slow one "
        "in MLX's wheel; FILE: a library with cblas_sgemm (if it fails its check, as with auto)",
    )
    cache_bytes: int | None = _of_device(
        None,
        size(_GIBI, "GB", "gigabytes"),
        help="how much memory cached prompts may use, in gigabytes; 0: no prompt cache",
        default="half of what the model leaves",
        option="--cache-gb",
    )
    cache_folder: Path | None = _of_device(
        None,
        path("DIR"),
        help="keep cached prompts across restarts, in this folder",
        default="not kept",
        option="--prompt-cache-dir",
    )
    cache_folder_bytes: int = _of_device(
        20 << 30,
        size(_GIBI, "GB", "gigabytes"),
        help="how large that folder may grow, in gigabytes",
        option="--prompt-cache-dir-gb",
    )

    # KV caches and drafts
    kv_bits: int | None = _of_caches(
        None,
        one_of(2, 3, 4, 5, 6, 8),
        help="quantise the KV caches to this many bits: those of layers that attend to everything; sliding windows "
        "and states stay as they are",
        default="not quantised",
    )
    kv_group_size: int = _of_caches(
        64,
        one_of(*GROUP_SIZES),
        help="group size of that quantisation",
    )
    draft_model: str | None = _of_model(
        None,
        text("PATH_OR_REPO", "a folder or a repository"),
        help="smaller model that drafts tokens for this one, or its MTP head in a folder of its own",
        default="none",
    )
    draft_from_text: bool = _of_model(
        False,
        switch(),
        help="draft tokens by repeating what the text already contains",
    )
    draft_tokens: int = _of_model(
        4,
        whole(0, 64),
        help="most tokens drafted at once; 0: none",
        option="--num-draft-tokens",
    )


def given_options(options: EngineOptions, names: Iterable[str]) -> list[str]:
    """Return the options by which any of these fields are given, as they are written on the command line."""
    settings = declared(EngineOptions)
    given = [name for name in names if getattr(options, name)]
    # On the command line one option gives both fields of adapters.
    return list(dict.fromkeys(option_of(name, settings[name]) or "--adapter-path" for name in given))
