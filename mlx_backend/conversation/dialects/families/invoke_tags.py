"""Families that write `<invoke name="f"><parameter name="a">`, each with a prefix of its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.base import Sign, own
from mlx_backend.conversation.dialects.block_format import (
    BlockCalls,
    BlockFormat,
    CallBlock,
    CallSection,
)
from mlx_backend.conversation.dialects.calls.elements import NAMESPACE, ElementCalls
from mlx_backend.conversation.dialects.calls.xml import XmlCalls
from mlx_backend.conversation.dialects.families.shared import (
    ALL_WITH_TOOLS,
    THINK_TAGS,
    family,
)

if TYPE_CHECKING:
    from mlx_backend.conversation.dialects.base import Dialect

_INVOKE = XmlCalls(
    call_tag=('<invoke name="{}">\n', "</invoke>"),
    parameter_tag=('<parameter name="{}">', "</parameter>\n"),
    around=("\n", "\n"),
    trims=False,
)
MINIMAX_M2 = family(
    "minimax-m2",
    *("minimax", "minimax-m2.5", "minimax-m2.7"),
    signs=(own("<minimax:tool_call>"),),
    form=BlockFormat(
        reasoning=THINK_TAGS,
        sections=(CallSection(openers=("<minimax:tool_call>",), closer="</minimax:tool_call>"),),
        blocks=(CallBlock(opener="<invoke name=", closers=("</invoke>",), syntax=_INVOKE, is_text=True),),
        ends=frozenset({"[e~["}),
    ),
    leaked_calls=("<minimax:tool_call>",),
)
MINIMAX_M3 = family(
    "minimax-m3",
    signs=(own(NAMESPACE), own("<mm:think>")),
    form=BlockFormat(
        reasoning={"<mm:think>": "</mm:think>", **THINK_TAGS},
        sections=(
            CallSection(
                openers=(f"{NAMESPACE}<tool_call>", f"{NAMESPACE} <tool_call>"),
                closer=f"{NAMESPACE}</tool_call>",
                more_closers=(f"{NAMESPACE} </tool_call>",),
            ),
        ),
        blocks=tuple(
            CallBlock(
                opener=f"{NAMESPACE}{blank}<invoke name=",
                closers=(f"{NAMESPACE}{blank}</invoke>",),
                syntax=ElementCalls(),
                is_text=True,
            )
            for blank in ("", " ")
        ),
        ends=frozenset({"[e~["}),
        controls=(NAMESPACE,),
        noise=frozenset({NAMESPACE}),
    ),
    leaked_calls=(f"{NAMESPACE}<tool_call>",),
    taught_by=(NAMESPACE,),
)

_DSML = "｜DSML｜"
_ANY_DSML = re.compile(_DSML)
_DSML_WORDS = ("function_calls", "tool_calls", "toolcalls", "tool", " calls", "calls")


def _dsml_xml(blank: str = "") -> XmlCalls:
    return XmlCalls(
        call_tag=(f'<{_DSML}{blank}invoke name="{{}}">\n', f"</{_DSML}{blank}invoke>"),
        parameter_tag=(
            f'<{_DSML}{blank}parameter name="{{}}" string="{{string}}">',
            f"</{_DSML}{blank}parameter>\n",
        ),
        around=("\n", "\n"),
        trims=False,
        untyped="json",
    )


_DSML_FORM = BlockFormat(
    reasoning=THINK_TAGS,
    sections=(
        CallSection(
            openers=tuple(f"<{_DSML}{word}>" for word in _DSML_WORDS),
            closer=f"</{_DSML}function_calls>",
            more_closers=tuple(f"</{_DSML}{word}>" for word in _DSML_WORDS[1:]),
        ),
    ),
    blocks=tuple(
        CallBlock(
            opener=f"<{_DSML}{blank}invoke name=",
            closers=(f"</{_DSML}{blank}invoke>",),
            syntax=_dsml_xml(),
            is_text=True,
        )
        for blank in ("", " ")
    ),
    ends=frozenset({"<｜end▁of▁sentence｜>"}),
    controls=(f"<{_DSML}", f"</{_DSML}"),
)


def _dsml(name: str, *aliases: str, word: str, blank: str = "", sign: Sign) -> Dialect:
    """Return a version's dialect. All versions are read alike, and written with the words of each."""
    block = CallBlock(
        opener=f"<{_DSML}{blank}invoke name=",
        closers=(f"</{_DSML}{blank}invoke>",),
        syntax=_dsml_xml(blank),
        is_text=True,
    )
    section = CallSection(openers=(f"<{_DSML}{word}>",), closer=f"</{_DSML}{word}>")
    return family(
        name,
        *aliases,
        signs=(sign, own(_ANY_DSML)) if word == "function_calls" else (sign,),
        form=_DSML_FORM,
        calls=BlockCalls(BlockFormat(sections=(section,), blocks=(block,)), taught_by=(_DSML,)),
        leaked_calls=(*(f"<{_DSML}{word}>" for word in _DSML_WORDS),) if word == "function_calls" else (),
        history=ALL_WITH_TOOLS,
    )


DSML_V41 = _dsml(
    "dsml-v4.1",
    "deepseek-v4.1",
    word=" calls",
    blank=" ",
    sign=own(_ANY_DSML, " invoke name=", " calls>"),
)
DSML_V4 = _dsml(
    "dsml-v4",
    "deepseek-v4",
    word="tool_calls",
    sign=own(_ANY_DSML, "tool_calls>"),
)
DSML = _dsml(
    "dsml",
    "deepseek-v3.2",
    word="function_calls",
    sign=own(_ANY_DSML, "function_calls>"),
)

FAMILIES = (MINIMAX_M3, MINIMAX_M2, DSML_V41, DSML_V4, DSML)
