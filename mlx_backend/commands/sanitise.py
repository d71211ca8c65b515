"""`mlx-backend sanitise`: show what a model's chat template would get for a posted history.

Reads a chat request (`messages`, perhaps `tools` and effort fields) as JSON on standard input, or one a line with
`--jsonl`, and prints the messages and template arguments. A line that cannot be used gets an error object of its own.

The messages are the ones the server renders, with one exception: gpt-oss's template refuses an assistant's text that
quotes `<|channel|>analysis<|message|>` or `<|channel|>final<|message|>`. The server hides every quoted marker while
it renders; here such a quotation gets one invisible character (U+2060) in the middle, so that what is printed
renders too. Take the character out to have the text back.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.json_lines import answer_input
from mlx_backend.conversation.background_requests import find_background_prompt
from mlx_backend.conversation.dialects import detect
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.effort import EffortError
from mlx_backend.conversation.effort_scale import GPT_OSS_SCALE
from mlx_backend.conversation.effort_sources import resolve
from mlx_backend.conversation.history import HistoryError, sanitise
from mlx_backend.conversation.json_values import MAX_DEPTH, is_too_deep, json_type
from mlx_backend.conversation.template import GPT_OSS_TRAITS, TemplateTraits, accepted, for_template

if TYPE_CHECKING:
    import argparse

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.effort_scale import EffortScale


def add_parser(subparsers: Any) -> None:
    """Add the command and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "sanitise",
        help="show what the chat template would get for a posted history",
        description="Read a chat request as JSON on standard input; print the messages a chat template would get.",
    )
    parser.add_argument(
        "--jsonl", action="store_true", help="read one request a line, print one result a line"
    )
    parser.add_argument(
        "--template", type=Path, metavar="FILE", help="the model's chat template (default: gpt-oss's)"
    )
    parser.add_argument("--canonical", action="store_true", help="print OpenAI's form, before any template")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a result for every request on standard input; return 1 if any could not be used."""
    traits, scale, dialect = GPT_OSS_TRAITS, GPT_OSS_SCALE, HARMONY
    if arguments.template is not None:
        from mlx_backend.chat.effort_probe import probe_effort
        from mlx_backend.chat.history_probe import probe_history

        try:
            template = arguments.template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            print(f"mlx-backend sanitise: cannot read {arguments.template}: {error}", file=sys.stderr)
            return 2
        traits, dialect = probe_history(template), detect(template, ())
        scale = probe_effort(template, reasons=traits.is_reasoning_model)

    def answer_text(text: bytes) -> dict[str, Any]:
        decoded = text.decode("utf-8-sig", "replace")
        return answer(decoded, traits, scale, dialect, canonical=arguments.canonical)

    return answer_input(answer_text, by_lines=arguments.jsonl)


_TOO_DEEP = f"the request is nested too deeply: more than {MAX_DEPTH} levels"


def answer(
    text: str,
    traits: TemplateTraits,
    scale: EffortScale,
    dialect: Dialect = HARMONY,
    *,
    canonical: bool = False,
) -> dict[str, Any]:
    """Return the result object for one request's JSON text; `error` says what was wrong with it."""
    identity: dict[str, Any] = {}
    if not text.strip():
        return {
            "error": {"message": "there is nothing on standard input; a chat request as JSON is expected"}
        }
    try:
        request = json.loads(text)
    except ValueError as error:
        return {"error": {"message": f"this is not JSON: {error}"}}
    except RecursionError:
        return {"error": {"message": _TOO_DEEP}}
    if is_too_deep(request):
        return {"error": {"message": _TOO_DEEP}}
    if isinstance(request, list):
        request = {"messages": request}
    if not isinstance(request, Mapping):
        return {"error": {"message": f"a request is an object with `messages`, not {json_type(request)}"}}
    if "id" in request:
        identity = {"id": request["id"]}
    tools = request.get("tools")
    if not isinstance(tools, list):
        tools = []
    try:
        messages = sanitise(
            request.get("messages", []),
            tools=[tool for tool in tools if isinstance(tool, Mapping)],
            policy=dialect.history,
        )
        background = find_background_prompt(messages, stream=request.get("stream") is True)
        resolution = resolve(request, messages, scale=scale, background=background)
    except (HistoryError, EffortError) as error:
        return {**identity, "error": {"message": str(error), "param": error.param}}
    messages = resolution.messages
    if canonical:
        return {**identity, "messages": messages, "effort": resolution.effort.value}
    return {
        **identity,
        "messages": accepted(for_template(messages, traits, dialect), traits),
        "template_kwargs": resolution.template_kwargs,
    }
