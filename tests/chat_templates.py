"""Chat templates in the layouts of families whose own are no data of ours."""

GEMMA_3 = """\
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
{%- set first = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{{ (first if loop.first else '') ~ message.content | trim }}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}
"""
GEMMA_3_MARKERS = ("<start_of_turn>", "<end_of_turn>", "<|endoftext|>")

QWEN_XML = """\
{%- if tools -%}
<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
Call as <tool_call>\\n<function=NAME>\\n<parameter=KEY>\\nVALUE\\n</parameter>\\n</function>\\n</tool_call>
{%- if messages[0].role == 'system' %}{{ '\\n' ~ messages[0].content }}{% endif -%}
<|im_end|>
{% elif messages[0].role == 'system' -%}
<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}
{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'user' -%}
<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{% if message.reasoning_content and (KEEPS) -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items -%}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor -%}
</function>
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
<think>
{% endif -%}
"""
QWEN_XML_MARKERS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)


def qwen_xml(keeps: str = "loop.index0 > last.user") -> str:
    """Return the layout of Qwen's XML calls; `keeps` is when it shows a message's reasoning."""
    return QWEN_XML.replace("KEEPS", keeps)


# As Qwen2.5-VL's: roles as they are, parts one after the other.
QWEN_VL = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content -%}
{%- if part.type == 'image' or 'image' in part -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
# As Gemma 3's: the roles must alternate, and texts are trimmed.
GEMMA_3_VISION = """\
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
{%- endif -%}
<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.content is string %}{{ message.content | trim }}{% else %}
{%- for item in message.content -%}
{%- if item.type == 'image' -%}<start_of_image>{%- elif item.type == 'text' -%}{{ item.text | trim }}{%- endif -%}
{%- endfor -%}{% endif %}<end_of_turn>
{% endfor -%}
{%- if add_generation_prompt -%}<start_of_turn>model
{% endif -%}
"""
QWEN_VL_MARKERS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
GEMMA_3_VISION_MARKERS = (
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
