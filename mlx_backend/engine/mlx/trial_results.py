"""What trials found right (batch_trial.py), kept in the user's cache folder, so that the next load need not try again.

A trial's outcome follows from the model's files, the code that reads and runs them, the libraries, the device, and how
caches and layers are set: a digest of them all is what a result is found by. Only that something is right is kept. What
was wrong may have been so for want of memory, and is tried in every load.

A file that cannot be read or written is as if there were none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.device.mlx import device_name, user_cache_folder
from mlx_backend.engine.mlx.disk_cache import model_fingerprint

if TYPE_CHECKING:
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

FILE_NAME: Final = "trials.json"
MAX_RESULTS: Final = 64
"""The oldest of more are forgotten."""
_CODE: Final = ("device", "engine", "layers", "models")
"""Packages whose code decides what a trial finds."""
_LIBRARIES: Final = ("mlx", "mlx-vlm", "transformers")
"""Those that decide it next to mlx-lm: the last two have a say in a network's settings."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """How a network runs packed, and that it got the right logits so.

    `merges` says whether caches are merged, `rewinds` whether tokens can be taken back (False: not, or not tried), and
    the others are `Packing.kinds`.
    """

    merges: bool
    rewinds: bool
    by_segment: tuple[str, ...]
    with_states: tuple[str, ...]


def key_of(folder: Path, options: EngineOptions, *, has_head: bool) -> str:
    """Return what the results of the model in `folder` are found by, with these options; "" if that is not known."""
    settings = [options.kv_bits, options.kv_group_size, options.dequantize, str(options.blas), has_head]
    libraries = [_version(name) for name in _LIBRARIES]
    try:
        return model_fingerprint(folder, json.dumps([libraries, _code_digest(), device_name(), settings]))
    except OSError as error:  # a file next to the model's own that cannot be read
        log.debug("The next load tries the model again: %s", error)
        return ""


def recall(key: str) -> TrialResult | None:
    """Return what was found before; None: nothing."""
    try:
        found = _read()[key]
        return TrialResult(
            merges=found["merges"] is True,
            rewinds=found["rewinds"] is True,
            by_segment=tuple(map(str, found["by_segment"])),
            with_states=tuple(map(str, found["with_states"])),
        )
    except (KeyError, TypeError):
        return None


def remember(key: str, result: TrialResult) -> None:
    """Keep what was found."""
    results = {name: value for name, value in _read().items() if name != key}
    kept = [*results.items(), (key, asdict(result))][-MAX_RESULTS:]
    try:
        path = user_cache_folder() / FILE_NAME
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = path.with_suffix(f".{secrets.token_hex(8)}.part")  # another may be written at the same time
        try:
            partial.write_text(json.dumps(dict(kept), indent=1))
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError) as error:  # no home folder, or one that cannot be written
        log.debug("The next load tries the model again: %s", error)


def _read() -> dict[str, Any]:
    try:
        found = json.loads((user_cache_folder() / FILE_NAME).read_bytes())
    except (OSError, RuntimeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


@cache
def _code_digest() -> str:
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for name in _CODE for path in (root / name).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
