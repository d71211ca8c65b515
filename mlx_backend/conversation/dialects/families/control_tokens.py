"""Families that write calls between control tokens of their own: Mistral, DeepSeek, Kimi, Cohere and others."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Sign, layout, own
from mlx_backend.conversation.dialects.block_format import (
    AnswerBlock,
    BlockCalls,
    BlockFormat,
    CallBlock,
    CallSection,
    CallsInReasoning,
)
from mlx_backend.conversation.dialects.calls.base import JsonSpan
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.calls.named_json import DEEPSEEK_V3 as DEEPSEEK_V3_CALLS
from mlx_backend.conversation.dialects.calls.named_json import DEEPSEEK_V31 as DEEPSEEK_V31_CALLS
from mlx_backend.conversation.dialects.calls.named_json import KIMI_K2 as KIMI_K2_CALLS
from mlx_backend.conversation.dialects.calls.named_json import MISTRAL_ARGS, MISTRAL_CALL_IDS
from mlx_backend.conversation.dialects.calls.named_json import SOLAR_OPEN as SOLAR_OPEN_CALLS
from mlx_backend.conversation.dialects.calls.xtml import (
    CALL_CLOSER,
    CALL_OPENER,
    CLOSE,
    OPEN,
    SEPARATOR,
    XtmlCalls,
)
from mlx_backend.conversation.dialects.families.shared import (
    THINK_TAGS,
    family,
)
from mlx_backend.conversation.dialects.tool_prompts import phi_tool_prompt

if TYPE_CHECKING:
    from mlx_backend.conversation.dialects.base import Dialect
    from mlx_backend.conversation.dialects.calls.base import CallSyntax


_MISTRAL_FORM = BlockFormat(
    reasoning={"[THINK]": "[/THINK]", **THINK_TAGS},
    blocks=(CallBlock(opener="[TOOL_CALLS]", syntax=MISTRAL_ARGS, span=JsonSpan),),
    separators=",;]}",
    ends=frozenset({"</s>"}),
    noise=frozenset({"[/TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
)


def _mistral_calls(syntax: CallSyntax) -> BlockCalls:
    return BlockCalls(BlockFormat(blocks=(CallBlock(opener="[TOOL_CALLS]", syntax=syntax),)))


# One reader for all versions of the format; which one a model writes is known by its template.
MISTRAL_LIST = family(
    "mistral-list",
    *("mistral-v3", "mistral-7b", "mistral-nemo", "mixtral"),
    signs=(own("[TOOL_CALLS]", re.compile(r"\[TOOL_CALLS\]\s{0,8}\[(?!ARGS|CALL_ID)"), in_template=True),),
    form=_MISTRAL_FORM,
    calls=_mistral_calls(JsonObjects(in_list=True, around=("", ""))),
)
MISTRAL_IDS = family(
    "mistral-ids",
    *("mistral-v11", "mistral-small-3.2"),
    signs=(own("[TOOL_CALLS]", "[CALL_ID]", in_template=True),),
    form=_MISTRAL_FORM,
    calls=_mistral_calls(MISTRAL_CALL_IDS),
)
MISTRAL = family(
    "mistral",
    *("devstral", "magistral", "ministral", "mistral-small"),
    signs=(own("[TOOL_CALLS]"), layout("[INST]", "[/INST]")),
    form=_MISTRAL_FORM,
    leaked_calls=("[TOOL_CALLS]",),
)


# Around the results of calls, which models repeat.
_DEEPSEEK_RESULTS = frozenset(
    f"<｜tool▁{word}▁{end}｜>" for word in ("output", "outputs") for end in ("begin", "end")
)


def _deepseek(name: str, *aliases: str, syntax: CallBlock, sign: Sign) -> Dialect:
    return family(
        name,
        *aliases,
        signs=(sign,),
        form=BlockFormat(
            reasoning=THINK_TAGS,
            sections=(CallSection(openers=("<｜tool▁calls▁begin｜>",), closer="<｜tool▁calls▁end｜>"),),
            blocks=(syntax,),
            ends=frozenset({"<｜end▁of▁sentence｜>"}),
            noise=_DEEPSEEK_RESULTS | {"<｜tool▁sep｜>"},
        ),
        leaked_calls=("<｜tool▁calls▁begin｜>",) if name == "deepseek-v3" else (),
    )


_DEEPSEEK_MARKERS = ("<｜tool▁call▁begin｜>", ("<｜tool▁call▁end｜>",))
DEEPSEEK_V3 = _deepseek(
    "deepseek-v3",
    "deepseek-r1",
    syntax=CallBlock(opener=_DEEPSEEK_MARKERS[0], closers=_DEEPSEEK_MARKERS[1], syntax=DEEPSEEK_V3_CALLS),
    sign=own("<｜tool▁sep｜>", "```json"),
)
DEEPSEEK_V31 = _deepseek(
    "deepseek-v3.1",
    syntax=CallBlock(opener=_DEEPSEEK_MARKERS[0], closers=_DEEPSEEK_MARKERS[1], syntax=DEEPSEEK_V31_CALLS),
    sign=own("<｜tool▁sep｜>"),
)
_KIMI_SECTIONS = CallSection(
    openers=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    closer="<|tool_calls_section_end|>",
    more_closers=("<|tool_call_section_end|>",),
)
KIMI_K2 = family(
    "kimi-k2",
    *("kimi", "kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6"),
    signs=(own("<|tool_calls_section_begin|>"), own("<|tool_call_argument_begin|>")),
    form=BlockFormat(
        reasoning={**THINK_TAGS, "◁think▷": "◁/think▷"},
        sections=(_KIMI_SECTIONS,),
        blocks=(
            CallBlock(opener="<|tool_call_begin|>", closers=("<|tool_call_end|>",), syntax=KIMI_K2_CALLS),
        ),
        noise=frozenset({"<|tool_call_argument_begin|>"}),
    ),
    leaked_calls=("<|tool_calls_section_begin|>",),
)


def _xtml(word: str) -> tuple[str, str]:
    return f"{OPEN}{word}{SEPARATOR}", f"{CLOSE}{word}{SEPARATOR}"


KIMI_K3 = family(
    "kimi-k3",
    signs=(own(OPEN, SEPARATOR),),
    form=BlockFormat(
        reasoning=dict([_xtml("think")]),
        answers=(AnswerBlock(*_xtml("response")), AnswerBlock(*_xtml("message"))),
        sections=(CallSection(openers=(_xtml("tools")[0],), closer=_xtml("tools")[1]),),
        blocks=(CallBlock(opener=CALL_OPENER, closers=(CALL_CLOSER,), syntax=XtmlCalls(), is_text=True),),
        ends=frozenset({"<|end_of_msg|>"}),
        controls=(OPEN, CLOSE),
        noise=frozenset({OPEN, CLOSE, SEPARATOR}),
    ),
    leaked_calls=(_xtml("tools")[0],),
    taught_by=(OPEN,),
)

APERTUS = family(
    "apertus",
    signs=(own("<|tools_prefix|>"), own("<|inner_prefix|>")),
    form=BlockFormat(
        reasoning={"<|inner_prefix|>": "<|inner_suffix|>"},
        sections=(
            CallSection(
                openers=("<|tools_prefix|>",),
                closer="<|tools_suffix|>",
                syntax=JsonObjects(in_list=True, by_name=True, around=("", "")),
            ),
        ),
        calls_in_reasoning=CallsInReasoning.STAY,
        separators=",",
        ends=frozenset({"<|assistant_end|>"}),
    ),
    leaked_calls=("<|tools_prefix|>",),
)
_COHERE_CALLS = JsonObjects(
    name_key="tool_name", arguments_key="parameters", in_list=True, index_key="tool_call_id", around=("", "")
)
COHERE = family(
    "cohere",
    *("command-a", "command-r7b", "cohere2"),
    signs=(own("<|START_ACTION|>"), own("<|START_RESPONSE|>"), own("<|START_THINKING|>")),
    form=BlockFormat(
        reasoning={"<|START_THINKING|>": "<|END_THINKING|>"},
        answers=(
            AnswerBlock("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            AnswerBlock("<|START_TEXT|>", "<|END_TEXT|>"),
        ),
        sections=(CallSection(openers=("<|START_ACTION|>",), closer="<|END_ACTION|>", syntax=_COHERE_CALLS),),
        separators=",",
        ends=frozenset({"<|END_OF_TURN_TOKEN|>"}),
    ),
    leaked_calls=("<|START_ACTION|>",),
)
INTERNLM_CALLS = CallSection(
    openers=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
    closer="<|action_end|>",
    syntax=JsonObjects(arguments_key="parameters", around=("\n", "")),
)
INTERNLM = family(
    "internlm",
    *("internlm2", "internlm2.5", "internlm3", "intern-s1"),
    signs=(own("<|action_start|>", "<|plugin|>"),),
    form=BlockFormat(reasoning=THINK_TAGS, sections=(INTERNLM_CALLS,), controls=("<|action_start|>",)),
    leaked_calls=("<|action_start|><|plugin|>",),
)
_GIGACHAT_CALLS = JsonObjects(around=("", ""))
GIGACHAT = family(
    "gigachat",
    *("gigachat3", "gigachat-3", "gigachat3.1"),
    signs=(own("<|function_call|>"), own("<|message_sep|>", "<|role_sep|>", "function call")),
    form=BlockFormat(
        blocks=(
            CallBlock(opener="<|function_call|>", syntax=_GIGACHAT_CALLS, span=JsonSpan),
            CallBlock(
                opener="<|message_sep|>\n\nfunction call<|role_sep|>", syntax=_GIGACHAT_CALLS, span=JsonSpan
            ),
        ),
        separators="]}",
        ends=frozenset({"</s>"}),
        controls=("<|message_sep|>",),
    ),
    leaked_calls=("<|function_call|>",),
)

# <|end|> stands after each part of a turn, <|flush|> or <|calls|> after the last.
_SOLAR_HEADER = "<|begin|>assistant"
SOLAR_OPEN = family(
    "solar-open",
    "solar",
    signs=(own("<|tool_call:begin|>"), own("<|think|>", _SOLAR_HEADER)),
    form=BlockFormat(
        reasoning={"<|think|>": "<|end|>", f"{_SOLAR_HEADER}<|think|>": "<|end|>"},
        answers=(
            AnswerBlock(f"{_SOLAR_HEADER}<|content|>", "<|end|>"),
            AnswerBlock("<|content|>", "<|end|>"),
        ),
        sections=(
            CallSection(openers=(f"{_SOLAR_HEADER}<|tool_calls|>", "<|tool_calls|>"), closer="<|calls|>"),
        ),
        blocks=(
            CallBlock(opener="<|tool_call:begin|>", closers=("<|tool_call:end|>",), syntax=SOLAR_OPEN_CALLS),
        ),
        ends=frozenset({"<|flush|>"}),
        controls=("<|begin|>",),
        noise=frozenset({"<|tool_call:name|>", "<|tool_call:args|>"}),
    ),
    leaked_calls=("<|tool_calls|>",),
)
PHI_4_MINI = family(
    "phi-4-mini",
    *("phi4-mini", "phi-4-multimodal", "phi-4-mini-reasoning"),
    signs=(own("<|tool|>", "<|/tool|>", in_template=True),),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        sections=(
            CallSection(
                openers=("<|tool_call|>",),
                closer="<|/tool_call|>",
                syntax=JsonObjects(in_list=True, around=("", "")),
            ),
        ),
    ),
    tool_prompt=phi_tool_prompt,
)

FAMILIES = (
    KIMI_K3,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    MISTRAL_LIST,
    MISTRAL_IDS,
    MISTRAL,
    APERTUS,
    COHERE,
    INTERNLM,
    GIGACHAT,
    SOLAR_OPEN,
    PHI_4_MINI,
)
