"""A model's own description of its output, transformers' `response_template`, as a dialect.

It stands in a tokenizer's configuration, and says with which texts reasoning, answer and calls begin and end:

    "response_template": {
        "start_anchor": "<|im_start|>assistant\\n",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": true},
            "content": {"close": "<|im_end|>"}
        }
    }

transformers' own parser reads by it; here its events become ours. It is for models of families that have no dialect of
ours, or that one would misread: a family's reader knows markers by their token ids, repairs calls and streams their
arguments, and its calls can be held to a schema. None of that is so here: markers are known by their spelling, a call
is put out when it is whole, and none can be required. What the parser cannot read is shown as it was written.

The older `response_schema` is not read: transformers itself drops it.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from mlx_backend.conversation import dialects
from mlx_backend.conversation.dialects.base import END_MARKERS, Dialect, Reader
from mlx_backend.conversation.dialects.block_format import BlockFormat
from mlx_backend.conversation.dialects.harmony import HARMONY
from mlx_backend.conversation.dialects.plain import PLAIN
from mlx_backend.conversation.dialects.recognition import Recognition
from mlx_backend.conversation.events import Channel
from mlx_backend.conversation.json_arguments import repair_arguments
from mlx_backend.conversation.parser import parse_text
from mlx_backend.conversation.quoting import OpenCode
from mlx_backend.conversation.scanner import MarkerSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from mlx_backend.conversation.events import EndedBy
    from mlx_backend.conversation.tools import ToolSet

MAX_TEMPLATE = 65_536
"""Characters of a template, as JSON."""
_SEARCH_SECONDS = 0.2
"""How long one search for a delimiter may take; after a longer one the rest of the reply is its answer."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_LAYOUT = "\r\n"
_REPEATED_GROUP = re.compile(r"\)\??[*+{]")
_TOOL = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
}


class ResponseTemplateError(ValueError):
    """A response template cannot be used; the message says why."""


def recognise(
    chat_template: str | None,
    control_tokens: Iterable[str],
    response_template: Any = None,
    *,
    on_refused: Callable[[str], None] | None = None,
) -> Recognition:
    """Return the dialect of a model. `on_refused` gets the reason if its response template cannot be used."""
    recognised = dialects.recognise(chat_template, control_tokens)
    family = recognised.dialect
    if response_template is None or (family is HARMONY and recognised.is_by_template):
        return recognised  # Harmony has more than any response template can say
    try:
        described = response_template_dialect(response_template)
    except ResponseTemplateError as error:
        if on_refused is not None:
            on_refused(str(error))
        return recognised
    if family is not PLAIN and _reads(described, family):
        return recognised
    return Recognition(described, "its tokenizer has a response template")


def response_template_dialect(template: Any) -> Dialect:
    """Return the dialect that a response template describes; always the same object for the same template.

    Raises ResponseTemplateError.
    """
    try:
        source = json.dumps(template, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ResponseTemplateError(f"response_template is not JSON: {error}") from error
    if len(source) > MAX_TEMPLATE:
        raise ResponseTemplateError(
            f"response_template has {len(source)} characters; {MAX_TEMPLATE} are allowed"
        )
    found = _dialect_of(source)
    if isinstance(found, ResponseTemplateError):
        raise found
    return found


@lru_cache(maxsize=256)
def _dialect_of(source: str) -> Dialect | ResponseTemplateError:
    template = json.loads(source)
    try:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        _check_patterns(template)
        loaded = load_response_template(template)
        if "content" not in loaded.fields:  # text outside of any field would be dropped
            loaded = load_response_template({**template, "fields": {**template["fields"], "content": {}}})
    except Exception as error:  # transformers may be older than this; its checks are not complete
        return ResponseTemplateError(f"response_template: {error}")
    for field in loaded.fields.values():
        field.optional = True
        field.open_re, field.close_re = _timed(field.open_re), _timed(field.close_re)
    reasoning = next((loaded.fields[name] for name in _REASONING if name in loaded.fields), None)
    if reasoning is None and "tool_calls" not in loaded.fields:
        return ResponseTemplateError("response_template has neither reasoning nor calls")
    blocks = {}
    if reasoning is not None and reasoning.open_literals and reasoning.close_literals:
        blocks = dict.fromkeys(reasoning.open_literals, reasoning.close_literals[0])
    form = BlockFormat(reasoning=blocks)
    return Dialect(
        name="response-template",
        reader=partial(TemplateReader, template=loaded, markers=source.replace("\\", ""), form=form),
        continuation=form.continuation,
        opens_in=partial(_opens_in, loaded),
        blocks=blocks,
        markers=form.telling_markers,
        has_reasoning=reasoning is not None,
        reasoning_markers=(*blocks, *blocks.values()),
        is_from_response_template=True,
    )


def _check_patterns(value: Any) -> None:
    """Refuse regular expressions that repeat a group: these may take any time, and a folder is not trusted so far."""
    match value:
        case dict():
            for key, each in value.items():
                if str(key).endswith("_pattern") and isinstance(each, str) and _REPEATED_GROUP.search(each):
                    raise ResponseTemplateError(f"its {key} repeats a group, and might never end")
                _check_patterns(each)
        case list():
            for each in value:
                _check_patterns(each)


class _TimedPattern:
    """A compiled pattern of the `regex` package whose searches raise TimeoutError if they take too long."""

    def __init__(self, pattern: Any) -> None:
        self.search = partial(pattern.search, timeout=_SEARCH_SECONDS)


def _timed(pattern: Any) -> Any:
    return None if pattern is None else _TimedPattern(pattern)


def _opens_in(template: Any, prompt_tail: str) -> Channel | None:
    """Return the channel that the prompt has opened after the last beginning of a turn, if any."""
    from transformers.utils.chat_parsing import ResponseParser

    if not template.start_anchor_re.search(prompt_tail):
        return None
    found = None
    try:
        events = ResponseParser(template, prefix=prompt_tail.rstrip()).initial_events
    except Exception:  # as of any text that the parser reads
        return None
    for event in events:
        if event["type"] != "region_chunk":
            is_open_reasoning = event["type"] == "region_open" and event["field"] in _REASONING
            found = Channel.ANALYSIS if is_open_reasoning else Channel.FINAL
    return found


class TemplateReader(Reader):
    """Reads one turn with transformers' parser, character by character: its events do not depend on the pieces."""

    __slots__ = (
        *("_code", "_field", "_form", "_layout", "_markers", "_parser", "_template", "_tools"),
        "_written",
    )

    def __init__(
        self,
        *,
        template: Any,
        markers: str,
        form: BlockFormat,
        tools: ToolSet,
        opens_in: Channel | None = None,
        special_tokens: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__()
        self._template, self._markers, self._form, self._tools = template, markers, form, tools
        self._field: str | None = None  # the one that is open, if its text is not the answer's
        self._layout: str | None = None  # line breaks that may be layout; None: no text has come yet
        self._written = ""  # since the last text that was put out
        self._code = OpenCode()  # of the answer
        closers = MarkerSet(form.reasoning.values())
        self.markers, self.spelt = closers, closers.without((special_tokens or {}).values())
        opener = next(iter(form.reasoning), "") if opens_in is Channel.ANALYSIS else ""
        self._parser = self._new_parser(opener)
        if opener:
            self._field = next(name for name in _REASONING if name in template.fields)
        elif opens_in is Channel.FINAL:
            self._has_spoken = True

    def _new_parser(self, prefix: str = "") -> Any:
        from transformers.utils.chat_parsing import ResponseParser

        tools = [{"name": name, "parameters": self._tools.parameters(name)} for name in self._tools.names]
        return ResponseParser(self._template, prefix=prefix, tools=tools)

    @property
    def is_reasoning(self) -> bool:
        return self._field in _REASONING

    @property
    def is_answering(self) -> bool:
        """Whether the answer or a call has begun."""
        return self._has_spoken and not self.is_reasoning

    def reasoning_closer(self, prompt_tail: str) -> tuple[str, ...]:
        """Close the block on a line of its own."""
        closer = next(iter(self._form.reasoning.values()), "")
        return ("\n", closer, "\n\n") if closer else ()

    def text(self, text: str) -> None:
        """Put out what is known to be reasoning or answer, and the calls that are whole."""
        for at, character in enumerate(text):
            if self._parser is None:
                self._put_out(Channel.FINAL, text[at:])
                return
            self._written += character
            try:
                events = self._parser.feed(character)
                for event in events:
                    self._take(event)
                if events and events[-1]["type"] == "region_close":
                    self._written = ""
            except TimeoutError:
                self._show_written()
                self._parser = None
            except Exception:  # the parser raises what the content's own parsers do
                self._show_written()

    def marker(self, marker: str) -> None:
        """Take a control token, or what closes reasoning. What the template does not name may end the turn."""
        if self._field is None and marker in self._form.reasoning.values() and not self._code.is_open:
            return  # the answer is not about it, and there is nothing to close
        if marker in self._markers:
            self.text(marker)
        elif marker in END_MARKERS:
            self.close("stop")
            self.ended = True

    def close(self, ended_by: EndedBy) -> None:
        """Handle the end: a call that was cut is not put out."""
        if self._parser is None or (self._field == "tool_calls" and ended_by == "length"):
            return
        try:
            for event in self._parser.finalize()[1]:
                self._take(event)
        except Exception:
            self._show_written()
        if self._layout and not self.is_reasoning:
            self._put_out(Channel.FINAL, self._layout)
        self._layout = ""

    def _take(self, event: Mapping[str, Any]) -> None:
        name = event["field"]
        is_text = name in _REASONING or name == "content"
        match event["type"]:
            case "region_open":
                self._layout = None
                self._field = None if name == "content" else name
                if is_text and self._template.fields[name].open_re is not None:
                    self._written = ""
            case "region_chunk" if is_text:
                self._written = self._written[len(event["text"]) :]
                self._put_out_but_breaks(
                    Channel.ANALYSIS if name in _REASONING else Channel.FINAL, event["text"]
                )
            case "region_close":
                if name == "tool_calls":
                    self._put_out_calls(event["value"])
                elif not is_text:  # a field that is none of ours is part of the answer
                    self._put_out(Channel.FINAL, self._written)
                self._written = self._written if is_text else ""
                self._field, self._layout = None, None

    def _put_out_but_breaks(self, channel: Channel, text: str) -> None:
        """Put text out; hold the line breaks at its ends, which are a block's layout."""
        if self._layout is None:
            text = text.lstrip(_LAYOUT)
        text = (self._layout or "") + text
        visible = text.rstrip(_LAYOUT)
        if visible or self._layout is not None:
            self._layout = text[len(visible) :]
        self._put_out(channel, visible)

    def _put_out(self, channel: Channel, text: str) -> None:
        if text:
            if channel is Channel.FINAL:
                self._code.add(text)
            self._open(channel)
            self._emit(text)
            self.delta = None

    def _put_out_calls(self, value: Any) -> None:
        """Put calls out. Raises ValueError if they are none."""
        if not self._tools.may_be_called:
            raise ValueError("there are no tools")
        calls = []
        for each in value if isinstance(value, list) else [value]:
            match each.get("function", each) if isinstance(each, dict) else None:
                case {"name": str(name), "arguments": dict() | str() | None as arguments} if name:
                    calls.append((name, arguments))
                case _:
                    raise ValueError("a name and arguments are expected")
        for name, arguments in calls:
            self._open_call(self._tools.offered_name(name))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            self._emit(repair_arguments(written))
            self._close_call(complete=True)

    def _show_written(self) -> None:
        """Show what could not be read, and go on after it."""
        self._put_out(Channel.FINAL, self._written)
        self._written, self._field, self._layout = "", None, None
        self._parser = self._new_parser()


@lru_cache(maxsize=256)
def _reads(described: Dialect, family: Dialect) -> bool:
    """Whether a response template reads what a family writes as the family does: then that reader is the better one."""
    begun = family.continuation("A thought.", "An answer.", opened=None)
    samples = ["".join(piece.text for piece in begun.pieces)]
    if family.calls is not None:
        arguments = {"city": "Paris, {right} now", "days": 3}
        call = "".join(piece.text for piece in family.calls.encode("get_weather", arguments))
        samples += [call, f"{samples[0]}\n{call}"]
    return all(_meaning(family, sample) == _meaning(described, sample) for sample in samples)


def _meaning(dialect: Dialect, text: str) -> tuple[Any, ...]:
    message = parse_text(text, dialect, tools=[_TOOL])
    try:
        calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    except ValueError:
        return (text,)
    return message.reasoning.strip(), message.content.strip(), calls
