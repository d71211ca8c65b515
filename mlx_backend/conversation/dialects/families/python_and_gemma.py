"""Families that write Python, Gemma's, and Llama's JSON."""

from __future__ import annotations

import re

from mlx_backend.conversation.dialects.base import call_format, layout, own
from mlx_backend.conversation.dialects.block_format import BlockFormat, CallBlock, CallSection
from mlx_backend.conversation.dialects.calls.base import JsonSpan, PythonSpan, beginnings
from mlx_backend.conversation.dialects.calls.gemma import GemmaCalls, UnwrappedGemmaCalls
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.calls.pythonic import PythonicCalls, TaggedCalls
from mlx_backend.conversation.dialects.calls.xml import XmlCalls
from mlx_backend.conversation.dialects.families.shared import THINK_TAGS, family
from mlx_backend.conversation.dialects.tool_prompts import python_tool_prompt

_UNWRAPPED_GEMMA = UnwrappedGemmaCalls('<|"|>')
GEMMA_4 = family(
    "gemma4",
    "gemma-4",
    signs=(own("<|tool_call>"), own("<|channel>")),
    form=BlockFormat(
        reasoning={"<|channel>thought": "<channel|>", "<|channel>": "<channel|>"},
        sections=(CallSection(openers=("<|tool_call>",), closer="<tool_call|>", syntax=GemmaCalls('<|"|>')),),
        blocks=(CallBlock(closers=("<tool_call|>",), syntax=_UNWRAPPED_GEMMA, head=_UNWRAPPED_GEMMA.head),),
        separators=",",
        ends=frozenset({"<|tool_response>", "<turn|>"}),
        controls=("<|channel>",),
        noise=frozenset({'<|"|>'}),
    ),
    leaked_calls=("<|tool_call>",),
)
FUNCTION_GEMMA = family(
    "functiongemma",
    signs=(own("<start_function_call>"),),
    form=BlockFormat(
        sections=(
            CallSection(
                openers=("<start_function_call>",),
                closer="<end_function_call>",
                syntax=GemmaCalls("<escape>"),
            ),
        ),
        ends=frozenset({"<end_of_turn>", "<start_function_response>"}),
    ),
    leaked_calls=("<start_function_call>",),
)

LFM2 = family(
    "lfm2",
    "lfm2.5",
    signs=(own("<|tool_call_start|>"),),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        sections=(
            CallSection(openers=("<|tool_call_start|>",), closer="<|tool_call_end|>", syntax=PythonicCalls()),
        ),
    ),
    leaked_calls=("<|tool_call_start|>",),
)
OLMO = family(
    "olmo",
    "olmo-3",
    signs=(own("<function_calls>"),),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        sections=(
            CallSection(
                openers=("<function_calls>",), closer="</function_calls>", syntax=PythonicCalls(in_list=False)
            ),
        ),
    ),
    leaked_calls=("<function_calls>",),
)
GEMMA_3 = family(
    "gemma3-tool_code",
    *("gemma3", "gemma-3", "gemma3n"),
    signs=(layout("<start_of_turn>"),),
    form=BlockFormat(
        sections=(
            CallSection(
                openers=("```tool_code",),
                closer="```",
                syntax=PythonicCalls(in_list=False, has_shell_style=True, around=("\n", "\n")),
            ),
        ),
        ends=frozenset({"<end_of_turn>"}),
    ),
    result_text="```tool_output\n{}\n```",
    tool_prompt=python_tool_prompt,
)
_PYTHON_HEAD = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.-]{0,128}\s*(?:\(.*)?)?)?", re.DOTALL)
LLAMA_PYTHONIC = family(
    "llama-pythonic",
    *("llama4", "llama-4", "pythonic"),
    signs=(
        own("<|python_start|>"),
        call_format("<|start_header_id|>", "[func_name1("),
        layout("<|header_start|>"),
    ),
    form=BlockFormat(
        sections=(
            CallSection(openers=("<|python_start|>",), closer="<|python_end|>", syntax=PythonicCalls()),
        ),
        blocks=(CallBlock(syntax=PythonicCalls(), head=_PYTHON_HEAD, is_anywhere=True, span=PythonSpan),),
        separators=";,",
        ends=frozenset({"<|eot|>", "<|eom|>", "<|eom_id|>"}),
    ),
)


_JSON_KEYS = "|".join(
    beginnings(key, '(?:".*)?') for key in ("name", "type", "function", "parameters", "arguments")
)
_JSON_HEAD = re.compile(rf'\s*(?:\[\s*)?(?:\{{\s*(?:"(?:{_JSON_KEYS})?)?)?', re.DOTALL)
_LLAMA_OBJECTS = JsonObjects(arguments_key="parameters", around=("", ""), needs_arguments=True)
LLAMA_3 = family(
    "llama3-json",
    *("llama3", "llama-3", "llama-3.1", "llama-3.3"),
    signs=(layout("<|start_header_id|>"), layout("<|python_tag|>")),
    form=BlockFormat(
        blocks=(
            CallBlock(syntax=_LLAMA_OBJECTS, head=_JSON_HEAD, is_anywhere=True, span=JsonSpan),
            CallBlock(opener="<|python_tag|>", syntax=TaggedCalls(_LLAMA_OBJECTS), span=JsonSpan),
            CallBlock(opener="<function=", closers=("</function>",), syntax=XmlCalls(), is_text=True),
        ),
        separators=";,]}",
        ends=frozenset({"<|eom_id|>", "<|eot_id|>"}),
    ),
    leaked_calls=("<|python_tag|>",),
)

FAMILIES = (GEMMA_4, FUNCTION_GEMMA, LFM2, OLMO, LLAMA_PYTHONIC, LLAMA_3, GEMMA_3)
