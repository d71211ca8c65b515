"""A model's family is told by what its chat template teaches, and by its control tokens where that tells less."""

from __future__ import annotations

import pytest
from chat_templates import GEMMA_3, QWEN_VL, QWEN_XML
from families.tiny_models import FAMILIES, REAL_TEMPLATES
from harmony_data import HARMONY_DATA
from predefined_templates import FAMILIES as PREDEFINED

from mlx_backend.conversation.dialects import DIALECTS, detect, recognise

# A template of each family's layout, in our words: how it renders an earlier call, or begins a turn.
TEMPLATES = {
    "harmony": "{{ '<|start|>assistant<|channel|>commentary to=functions.' + name + '<|message|>' }}",
    "hermes-json": "{{ '<tool_call>\\n{\"name\": \"' + call.name + '\"}\\n</tool_call>' }}",
    "qwen-xml": "{{ '<tool_call>\\n<function=' + call.name + '>\\n<parameter=' + key + '>' }}",
    "glm": "[gMASK]<sop>{{ '<tool_call>' + call.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "laguna": "All available function signatures are listed below<tool_call><arg_key>{{ k }}</arg_key><arg_value>",
    "ling": "<role>ASSISTANT</role>{{ '<tool_call>' + call.name }}<arg_key>{{ k }}</arg_key><arg_value>",
    "hunyuan": "{{ '<tool_calls>\\n<tool_call>' + call.name + '<tool_sep>' }}<arg_key>{{ k }}</arg_key>",
    "hunyuan-opensource": "{%- set s = ':opensource' %}{{ '<tool_call' + s + '>' + name + '<tool_sep' + s + '>' }}",
    "hunyuan-a13b": "<answer>{{ text }}</answer><tool_calls>[{{ calls }}]</tool_calls>",
    "longcat": "<longcat_tool_call>{{ call.name }}<longcat_arg_key>",
    "gemma4": "{{ '<|turn>model\\n<|tool_call>call:' + name }}<tool_call|>",
    "functiongemma": "<start_of_turn>model<start_function_call>call:{{ name }}",
    "gemma3-tool_code": "{{ '<start_of_turn>' + role }}{{ message.content | trim }}<end_of_turn>",
    "mistral": "[INST]{{ text }}[/INST][TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "mistral-list": "[INST]{{ text }}[/INST]{{ '[TOOL_CALLS] [' + calls + ']' }}",
    "mistral-ids": "[INST]{{ t }}[/INST][TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]{{ arguments }}",
    "llama3-json": "<|start_header_id|>{{ role }}<|end_header_id|>Environment: ipython <|python_tag|>",
    "llama-pythonic": "<|header_start|>{{ role }}<|header_end|>[func_name1(params_name1=params_value1)]<|eot|>",
    "deepseek-v3": "<｜tool▁calls▁begin｜>{{ 'function<｜tool▁sep｜>' + name + '\\n```json\\n' }}",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜>{{ name + '<｜tool▁sep｜>' + arguments }}<think>",
    "dsml": "{%- set token = '｜DSML｜' -%}{{ '<' + token + 'invoke name=' }}<think>",
    "dsml-v4": "{%- set t = '｜DSML｜' -%}{{ '<' + t + 'tool_calls>' + '<' + t + 'invoke name=' }}<think>",
    "dsml-v4.1": "{%- set t = '｜DSML｜' -%}{{ '<' + t + ' calls>' + '<' + t + ' invoke name=' }}<think>",
    "kimi-k2": "<|tool_calls_section_begin|>{{ id }}<|tool_call_argument_begin|>",
    "kimi-k3": "{{ '<|open|>' + element + '<|sep|>' }}",
    "minimax-m2": "{{ '<minimax:tool_call>' }}<invoke name=\"{{ name }}\"><think>",
    "minimax-m3": "]<]minimax[>[<tool_call>{{ '<mm:think>' }}",
    "lfm2": "<|im_start|>{{ '<|tool_call_start|>[' + call + ']<|tool_call_end|>' }}",
    "seed-oss": "{{ '<seed:tool_call>\\n<function=' + name + '>\\n<parameter=' }}<seed:think>",
    "nemotron": "{%- set truncate_history_thinking = true %}<tool_call>\\n<function={{ name }}>\\n<parameter=a>",
    "granite": '<|start_of_role|>assistant<|end_of_role|><tool_call>\\n{"name": ',
    "granite-4.2": "defer_loading truncate_history_thinking <tool_call>\\n<function={{ name }}>\\n<parameter=a>",
    "olmo": "<|im_start|>{{ '<function_calls>' + calls + '</function_calls>' }}<think>",
    "apertus": "{{ '<|inner_prefix|>' + thoughts }}<|tools_prefix|>",
    "cohere": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_ACTION|>",
    "step": "{{ 'Reasoning: ' + reasoning_effort }}<tool_call>\\n<function={{ name }}>\\n<parameter=a>",
    "mimo": "You are MiMo.<tool_call>\\n<function={{ name }}>\\n<parameter=a>",
    "minicpm5": '<function name="{{ name }}"><param name="{{ key }}">',
    "k2-horizon": "<ifm|think>{{ thoughts }}</ifm|think><ifm|tool_calls>",
    "internlm": "{{ '<|action_start|><|plugin|>' + call }}<|action_end|>",
    "jamba": "<tool_calls>[{{ calls }}]</tool_calls>",
    "gigachat": "{{ '<|function_call|>' + call }}<|message_sep|>",
    "solar-open": "<|begin|>{{ role }}<|tool_calls|>{{ '<|tool_call:begin|>' + id + '<|tool_call:name|>' + name }}",
    "phi-4-mini": "{{ '<|' + role + '|>' + content + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}",
    "plain": "{{ role }}: {{ message.content }}",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_family_is_recognised_by_its_template(name: str) -> None:
    assert detect(TEMPLATES[name], []).name == name


@pytest.mark.parametrize(("template", "name"), REAL_TEMPLATES.items())
def test_a_real_template_is_recognised_and_teaches_the_calls_that_are_read(template: str, name: str) -> None:
    file = HARMONY_DATA / "templates" / f"{template}.jinja"
    if not file.exists():
        pytest.skip(
            "the real chat templates are not here; set HARMONY_DATA to the folder that holds templates/"
        )
    source = file.read_text(encoding="utf-8")
    dialect = detect(source, [])
    assert dialect.name == name
    assert dialect.calls is not None
    assert dialect.calls.is_taught_by(source) or template == "HuggingFaceTB-SmolLM3-3B"


INHERITED = [
    "<|tool_calls_section_begin|>",
    "<|tool_call>",
    "[TOOL_CALLS]",
    "<tool_call>",
    "<|channel|>",
    "<|message|>",
]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("plain", "llama3-json")])
def test_the_template_decides_where_a_vocabulary_has_other_families_markers(name: str) -> None:
    assert detect(TEMPLATES[name], INHERITED).name == name


@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        (["<think>", "</think>"], "hermes-json"),
        (["<arg_key>", "<arg_value>", "<tool_call>", "<think>"], "glm"),
        (["[TOOL_CALLS]", "[ARGS]"], "mistral"),
        (["<|tool_call_start|>", "<|im_end|>"], "lfm2"),
        (["<tool_calls:6124c78e>", "<tool_sep:6124c78e>"], "hunyuan"),
        (["｜DSML｜"], "dsml"),
        (["<eos>"], "plain"),
    ],
)
def test_without_a_telling_template_the_control_tokens_decide(tokens: list[str], name: str) -> None:
    for template in (None, "", "{{ message.content }}"):
        assert detect(template, tokens).name == name


@pytest.mark.parametrize(
    ("name", "prompt", "channel"),
    [
        ("qwen-xml", "<|im_start|>assistant\n<think>\n", "analysis"),
        ("glm", "<|assistant|></think>", "final"),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", "final"),
        ("gemma4", "<|turn>model\n", None),
        ("kimi-k3", "<|open|>think<|sep|>", "analysis"),
        ("kimi-k3", "<|open|>response<|sep|>", "final"),
        ("cohere", "<|CHATBOT_TOKEN|><|START_THINKING|>", "analysis"),
        ("hunyuan", "<think:opensource>", "analysis"),
        ("seed-oss", "<seed:think>\n</seed:think>", "final"),
        ("k2-horizon", "<ifm|think_fast>", "analysis"),
        ("llama3-json", "<|start_header_id|>assistant<|end_header_id|>\n\n", None),
    ],
)
def test_a_prompt_tells_what_it_has_opened(name: str, prompt: str, channel: str | None) -> None:
    assert DIALECTS[name].opens_in(prompt) == channel


def test_a_template_that_only_cuts_reasoning_from_answers_belongs_to_a_model_that_reasons() -> None:
    assert detect("{{ message.content.split('</think>')[-1] }}", []).name == "hermes-json"


CHATML = "{{ '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>' }}"
CUTS_REASONING = CHATML + "{{ text.split('</think>')[-1] }}"


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        # It tells its models of tools, and never writes a call.
        (CUTS_REASONING, ["<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"], "lfm2"),
        (CUTS_REASONING, ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"], "kimi-k2"),
        (CUTS_REASONING, ["<｜tool▁sep｜>", "<｜tool▁call▁begin｜>"], "deepseek-v3.1"),
        (CUTS_REASONING, ["<arg_key>", "<arg_value>", "<think>", "<tool_call>"], "glm"),
        # This family writes no <think>: its token is inherited.
        (CUTS_REASONING, ["<|python_tag|>", "<|eot_id|>"], "hermes-json"),
        (CUTS_REASONING, ["<|channel|>", "<|message|>"], "hermes-json"),
        # Several families' tokens tell nothing.
        (CUTS_REASONING, ["<|tool_call_start|>", "[TOOL_CALLS]"], "hermes-json"),
        (CHATML, ["<|tool_call_start|>", "[TOOL_CALLS]"], "plain"),
        # A template that uses a marker of another family for something else.
        ("{{ text.split('<tool_sep>') }}" + TEMPLATES["minicpm5"], ["<tool_sep>", "<tool_call>"], "minicpm5"),
        ("{{ text.split('<tool_sep>') }}" + TEMPLATES["hermes-json"], ["<tool_sep>"], "hermes-json"),
        ("<start_of_turn>model", ["<start_function_call>", "<start_of_turn>"], "functiongemma"),
        ("[INST]{{ text }}[/INST]</think>", [], "mistral"),
        ("[INST]{{ text }}[/INST]" + TEMPLATES["hermes-json"], ["[TOOL_CALLS]"], "hermes-json"),
    ],
)
def test_all_evidence_is_weighed(template: str, tokens: list[str], name: str) -> None:
    assert detect(template, tokens).name == name


AT_HAND = {
    **{name: (template, []) for name, template in TEMPLATES.items()},
    **{f"tiny {name}": (family.template, family.tokens) for name, family in FAMILIES.items()},
    **{name: (family.template, family.markers) for name, family in PREDEFINED.items()},
    **{name: (template, []) for name, template in (("gemma", GEMMA_3), ("qwen", QWEN_XML), ("vl", QWEN_VL))},
    **{
        file.stem: (file.read_text(encoding="utf-8"), [])
        for file in sorted((HARMONY_DATA / "templates").glob("*.jinja"))
    },
}


@pytest.mark.parametrize("name", AT_HAND)
def test_exactly_one_family_is_found_in_a_template_and_the_reason_is_told(name: str) -> None:
    template, tokens = AT_HAND[name]
    found = recognise(template, tokens)
    assert not found.rivals
    if found.dialect is DIALECTS["plain"]:
        assert found.reason == "no family's markers are in its template or among its control tokens"
    else:
        shown = found.reason.removeprefix("the template has ").removeprefix("control tokens ").split(", ")
        assert all(text in template or text in tokens for text in shown)


def test_what_is_not_decided_names_its_rivals() -> None:
    found = recognise("<|tools_prefix|>{{ '<|START_ACTION|>' }}", [])
    assert found.told == "the template has <|tools_prefix|> (as much speaks for cohere)"
    assert found.dialect.name == "apertus"
    # What surrounds calls says less than how calls are written.
    wrapped = recognise(f"<tool_calls>{TEMPLATES['qwen-xml']}</tool_calls>", [])
    assert wrapped.dialect.name == "qwen-xml"
    assert wrapped.rivals == ("jamba",)
    assert recognise(CHATML, ["<|tool_call_start|>", "[TOOL_CALLS]"]).reason == (
        "control tokens [TOOL_CALLS] and others'"
    )
