"""The posted histories of `history_cases/`, and what a template makes of one.

A line is one case: `name`, `messages` as a client posts them, perhaps `tools`, and `shown`: every message of the
rendered prompt, in order, as "who: text". That says all at once: what is there and how often, which reasoning is
kept, that no tag is left over, and that nothing else is there.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harmony_data import GPT_OSS_TEMPLATE
from jinja2.sandbox import ImmutableSandboxedEnvironment

import mlx_backend.demo
from mlx_backend.chat.effort_probe import probe_effort
from mlx_backend.commands.sanitise import sanitised
from mlx_backend.conversation.template import INVISIBLE, TemplateTraits

FOLDER = Path(__file__).parent / "history_cases"
DEMO_TEMPLATE = Path(mlx_backend.demo.__file__).parent / "model" / "chat_template.jinja"

_MESSAGE = re.compile(
    r"<\|start\|>(?P<header>.*?)<\|message\|>(?P<body>.*?)<\|(?:end|call|return)\|>(?=<\|start\|>|\Z)",
    re.DOTALL,
)


class Refused(Exception):
    """The template raised an exception of its own."""


@dataclass(frozen=True)
class HistoryCase:
    """One posted history and the prompt it must become."""

    name: str
    request: dict[str, Any]
    shown: list[str]


def history_cases() -> list[HistoryCase]:
    """Read every case of every file."""
    found = []
    for file in sorted(FOLDER.glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            case = json.loads(line)
            request = {key: value for key, value in case.items() if key not in ("name", "shown")}
            found.append(HistoryCase(f"{file.stem}: {case['name']}", request, case["shown"]))
    return found


class Prompt:
    """A chat template, rendered as transformers renders it."""

    def __init__(self, file: Path) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda _: "2026-11-21")
        source = file.read_text(encoding="utf-8")
        self.traits = TemplateTraits.of(source)
        self.scale = probe_effort(source, reasons=self.traits.is_reasoning_model)
        self._template = environment.from_string(source)

    def of(self, request: dict[str, Any]) -> str:
        """Render what the `sanitise` command prints for a request."""
        result = sanitised(request, self.traits, self.scale)
        return self.render(result["messages"], request.get("tools"), **result["template_kwargs"])

    def render(self, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
        """Render messages as they are."""
        return self._template.render(
            messages=messages, tools=tools or None, add_generation_prompt=True, **kwargs
        )

    def shown(self, request: dict[str, Any]) -> list[str]:
        """Return the rendered prompt's messages after the system message as "who: text"."""
        result = sanitised(request, self.traits, self.scale)
        kwargs = result["template_kwargs"]
        self.render(result["messages"], request.get("tools"), **kwargs)  # as it is, it must not be refused
        text = self.render(
            [_disarmed(message) for message in result["messages"]], request.get("tools"), **kwargs
        )
        found = [self._said(match["header"], match["body"]) for match in _MESSAGE.finditer(text)]
        return [said.replace("<¦", "<|").replace(INVISIBLE, "") for said in found[1:] if said != "system: "]

    def _said(self, header: str, body: str) -> str:
        if header.startswith("functions."):
            name = header.removeprefix("functions.").split(" to=")[0]
            return f"result of {name}: {json.loads(body) if self._quotes(body) else body}"
        if called := re.search(r"to=functions\.(.*?)(?:<\|channel\|>| <\|constrain\|>|$)", header):
            return f"call {called[1]}: {body}"
        if header == "developer":
            instructions = body.removeprefix("# Instructions\n\n").partition("# Tools\n\n")[0]
            return f"system: {instructions.removesuffix('\n\n')}"
        return f"{header.removeprefix('assistant<|channel|>')}: {body}"

    def _quotes(self, body: str) -> bool:
        return self.traits.quotes_tool_results and body.startswith('"')


def _disarmed(value: Any) -> Any:
    """Markers that people spelt get another bar, so that every marker of the prompt is the template's own."""
    match value:
        case str():
            return value.replace("<|", "<¦")
        case dict():
            return {key: _disarmed(item) for key, item in value.items()}
        case list():
            return [_disarmed(item) for item in value]
        case _:
            return value


def _refuse(message: str) -> None:
    raise Refused(message)


def gpt_oss() -> Prompt:
    """Return the real template."""
    return Prompt(GPT_OSS_TEMPLATE)


def demo() -> Prompt:
    """Return the demonstration model's template."""
    return Prompt(DEMO_TEMPLATE)
