"""What the tiny models are made of: small architectures, and the pieces that chat templates have in common.

The pieces are written for these tests: they have a family's layout and none of its words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
