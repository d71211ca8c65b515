"""A tiny model of every family: its mlx-lm architecture with random weights, its control tokens, its template's layout.

`REAL_TEMPLATES` names the published templates that are tried with the same models where they are there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from families.a_to_k import A_TO_K
from families.l_to_z import L_TO_Z
from families.layouts import AS_JSON, DIAL, DSML, NAME, SMALL, THINK, Family, switched, template

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = A_TO_K | L_TO_Z
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
