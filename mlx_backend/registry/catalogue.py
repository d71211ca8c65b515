"""What can be served, by which names, and which names are refused.

    configured        by name, by alias, and by what they are loaded from
    --models-dir      every folder that holds a model, called `name` or `owner/name`
    Hugging Face      what its cache holds, if that is wanted, and what may be downloaded

Knows folders and names; nothing of what is in memory. The listing is kept: it is made anew when one of the
folders it was made from has changed, and that is looked at every few seconds at most.

A name that comes with a request is data. It chooses among what is listed. If it is a path, it leads to a model
below one of the --models-dirs or nowhere, links and all; what lies elsewhere is refused without being looked at.
"""

from __future__ import annotations

import difflib
import logging
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_backend.models.folders import (
    Watch,
    holds_model,
    models_below,
    models_in_hugging_face_cache,
    snapshot,
    weight_sizes,
)
from mlx_backend.models.model_type import model_type
from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.config_file import is_repository
from mlx_backend.registry.errors import ConfigurationError, ModelNotAllowed, UnknownModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mlx_backend.models.model_type import ModelType

log = logging.getLogger(__name__)

LOOK_EVERY = 2.0  # seconds
_MAX_NAMES = 20  # in an error's text
_NEVER = frozenset(["..", "\\", "\0"])  # in a path from a request


@dataclass(slots=True)
class _Listing:
    """One look at everything."""

    watch: Watch
    models: list[ModelSpec] = field(default_factory=list)
    names: dict[str, ModelSpec] = field(default_factory=dict)  # and aliases
    sources: dict[str, ModelSpec] = field(default_factory=dict)
    tails: dict[str, list[ModelSpec]] = field(default_factory=dict)
    folders: dict[Path, ModelSpec] = field(default_factory=dict)  # resolved
    absent: dict[str, ModelSpec] = field(default_factory=dict)  # configured, and not to be had

    def add(self, spec: ModelSpec) -> None:
        """List a model under every name that is still free; the first to have a name keeps it."""
        if spec.name in self.names:
            return
        self.models.append(spec)
        for name in (spec.name, *spec.aliases):
            self.names.setdefault(name, spec)
        self.sources.setdefault(spec.source, spec)
        for name in {_tail(spec.name), _tail(spec.source)} - {""}:
            self.tails.setdefault(name, []).append(spec)


class Catalogue:
    """The models that can be served. Safe to use from several threads."""

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        *,
        models_dirs: Iterable[Path] = (),
        hugging_face_cache: bool = False,
        allow_download: bool = False,
        others: ModelSpec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`others` is what models are like that `specs` does not name."""
        self._specs = tuple(specs)
        self._roots = [_root(place) for place in models_dirs]
        self._hugging_face_cache = hugging_face_cache
        self._allow_download = allow_download
        self._others = others or ModelSpec(name="", source="")
        self._clock = clock
        self._looking = threading.Lock()
        self._looked = clock()
        self._warned: set[Path] = set()
        self._types: dict[str, tuple[int | None, ModelType]] = {}  # by source
        self._listing = self._look()

    def models(self) -> tuple[ModelSpec, ...]:
        """List what can be served: the configured ones in their order, then what was found."""
        return tuple(self._current().models)

    def pinned(self) -> tuple[ModelSpec, ...]:
        """List the models that are to stay in memory, also those that are not to be had."""
        return tuple(spec for spec in self._specs if spec.pinned)

    def find(self, name: str) -> ModelSpec:
        """Return the model of that name. Raises UnknownModel or ModelNotAllowed."""
        listing = self._current()
        if spec := listing.names.get(name) or listing.sources.get(name):
            return spec
        if spec := listing.absent.get(name):
            text = f"The model {spec.name!r} is not on this machine: {spec.source!r} has not been downloaded"
            raise UnknownModel(f"{text}, and that is not allowed (--allow-download). {_there(name, listing)}")
        called = listing.tails.get(name, [])
        if len(called) == 1:
            return called[0]
        shown = repr(name[:200])
        if called:
            names = " or ".join(repr(spec.name) for spec in called)
            raise UnknownModel(f"The model {shown} could be {names}: send the whole name.")
        if _is_path(name):
            if spec := self._at_path(name, listing):
                return spec
        elif is_repository(name):
            if self._allow_download:
                return replace(self._others, name=name, source=name)
            raise UnknownModel(
                f"The model {shown} is not on this machine, and this server does not download what a request "
                f"names (--allow-download). {_there(name, listing)}"
            )
        raise UnknownModel(f"The model {shown} is not served here. {_there(name, listing)}")

    def aliases(self, name: str) -> tuple[str, ...]:
        """The other names by which a model was configured, but for those that another one has."""
        names = self._listing.names
        spec = names.get(name)
        return tuple(alias for alias in spec.aliases if names.get(alias) is spec) if spec else ()

    def may_download(self, spec: ModelSpec) -> bool:
        """Whether loading it may fetch files."""
        return self._allow_download or spec.named_on_command_line

    def folder(self, spec: ModelSpec) -> Path | None:
        """Where it lies on this machine; None if it would have to be downloaded."""
        return _local(spec.source)

    def type(self, spec: ModelSpec) -> ModelType:
        """What it is made for: as was said, else by its files. They are read again when they have changed."""
        if spec.type is not None:
            return spec.type
        folder = _local(spec.source)
        try:
            stamp = (folder / "config.json").stat().st_mtime_ns if folder is not None else None
        except OSError:
            stamp = None
        known = self._types.get(spec.source)
        if known is None or known[0] != stamp:
            known = self._types[spec.source] = (stamp, model_type(folder, spec.source))
        return known[1]

    def weight_bytes(self, spec: ModelSpec) -> int:
        """How large its weights are on disk, its draft model's included; 0 for what is not there yet."""
        sources = (spec.source, spec.engine.get("draft_model"))
        folders = [folder for source in sources if source and (folder := _local(source))]
        return sum(size for folder in folders for size in weight_sizes(folder))

    # -- the listing -----------------------------------------------------------------------------------------

    def _current(self) -> _Listing:
        # One thread looks, the others go on with what there was: a sleeping disk keeps nobody else waiting.
        if self._clock() - self._looked >= LOOK_EVERY and self._looking.acquire(blocking=False):
            try:
                if self._listing.watch.changed():
                    self._listing = self._look()
                self._looked = self._clock()
            finally:
                self._looking.release()
        return self._listing

    def _look(self) -> _Listing:
        listing = _Listing(Watch())
        for spec in self._specs:
            folder = _local(spec.source, listing.watch)
            if folder is None and is_repository(spec.source) and not self.may_download(spec):
                listing.absent.update(dict.fromkeys((spec.name, *spec.aliases, spec.source), spec))
                continue
            listing.add(spec)
            if folder is not None:
                listing.folders.setdefault(folder.resolve(), spec)
        for _, root in self._roots:
            for name, folder in models_below(root, listing.watch):
                self._add_folder(name, folder.resolve(), listing)
        if self._hugging_face_cache:
            for repository in models_in_hugging_face_cache(listing.watch):
                if repository not in listing.sources:
                    listing.add(replace(self._others, name=repository, source=repository))
        return listing

    def _add_folder(self, name: str, folder: Path, listing: _Listing) -> None:
        if spec := listing.folders.get(folder):  # listed already, under a better name
            listing.names.setdefault(name, spec)
        elif any(folder.is_relative_to(root) for _, root in self._roots):
            spec = replace(self._others, name=name, source=str(folder))
            listing.add(spec)
            listing.folders[folder] = spec
        elif folder not in self._warned:
            self._warned.add(folder)
            log.warning("%s is a link to %s, outside of every --models-dir: not served.", name, folder)

    def _at_path(self, name: str, listing: _Listing) -> ModelSpec | None:
        """Return the model a path leads to, None if there is none. Raises ModelNotAllowed."""
        places = list(self._served_places(name))
        if not places:
            raise ModelNotAllowed(
                f"The model {name[:200]!r} is a path outside of the folders that are served (--models-dir)."
            )
        for root, folder in places:
            if spec := listing.folders.get(folder):
                return spec
            if holds_model(folder):
                return replace(self._others, name=str(folder.relative_to(root)), source=str(folder))
        return None

    def _served_places(self, name: str) -> Iterator[tuple[Path, Path]]:
        """Give what a path may mean, links followed, with the root above it."""
        if name.startswith("~") or _NEVER & {*name, *name.split("/")}:
            return
        for spelt, root in self._roots:
            for beginning in dict.fromkeys((spelt, root)):
                place = beginning / name  # an absolute one stays what it is
                if not place.is_relative_to(beginning):
                    continue
                try:
                    folder = place.resolve()
                except (OSError, RuntimeError, ValueError):  # links in a circle, half a character
                    continue
                if folder != root and folder.is_relative_to(root):
                    yield root, folder


def _root(place: Path) -> tuple[Path, Path]:
    """Return the folder as it is spelt, and where that leads."""
    spelt = place.expanduser().absolute()
    root = spelt.resolve()
    if not root.is_dir():
        raise ConfigurationError(f"--models-dir {place}: there is no such folder.")
    if (root / "config.json").is_file():
        raise ConfigurationError(
            f"--models-dir {place}: this is a model itself. Name it with --model, or name the folder above it."
        )
    return spelt, root


def _local(source: str, watch: Watch | None = None) -> Path | None:
    place = Path(source).expanduser()
    if place.is_dir():
        return place
    return snapshot(source, watch) if is_repository(source) else None


def _is_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or bool(_NEVER & {*name, *name.split("/")})


def _tail(name: str) -> str:
    return name.rpartition("/")[2]


def _there(name: str, listing: _Listing) -> str:
    """Say what there is, nearest first."""
    matcher = difflib.SequenceMatcher(None, "", name[:200].casefold())

    def likeness(spec: ModelSpec) -> float:
        best = 0.0
        for each in (spec.name, _tail(spec.name), *spec.aliases):
            matcher.set_seq1(each.casefold())
            if matcher.quick_ratio() > best:
                best = max(best, matcher.ratio())
        return best

    if not listing.models:
        return "There is no model here at all."
    nearest = sorted(listing.models, key=likeness, reverse=True)
    names = ", ".join(repr(spec.name) for spec in nearest[:_MAX_NAMES])
    more = f" and {len(nearest) - _MAX_NAMES} more" if len(nearest) > _MAX_NAMES else ""
    return f"There is {names}{more}."
