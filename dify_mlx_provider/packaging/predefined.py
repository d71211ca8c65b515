"""Write the files of the predefined models: `python -m dify_mlx_provider.packaging.predefined`, or `make models`.

Dify reads one YAML file per model, and YAML files cannot include each other; so all of them are written from the
table below; a test says whether they are current. Not packed; does not import the SDK.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dify_mlx_provider.servers.efforts import LEVELS
from dify_mlx_provider.settings.parameters import ParameterOptions, parameter_rules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FOLDER = Path(__file__).resolve().parents[2] / "provider_assets" / "llm"
ORDER = "_position.yaml"
WRITTEN_BY = "# Written by `make models` from dify_mlx_provider/packaging/predefined.py: change it there.\n"
ANY_EFFORT = ("none", *LEVELS)
"""The efforts of a model, also of one whose template only switches reasoning: low and medium are budgets then."""

FEATURES = ("agent-thought", "tool-call", "stream-tool-call", "structured-output")
"""The features of every model in the list.

tool-call and not multi-tool-call: gpt-oss makes one call and waits for its result. stream-tool-call: a call arrives
whole, but within a stream, so Dify need not switch streaming off while tools are offered.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predefined:
    """A model people run with MLX: it reasons and calls tools. `efforts` are its levels, as mlx-backend finds them."""

    model: str
    label: Mapping[str, str]
    context_size: int
    efforts: Sequence[str] = ANY_EFFORT
    default_effort: str
    sees: bool = False
    """Dify's pages offer Vision by what is declared here, whatever the server says; one that does not see refuses an
    image in a sentence."""
    comment: str = ""


def _named(text: str) -> Mapping[str, str]:
    return {"en_US": text, "ja_JP": text, "zh_Hans": text}


def _gpt_oss(size: str) -> Predefined:
    return Predefined(
        model=f"mlx-community/gpt-oss-{size}-MXFP4-Q8",
        label=_named(f"gpt-oss {size} (MXFP4, Q8)"),
        context_size=131_072,
        efforts=LEVELS,  # what its template takes: servers other than mlx-backend may know no `none`
        default_effort="medium",
    )


# Default, and the models that the server recommends (mlx_backend/models/spec.py), from small to large. The list
# is short: the server's own is what counts, and any name in it can be added in Dify. What is declared here is used
# while the server has never been reached. Context sizes are the models' own, without rope scaling, which a server would
# have to be started with. tests/chat/test_predefined_models.py compares it with what the server finds and does.
MODELS: tuple[Predefined, ...] = (
    Predefined(
        model="default",
        label={"en_US": "Default", "ja_JP": "既定", "zh_Hans": "默认"},
        context_size=16_384,  # the demonstration model's, the least that is served; Dify shows it in the list
        default_effort="medium",
        sees=True,
        comment=(
            "# The server serves the model it was started with under this name: no model's name has to be typed.\n"
            "# What that model is and can do, the server says; until it does, the least context is assumed.\n"
            "# Dify's pages offer Vision by this file.\n"
        ),
    ),
    Predefined(
        model="mlx-community/Qwen3.5-4B-MLX-4bit",
        label=_named("Qwen3.5 4B (4 bit)"),
        context_size=262_144,
        default_effort="high",
        sees=True,
    ),
    Predefined(
        model="mlx-community/Qwen3.5-9B-4bit",
        label=_named("Qwen3.5 9B (4 bit)"),
        context_size=262_144,
        default_effort="high",
        sees=True,
    ),
    _gpt_oss("20b"),
    Predefined(
        model="mlx-community/gemma-4-26b-a4b-it-4bit",
        label=_named("Gemma 4 26B-A4B (4 bit)"),
        context_size=262_144,
        default_effort="none",
        sees=True,
    ),
    Predefined(
        model="mlx-community/Qwen3.8-27B-4bit",
        label=_named("Qwen3.8 27B (4 bit)"),
        context_size=262_144,
        efforts=("none", "low", "medium", "xhigh"),  # its first template refuses `high`
        default_effort="xhigh",
        sees=True,
    ),
    Predefined(
        model="mlx-community/Qwen3.6-35B-A3B-4bit",
        label=_named("Qwen3.6 35B-A3B (4 bit)"),
        context_size=262_144,
        default_effort="high",
        sees=True,
    ),
    _gpt_oss("120b"),
)


def declaration(model: Predefined) -> dict[str, Any]:
    """Return a model's declaration as Dify reads it."""
    options = ParameterOptions(
        efforts=model.efforts,
        default_effort=model.default_effort,
        max_output=min(131_072, model.context_size),
    )
    return {
        "model": model.model,
        "label": dict(model.label),
        "model_type": "llm",
        "features": [*FEATURES, *(["vision"] if model.sees else [])],
        "model_properties": {"mode": "chat", "context_size": model.context_size},
        "parameter_rules": parameter_rules(options),
    }


def files() -> dict[str, str]:
    """Return the files to write, name to text."""
    texts = {
        f"{_file_name(model.model)}.yaml": WRITTEN_BY + model.comment + _yaml(declaration(model))
        for model in MODELS
    }
    order = "# The order in which Dify lists the models. Dify and its SDK know this file by the end of its name.\n"
    return {**texts, ORDER: WRITTEN_BY + order + _yaml([model.model for model in MODELS])}


def stale(folder: Path = FOLDER) -> list[str]:
    """Return the names of files that are missing, differ, or should not be there."""
    wanted = files()
    there = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.yaml"))}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m dify_mlx_provider.packaging.predefined",
        description="Write the predefined models' files.",
    )
    parser.parse_args(argv)
    changed, wanted = stale(), files()
    for name in changed:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8", newline="\n")
        else:
            (FOLDER / name).unlink()
    print(f"{len(wanted)} files, {len(changed)} changed")
    return 0


def _file_name(model: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", model.lower())


class _Dumper(yaml.SafeDumper):
    """Indents lists under their key, as in the other declarations."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Always indent."""
        del indentless
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Write every text out: no anchors."""
        del data
        return True


def _yaml(data: Any) -> str:
    return yaml.dump(data, Dumper=_Dumper, allow_unicode=True, sort_keys=False, width=1000)


if __name__ == "__main__":
    sys.exit(main())
