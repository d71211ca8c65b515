"""The families whose names begin with a to k: architecture, control tokens, template and effort levels of each."""

from __future__ import annotations

from scripted_engine import HARMONY_MARKERS, HARMONY_TEMPLATE

from families.layouts import (
    ARGUMENTS,
    AS_JSON,
    CHATML,
    DEEPSEEK,
    DEEPSEEK_V3,
    DSML,
    EXPERTS,
    FUNCTION_TAGS,
    GEMMA,
    GLM,
    JSON_CALL,
    NAME,
    OPENED,
    THINK,
    TOOL_CALL,
    Family,
    chatml,
    deepseek,
    each,
    gemma,
    of,
    switched,
    template,
    xtml,
)

A_TO_K: dict[str, Family] = {
    "apertus": Family(
        architecture=of("apertus", post_norm=False, qk_norm=True),
        tokens=(
            *("<s>", "</s>", "<|system_start|>", "<|system_end|>", "<|user_start|>", "<|user_end|>"),
            *("<|assistant_start|>", "<|assistant_end|>", "<|inner_prefix|>", "<|inner_suffix|>"),
            *("<|tools_prefix|>", "<|tools_suffix|>"),
        ),
        ends=("<|assistant_end|>", "</s>"),
        template=template(
            before="<s>",
            tools="<|system_start|>{{ tools | tojson }}<|system_end|>",
            system="<|system_start|>{{ m.content }}<|system_end|>",
            user="<|user_start|>{{ m.content }}<|user_end|>",
            assistant="<|assistant_start|>",
            reasoning="<|inner_prefix|>{{ m.reasoning_content }}<|inner_suffix|>",
            calls=("<|tools_prefix|>[", "]<|tools_suffix|>"),
            call=f'{{"{NAME}": {AS_JSON}}}{{{{ ", " if not loop.last }}}}',
            end="<|assistant_end|>",
            result="<|user_start|>{{ m.content }}<|user_end|>",
            prompt="<|assistant_start|>",
        ),
    ),
    "cohere": Family(
        architecture=of("cohere2", sliding_window=32, sliding_window_pattern=2, layer_norm_eps=1e-5),
        tokens=(
            *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>"),
            *("<|END_ACTION|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
        ),
        ends=("<|END_OF_TURN_TOKEN|>",),
        template=template(
            before="<BOS_TOKEN>",
            tools="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ tools | tojson }}<|END_OF_TURN_TOKEN|>",
            system="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
            user="<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ m.content }}<|END_OF_TURN_TOKEN|>",
            assistant="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            reasoning="<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>",
            calls=("<|START_ACTION|>[\n", "\n]<|END_ACTION|>"),
            call='    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "'
            + NAME
            + f'", "parameters": {AS_JSON}}}{{{{ ",\n" if not loop.last }}}}',
            end="<|END_OF_TURN_TOKEN|>",
            result="<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ m.content | tojson }}"
            "<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>",
            prompt="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
            "{%- if reasoning is defined and not reasoning %}<|START_THINKING|><|END_THINKING|>{% else %}"
            "<|START_THINKING|>{% endif %}",
        ),
    ),
    "deepseek-v3": Family(
        architecture=DEEPSEEK_V3,
        tokens=DEEPSEEK,
        unmarked=THINK,
        ends=("<｜end▁of▁sentence｜>",),
        template=template(
            **deepseek,
            call=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{AS_JSON}\n```<｜tool▁call▁end｜>",
            prompt="<｜Assistant｜><think>\n",
        ),
    ),
    "deepseek-v3.1": Family(
        architecture=DEEPSEEK_V3,
        tokens=DEEPSEEK,
        ends=("<｜end▁of▁sentence｜>",),
        template=template(
            **deepseek,
            reasoning="<think>{{ m.reasoning_content }}</think>",
            call=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{AS_JSON}<｜tool▁call▁end｜>",
            prompt="<｜Assistant｜>{%- if thinking %}<think>{% else %}</think>{% endif %}",
        ),
        default="none",
    ),
    "dsml": Family(
        architecture=DEEPSEEK_V3,
        tokens=(*DEEPSEEK[:6], DSML),
        ends=("<｜end▁of▁sentence｜>",),
        template=template(
            **deepseek
            | {
                "calls": (f"\n\n<{DSML}function_calls>\n", f"</{DSML}function_calls>"),
                "result": "<｜User｜><function_results>{{ m.content }}</function_results>",
            },
            reasoning="<think>{{ m.reasoning_content }}</think>",
            call=f'<{DSML}invoke name="{NAME}">\n'
            + each(
                f"<{DSML}parameter name=\"{{{{ k }}}}\" string=\"{{{{ 'true' if v is string else 'false' }}}}\">",
                f"</{DSML}parameter>\n",
            )
            + f"</{DSML}invoke>\n",
            prompt="<｜Assistant｜>{%- if thinking %}<think>{% else %}</think>{% endif %}",
        ),
        default="none",
    ),
    "functiongemma": Family(
        architecture=of("gemma3_text", sliding_window=32, sliding_window_pattern=2, query_pre_attn_scalar=16),
        tokens=(
            *(*GEMMA, "<start_function_call>", "<end_function_call>", "<escape>"),
            *("<start_function_response>", "<end_function_response>"),
        ),
        ends=("<end_of_turn>", "<eos>", "<start_function_response>"),
        template=template(
            **gemma,
            tools="<start_of_turn>developer\n{{ tools | tojson }}<end_of_turn>\n",
            system="<start_of_turn>developer\n{{ m.content }}<end_of_turn>\n",
            call=f"<start_function_call>call:{NAME}{{{{ '{{' }}}}"
            f"{{% for k, v in {ARGUMENTS}.items() %}}{{{{ k }}}}:"
            "{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v | tojson }}{% endif %}"
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<end_function_call>",
            result="<start_function_response>{{ m.content }}<end_function_response>",
        ),
        efforts=(),
    ),
    "gemma3-tool_code": Family(
        architecture=of("gemma3_text", sliding_window=32, sliding_window_pattern=2, query_pre_attn_scalar=16),
        tokens=GEMMA,
        ends=("<end_of_turn>", "<eos>"),
        template=template(**gemma, tools=""),
        efforts=(),
    ),
    "gemma4": Family(
        architecture=of(
            "gemma4_text",
            global_head_dim=16,
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=0,
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
            tie_word_embeddings=True,
        ),
        tokens=(
            *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>'),
            *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
        ),
        ends=("<turn|>", "<eos>", "<|tool_response>"),
        template=template(
            before="<bos>{%- if enable_thinking %}<|turn>system\n<|think|><turn|>\n{% endif %}",
            tools="<|turn>system\n<|tool>{{ tools | tojson }}<tool|><turn|>\n",
            system="<|turn>system\n{{ m.content }}<turn|>\n",
            user="<|turn>user\n{{ m.content }}<turn|>\n",
            assistant="<|turn>model\n",
            reasoning="<|channel>thought\n{{ m.reasoning_content }}<channel|>",
            call=f"<|tool_call>call:{NAME}{{{{ '{{' }}}}"
            f"{{% for k, v in {ARGUMENTS}.items() %}}{{{{ k }}}}:"
            "{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v | tojson }}{% endif %}{{ ',' if not loop.last }}"
            "{% endfor %}{{ '}' }}<tool_call|>",
            result="<|tool_response>{{ m.content }}<tool_response|>",
            end="<turn|>\n",
            prompt="<|turn>model\n",
        ),
        default="none",
    ),
    "gigachat": Family(
        architecture=of("qwen3"),
        tokens=(*CHATML, "<|function_call|>", "<|message_sep|>", "<|role_sep|>"),
        ends=("<|im_end|>",),
        template=chatml(reasoning="", call=f'<|function_call|>{{"name": "{NAME}", "arguments": {AS_JSON}}}'),
        efforts=(),
    ),
    "glm": Family(
        architecture=of(
            "glm4_moe",
            **EXPERTS,
            rope_scaling=None,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
        ),
        tokens=GLM,
        unmarked=GLM[7:],
        ends=("<|endoftext|>", "<|user|>", "<|observation|>"),
        template=template(
            before="[gMASK]<sop><|system|>Reasoning Effort: {%- set e = reasoning_effort | default('max') %}"
            "{%- if e == 'low' %} Low{% elif e == 'high' %} High{% else %} Max{% endif %}",
            tools="<|system|>{{ tools | tojson }}",
            system="<|system|>{{ m.content }}",
            user="<|user|>{{ m.content }}",
            assistant="<|assistant|>",
            reasoning="<think>{{ m.reasoning_content }}</think>",
            call=f"<tool_call>{NAME}"
            + each("<arg_key>{{ k }}</arg_key><arg_value>", "</arg_value>")
            + "</tool_call>",
            result="<|observation|><tool_response>{{ m.content }}</tool_response>",
            prompt="<|assistant|><think>",
        ),
        efforts=("none", "low", "high", "max"),
        default="max",
    ),
    "granite": Family(
        architecture=of(
            "granite",
            logits_scaling=1.0,
            attention_multiplier=1.0,
            embedding_multiplier=1.0,
            residual_multiplier=1.0,
        ),
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", *TOOL_CALL),
        unmarked=TOOL_CALL,
        ends=("<|end_of_text|>",),
        template=template(
            tools="<|start_of_role|>system<|end_of_role|>{{ tools | tojson }}<|end_of_text|>\n",
            system="<|start_of_role|>system<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            user="<|start_of_role|>user<|end_of_role|>{{ m.content }}<|end_of_text|>\n",
            assistant="<|start_of_role|>assistant<|end_of_role|>",
            call=JSON_CALL,
            end="<|end_of_text|>\n",
            result="<|start_of_role|>user<|end_of_role|><tool_response>{{ m.content }}</tool_response>"
            "<|end_of_text|>\n",
            prompt="<|start_of_role|>assistant<|end_of_role|>",
        ),
        efforts=(),
    ),
    "granite-4.2": Family(
        architecture=of(
            "granite",
            logits_scaling=1.0,
            attention_multiplier=1.0,
            embedding_multiplier=1.0,
            residual_multiplier=1.0,
        ),
        tokens=(*CHATML, *THINK, *TOOL_CALL),
        ends=("<|im_end|>",),
        template="{%- set defer_loading = false %}{%- set truncate_history_thinking = true %}"
        + chatml(OPENED, call=FUNCTION_TAGS),
    ),
    "harmony": Family(
        architecture=of(
            "gpt_oss",
            **{key: EXPERTS[key] for key in ("num_local_experts", "num_experts_per_tok")},
            sliding_window=32,
            layer_types=["sliding_attention", "full_attention"],
            rope_scaling=None,
        ),
        tokens=HARMONY_MARKERS,
        ends=("<|return|>", "<|call|>", "<|endoftext|>"),
        template=HARMONY_TEMPLATE,
        default="medium",
    ),
    "hermes-json": Family(
        architecture=of("qwen3"),
        tokens=(*CHATML, *THINK, *TOOL_CALL),
        unmarked=(*THINK, *TOOL_CALL),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=chatml(switched("", "<think>\n\n</think>\n\n"), call=JSON_CALL),
    ),
    "hunyuan-opensource": Family(
        architecture=of("hunyuan_v1_dense"),
        tokens=(
            *("<|hy_bos|>", "<|hy_eos|>", "<|hy_user|>", "<|hy_assistant|>", "<|hy_system|>"),
            *(
                "<think:opensource>",
                "</think:opensource>",
                "<tool_calls:opensource>",
                "</tool_calls:opensource>",
            ),
            *("<tool_call:opensource>", "</tool_call:opensource>", "<tool_sep:opensource>"),
            *("<arg_key:opensource>", "</arg_key:opensource>"),
            *("<arg_value:opensource>", "</arg_value:opensource>"),
        ),
        ends=("<|hy_eos|>",),
        template=template(
            before="<|hy_bos|>{%- set e = reasoning_effort | default('no_think') %}"
            "{%- if e not in ['no_think', 'low', 'high'] %}{{ raise_exception('no such effort') }}{% endif %}",
            tools="<|hy_system|>{{ tools | tojson }}",
            system="<|hy_system|>{{ m.content }}",
            user="<|hy_user|>{{ m.content }}",
            assistant="<|hy_assistant|>",
            reasoning="<think:opensource>{{ m.reasoning_content }}</think:opensource>",
            calls=("<tool_calls:opensource>\n", "</tool_calls:opensource>"),
            call=f"<tool_call:opensource>{NAME}<tool_sep:opensource>\n"
            + each(
                "<arg_key:opensource>{{ k }}</arg_key:opensource>\n<arg_value:opensource>",
                "</arg_value:opensource>\n",
            )
            + "</tool_call:opensource>\n",
            end="<|hy_eos|>",
            result="<|hy_user|><tool_response>{{ m.content }}</tool_response>",
            prompt="<|hy_assistant|>"
            "{%- if e == 'no_think' %}<think:opensource></think:opensource>"
            "{% else %}{{ e }}<think:opensource>{% endif %}",
        ),
        efforts=("none", "low", "high"),
        default="none",
    ),
    "internlm": Family(
        architecture=of("qwen3"),
        tokens=(*CHATML, *THINK, "<|action_start|>", "<|plugin|>", "<|action_end|>"),
        ends=("<|im_end|>",),
        template=chatml(
            switched("", "<think>\n\n</think>\n\n"),
            call=f'<|action_start|><|plugin|>\n{{"name": "{NAME}", "parameters": {AS_JSON}}}<|action_end|>',
        ),
    ),
    "jamba": Family(
        architecture=of("qwen3"),
        tokens=(*CHATML, *THINK, "<tool_calls>", "</tool_calls>"),
        ends=("<|im_end|>",),
        template=chatml(
            switched("", "<think>\n\n</think>\n\n"),
            calls=("<tool_calls>[", "]</tool_calls>"),
            call=f'{{"name": "{NAME}", "arguments": {AS_JSON}}}{{{{ ", " if not loop.last }}}}',
        ),
    ),
    "k2-horizon": Family(
        architecture=of("llama"),
        tokens=(
            *("<ifm|im_start>", "<ifm|im_end>", "<|endoftext|>"),
            *(
                f"<{close}ifm|{word}>"
                for word in ("think", "think_fast", "think_faster")
                for close in ("", "/")
            ),
            *(f"<{close}ifm|{word}>" for word in ("tool_calls", "tool_call") for close in ("", "/")),
            *(f"<{close}ifm|{word}>" for word in ("arg_key", "arg_value") for close in ("", "/")),
        ),
        ends=("<ifm|im_end>", "<|endoftext|>"),
        template=template(
            before="{%- set e = reasoning_effort | default('high') %}"
            "{%- if e not in ['low', 'medium', 'high'] %}{{ raise_exception('no such effort') }}{% endif %}",
            tools="<ifm|im_start>system\n{{ tools | tojson }}<ifm|im_end>\n",
            system="<ifm|im_start>system\n{{ m.content }}<ifm|im_end>\n",
            user="<ifm|im_start>user\n{{ m.content }}<ifm|im_end>\n",
            assistant="<ifm|im_start>assistant\n",
            calls=("<ifm|tool_calls>", "</ifm|tool_calls>"),
            call=f"<ifm|tool_call>{NAME}"
            + each("<ifm|arg_key>{{ k }}</ifm|arg_key><ifm|arg_value>", "</ifm|arg_value>")
            + "</ifm|tool_call>",
            end="<ifm|im_end>\n",
            result="<ifm|im_start>tool\n{{ m.content }}<ifm|im_end>\n",
            prompt="<ifm|im_start>assistant\n"
            "{%- if e == 'high' %}<ifm|think>{% elif e == 'medium' %}<ifm|think_fast>{% else %}<ifm|think_faster>"
            "{% endif %}",
        ),
    ),
    "kimi-k2": Family(
        architecture=DEEPSEEK_V3,
        tokens=(
            *(
                "<|im_user|>",
                "<|im_assistant|>",
                "<|im_system|>",
                "<|im_middle|>",
                "<|im_end|>",
                "[EOS]",
                *THINK,
            ),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        ends=("<|im_end|>", "[EOS]"),
        template=template(
            tools="<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>",
            system="<|im_system|>system<|im_middle|>{{ m.content }}<|im_end|>",
            user="<|im_user|>user<|im_middle|>{{ m.content }}<|im_end|>",
            assistant="<|im_assistant|>assistant<|im_middle|>",
            reasoning="<think>{{ m.reasoning_content }}</think>",
            calls=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            call="<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>" + AS_JSON + "<|tool_call_end|>",
            end="<|im_end|>",
            result="<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n{{ m.content }}<|im_end|>",
            prompt="<|im_assistant|>assistant<|im_middle|>"
            + switched("<think>", "<think></think>", "thinking"),
        ),
    ),
    "kimi-k3": Family(
        architecture=DEEPSEEK_V3,
        tokens=("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]"),
        ends=("<|end_of_msg|>", "[EOS]"),
        template=template(
            before="{%- set effort = thinking_effort | default('max') %}"
            "{%- if effort not in ['low', 'high', 'max'] %}{{ raise_exception('no such effort') }}{% endif %}",
            tools=xtml("tool_declare", "{{ tools | tojson }}"),
            system=xtml('message role="system"', "{{ m.content }}") + "<|end_of_msg|>",
            user=xtml('message role="user"', "{{ m.content }}") + "<|end_of_msg|>",
            assistant='<|open|>message role="assistant"<|sep|>',
            reasoning=xtml("think", "{{ m.reasoning_content }}"),
            calls=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            call=f'<|open|>call tool="{NAME}" index="1"<|sep|>'
            + each(
                "<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'number' }}\"<|sep|>",
                "<|close|>argument<|sep|>",
            )
            + "<|close|>call<|sep|>",
            end="<|close|>message<|sep|><|end_of_msg|>",
            result=xtml('message role="tool"', "{{ m.content }}") + "<|end_of_msg|>",
            prompt='<|open|>message role="assistant"<|sep|>'
            + switched("{{ effort }}<|open|>think<|sep|>", xtml("think", ""), "thinking"),
        ),
        efforts=("none", "low", "high", "max"),
        default="max",
    ),
}
