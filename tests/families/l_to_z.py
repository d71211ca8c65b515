"""The families whose names begin with l to z: architecture, control tokens, template and effort levels of each."""

from __future__ import annotations

from families.layouts import (
    AS_JSON,
    CHATML,
    DEEPSEEK_V3,
    EXPERTS,
    FUNCTION_TAGS,
    LLAMA,
    NAME,
    NAMESPACE,
    OPENED,
    PAIRS,
    PYTHON,
    THINK,
    TOOL_CALL,
    Family,
    chatml,
    each,
    llama,
    llama_header,
    of,
    switched,
    template,
)

L_TO_Z: dict[str, Family] = {
    "laguna": Family(
        architecture=of(
            "laguna",
            sliding_window=32,
            rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
            shared_expert_intermediate_size=32,
            **{key: EXPERTS[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
        ),
        tokens=(*CHATML, *THINK, *TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=chatml(
            "{%- if enable_thinking %}<think>{% else %}</think>{% endif %}",
            tools="<|im_start|>system\nAll available function signatures are listed below:\n{{ tools | tojson }}"
            "<|im_end|>\n",
            call=f"<tool_call>{NAME}\n{PAIRS}</tool_call>",
        ),
        default="none",
    ),
    "lfm2": Family(
        architecture=of(
            "lfm2",
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=32,
            block_ff_dim=32,
            block_multiple_of=16,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            layer_types=["conv", "full_attention"],
        ),
        tokens=(
            *("<|startoftext|>", *CHATML, *THINK, "<|tool_call_start|>", "<|tool_call_end|>"),
            *("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
        ),
        ends=("<|im_end|>",),
        template=chatml(
            before="<|startoftext|>",
            tools="<|im_start|>system\n<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|><|im_end|>\n",
            reasoning="",
            calls=("<|tool_call_start|>[", "]<|tool_call_end|>"),
            call=PYTHON,
            result="<|im_start|>tool\n{{ m.content }}<|im_end|>\n",
        )
        + "{#- <think> -#}",
    ),
    "ling": Family(
        architecture=of("bailing_moe", **EXPERTS | {"num_experts": 4, "num_experts_per_tok": 2}),
        tokens=("<|startoftext|>", "<role>", "</role>", "<|role_end|>", "<|endoftext|>", *THINK, *TOOL_CALL),
        unmarked=(*THINK, *TOOL_CALL),
        ends=("<|role_end|>", "<|endoftext|>"),
        template=template(
            tools="<role>SYSTEM</role>{{ tools | tojson }}<|role_end|>",
            system="<role>SYSTEM</role>{{ m.content }}<|role_end|>",
            user="<role>HUMAN</role>{{ m.content }}<|role_end|>",
            assistant="<role>ASSISTANT</role>",
            reasoning="<think>{{ m.reasoning_content }}</think>",
            call=f"<tool_call>{NAME}{PAIRS}</tool_call>",
            end="<|role_end|>",
            result="<role>OBSERVATION</role><tool_response>{{ m.content }}</tool_response><|role_end|>",
            prompt="<role>ASSISTANT</role>" + switched("<think>", "<think></think>"),
        ),
    ),
    "llama-pythonic": Family(
        architecture=of("llama"),
        tokens=(
            *("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>"),
            *("<|python_start|>", "<|python_end|>"),
        ),
        ends=("<|eot|>", "<|eom|>"),
        template=template(
            before="<|begin_of_text|>",
            tools="<|header_start|>system<|header_end|>\n\n{{ tools | tojson }}<|eot|>",
            system="<|header_start|>system<|header_end|>\n\n{{ m.content }}<|eot|>",
            user="<|header_start|>user<|header_end|>\n\n{{ m.content }}<|eot|>",
            assistant="<|header_start|>assistant<|header_end|>\n\n",
            calls=("<|python_start|>[", "]<|python_end|>"),
            call=PYTHON + "{{ ', ' if not loop.last }}",
            end="<|eot|>",
            result="<|header_start|>ipython<|header_end|>\n\n{{ m.content | tojson }}<|eot|>",
            prompt="<|header_start|>assistant<|header_end|>\n\n",
        ),
        efforts=(),
    ),
    "llama3-json": Family(
        architecture=of("llama"),
        tokens=(*LLAMA, "<|python_tag|>"),
        ends=("<|eot_id|>", "<|eom_id|>"),
        template=template(
            **llama,
            tools=llama_header("system") + "{{ tools | tojson }}<|python_tag|><|eot_id|>",
            call=f'{{"name": "{NAME}", "parameters": {AS_JSON}}}',
        ),
        efforts=(),
    ),
    "longcat": Family(
        architecture=DEEPSEEK_V3,
        tokens=(
            *("<longcat_s>", "</longcat_s>", "<longcat_user>", "<longcat_assistant>", "<longcat_system>"),
            *("<longcat_think>", "</longcat_think>", "<longcat_tool_call>", "</longcat_tool_call>"),
            *("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
        ),
        ends=("</longcat_s>",),
        template=template(
            tools="<longcat_system>{{ tools | tojson }}",
            system="<longcat_system>{{ m.content }}",
            user="<longcat_user>{{ m.content }}",
            assistant="<longcat_assistant>",
            reasoning="<longcat_think>{{ m.reasoning_content }}</longcat_think>\n",
            call=f"<longcat_tool_call>{NAME}\n"
            + each(
                "<longcat_arg_key>{{ k }}</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"
            )
            + "</longcat_tool_call>",
            end="</longcat_s>",
            result="<longcat_user><longcat_tool_response>{{ m.content }}</longcat_tool_response>",
            prompt="<longcat_assistant>"
            + switched("<longcat_think>\n", "<longcat_think>\n\n</longcat_think>\n"),
        ),
    ),
    "mimo": Family(
        architecture=of("mimo", num_nextn_predict_layers=0),
        tokens=(*CHATML, *THINK, *TOOL_CALL),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=chatml(
            OPENED,
            before="<|im_start|>system\nYou are MiMo.<|im_end|>\n",
            call=f"<tool_call>\n<function={NAME}>\n"
            + each("<parameter={{ k }}>", "</parameter>\n")
            + "</function>\n</tool_call>",
        ),
    ),
    "minicpm5": Family(
        architecture=of("llama"),
        tokens=(*CHATML, *THINK),
        ends=("<|im_end|>",),
        template=chatml(
            OPENED,
            call=f'<function name="{NAME}">' + each('<param name="{{ k }}">', "</param>") + "</function>",
        ),
    ),
    "minimax-m2": Family(
        architecture=of(
            "minimax", shared_intermediate_size=32, rotary_dim=16, num_local_experts=2, num_experts_per_tok=1
        ),
        tokens=("]~b]", "[e~[", *THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        unmarked=(*THINK, "<minimax:tool_call>", "</minimax:tool_call>"),
        ends=("[e~[",),
        template=template(
            tools="]~b]system\n{{ tools | tojson }}[e~[\n",
            system="]~b]system\n{{ m.content }}[e~[\n",
            user="]~b]user\n{{ m.content }}[e~[\n",
            assistant="]~b]ai\n",
            reasoning="<think>\n{{ m.reasoning_content }}\n</think>\n\n",
            calls=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
            call=f'<invoke name="{NAME}">\n'
            + each('<parameter name="{{ k }}">', "</parameter>\n")
            + "</invoke>\n",
            end="[e~[\n",
            result="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
            prompt="]~b]ai\n<think>\n",
        ),
    ),
    "minimax-m3": Family(
        architecture=of(
            "minimax", shared_intermediate_size=32, rotary_dim=16, num_local_experts=2, num_experts_per_tok=1
        ),
        tokens=("]~b]", "[e~[", "<mm:think>", "</mm:think>", NAMESPACE),
        ends=("[e~[",),
        template=template(
            before="{%- set mode = thinking_mode | default('enabled') %}",
            tools="]~b]system\n{{ tools | tojson }}[e~[\n",
            system="]~b]system\n{{ m.content }}[e~[\n",
            user="]~b]user\n{{ m.content }}[e~[\n",
            assistant="]~b]ai\n",
            reasoning="<mm:think>{{ m.reasoning_content }}</mm:think>",
            calls=(f"\n{NAMESPACE}<tool_call>\n", f"{NAMESPACE}</tool_call>"),
            call=f'{NAMESPACE}<invoke name="{NAME}">'
            + each(f"{NAMESPACE}<{{{{ k }}}}>", f"{NAMESPACE}</{{{{ k }}}}>")
            + f"{NAMESPACE}</invoke>\n",
            end="[e~[\n",
            result="]~b]tool\n<response>{{ m.content }}</response>[e~[\n",
            prompt="]~b]ai\n"
            "{%- if mode == 'enabled' %}<mm:think>{% elif mode == 'disabled' %}</mm:think>{% endif %}",
        ),
    ),
    "mistral": Family(
        architecture=of(
            "ministral3",
            rope_parameters={
                "rope_theta": 10_000.0,
                "rope_type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 4096,
            },
        ),
        tokens=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
            *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
            *("[THINK]", "[/THINK]"),
        ),
        ends=("</s>",),
        template=template(
            before="<s>{%- set e = reasoning_effort | default('none') %}"
            "{%- if e not in ['none', 'high'] %}{{ raise_exception('no such effort') }}{% endif %}"
            "[SYSTEM_PROMPT]reasoning: {{ e }}[/SYSTEM_PROMPT]",
            tools="[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]",
            system="[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]",
            user="[INST]{{ m.content }}[/INST]",
            assistant="",
            reasoning="[THINK]{{ m.reasoning_content }}[/THINK]",
            call=f"[TOOL_CALLS]{NAME}[ARGS]{AS_JSON}",
            end="</s>",
            result="[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]",
            prompt="",
        ),
        efforts=("none", "high"),
        default="none",
    ),
    "nemotron": Family(
        architecture=of(
            "nemotron_h",
            mamba_num_heads=2,
            mamba_head_dim=16,
            mamba_proj_bias=False,
            ssm_state_size=8,
            conv_kernel=4,
            n_groups=1,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            hybrid_override_pattern=["M", "*"],
        ),
        tokens=(*CHATML, *THINK, *TOOL_CALL),
        ends=("<|im_end|>", "<|endoftext|>"),
        template="{%- set truncate_history_thinking = truncate_history_thinking | default(true) %}"
        + chatml(
            OPENED,
            call=FUNCTION_TAGS,
            user="<|im_start|>user\n{{ m.content }}{%- if low_effort %}{reasoning effort: low}{% endif %}<|im_end|>\n",
        ),
        efforts=("none", "low", "high"),
    ),
    "olmo": Family(
        architecture=of("olmo3", sliding_window=32, layer_types=["sliding_attention", "full_attention"]),
        tokens=CHATML,
        ends=("<|im_end|>", "<|endoftext|>"),
        template=chatml(
            "<think>",
            calls=("<function_calls>", "</function_calls>"),
            call=PYTHON + "{{ '\n' if not loop.last }}",
            result="<|im_start|>environment\n{{ m.content }}<|im_end|>\n",
        ),
    ),
    "phi-4-mini": Family(
        architecture=of("phi3"),
        tokens=(
            *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>", "<|tool|>", "<|/tool|>"),
            *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>"),
        ),
        ends=("<|end|>", "<|endoftext|>"),
        template=template(
            tools="<|system|><|tool|>{{ tools | tojson }}<|/tool|><|end|>",
            system="<|system|>{{ m.content }}<|end|>",
            user="<|user|>{{ m.content }}<|end|>",
            assistant="<|assistant|>",
            calls=("<|tool_call|>[", "]<|/tool_call|>"),
            call=f'{{"name": "{NAME}", "arguments": {AS_JSON}}}{{{{ ", " if not loop.last }}}}',
            end="<|end|>",
            result="<|tool_response|>{{ m.content }}<|end|>",
            prompt="<|assistant|>",
        ),
    ),
    "plain": Family(
        architecture=of("llama"),
        tokens=("<s>", "</s>"),
        ends=("</s>",),
        template=template(
            user="USER: {{ m.content }}\n",
            assistant="ASSISTANT: ",
            end="</s>",
            prompt="ASSISTANT: ",
            tools="",
        ),
        efforts=(),
    ),
    "qwen-xml": Family(
        architecture=of(
            "qwen3_5",
            linear_num_value_heads=2,
            linear_num_key_heads=1,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            full_attention_interval=2,
        ),
        tokens=(*CHATML, *THINK, *TOOL_CALL),
        unmarked=(*THINK, *TOOL_CALL),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=chatml(
            OPENED,
            before="{%- set e = reasoning_effort if reasoning_effort is defined else 'xhigh' %}"
            "{%- if e not in ['low', 'medium', 'xhigh'] %}{{ raise_exception('Unexpected ' ~ e) }}{% endif %}"
            "{%- if e != 'medium' %}<|im_start|>system\nReason {{ e }}.<|im_end|>\n{% endif %}",
            call=FUNCTION_TAGS,
        ),
        efforts=("none", "low", "medium", "xhigh"),
        default="xhigh",
    ),
    "seed-oss": Family(
        architecture=of("seed_oss"),
        tokens=(
            "<seed:bos>",
            "<seed:eos>",
            "<seed:think>",
            "</seed:think>",
            "<seed:tool_call>",
            "</seed:tool_call>",
        ),
        ends=("<seed:eos>",),
        template=template(
            before="{%- if thinking_budget is defined and thinking_budget != -1 %}"
            "<seed:bos>system\nbudget {{ thinking_budget }}<seed:eos>{% endif %}",
            tools="<seed:bos>system\n{{ tools | tojson }}<seed:eos>",
            system="<seed:bos>system\n{{ m.content }}<seed:eos>",
            user="<seed:bos>user\n{{ m.content }}<seed:eos>",
            assistant="<seed:bos>assistant\n",
            reasoning="<seed:think>{{ m.reasoning_content }}</seed:think>",
            call=f"\n<seed:tool_call>\n<function={NAME}>\n"
            + each("<parameter={{ k }}>", "</parameter>\n")
            + "</function>\n</seed:tool_call>",
            end="<seed:eos>",
            result="<seed:bos>tool\n{{ m.content }}<seed:eos>",
            prompt="<seed:bos>assistant\n",
        ),
    ),
    "solar-open": Family(
        architecture=of("solar_open", **EXPERTS, rope_scaling=None, partial_rotary_factor=1.0),
        tokens=(
            *("<|begin|>", "<|end|>", "<|flush|>", "<|calls|>", "<|think|>", "<|content|>", "<|tool_calls|>"),
            *("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
        ),
        ends=("<|flush|>",),
        template=template(
            tools="<|begin|>system<|content|>{{ tools | tojson }}<|end|>",
            system="<|begin|>system<|content|>{{ m.content }}<|end|>",
            user="<|begin|>user<|content|>{{ m.content }}<|end|>",
            reasoning="<|begin|>assistant<|think|>{{ m.reasoning_content }}<|end|>",
            assistant="",
            calls=("<|begin|>assistant<|tool_calls|>", "<|calls|>"),
            call="<|tool_call:begin|>{{ c.id }}<|tool_call:name|>"
            f"{NAME}<|tool_call:args|>{AS_JSON}<|tool_call:end|>",
            result="<|begin|>tool<|content|>{{ m.content }}<|end|>",
            prompt="<|begin|>assistant",
        ).replace("{{ m.content or '' }}", "<|begin|>assistant<|content|>{{ m.content or '' }}<|end|>"),
    ),
    "step": Family(
        architecture=of(
            "step3p5",
            num_attention_groups=1,
            sliding_window=32,
            moe_num_experts=2,
            moe_top_k=1,
            moe_layers_enum="",
        ),
        tokens=(*CHATML, *THINK, *TOOL_CALL),
        ends=("<|im_end|>",),
        template=chatml(
            "<think>\n",
            before="{%- if reasoning_effort %}"
            "<|im_start|>system\nReasoning: {{ reasoning_effort }}<|im_end|>\n{% endif %}",
            call=FUNCTION_TAGS,
            result="<|im_start|>tool_response\n{{ m.content }}<|im_end|>\n",
        ),
        default="medium",
    ),
}
