"""`mlx-backend sanitise`: show what a model's chat template would get for a posted history.

Reads a chat request (`messages`, perhaps `tools` and effort fields) as JSON on standard input, or one a line with
`--jsonl`, and prints the messages and template arguments. A line that cannot be used gets an error object of its own.

The messages are the ones the server renders, with one exception: gpt-oss's template refuses an assistant's text that
quotes `<|channel|>analysis<|message|>` or `<|channel|>final<|message|>`. The server hides every quoted marker while
it renders; here such a quotation gets one invisible character (U+2060) in the middle, so that what is printed
renders too. Take the character out to have the text back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_backend.commands.errors import WRONG_USAGE, CommandError
from mlx_backend.commands.json_lines import InputError, answer_input, chat_request, decode, read_template
from mlx_backend.conversation.background_requests import find_background_prompt
from mlx_backend.conversation.dialects import detect
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.effort import GPT_OSS_SCALE, EffortError
from mlx_backend.conversation.effort_sources import resolve
from mlx_backend.conversation.history import HistoryError, sanitise
from mlx_backend.conversation.template import GPT_OSS_TRAITS, TemplateTraits, accepted, for_template

if TYPE_CHECKING:
    import argparse

    from mlx_backend.conversation.dialects import Dialect
    from mlx_backend.conversation.effort import EffortScale


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Read a chat request as JSON on standard input; print the messages a chat template would get."
    )
    parser.add_argument(
        "--jsonl", action="store_true", help="read one request a line, print one result a line"
    )
    parser.add_argument(
        "--template", type=Path, metavar="FILE", help="the model's chat template (default: gpt-oss's)"
    )
    parser.add_argument("--canonical", action="store_true", help="print OpenAI's form, before any template")


def run(arguments: argparse.Namespace) -> int:
    """Print a result for every request on standard input; return 1 if any could not be used."""
    traits, scale, dialect = GPT_OSS_TRAITS, GPT_OSS_SCALE, HARMONY
    if arguments.template is not None:
        from mlx_backend.chat.effort_probe import probe_effort
        from mlx_backend.chat.history_probe import probe_history

        try:
            template = read_template(arguments.template)
        except InputError as error:
            raise CommandError(str(error), status=WRONG_USAGE) from None
        traits, dialect = probe_history(template), detect(template, ())
        scale = probe_effort(template, reasons=traits.is_reasoning_model)
    return answer_input(
        lambda line: chat_request(decode(line, errors="replace")),
        partial(sanitised, traits=traits, scale=scale, dialect=dialect, canonical=arguments.canonical),
        by_lines=arguments.jsonl,
    )


def sanitised(
    request: Mapping[str, Any],
    traits: TemplateTraits,
    scale: EffortScale,
    dialect: Dialect = HARMONY,
    *,
    canonical: bool = False,
) -> dict[str, Any]:
    """Return the messages and template arguments for one chat request. Raises InputError."""
    tools = request.get("tools")
    if not isinstance(tools, list):
        tools = []
    try:
        messages = sanitise(
            request.get("messages", []),
            tools=[tool for tool in tools if isinstance(tool, Mapping)],
            dialect=dialect,
        )
        background = find_background_prompt(messages, stream=request.get("stream") is True)
        resolution = resolve(request, messages, scale=scale, background=background)
    except (HistoryError, EffortError) as error:
        raise InputError(str(error), error.param) from error
    messages = resolution.messages
    if canonical:
        return {"messages": messages, "effort": resolution.effort.value}
    return {
        "messages": accepted(for_template(messages, traits, dialect), traits),
        "template_kwargs": resolution.template_kwargs,
    }
