"""Families that write `<function=f><parameter=a>`, and Granite, whose older versions write JSON."""

from __future__ import annotations

import re

from mlx_backend.conversation.dialects.base import Sign, call_format, layout, own
from mlx_backend.conversation.dialects.block_format import BlockFormat, CallBlock, CallSection
from mlx_backend.conversation.dialects.calls.any_syntax import AnySyntax
from mlx_backend.conversation.dialects.calls.base import JsonSpan
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.calls.xml import XmlCalls
from mlx_backend.conversation.dialects.families.shared import (
    ALL_WITH_TOOLS,
    THINK_TAGS,
    family,
    tool_call,
)

_XML = XmlCalls()


def _xml_sign(*words: str) -> Sign:
    """Return the sign of calls that many families write, with words of one family's template."""
    return call_format("<function=", "<parameter=", *words)


# Models leave out <tool_call>.
_BARE_FUNCTION = CallBlock(opener="<function=", closers=("</function>",), syntax=_XML, is_text=True)
_QWEN = BlockFormat(reasoning=THINK_TAGS, sections=(tool_call(_XML),), blocks=(_BARE_FUNCTION,))
QWEN_XML = family(
    "qwen-xml",
    *("qwen3-coder", "qwen3-coder-next", "qwen3.5", "qwen3.6", "qwen3.8"),
    signs=(_xml_sign(),),
    form=_QWEN,
    history=ALL_WITH_TOOLS,
)

_TOOLCALL = CallSection(
    openers=("<TOOLCALL>",), closer="</TOOLCALL>", syntax=JsonObjects(in_list=True, around=("", ""))
)
_NEMOTRON_FORM = BlockFormat(
    reasoning=THINK_TAGS, sections=(tool_call(_XML), _TOOLCALL), blocks=(_BARE_FUNCTION,), separators=","
)
NEMOTRON = family(
    "nemotron",
    *("nemotron-3", "nemotron-3.5", "nemotron-nano"),
    signs=(_xml_sign("truncate_history_thinking"), own("<TOOLCALL>")),
    form=_NEMOTRON_FORM,
)
GRANITE_42 = family(
    "granite-4.2",
    signs=(_xml_sign("truncate_history_thinking", "defer_loading"),),
    form=_QWEN,
)
# As Granite 3 writes them: words, not markers.
_GRANITE_3 = {f"{here} my thought process:": f"{here} my response:" for here in ("Here is", "Here's")}
_GRANITE_FORM = BlockFormat(
    reasoning={**THINK_TAGS, "<|thinking|>": "<|/thinking|>", **_GRANITE_3},
    words=frozenset(_GRANITE_3),
    sections=(
        tool_call(JsonObjects()),
        CallSection(openers=("<|tool_call|>",), closer="<|/tool_call|>", syntax=JsonObjects(in_list=True)),
    ),
    blocks=(CallBlock(opener="<function_call>", syntax=JsonObjects(), span=JsonSpan),),
    separators=",",
)
GRANITE = family(
    "granite",
    *("granite-4.0", "granite-4"),
    signs=(
        own("<|tool_call|>"),
        own("<function_call>"),
        call_format("<tool_call>", "<|start_of_role|>"),
        layout("<|start_of_role|>"),
    ),
    form=_GRANITE_FORM,
)

_STEP_XML = XmlCalls(
    call_tag=('<steptml:invoke name="{}">', "</steptml:invoke>"),
    parameter_tag=('<steptml:parameter name="{}">', "</steptml:parameter>"),
    around=("", ""),
)
_STEP_3 = CallSection(openers=("<｜tool_calls_begin｜>",), closer="<｜tool_calls_end｜>")
STEP = family(
    "step",
    *("step-3.5", "step-3.7", "step3"),
    signs=(
        _xml_sign("Step-3"),
        _xml_sign("reasoning_effort", "Reasoning: "),
        own("<steptml:invoke"),
        own("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
    ),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        sections=(tool_call(_XML), _STEP_3),
        noise=frozenset({"<｜tool_sep｜>"}),
        blocks=(
            _BARE_FUNCTION,
            CallBlock(
                opener="<｜tool_call_begin｜>",
                closers=("<｜tool_call_end｜>",),
                syntax=_STEP_XML,
                head=re.compile(r".*", re.DOTALL),  # "function", and a separator
            ),
            CallBlock(
                opener="<steptml:invoke", closers=("</steptml:invoke>",), syntax=_STEP_XML, is_text=True
            ),
        ),
    ),
    history=ALL_WITH_TOOLS,
)

_MIMO_XML = XmlCalls(parameter_tag=("<parameter={}>", "</parameter>\n"), trims=False)
MIMO = family(
    "mimo",
    *("mimo-v2", "mimo-v2.6"),
    signs=(_xml_sign("MiMo"),),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        sections=(tool_call(_MIMO_XML),),
        blocks=(CallBlock(opener="<function=", closers=("</function>",), syntax=_MIMO_XML, is_text=True),),
    ),
)

_SEED_XML = XmlCalls(parameter_tag=("<parameter={}>", "</parameter>\n"), trims=False)
SEED_OSS = family(
    "seed-oss",
    *("seed", "seed_oss"),
    signs=(own("<seed:tool_call>"), own("<seed:think>")),
    form=BlockFormat(
        reasoning={"<seed:think>": "</seed:think>", **THINK_TAGS},
        sections=(
            CallSection(
                openers=("<seed:tool_call>", "<tool_call>"),
                closer="</seed:tool_call>",
                syntax=AnySyntax(_SEED_XML),
                more_closers=("</tool_call>",),
            ),
        ),
        blocks=(CallBlock(opener="<function=", closers=("</function>",), syntax=_SEED_XML, is_text=True),),
        ends=frozenset({"<seed:eos>"}),
    ),
    leaked_calls=("<seed:tool_call>",),
)

_PARAM_XML = XmlCalls(
    call_tag=('<function name="{}">', "</function>"),
    parameter_tag=('<param name="{}">', "</param>"),
    around=("", ""),
)
MINICPM = family(
    "minicpm5",
    "minicpm",
    signs=(own("<function name=", "<param name="),),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        blocks=(
            CallBlock(opener="<function name=", closers=("</function>",), syntax=_PARAM_XML, is_text=True),
        ),
    ),
)

FAMILIES = (SEED_OSS, GRANITE_42, NEMOTRON, STEP, MIMO, QWEN_XML, MINICPM, GRANITE)
