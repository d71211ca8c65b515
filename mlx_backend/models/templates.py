"""Chat templates, which are programs by strangers: each runs in a process with limits (child_process), and only there.

A model's template is tried before its weights are loaded (`check`), run on made-up messages to find out what it does
with its arguments (`TemplateProbe`), and renders the conversations that are answered (`render`). So one that never
ends or fills the memory, with whatever conversation, ends its own process, and holds up no other model's request.

Some models come without a Jinja template and name a function of mlx-lm's in `chat_template_type`. Prompts are rendered
by that function, which is no stranger's. What it takes, and which efforts it has, is found out by rendering a small
Jinja template with the same layout and switches (`stand_in`), which is tested against the function itself.

Knows nothing of efforts, tools or dialects; no Jinja, which is imported where the templates run (template_program).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.child_process import ChildAnswer, ChildProcesses, Overrun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_SOURCE: Final = 1 << 17
"""Characters of a template; the longest that are published have about 20,000. Parsing each thousand takes some ms."""
MAX_CHARACTERS: Final = 1 << 25
"""Characters of a prompt."""
MAX_SECONDS: Final = 10.0
"""Seconds of processor time for a prompt. Those of published templates take milliseconds."""
TRIAL_SECONDS: Final = 2.0
"""Seconds of processor time for parsing a template and rendering one conversation of every kind."""
_MAX_PROBE_CHARACTERS: Final = 1 << 20
"""Characters of a prompt of made-up messages; with a tool, published templates write less than 20,000."""
MAX_PROCESSES: Final = 6
MAX_PROCESSES_OF_TEMPLATE: Final = 3

_processes = ChildProcesses(
    "mlx_backend.models.template_program:answer",
    at_once=MAX_PROCESSES,
    max_of_client=MAX_PROCESSES_OF_TEMPLATE,
    reused=True,
)


class TemplateFault(Exception):
    """A template that cannot be parsed, refused what it was given, or failed."""


class TemplateOverrun(TemplateFault):
    """A template that took more time or memory than it may; the text says which, a clause that begins with "it"."""


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    arguments: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Render a conversation.

    Raises TemplateFault, and what `ChildProcesses.call` raises for the request that needs it.
    """
    found = _run(
        source,
        MAX_SECONDS,
        examine=False,
        messages=messages,
        tools=tools,
        arguments=arguments,
        add_generation_prompt=add_generation_prompt,
        any_day=False,
        max_characters=MAX_CHARACTERS,
    )
    return _result(found)


def check(source: str | None) -> None:
    """Raise TemplateOverrun for a template that cannot be used; one that only fails may be of use for something."""
    if not source:
        return
    try:
        examined(source)
    except TemplateOverrun:
        raise
    except TemplateFault:
        pass


@dataclass(frozen=True, slots=True)
class TemplateContents:
    """What stands in a template."""

    variables: frozenset[str]
    """What a caller may give it; also names that are only set in some of its branches."""
    words: tuple[str, ...]
    """The texts in its expressions, in their order: what it compares something with, looks up, or takes by default."""
    numbers: frozenset[float]
    """The numbers in its expressions."""
    defaults: frozenset[str]
    """Those of its words that stand where a variable is given a value of its own."""
    parts: frozenset[str]
    """What it reads of a variable that holds an object: `reasoning.effort`."""


def examined(source: str) -> TemplateContents:
    """Return what stands in a template, after it has rendered one conversation of every kind. Raises TemplateFault."""
    match _examination(source):
        case TemplateFault() as fault:
            raise type(fault)(*fault.args)
        case contents:
            return contents


def variables_of(source: str | None) -> frozenset[str] | None:
    """Return what a caller may give a template; None where that is not known."""
    try:
        return examined(source).variables if source else frozenset()
    except TemplateFault:
        return None


@lru_cache(maxsize=64)
def _examination(source: str) -> TemplateContents | TemplateFault:
    """Return what `examined` returns or raises: what takes too long is tried once, however often it is asked for."""
    try:
        found = json.loads(_result(_run(source, TRIAL_SECONDS, examine=True)))
    except TemplateFault as fault:
        return fault
    words = tuple(found.pop("words"))
    return TemplateContents(words=words, **{name: frozenset(values) for name, values in found.items()})


class TemplateProbe:
    """Renders one template with made-up messages. All renderings together may take `seconds` of processor time.

    Raises TemplateFault for one that cannot be examined, and TemplateOverrun once its time is up.
    """

    def __init__(self, source: str, seconds: float) -> None:
        self.contents = examined(source)
        self._source = source
        self._seconds_left = seconds

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | None:
        """Render a conversation, on a day that is always the same; None where the template refuses it."""
        if self._seconds_left <= 0:
            raise TemplateOverrun("it takes too long")
        found = _run(
            self._source,
            self._seconds_left,
            examine=False,
            messages=messages,
            tools=tools,
            arguments=arguments,
            add_generation_prompt=True,
            any_day=True,
            max_characters=_MAX_PROBE_CHARACTERS,
        )
        self._seconds_left -= found.seconds
        try:
            return _result(found)
        except TemplateFault:
            return None


def _run(source: str, seconds: float, **asked: Any) -> ChildAnswer:
    if len(source) > MAX_SOURCE:
        raise TemplateFault(f"The chat template has more than {MAX_SOURCE:,} characters.")
    # Settings may hold what JSON has no word for, such as a date.
    request = json.dumps({"source": source, **asked}, default=str).encode()
    try:
        return _processes.call(request, seconds=seconds, client=source)
    except Overrun as overrun:
        raise TemplateOverrun(str(overrun)) from overrun


def _result(answer: ChildAnswer) -> str:
    text = answer.data[1:].decode("utf-8", "surrogatepass")
    if answer.data[:1] != b"=":
        raise TemplateFault(text)
    return text


_DEEPSEEK_V32 = """\
<｜begin▁of▁sentence｜>
{%- set thinking = enable_thinking is not defined or enable_thinking -%}
{%- set marker = '<think>' if thinking else '</think>' -%}
{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools and messages[0].role != 'system' -%}{{ tools | tojson }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{{ m.content }}
{%- if tools -%}{{ '\\n\\n' }}{{ tools | tojson }}{%- endif -%}
{%- elif m.role == 'user' -%}
<｜User｜>{{ m.content }}<｜Assistant｜>{{ marker if loop.index0 == last.user else '</think>' }}
{%- elif m.role == 'assistant' -%}
{%- if thinking and loop.index0 > last.user -%}{{ m.reasoning_content or '' }}</think>{%- endif -%}
{{ m.content or '' }}
{%- if m.tool_calls -%}
{{ '\\n\\n<｜DSML｜function_calls>\\n' }}
{%- for c in m.tool_calls -%}
<｜DSML｜invoke name="{{ c.function.name }}">{{ c.function.arguments + '' }}</｜DSML｜invoke>{{ '\\n' }}
{%- endfor -%}
</｜DSML｜function_calls>
{%- endif -%}
<｜end▁of▁sentence｜>
{%- elif m.role == 'tool' -%}
{{ '\\n\\n<function_results>\\n<result>' }}{{ m.content }}{{ '</result>\\n</function_results>\\n\\n' }}
{{- marker if loop.index0 >= last.user else '</think>' }}
{%- else -%}
{{ raise_exception('unknown role') }}
{%- endif -%}
{%- endfor -%}
"""

STAND_INS = {"deepseek_v32": _DEEPSEEK_V32}
"""By `chat_template_type`. Of others nothing can be found out, and a model that has nothing else has no template."""


def stand_in(template_type: object) -> str | None:
    """Return the stand-in for a function of mlx-lm's; None where there is none."""
    return STAND_INS.get(template_type) if isinstance(template_type, str) else None
