"""Which model a name means: its own name, or one of those that people know from elsewhere.

    gpt-oss:20b, gpt-oss-20b      mlx-community/gpt-oss-20b-MXFP4-Q8
    qwen3.5:4b                    mlx-community/Qwen3.5-4B-MLX-4bit
    mlx-demo                      the demonstration model that is included
    gpt-oss:20b:high              the same model as gpt-oss:20b, told to reason much

A short name means a model whose own name begins with the same words and numbers, as long as it is the only one: first
among those on this machine, then among the recommended ones. Knows names; reads nothing of a model.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_backend.conversation.effort import EFFORT_OF, fold
from mlx_backend.errors import EngineError
from mlx_backend.models.spec import RECOMMENDED_MODELS, is_repository

if TYPE_CHECKING:
    from collections.abc import Iterable

LATEST = ":latest"
"""What some clients add to a name that has no tag."""
_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)*")


def words_of(name: str) -> list[str]:
    """Return the words and numbers of a name, without its owner: gpt, oss, 20, b."""
    return _WORD.findall(name.removesuffix(LATEST).rpartition("/")[2].casefold())


def matching(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that a short one may mean: that are it, else that begin with its words and numbers."""
    known = dict.fromkeys(names)
    whole = name.removesuffix(LATEST)
    if whole in known or "/" in whole:
        return [whole] if whole in known else []
    asked = words_of(whole) if whole[-1:].isalnum() else []  # `model:` lacks its effort
    starting = [each for each in known if asked and words_of(each)[: len(asked)] == asked]
    return [each for each in starting if words_of(each) == asked] or starting


def split_effort(name: str) -> tuple[str, str | None]:
    """Return a name without the effort that it may end with, and that effort: `mlx-demo:high`."""
    base, _, word = name.rpartition(":")
    return (base, word) if base and fold(word) in EFFORT_OF else (name, None)


def source_of(name: str, here: Iterable[str] = ()) -> str:
    """Return the folder, repository or demonstration model that a name means; `here` are those on this machine.

    Raises EngineError for what means none, or several.
    """
    here = tuple(here)
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        return name
    recommended = [model.repository for model in RECOMMENDED_MODELS]
    for names in (here, recommended):
        if len(found := matching(name, names)) == 1:
            return found[0]
        if found:
            raise EngineError(f"{name!r} could be {' or '.join(found)}: name one of them.")
    if is_repository(name):
        return name
    known = {each.rpartition("/")[2].casefold(): each for each in (*here, *recommended)}
    close = difflib.get_close_matches(name.replace(":", "-").casefold(), known, n=1)
    hint = f"did you mean {known[close[0]]}?" if close else "`mlx-backend list` shows those on this machine."
    raise EngineError(
        f"There is no model {name!r} here; {hint} A repository on Hugging Face is written owner/name, and "
        "`mlx-backend recommend` names a few."
    )
