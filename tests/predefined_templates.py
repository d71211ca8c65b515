"""The predefined models' chat templates and architectures: each family's layout in our own words, and tiny networks.

Only what matters to the server is there: how a turn is framed, which arguments decide on reasoning, how calls, results
and earlier reasoning are written. The configurations have the fields of the published ones, with small sizes.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_models import byte_level, write_random, write_tokenizer

from mlx_backend.demo import MODEL_PATH
from mlx_backend.models.files import read_json

_QWEN_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
_QWEN = (
    "@EFFORT@"
    "{% if tools %}<|im_start|>system\nYou may call:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Write <tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>"
    "{% if messages[0].role == 'system' %}\n{{ messages[0].content }}{% endif %}<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% set asked = namespace(at=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% if asked.at < 0 %}{{ raise_exception('There is no question.') }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('The system message comes first.') }}"
    "{% elif m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content and @KEPT@ %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}" + _QWEN_CALLS + "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}@WORDS@<think>\n{% endif %}{% endif %}"
)


def _qwen(*, kept: str = "loop.index0 > asked.at", effort: str = "", words: str = "") -> str:
    return _QWEN.replace("@KEPT@", f"({kept})").replace("@EFFORT@", effort).replace("@WORDS@", words)


QWEN_35 = _qwen()
QWEN_36 = _qwen(kept="loop.index0 > asked.at or (preserve_thinking is defined and preserve_thinking)")
QWEN_38 = _qwen(
    kept="loop.index0 > asked.at or preserve_thinking is undefined or preserve_thinking",
    effort=(
        "{% set effort = reasoning_effort if reasoning_effort is defined else 'xhigh' %}"
        "{% if effort not in ['low', 'medium', 'xhigh'] %}"
        "{{ raise_exception('Unexpected reasoning effort ' ~ effort) }}{% endif %}"
    ),
    words="{% if effort == 'low' %}(think briefly)\n{% elif effort == 'xhigh' %}(think thoroughly)\n{% endif %}",
)
GEMMA_4 = (
    '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}{% endmacro %}'
    "{{ bos_token }}{% set on = enable_thinking | default(false) %}"
    "{% if on or tools or messages[0].role == 'system' %}<|turn>system\n{% if on %}<|think|>\n{% endif %}"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}{{ tool.function.parameters | tojson }}"
    "<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% set asked = namespace(at=-1, goes_on=false) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set asked.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}<|turn>user\n{{ m.content }}<turn|>\n{% set asked.goes_on = false %}"
    "{% elif m.role == 'tool' %}<|tool_response>response:{{ m.name | default('f') }}{{ '{value:' }}"
    "{{ value(m.content) }}{{ '}' }}<tool_response|>{% set asked.goes_on = true %}"
    "{% elif m.role == 'assistant' %}{% if not asked.goes_on %}<|turn>model\n{% endif %}"
    "{% if m.reasoning_content and m.tool_calls and loop.index0 > asked.at %}"
    "<|channel>thought\n{{ m.reasoning_content }}\n<channel|>{% endif %}"
    "{% for call in m.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{{ '{' }}"
    "{% for name, v in call.function.arguments | items %}"
    "{{ name }}:{{ value(v) }}{% if not loop.last %},{% endif %}{% endfor %}"
    "}<tool_call|>{% endfor %}{{ m.content }}"
    "{% if not m.tool_calls %}<turn|>\n{% set asked.goes_on = false %}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not asked.goes_on %}<|turn>model\n"
    "{% if not on %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
}
_WINDOWS = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN_TEXT = {
    **_SMALL,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262_144,
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
_GEMMA_TEXT = {
    **_SMALL,
    **_WINDOWS,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "use_double_wide_mlp": False,
    "max_position_embeddings": 262_144,
}
_QWEN_MARKERS = (
    *("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
_GEMMA_MARKERS = (
    *("<turn|>", "<|turn>", "<eos>", "<bos>", "<|channel>", "<channel|>", "<|think|>", '<|"|>'),
    *("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"),
)
_HARMONY_MARKERS = (
    *("<|return|>", "<|call|>", "<|endoftext|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredefinedFamily:
    """What a published model of the list is, in small. The first of its markers ends a turn."""

    template: str
    config: Mapping[str, Any]
    markers: Sequence[str]
    real_template: str
    """Its name in the folder of real templates."""

    def write(self, folder: Path) -> Path:
        """Write a model of this family, with random weights."""
        write_random(folder, {**deepcopy(dict(self.config)), "eos_token_id": [0]}, seed=1)
        write_tokenizer(folder, byte_level(self.markers), eos_token=self.markers[0])
        (folder / "chat_template.jinja").write_text(self.template)
        return folder


class _DemoFamily(PredefinedFamily):
    """The demonstration model, with the context of the large ones."""

    def write(self, folder: Path) -> Path:
        """Copy it."""
        shutil.copytree(MODEL_PATH, folder, dirs_exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def _qwen_family(template: str, real_template: str = "") -> PredefinedFamily:
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **_QWEN_TEXT}}
    return PredefinedFamily(
        template=template, config=config, markers=_QWEN_MARKERS, real_template=real_template
    )


_QWEN_35_FAMILY = _qwen_family(QWEN_35, "templates/Qwen3.5-4B.jinja")
_GPT_OSS_FAMILY = _DemoFamily(
    template=(MODEL_PATH / "chat_template.jinja").read_text(encoding="utf-8"),
    config={**read_json(MODEL_PATH / "config.json"), "max_position_embeddings": 131_072},
    markers=_HARMONY_MARKERS,
    real_template="gpt-oss.chat_template.jinja",
)
FAMILIES: Mapping[str, PredefinedFamily] = {
    "default": _GPT_OSS_FAMILY,
    "mlx-community/Qwen3.5-4B-MLX-4bit": _QWEN_35_FAMILY,
    "mlx-community/Qwen3.5-9B-4bit": _QWEN_35_FAMILY,
    "mlx-community/gpt-oss-20b-MXFP4-Q8": _GPT_OSS_FAMILY,
    "mlx-community/gemma-4-26b-a4b-it-4bit": PredefinedFamily(
        template=GEMMA_4,
        config={"model_type": "gemma4", "text_config": {"model_type": "gemma4_text", **_GEMMA_TEXT}},
        markers=_GEMMA_MARKERS,
        real_template="templates/google-gemma-4-31B-it.jinja",
    ),
    "mlx-community/Qwen3.8-27B-4bit": _qwen_family(QWEN_38),
    "mlx-community/Qwen3.6-35B-A3B-4bit": PredefinedFamily(
        template=QWEN_36,
        config={
            "model_type": "qwen3_5_moe",
            "text_config": {"model_type": "qwen3_5_moe_text", **_QWEN_TEXT, **_QWEN_EXPERTS},
        },
        markers=_QWEN_MARKERS,
        real_template="",
    ),
    "mlx-community/gpt-oss-120b-MXFP4-Q8": _GPT_OSS_FAMILY,
}
