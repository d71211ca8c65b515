"""Chat templates that mlx-lm has as Python functions, described in Jinja, so that rendering tells what they take.

Some models come without a Jinja template and name a function in `chat_template_type`. Prompts are rendered by that
function. What a template takes, and which efforts it has, is found out by rendering a small Jinja template with the
same layout and switches, which is all that it is for. Tested against the functions themselves.
"""

from __future__ import annotations

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
