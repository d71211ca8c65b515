"""From the fields of a response template to the table that `BlockReader` reads by.

Reasoning, answer and calls become blocks. A field of another name is left as it is written: its text is part of the
answer, so that nothing is lost.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation.dialects.base import END_MARKERS, Dialect
from mlx_backend.conversation.dialects.block_format import AnswerBlock, BlockCalls, BlockFormat, CallBlock
from mlx_backend.conversation.dialects.block_reader import BlockReader
from mlx_backend.conversation.dialects.response_template.calls import JsonTemplateCalls, TemplateCalls
from mlx_backend.conversation.dialects.response_template.contents import check_transform, content
from mlx_backend.conversation.dialects.response_template.pattern_parser import MAX_CHOICES, parse_pattern
from mlx_backend.conversation.dialects.response_template.patterns import (
    Pattern,
    ResponseTemplateError,
    literal,
    split,
    split_end,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

_REASONING = ("reasoning_content", "reasoning", "thinking")
_KEYS = frozenset({"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"})
_FIELD_KEYS = frozenset(
    {
        *("open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats"),
        *("join", "optional", "transform", "transform_each"),
    }
)
_MAX_FIELDS = 32
_MIN_OPENER = 3  # characters: what is shorter also stands in texts


def dialect_of(template: Any) -> Dialect:
    """Return the dialect that a template describes. Raises ResponseTemplateError."""
    fields = _checked(template)
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    form = BlockFormat(
        reasoning=_at("reasoning", _reasoning, reasoning) if reasoning is not None else {},
        is_anywhere=reasoning is not None and reasoning.get("repeats") is True,
        blocks=_at("tool_calls", _calls, fields["tool_calls"]) if "tool_calls" in fields else (),
        separators=",",
        **(_at("content", _answers, fields["content"]) if "content" in fields else {}),
    )
    if not form.reasoning and not form.blocks:
        raise ResponseTemplateError("response_template has neither reasoning nor calls")
    # A chat template may write a marker in parts; that it takes tools is known by the word.
    calls = BlockCalls(form, taught_by=("tools",)) if form.blocks else None
    return Dialect(
        name="response-template",
        recognises=_recognises,
        reader=partial(BlockReader, form=form),
        continuation=form.continuation,
        opens_in=form.opens_in,
        calls=calls,
        blocks=form.reasoning,
        answers=form.answer_markers,
        ends=form.ends,
        is_from_response_template=True,
        has_reasoning=bool(form.reasoning),
        reasoning_markers=(*form.reasoning, *form.reasoning.values()),
    )


def _recognises(template: str, control_tokens: Set[str]) -> bool:
    return False  # by its response template alone


def _checked(template: Any) -> Mapping[str, Mapping[str, Any]]:
    if not isinstance(template, dict):
        raise ResponseTemplateError("response_template is not an object")
    if template.get("version", 1) != 1:
        raise ResponseTemplateError(f"version {template['version']!r} of response_template is not known")
    if unknown := sorted(set(template) - _KEYS):
        raise ResponseTemplateError(f"response_template has the unknown key {unknown[0]!r}")
    fields = template.get("fields")
    if not isinstance(fields, dict) or not 0 < len(fields) <= _MAX_FIELDS:
        raise ResponseTemplateError(
            f"response_template.fields must be an object of 1 to {_MAX_FIELDS} fields"
        )
    for name, field in fields.items():
        if not isinstance(field, dict):
            raise ResponseTemplateError(f"the field {name!r} of response_template is not an object")
        if unknown := sorted(set(field) - _FIELD_KEYS):
            raise ResponseTemplateError(
                f"the field {name!r} of response_template has the unknown key {unknown[0]!r}"
            )
    return fields


def _at(name: str, make: Any, field: Mapping[str, Any]) -> Any:
    try:
        return make(field)
    except ResponseTemplateError as error:
        raise ResponseTemplateError(f"response_template, {name}: {error}") from error


def _anchor(field: Mapping[str, Any], word: str) -> Pattern | None:
    """Return the pattern that opens or closes a field."""
    texts, source = field.get(word), field.get(f"{word}_pattern")
    if texts is not None and source is not None:
        raise ResponseTemplateError(f"it has {word} and {word}_pattern")
    if source is not None:
        if not isinstance(source, str):
            raise ResponseTemplateError(f"{word}_pattern is not a text")
        return parse_pattern(source)
    if texts is None:
        return None
    choices = [texts] if isinstance(texts, str) else texts
    if not isinstance(choices, list) or not 0 < len(choices) <= MAX_CHOICES:
        raise ResponseTemplateError(f"{word} is neither a text nor a list of texts")
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise ResponseTemplateError(f"{word} is neither a text nor a list of texts")
    return literal(choices)


def _markers(field: Mapping[str, Any], word: str) -> tuple[str, ...]:
    """Return the texts that open or close a field of text, without the white space around them."""
    pattern = _anchor(field, word)
    if pattern is None:
        return ()
    texts = pattern.texts()
    markers = tuple(dict.fromkeys(filter(None, (text.strip() for text in texts or ()))))
    if not markers:
        raise ResponseTemplateError(f"its {word}_pattern is more than a choice of texts")
    return markers


def _openers(markers: tuple[str, ...]) -> tuple[str, ...]:
    for marker in markers:
        if len(marker) < _MIN_OPENER:
            raise ResponseTemplateError(f"{marker!r} is too short to begin a block")
    return markers


def _reasoning(field: Mapping[str, Any]) -> dict[str, str]:
    openers, closers = _openers(_markers(field, "open")), _markers(field, "close")
    if not openers:
        raise ResponseTemplateError("nothing opens it")
    if len(closers) != 1:
        raise ResponseTemplateError(f"it must have one closer, not {len(closers)}")
    return dict.fromkeys(openers, closers[0])


def _answers(field: Mapping[str, Any]) -> dict[str, Any]:
    openers, closers = _openers(_markers(field, "open")), _markers(field, "close")
    if openers:
        if len(closers) != 1:
            raise ResponseTemplateError(f"it must have one closer, not {len(closers)}")
        return {"answers": tuple(AnswerBlock(opener, closers[0]) for opener in openers)}
    ends = frozenset(closers) & END_MARKERS
    return {
        "ends": ends,
        "answers": tuple(AnswerBlock("", closer) for closer in closers if closer not in ends),
    }


def _calls(field: Mapping[str, Any]) -> tuple[CallBlock, ...]:
    opening, closing = _anchor(field, "open"), _anchor(field, "close")
    if opening is None:
        raise ResponseTemplateError("nothing opens it")
    try:
        openers, beginning = split(opening)
        ending, closers = split_end(closing) if closing else (Pattern(()), ())
    except ResponseTemplateError as error:
        raise ResponseTemplateError(
            f"{error}: its open_pattern and close_pattern have to be markers"
        ) from error
    inner = content(field.get("content", "text"), field.get("content_args", {}))
    transform, each = field.get("transform"), field.get("transform_each") is True
    if each and transform is None:
        raise ResponseTemplateError("transform_each has no transform")
    check_transform(transform, None if each else {"content", *beginning.names})
    syntax = TemplateCalls(beginning, ending, inner, transform, each=each)
    if syntax.is_json:
        syntax = JsonTemplateCalls(beginning, ending, inner, transform, each=each)
    return tuple(
        CallBlock(opener=opener, closers=tuple(c for c in closers if c), syntax=syntax)
        for opener in _openers(openers)
    )
