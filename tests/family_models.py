"""A tiny model of every family: its mlx-lm architecture with random weights, its control tokens, its template's layout.

The templates are written for these tests: each has the family's layout (headers, reasoning, calls, results, what a
prompt opens) and its effort switches, and none of its words. `REAL_TEMPLATES` names the published ones that are tried
with the same models where they are there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_backend.engine.scripted import HARMONY_MARKERS, HARMONY_TEMPLATE

if TYPE_CHECKING:
    from pathlib import Path

THINK = ("<think>", "</think>")
DIAL = ("none", "low", "medium", "high")
NAME, ARGUMENTS = "{{ c.function.name }}", "c.function.arguments"
AS_JSON = f"{{{{ {ARGUMENTS} | tojson }}}}"
AS_TEXT = "{{ v if v is string else v | tojson }}"
TOOL_CALL = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family's tiny model is made of. `efforts` are the levels that /v1/models has to list, "" if none."""

    architecture: dict[str, Any]
    tokens: tuple[str, ...]
    ends: tuple[str, ...]
    template: str
    efforts: tuple[str, ...] = DIAL
    default: str = "high"
    unmarked: tuple[str, ...] = field(default=())
    """Control tokens that the vocabulary does not mark as special, as many models do with <think>."""


def each(before: str, after: str) -> str:
    """Write every argument of a call between these."""
    return f"{{% for k, v in {ARGUMENTS}.items() %}}{before}{AS_TEXT}{after}{{% endfor %}}"


def template(
    *,
    user: str,
    assistant: str,
    prompt: str,
    call: str = "",
    calls: tuple[str, str] = ("", ""),
    system: str = "",
    result: str = "",
    tools: str = "{{ tools | tojson }}",
    before: str = "",
    reasoning: str = "",
    end: str = "",
) -> str:
    """Put a template together. `assistant` is its header, `end` what ends its turn."""
    calls_of = f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}"
    reason = f"{{%- if m.reasoning_content %}}{reasoning}{{%- endif %}}" if reasoning else ""
    text = (
        before
        + (f"{{%- if tools %}}{tools}{{% endif %}}" if tools else "")
        + "{%- for m in messages %}"
        + (f"{{%- if m.role == 'system' %}}{system}{{% endif %}}" if system else "")
        + f"{{%- if m.role == 'user' %}}{user}{{% endif %}}"
        + "{%- if m.role == 'assistant' %}"
        + assistant
        + reason
        + "{{ m.content or '' }}"
        + (f"{{%- if m.tool_calls %}}{calls[0]}{calls_of}{calls[1]}{{% endif %}}" if call else "")
        + end
        + "{% endif %}"
        + (f"{{%- if m.role == 'tool' %}}{result}{{% endif %}}" if result else "")
        + "{%- endfor %}"
    )
    return text + f"{{%- if add_generation_prompt %}}{prompt}{{% endif %}}"


def chatml(prompt: str = "", **parts: Any) -> str:
    """A template in ChatML, as of Qwen and many others."""
    headed = {
        role: f"<|im_start|>{role}\n{{{{ m.content }}}}<|im_end|>\n" for role in ("user", "system", "tool")
    }
    return template(
        **{
            "user": headed["user"],
            "system": headed["system"],
            "result": "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n",
            "assistant": "<|im_start|>assistant\n",
            "end": "<|im_end|>\n",
            "prompt": "<|im_start|>assistant\n" + prompt,
            "reasoning": "<think>\n{{ m.reasoning_content }}\n</think>\n\n",
            "tools": "<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n",
        }
        | parts
    )


def switched(on: str, off: str, name: str = "enable_thinking") -> str:
    """Open what the switch says; it is on by default."""
    return f"{{%- if {name} is defined and not {name} %}}{off}{{% else %}}{on}{{% endif %}}"


CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
OPENED = switched("<think>\n", "<think>\n\n</think>\n\n")
FUNCTION_TAGS = (
    f"<tool_call>\n<function={NAME}>\n"
    + each("<parameter={{ k }}>\n", "\n</parameter>\n")
    + "</function>\n</tool_call>"
)
JSON_CALL = f'<tool_call>\n{{"name": "{NAME}", "arguments": {AS_JSON}}}\n</tool_call>'
PAIRS = each("<arg_key>{{ k }}</arg_key>\n<arg_value>", "</arg_value>\n")
PYTHON = (
    f"{NAME}({{% for k, v in {ARGUMENTS}.items() %}}"
    "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
)

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 2,
    "num_local_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


def of(model_type: str, **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **more}


DEEPSEEK_V3 = of("deepseek_v3", **EXPERTS, **LATENT)
DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *THINK),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
deepseek: dict[str, Any] = {
    "before": "<｜begin▁of▁sentence｜>",
    "system": "{{ m.content }}",
    "user": "<｜User｜>{{ m.content }}",
    "assistant": "<｜Assistant｜>",
    "end": "<｜end▁of▁sentence｜>",
    "calls": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "result": "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>",
}
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
gemma: dict[str, Any] = {
    "before": "<bos>",
    "user": "<start_of_turn>user\n{{ m.content }}<end_of_turn>\n",
    "assistant": "<start_of_turn>model\n",
    "end": "<end_of_turn>\n",
    "prompt": "<start_of_turn>model\n",
}
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")


def llama_header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


llama: dict[str, Any] = {
    "before": "<|begin_of_text|>",
    "system": llama_header("system") + "{{ m.content }}<|eot_id|>",
    "user": llama_header("user") + "{{ m.content }}<|eot_id|>",
    "assistant": llama_header("assistant"),
    "end": "<|eot_id|>",
    "result": llama_header("ipython") + "{{ m.content | tojson }}<|eot_id|>",
    "prompt": llama_header("assistant"),
}


def xtml(word: str, text: str) -> str:
    return f"<|open|>{word}<|sep|>{text}<|close|>{word.partition(' ')[0]}<|sep|>"


GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"),
    *(*THINK, *TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
NAMESPACE = "]<]minimax[>["
DSML = "｜DSML｜"

FAMILIES: dict[str, Family] = {
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
    "minicpm5": Family(
        architecture=of("llama"),
        tokens=(*CHATML, *THINK),
        ends=("<|im_end|>",),
        template=chatml(
            OPENED,
            call=f'<function name="{NAME}">' + each('<param name="{{ k }}">', "</param>") + "</function>",
        ),
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
    "hermes-json": Family(
        architecture=of("qwen3"),
        tokens=(*CHATML, *THINK, *TOOL_CALL),
        unmarked=(*THINK, *TOOL_CALL),
        ends=("<|im_end|>", "<|endoftext|>"),
        template=chatml(switched("", "<think>\n\n</think>\n\n"), call=JSON_CALL),
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
    "gemma3-tool_code": Family(
        architecture=of("gemma3_text", sliding_window=32, sliding_window_pattern=2, query_pre_attn_scalar=16),
        tokens=GEMMA,
        ends=("<end_of_turn>", "<eos>"),
        template=template(**gemma, tools=""),
        efforts=(),
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
}
"""By the name of the dialect that has to be recognised."""


def _version(of: str, *words: tuple[str, str], **changes: Any) -> Family:
    """Another version of a family, whose template and tokens have some words in place of others."""
    family = FAMILIES[of]
    text, tokens = family.template, list(family.tokens)
    for old, other in words:
        assert old in text, old
        text, tokens = text.replace(old, other), [token.replace(old, other) for token in tokens]
    return replace(family, **{"template": text, "tokens": tuple(tokens)} | changes)


_MISTRAL_CALL = f"[TOOL_CALLS]{NAME}[ARGS]{AS_JSON}"
_MISTRAL_LIST = (
    "{%- if loop.first %}[TOOL_CALLS][{% endif %}"
    f'{{"name": "{NAME}", "arguments": {AS_JSON}}}{{{{ "]" if loop.last else ", " }}}}'
)
FAMILIES |= {
    "dsml-v4": _version("dsml", ("function_calls>", "tool_calls>")),
    "dsml-v4.1": _version(
        "dsml",
        ("function_calls>", " calls>"),
        (f"{DSML}invoke", f"{DSML} invoke"),
        (f"{DSML}param", f"{DSML} param"),
    ),
    "mistral-ids": _version(
        "mistral",
        (_MISTRAL_CALL, f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{AS_JSON}"),
        tokens=(*FAMILIES["mistral"].tokens, "[CALL_ID]"),
    ),
    "mistral-list": _version(
        "mistral",
        (_MISTRAL_CALL, _MISTRAL_LIST),
        tokens=tuple(token for token in FAMILIES["mistral"].tokens if token != "[ARGS]"),
    ),
    "hunyuan": _version("hunyuan-opensource", (":opensource>", ">")),
    "hunyuan-a13b": replace(
        FAMILIES["hunyuan-opensource"],
        tokens=(
            *("<|hy_bos|>", "<|hy_eos|>", "<|hy_user|>", "<|hy_assistant|>", "<|hy_system|>", *THINK),
            *("<answer>", "</answer>", "<tool_calls>", "</tool_calls>"),
        ),
        template=template(
            before="<|hy_bos|>",
            tools="<|hy_system|>{{ tools | tojson }}",
            system="<|hy_system|>{{ m.content }}",
            user="<|hy_user|>{{ m.content }}",
            assistant="<|hy_assistant|>",
            reasoning="<think>\n{{ m.reasoning_content }}\n</think>\n",
            calls=("<tool_calls>[", "]</tool_calls>"),
            call=f'{{"name": "{NAME}", "arguments": {AS_JSON}}}{{{{ ", " if not loop.last }}}}',
            end="<|hy_eos|>",
            result="<|hy_user|><tool_response>{{ m.content }}</tool_response>",
            prompt="<|hy_assistant|>" + switched("", "<think>\n\n</think>\n"),
        ).replace(
            "{{ m.content or '' }}", "{% if m.content %}<answer>\n{{ m.content }}\n</answer>{% endif %}"
        ),
        efforts=DIAL,
        default="high",
    ),
}

REAL_TEMPLATES = {
    "ByteDance-Seed-OSS": "seed-oss",
    "Cohere2MoE": "cohere",
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "HuggingFaceTB-SmolLM3-3B": "hermes-json",
    "Kimi-K2-Instruct": "kimi-k2",
    "MiniMax-M2": "minimax-m2",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron",
    "Qwen-Qwen3-0.6B": "hermes-json",
    "Qwen3-Coder": "qwen-xml",
    "Qwen3.5-4B": "qwen-xml",
    "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "dsml",
    "google-gemma-4-31B-it": "gemma4",
    "ibm-granite-granite-4.0": "granite",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3-json",
}
"""Files of `data/templates`, each with the family whose tiny model is tried with it."""


def write_family(
    folder: Path,
    name: str,
    source: str | None = None,
    *,
    tokens: tuple[str, ...] = (),
    ends: tuple[str, ...] = (),
) -> Path:
    """Write the folder of a family's tiny model; the other arguments replace what the family has."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    family = FAMILIES[name]
    family = replace(family, tokens=tokens or family.tokens, ends=ends or family.ends)
    folder.mkdir(parents=True)
    tokenizer = _byte_level(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.ends[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(source or family.template, encoding="utf-8")
    config = {
        **SMALL,
        **family.architecture,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": [tokenizer.token_to_id(end) for end in family.ends],
    }
    (folder / "config.json").write_text(json.dumps(config))
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    shapes = tree_flatten(model.parameters())
    keys = mx.random.split(mx.random.key(5), len(shapes))
    weights = {
        key: mx.random.normal(value.shape, key=keys[at]) * 0.3 for at, (key, value) in enumerate(shapes)
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def _byte_level(family: Family) -> Tokenizer:
    """Make a vocabulary of single bytes and the family's control tokens: the smallest with which every text is said."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    for token in family.tokens:
        tokenizer.add_tokens([AddedToken(token, special=token not in family.unmarked, normalized=False)])
    return tokenizer
