"""Finds out how a chat template wants a history by rendering short ones, each made of words that stand nowhere else.

What a template's text suggests (`TemplateTraits.of`) is tried: whether it tells the model of tools, the key from which
it renders reasoning, whether that of answered turns comes out and which switch changes it, whether a system message may
stand in the middle, whether it takes calls, how many in one message, with arguments as an object or as a text, and with
which ids, and where it writes images. Where a rendering tells nothing, because the template refuses it or nothing of it
comes out in any form, the guess from the text stands.

Knows no tokens, no requests and no families.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from mlx_backend.conversation.message_layout import CallIds
from mlx_backend.conversation.message_parts import TEMPLATE_KEYS
from mlx_backend.conversation.template import TemplateTraits
from mlx_backend.models.templates import TemplateFault, TemplateProbe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROBE_SECONDS: Final = 3.0
"""Of processor time, for all renderings of one template together; published templates take 10 to 100 ms."""

type _Message = Mapping[str, Any]

_SWITCH: Final = re.compile(
    r"(?:preserve|clear|truncate|keep|drop|retain|strip|interleave)\w*(?:think|reason)"
)
_TOOLS: Final = (
    {
        "type": "function",
        "function": {
            "name": "toolname",
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"argname": {"type": "string"}}},
        },
    },
)
_BARE_TOOLS: Final = ({"type": "function", "function": {"name": "toolname"}},)
_USER: Final = {"role": "user", "content": "firstquestion"}
_IMAGE: Final = {"type": "image"}
_NEXT: Final = {"role": "user", "content": "nextquestion"}
_ANSWER: Final = {"role": "assistant", "content": "firstanswer"}
_SYSTEM: Final = {"role": "system", "content": "systemwords"}
_REASONING: Final = "thinkwords"
_OBJECT: Final = {"argname": "argvalue"}
_TEXT: Final = '{"argname": "argvalue"}'


@lru_cache(maxsize=64)
def probe_history(source: str | None, *, seconds: float = PROBE_SECONDS) -> TemplateTraits:
    """Return the traits of a chat template. Never raises."""
    guessed = TemplateTraits.of(source)
    if not source:
        return guessed
    try:
        return _HistoryProbe(TemplateProbe(source, seconds), guessed).traits()
    except TemplateFault:
        return guessed


class _HistoryProbe:
    """Renders one template with one history after another. Raises TemplateOverrun once its time is up."""

    def __init__(self, template: TemplateProbe, guessed: TemplateTraits) -> None:
        self._template = template
        self._guessed = guessed

    def traits(self) -> TemplateTraits:
        """Try everything."""
        found = self._guessed
        if "firstquestion" in self._render([_USER]):
            found = self._tools(self._system(found))
        found = self._parts(self._calls(found))
        return self._reasoning(found)

    def _render(
        self,
        messages: Sequence[_Message],
        *,
        tools: bool | Sequence[_Message] = False,
        **arguments: Any,
    ) -> str:
        """Return the prompt, "" where the template refuses; `tools` are a usual one, or those given."""
        definitions = (_TOOLS if tools else None) if isinstance(tools, bool) else tools
        return self._template.render(messages, arguments, definitions) or ""

    # -- system messages and order -----------------------------------------------------------------

    def _system(self, traits: TemplateTraits) -> TemplateTraits:
        middle = self._render([_USER, _ANSWER, _SYSTEM, _NEXT])
        return replace(
            traits,
            has_system_role=_in_order(self._render([_SYSTEM, _USER]), "systemwords", "firstquestion"),
            takes_system_anywhere=_in_order(middle, "firstanswer", "systemwords", "nextquestion"),
            must_alternate=traits.must_alternate or not self._render([_USER, _NEXT]),
        )

    def _tools(self, traits: TemplateTraits) -> TemplateTraits:
        told = self._render([_USER], tools=True) + self._render([_SYSTEM, _USER], tools=True)
        bare = self._render([_USER], tools=_BARE_TOOLS)
        return replace(
            traits,
            has_tools="toolname" in told,
            refuses_tools=not told,
            needs_parameters="toolname" in told and "toolname" not in bare,
        )

    # -- calls and results -------------------------------------------------------------------------

    def _calls(self, traits: TemplateTraits) -> TemplateTraits:
        for ids in (CallIds.ANY, CallIds.NINE_LETTERS):
            as_object, as_text = (
                self._render(_loop(ids, arguments), tools=True) for arguments in (_OBJECT, _TEXT)
            )
            takes_object = "argvalue" in as_object and "{'argname'" not in as_object
            takes_text = "argvalue" in as_text and '\\"argname' not in as_text
            if takes_object or takes_text:
                break
        else:
            if not self._render([_USER, _ANSWER, _NEXT]):
                return traits  # nothing can be found out
            return replace(traits, takes_calls=False, takes_results="resultwords" in as_object + as_text)
        rendered = as_object if takes_object else as_text
        if "toolname" not in _after_question(rendered) and "callidentity" in rendered:
            ids = CallIds.WITH_NAME  # the id is all that it prints of a call
        arguments = _OBJECT if takes_object else _TEXT
        two = self._render(_loop(ids, arguments, count=2), tools=True)
        with_text = self._render(_loop(ids, arguments, content="contentwords"), tools=True)
        return replace(
            traits,
            arguments_as_text=not takes_object,
            iterates_arguments=traits.iterates_arguments and takes_object,
            call_ids=ids,
            takes_results="resultwords" in rendered,
            one_call_per_message=two.count("argvalue") < 2 * rendered.count("argvalue"),
            writes_content_beside_calls=_in_order(with_text, "contentwords", "argvalue"),
        )

    # -- images ------------------------------------------------------------------------------------

    def _parts(self, traits: TemplateTraits) -> TemplateTraits:
        """Try lists of parts. A template without a word of images may print them as Python would."""
        if not traits.takes_parts:
            return traits
        arguments = _TEXT if traits.arguments_as_text else _OBJECT
        *calling, result = _loop(traits.call_ids, arguments)

        def writes_images(word: str, *messages: _Message, tools: bool = False) -> bool:
            *before, last = messages
            text = {"type": "text", "text": word}
            bare, shown = (
                self._render([*before, {**last, "content": parts}], tools=tools)
                for parts in ([text], [text, _IMAGE])
            )
            return word in shown and shown != bare and "'type'" not in shown and '"type"' not in shown

        return replace(
            traits,
            takes_parts=writes_images("firstquestion", _USER),
            takes_result_parts=traits.takes_calls
            and traits.takes_results
            and writes_images("resultwords", *calling, result, tools=True),
        )

    # -- reasoning ---------------------------------------------------------------------------------

    def _reasoning(self, traits: TemplateTraits) -> TemplateTraits:
        key, on = self._reasoning_key(traits)
        if key is None:
            return traits
        answered = [_USER, {**_ANSWER, key: _REASONING}, _NEXT]
        agents = [
            *_loop(traits.call_ids, _TEXT if traits.arguments_as_text else _OBJECT, key=key),
            _ANSWER,
            _NEXT,
        ]

        def keeps(**switch: bool) -> tuple[bool, bool]:
            return (
                _REASONING in self._render(answered, **on, **switch),
                _REASONING in self._render(agents, tools=True, **on, **switch),
            )

        by_itself = keeps()
        switches = [
            (name, value)
            for name in sorted(self._template.contents.variables)
            if _SWITCH.search(name)
            for value in (True, False)
            if (kept := keeps(**{name: value})) != by_itself and any(kept)
        ]
        return replace(
            traits,
            reasoning_key=key,
            keeps_answered_reasoning=any(by_itself),
            keep_switches=tuple(switches[:1]),
        )

    def _reasoning_key(self, traits: TemplateTraits) -> tuple[str | None, Mapping[str, Any]]:
        """Return the key whose text comes out in a tool loop, and what has to be switched on for it."""
        arguments = _TEXT if traits.arguments_as_text else _OBJECT
        keys = dict.fromkeys((traits.reasoning_key, *TEMPLATE_KEYS))
        for on in ({}, {"enable_thinking": True}, {"thinking": True}):
            if on and not on.keys() & self._template.contents.variables:
                continue
            for key in filter(None, keys):
                loop = _loop(traits.call_ids, arguments, key=key)
                if _REASONING in self._render(loop, tools=True, **on):
                    return key, on
        answered = [_USER, {**_ANSWER, "reasoning_content": _REASONING}, _NEXT]
        if _REASONING in self._render(answered):
            return "reasoning_content", {}
        return traits.reasoning_key, {}


def _loop(
    ids: CallIds, arguments: Any, *, key: str | None = None, count: int = 1, content: str = ""
) -> list[_Message]:
    """Make an open tool loop."""
    identities = ["callident" if ids is CallIds.NINE_LETTERS else "callidentity", "callidtwo"][:count]
    calls = [
        {"id": each, "type": "function", "function": {"name": "toolname", "arguments": arguments}}
        for each in identities
    ]
    reasoning = {key: _REASONING} if key else {}
    results = [
        {"role": "tool", "tool_call_id": each, "name": "toolname", "content": "resultwords"}
        for each in identities
    ]
    return [_USER, {"role": "assistant", "content": content, "tool_calls": calls, **reasoning}, *results]


def _after_question(rendered: str) -> str:
    """Return what a prompt holds after the question: tools are described before it."""
    return rendered.partition("firstquestion")[2]


def _in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)
