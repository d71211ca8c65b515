"""Families that write `f<arg_key>a</arg_key><arg_value>…</arg_value>`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Sign, call_format, own
from mlx_backend.conversation.dialects.block_format import (
    AnswerBlock,
    BlockCalls,
    BlockFormat,
    CallBlock,
    CallSection,
)
from mlx_backend.conversation.dialects.calls.any_syntax import AnySyntax
from mlx_backend.conversation.dialects.calls.json_object import JsonObjects
from mlx_backend.conversation.dialects.calls.pairs import PairCalls
from mlx_backend.conversation.dialects.families.shared import (
    ALL_WITH_TOOLS,
    THINK_TAGS,
    family,
    tool_call,
)

if TYPE_CHECKING:
    from mlx_backend.conversation.dialects.base import Dialect


_PAIR_ENDS = frozenset({"<|observation|>", "<|user|>", "<|assistant|>"})
_GLM_FORM = BlockFormat(reasoning=THINK_TAGS, sections=(tool_call(PairCalls()),), ends=_PAIR_ENDS)
GLM = family(
    "glm",
    *("glm-4.5", "glm-4.6", "glm-4.7", "glm-5", "glm-5.1", "glm-5.2", "glm-5.3"),
    signs=(call_format("<arg_key>", "<arg_value>"),),
    form=_GLM_FORM,
    history=ALL_WITH_TOOLS,
)
LAGUNA = family(
    "laguna",
    "poolside",
    signs=(
        call_format("<arg_key>", "<arg_value>", "unescaped XML-like object"),
        call_format("<arg_key>", "<arg_value>", "All available function signatures are listed below"),
    ),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        sections=(tool_call(PairCalls(lines=True)),),
        ends=frozenset({"</assistant>"}),
    ),
    history=ALL_WITH_TOOLS,
)
LING = family(
    "ling",
    *("ling-3", "ring"),
    signs=(call_format("<arg_key>", "<arg_value>", "<role>"), call_format("<tool_call>", "<role>")),
    form=BlockFormat(
        reasoning=THINK_TAGS, sections=(tool_call(PairCalls()),), ends=frozenset({"<|role_end|>"})
    ),
)
LONGCAT = family(
    "longcat",
    "longcat-flash",
    signs=(own("<longcat_tool_call>"), own("<longcat_think>")),
    form=BlockFormat(
        reasoning={"<longcat_think>": "</longcat_think>", **THINK_TAGS},
        sections=(
            CallSection(
                openers=("<longcat_tool_call>",),
                closer="</longcat_tool_call>",
                syntax=AnySyntax(PairCalls(prefix="longcat_", lines=True)),
            ),
        ),
        ends=frozenset({"</longcat_s>"}),
    ),
    leaked_calls=("<longcat_tool_call>",),
)
_HUNYUAN_FORM = BlockFormat(
    reasoning=THINK_TAGS,
    answers=(AnswerBlock("<answer>", "</answer>", has_layout=True),),
    sections=(
        CallSection(openers=("<tool_calls>",), closer="</tool_calls>", syntax=JsonObjects(in_list=True)),
    ),
    blocks=(
        CallBlock(
            opener="<tool_call>",
            closers=("</tool_call>",),
            syntax=AnySyntax(PairCalls(separator="<tool_sep>", lines=True)),
        ),
    ),
    separators=",",
    suffixes=("opensource",),
    ends=frozenset({"<|eos|>", "<|hy_eos|>", "<｜hy_eos｜>", "<｜hy_eos:opensource｜>"}),
)


def _hunyuan(name: str, *aliases: str, suffix: str, sign: Sign) -> Dialect:
    """Return the third version's dialect. All versions are read alike, and written as each has its markers."""
    pairs = PairCalls(separator=f"<tool_sep{suffix}>", suffix=suffix, lines=True)
    written = BlockFormat(
        sections=(CallSection(openers=(f"<tool_calls{suffix}>",), closer=f"</tool_calls{suffix}>"),),
        blocks=(CallBlock(opener=f"<tool_call{suffix}>", closers=(f"</tool_call{suffix}>",), syntax=pairs),),
    )
    return family(
        name,
        *aliases,
        signs=(sign,),
        form=_HUNYUAN_FORM,
        calls=BlockCalls(written, taught_by=("<tool_calls",)),
        history=ALL_WITH_TOOLS,
    )


# With any suffix. Other families' templates have `<tool_sep>` too, for something else.
_SEPARATOR = re.compile(r"<tool_sep\b")
HUNYUAN_OPEN_SOURCE = _hunyuan(
    "hunyuan-opensource",
    suffix=":opensource",
    sign=own(re.compile(r"<tool_calls?\b"), _SEPARATOR, re.compile(":opensource")),
)
HUNYUAN = _hunyuan("hunyuan", "hy3", "hy4", suffix="", sign=own(re.compile(r"<tool_calls\b"), _SEPARATOR))
_JSON_LIST = BlockFormat(
    sections=(
        CallSection(
            openers=("<tool_calls>",),
            closer="</tool_calls>",
            syntax=JsonObjects(in_list=True, around=("", "")),
        ),
    ),
)
HUNYUAN_A13B = family(
    "hunyuan-a13b",
    signs=tuple(
        call_format("<tool_calls>", "</tool_calls>", word, in_template=True)
        for word in ("<answer>", "<|extra_0|>")
    ),
    form=_HUNYUAN_FORM,
    calls=BlockCalls(_JSON_LIST),
)
JAMBA = family(
    "jamba",
    *("apriel", "minimax-m1"),
    signs=(call_format("<tool_calls>", "</tool_calls>"), own("[BEGIN FINAL RESPONSE]")),
    form=replace(
        _JSON_LIST,
        reasoning={**THINK_TAGS, "Here are my reasoning steps:": "[BEGIN FINAL RESPONSE]"},  # Apriel's
        ends=frozenset({"<|eom|>", "<|end|>"}),
    ),
)
K2_HORIZON = family(
    "k2-horizon",
    signs=(own("<ifm|tool_calls>"), own("<ifm|think>")),
    form=BlockFormat(
        reasoning={f"<ifm|{word}>": f"</ifm|{word}>" for word in ("think", "think_fast", "think_faster")},
        sections=(CallSection(openers=("<ifm|tool_calls>",), closer="</ifm|tool_calls>"),),
        blocks=(
            CallBlock(
                opener="<ifm|tool_call>",
                closers=("</ifm|tool_call>",),
                syntax=AnySyntax(PairCalls(prefix="ifm|")),
            ),
        ),
    ),
    leaked_calls=("<ifm|tool_calls>",),
)

FAMILIES = (LONGCAT, K2_HORIZON, HUNYUAN_OPEN_SOURCE, HUNYUAN, HUNYUAN_A13B, LAGUNA, LING, GLM)
