"""Which models can be served, under which names, and which names are refused.

    configured        by name, by alias, and by folder or repository
    --models-dir      every folder that holds a model, as `name` or `owner/name`
    Hugging Face      what its cache holds, if that is enabled, and what may be downloaded

Knows folders and names; nothing of what is in memory. The listing is cached: it is rebuilt when one of the folders it
was made from has changed, which is checked every few seconds at most.

A name that comes with a request is data. It selects among what is listed. If it is a path, it must lead to a model
below one of the --models-dirs, or one that is listed because its owner has put a link to it there; anything else is
refused without touching the disk there.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.files import detect_model_type
from mlx_backend.models.folders import (
    ChangeDetector,
    adapter_bytes,
    cached_snapshot,
    folder_bytes,
    holds_model,
    models_below,
    models_in_hugging_face_cache,
    repository_bytes,
)
from mlx_backend.models.names import LATEST, matching
from mlx_backend.models.spec import ModelSpec, is_repository
from mlx_backend.registry.errors import ConfigurationError, ModelNotAllowed, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mlx_backend.models.files import ModelType

log = logging.getLogger(__name__)

RESCAN_SECONDS = 2.0
_MAX_NAMES = 20
"""Names in an error message."""
_MAX_NAME_LENGTH = 200
"""Characters of a name that is looked for by its words."""
_FORBIDDEN = frozenset(["..", "\\", "\0"])
"""What a path from a request must not hold."""


@dataclass(slots=True)
class _Listing:
    """The result of one scan.

    `names` holds aliases too, `short_names` are those without the owner, `folders` are resolved. `not_downloaded` are
    models that are configured, but not on this machine. `unserved` says of folders why they cannot be served. `loaded`
    has what is loaded for each of those with the same weights.
    """

    changes: ChangeDetector
    models: list[ModelSpec] = field(default_factory=list)
    names: dict[str, ModelSpec] = field(default_factory=dict)
    sources: dict[str, ModelSpec] = field(default_factory=dict)
    short_names: dict[str, list[ModelSpec]] = field(default_factory=dict)
    folders: dict[Path, ModelSpec] = field(default_factory=dict)
    not_downloaded: dict[str, ModelSpec] = field(default_factory=dict)
    unserved: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, ModelSpec] = field(default_factory=dict)

    def add(self, spec: ModelSpec) -> None:
        """List a model under every name that is still free: first come, first served."""
        if spec.name in self.names:
            return
        self.models.append(spec)
        for name in (spec.name, *spec.aliases):
            self.names.setdefault(name, spec)
        self.sources.setdefault(spec.source, spec)
        for name in {_short_name(spec.name), _short_name(spec.source)} - {""}:
            self.short_names.setdefault(name, []).append(spec)

    def matching(self, name: str) -> list[ModelSpec]:
        """Return the models that may be meant by a name that people know from elsewhere: gpt-oss:20b."""
        if len(name) > _MAX_NAME_LENGTH:
            return []
        known = {alias: [spec] for alias, spec in self.names.items()} | self.short_names
        found = (spec for each in matching(name, known) for spec in known[each])
        return list({spec.name: spec for spec in found}.values())

    def add_unserved(self, name: str, problem: str) -> None:
        """Note why a model cannot be served, for those who ask for it by any of its names."""
        for each in (name, _short_name(name)):
            self.unserved.setdefault(each, problem)


class Catalogue:
    """The models that can be served. Thread-safe."""

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        *,
        models_dirs: Iterable[Path] = (),
        hugging_face_cache: bool = False,
        allow_download: bool = False,
        others: ModelSpec | None = None,
        options: EngineOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`others` holds the settings of every model that `specs` does not name, `options` the engine's for all."""
        self._specs = tuple(specs)
        self._roots = [_models_dir(folder) for folder in models_dirs]
        self._hugging_face_cache = hugging_face_cache
        self._allow_download = allow_download
        self._options = options or EngineOptions()
        self._others = others or ModelSpec(name="", source="")
        self._clock = clock
        self._scan_lock = threading.Lock()
        self._checked_at = clock()
        self._warned: set[str] = set()
        # Source -> the time its config.json was changed, and the type.
        self._types: dict[str, tuple[int | None, ModelType]] = {}
        self._listing = self._scan()

    def models(self) -> tuple[ModelSpec, ...]:
        """Return what can be served: the configured models in their order, then those that were found."""
        return tuple(self._current().models)

    def pinned(self) -> tuple[ModelSpec, ...]:
        """Return the models that must stay in memory, including those that are not on this machine."""
        return tuple(spec for spec in self._specs if spec.pinned)

    def find(self, name: str) -> ModelSpec:
        """Return the model of that name. Raises UnknownModel or ModelNotAllowed."""
        listing = self._current()
        if name not in listing.names:
            name = name.removesuffix(LATEST)
        if spec := listing.names.get(name) or listing.sources.get(name):
            return spec
        if spec := listing.not_downloaded.get(name):
            text = f"The model {spec.name!r} is not on this machine: {spec.source!r} has not been downloaded"
            raise UnknownModel(
                f"{text}, and that is not allowed (--allow-download). {_served(name, listing)}"
            )
        matches = listing.short_names.get(name) or listing.matching(name)
        if len({spec.source for spec in matches}) == 1:
            return matches[0]
        if reason := listing.unserved.get(name):
            raise UnknownModel(f"{reason} {_served(name, listing)}")
        shown = repr(name[:200])
        if matches:
            names = " or ".join(repr(spec.name) for spec in matches)
            raise UnknownModel(f"The model {shown} could be {names}: send the whole name.")
        if _is_path(name):
            if spec := self._at_path(name, listing):
                return spec
        elif is_repository(name):
            if self._allow_download:
                return replace(self._others, name=name, source=name)
            raise UnknownModel(
                f"The model {shown} is not on this machine, and this server does not download what a request "
                f"names (--allow-download). {_served(name, listing)}"
            )
        raise UnknownModel(f"The model {shown} is not served here. {_served(name, listing)}")

    def aliases(self, name: str) -> tuple[str, ...]:
        """Return a model's configured aliases, without those that another model has."""
        names = self._listing.names
        spec = names.get(name)
        return tuple(alias for alias in spec.aliases if names.get(alias) is spec) if spec else ()

    def loaded(self, spec: ModelSpec) -> ModelSpec:
        """Return what is loaded for a model: of several with the same weights and engine options, it is the first.

        It is pinned if one of them is, and has the longest of their times to live.
        """
        return self._listing.loaded.get(spec.name, spec)

    def may_download(self, spec: ModelSpec) -> bool:
        """Whether loading the model may fetch files."""
        return self._allow_download or spec.named_on_command_line

    def folder(self, spec: ModelSpec) -> Path | None:
        """Return the model's folder on this machine; None if it would have to be downloaded."""
        return _local_folder(spec.source)

    def model_type(self, spec: ModelSpec) -> ModelType:
        """Return the type that was configured, else what the model's files say; cached until config.json changes."""
        if spec.type is not None:
            return spec.type
        folder = _local_folder(spec.source)
        try:
            mtime = (folder / "config.json").stat().st_mtime_ns if folder is not None else None
        except OSError:
            mtime = None
        cached = self._types.get(spec.source)
        if cached is None or cached[0] != mtime:
            cached = self._types[spec.source] = (mtime, detect_model_type(folder, spec.source))
        return cached[1]

    def weight_bytes(self, spec: ModelSpec) -> int:
        """Return the size of its weights, with those of its draft model and its adapters; 0 if not known.

        What loading it would have to download is measured by the repository's listing.
        """
        sizes = [self._source_bytes(source, spec) for source in spec.sources]
        sizes += [adapter_bytes(folder) for folder in spec.engine.get("adapters", {}).values()]
        return sum(size or 0 for size in sizes)

    def _source_bytes(self, source: str, spec: ModelSpec) -> int | None:
        if (folder := _local_folder(source)) is not None:
            return folder_bytes(folder)
        return repository_bytes(source) if is_repository(source) and self.may_download(spec) else None

    # -- the listing -----------------------------------------------------------------------------------------

    def _current(self) -> _Listing:
        # One thread checks, the others use the listing there is: a sleeping disk delays only one request.
        if self._clock() - self._checked_at >= RESCAN_SECONDS and self._scan_lock.acquire(blocking=False):
            try:
                if self._listing.changes.detected():
                    self._listing = self._scan()
                self._checked_at = self._clock()
            finally:
                self._scan_lock.release()
        return self._listing

    def _scan(self) -> _Listing:
        listing = _Listing(ChangeDetector())
        for spec in self._specs:
            folder = _local_folder(spec.source, listing.changes)
            if folder is None and is_repository(spec.source) and not self.may_download(spec):
                listing.not_downloaded.update(dict.fromkeys((spec.name, *spec.aliases, spec.source), spec))
                continue
            listing.add(spec)
            if folder is not None:
                listing.folders.setdefault(folder.resolve(), spec)
        listing.loaded = self._shared(listing)
        for _, root in self._roots:
            for name, folder, problem in models_below(root, listing.changes):
                if problem:
                    listing.add_unserved(name, problem)
                    self._warn(problem, folder)
                else:
                    self._add_folder(name, folder.resolve(), listing)
        if self._hugging_face_cache:
            for repository, problem in models_in_hugging_face_cache(listing.changes):
                if problem and not self._allow_download:  # which may complete it, or says why not
                    listing.add_unserved(repository, problem)
                elif not problem and repository not in listing.sources:
                    listing.add(replace(self._others, name=repository, source=repository))
        return listing

    def _shared(self, listing: _Listing) -> dict[str, ModelSpec]:
        """Return what is loaded for each model that is loaded together with others."""
        same: dict[str, list[ModelSpec]] = {}
        for spec in listing.models:
            folder = _local_folder(spec.source)
            weights = folder.resolve() if folder is not None else spec.source
            options = spec.options(self._options), sorted(spec.embedding.items())
            same.setdefault(repr((weights, spec.type, options)), []).append(spec)
        loaded: dict[str, ModelSpec] = {}
        for group in same.values():
            if len(group) > 1:
                times = [each.ttl for each in group]
                first = replace(
                    group[0],
                    pinned=any(each.pinned for each in group),
                    ttl=None if None in times else max(filter(None, times)),
                    named_on_command_line=any(each.named_on_command_line for each in group),
                )
                loaded |= dict.fromkeys([each.name for each in group], first)
        return loaded

    def _add_folder(self, name: str, folder: Path, listing: _Listing) -> None:
        if spec := listing.folders.get(folder):  # already listed, under a better name
            listing.names.setdefault(name, spec)
        else:
            if same := listing.names.get(name):
                self._warn(f"The name {name!r} is already that of {same.source}.", folder)
            spec = replace(self._others, name=name, source=str(folder))
            listing.add(spec)
            listing.folders[folder] = spec

    def _warn(self, problem: str, folder: Path) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            log.warning("%s is left out. %s", folder, problem)

    def _at_path(self, name: str, listing: _Listing) -> ModelSpec | None:
        """Return the model at a path, None if there is none. Raises ModelNotAllowed."""
        candidates = list(self._resolved_paths(name, listing))
        if not candidates:
            raise ModelNotAllowed(
                f"The model {name[:200]!r} is a path outside of the served folders (--models-dir)."
            )
        for root, folder in candidates:
            if spec := listing.folders.get(folder):
                return spec
            if holds_model(folder):
                return replace(self._others, name=str(folder.relative_to(root)), source=str(folder))
        return None

    def _resolved_paths(self, name: str, listing: _Listing) -> Iterator[tuple[Path, Path]]:
        """Yield the served folders a path may mean, each with its root; links are resolved."""
        if name.startswith("~") or _FORBIDDEN & {*name, *name.split("/")}:
            return
        for given, root in self._roots:
            for base in dict.fromkeys((given, root)):
                path = base / name  # an absolute path stays as it is
                if not path.is_relative_to(base):
                    continue
                try:
                    folder = path.resolve()
                except (OSError, RuntimeError, ValueError):  # circular links, half a surrogate pair
                    continue
                if folder in listing.folders or (folder != root and folder.is_relative_to(root)):
                    yield root, folder


def _models_dir(path: Path) -> tuple[Path, Path]:
    """Return a --models-dir as it was given and with links resolved. Raises ConfigurationError."""
    given = path.expanduser().absolute()
    root = given.resolve()
    if not root.is_dir():
        raise ConfigurationError(f"--models-dir {path}: there is no such folder.")
    if (root / "config.json").is_file():
        raise ConfigurationError(
            f"--models-dir {path}: this is a model itself. Name it with --model, or name the folder above it."
        )
    return given, root


def _local_folder(source: str, changes: ChangeDetector | None = None) -> Path | None:
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    return cached_snapshot(source, changes) if is_repository(source) else None


def _is_path(name: str) -> bool:
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or bool(_FORBIDDEN & {*name, *name.split("/")})
    )


def _short_name(name: str) -> str:
    return name.rpartition("/")[2]


def _served(name: str, listing: _Listing) -> str:
    """Write the list of served models for an error message, the most similar names first."""
    matcher = difflib.SequenceMatcher(None, "", name[:200].casefold())

    def similarity(spec: ModelSpec) -> float:
        best = 0.0
        for each in (spec.name, _short_name(spec.name), *spec.aliases):
            matcher.set_seq1(each.casefold())
            if matcher.quick_ratio() > best:
                best = max(best, matcher.ratio())
        return best

    if not listing.models:
        return "There is no model here at all."
    nearest = sorted(listing.models, key=similarity, reverse=True)
    names = ", ".join(repr(spec.name) for spec in nearest[:_MAX_NAMES])
    more = f" and {len(nearest) - _MAX_NAMES} more" if len(nearest) > _MAX_NAMES else ""
    return f"There is {names}{more}."
