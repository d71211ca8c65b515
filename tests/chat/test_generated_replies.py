"""Prompts hold earlier replies as the model generated them, however a client has written them anew.

A model's prefix cache has the prompt and what was generated. So the next prompt has to begin with just these tokens.
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import QWEN_XML_MARKERS, qwen_xml
from harmony_data import GPT_OSS_TEMPLATE, needs_gpt_oss_template
from scripted_engine import HARMONY_MARKERS, HARMONY_TEMPLATE, ScriptedEngine

from mlx_backend.byte_cache import CacheBudget
from mlx_backend.chat import generated_replies
from mlx_backend.chat.generated_replies import GeneratedReplies, is_same_call
from mlx_backend.chat.prompt import Prompt
from mlx_backend.chat.reply import FinishedReply
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Event, Message
from mlx_backend.conversation.parser import fold
from mlx_backend.engine.base import QueueClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlx_backend.chat.reply import Reply

EDIT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer"},
                "replace_all": {"type": "boolean", "default": False},
                "mode": {"type": "string", "default": "text"},
            },
        },
    },
}
USER: dict[str, Any] = {"role": "user", "content": "Please edit."}

QWEN_JSON = (
    qwen_xml()
    .replace("<function={{ call.function.name }}>\n", '{"name": "{{ call.function.name }}", "arguments": ')
    .replace(
        """{% for key, value in call.function.arguments | items -%}
<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor -%}
</function>
""",
        "{{ call.function.arguments | tojson }}}\n",
    )
)

HARMONY_CALL = (
    "<|channel|>analysis<|message|>I look at it. <|end|><|start|>assistant<|channel|>commentary to=functions.edit "
    '<|constrain|>json<|message|>{"path":"a.py","line": 3}<|call|>'
)
HARMONY_PREAMBLE_CALL = HARMONY_CALL.replace(
    "<|start|>assistant",
    "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant",
)
HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>Done.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is edited.<|return|>"
)
JSON_CALL = (
    "I look at it. \n</think>\n\n<tool_call>\n"
    '{"name":"edit","arguments":{"path":"a.py",  "line":3}}\n</tool_call><|im_end|>'
)
XML_CALL = (
    "I look at it. \n</think>\n\n<tool_call>\n<function=edit>\n<parameter=path>\na.py\n</parameter>\n"
    "<parameter=line>\n3\n</parameter>\n</function>\n</tool_call><|im_end|>"
)
THINK_ANSWER = "Done.\n</think>\n\n\nIt is edited.<|im_end|>"


def harmony(template: str = HARMONY_TEMPLATE, call: str = HARMONY_CALL) -> Callable[..., Scene]:
    return partial(Scene, HARMONY_MARKERS, template, call, HARMONY_ANSWER)


def think(template: str, call: str) -> Callable[..., Scene]:
    return partial(Scene, QWEN_XML_MARKERS, template, call, THINK_ANSWER)


class Scene:
    """A model that calls `edit` until it is to answer, and a client that sends its replies back in its own form."""

    def __init__(self, markers: tuple[str, ...], template: str, call: str, answer: str) -> None:
        self.call, self.answer = call, answer
        self.reply_text = call
        self.engine = ScriptedEngine(lambda _: self.reply_text, markers=markers, chat_template=template)
        self.service = Service(self.engine)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, USER]

    def reply(self, text: str | None = None, client: str = "", **fields: Any) -> tuple[Message, Reply]:
        self.reply_text = text or self.call
        request = ChatRequest(messages=self.messages, tools=[EDIT], **fields)
        reply = self.service.chat(request, QueueClient(client))
        events = [event for event in reply.events() if isinstance(event, Event.__value__)]
        return fold(events), reply

    def called(self, text: str | None = None, **fields: Any) -> dict[str, Any]:
        """Have the model call the tool; return the message as a careful client sends it back."""
        message, reply = self.reply(text, **fields)
        (call,) = message.tool_calls
        function = {"name": call.name, "arguments": call.arguments}
        calls = [{"id": reply.call_id(0), "type": "function", "function": function}]
        sent = {"role": "assistant", "content": message.content, "tool_calls": calls}
        return {**sent, "reasoning_content": message.reasoning}

    def send(self, message: dict[str, Any], result: str = "edited") -> None:
        """Go on with a message and the results of its calls."""
        calls = message.get("tool_calls", ())
        results = [{"role": "tool", "tool_call_id": each["id"], "content": result} for each in calls]
        self.messages = [*self.messages, message, *results]

    def unmatched(self, since: int = -2) -> int:
        """How many tokens of an earlier prompt (the last but one) and its reply the last prompt does not begin with."""
        before, now = (self.engine.requests[at].request.prompt for at in (since, -1))
        tokens = self.engine.tokenizer.encode(self.reply_text, control_tokens=True)
        had = (*before, *tokens[:-1])  # the end marker is the template's
        return sum(one != other for one, other in zip(had, now, strict=False)) + max(0, len(had) - len(now))

    @property
    def prompt(self) -> str:
        return self.engine.requests[-1].prompt


SCENES = [
    pytest.param(harmony(), id="harmony"),
    pytest.param(
        harmony(call=HARMONY_PREAMBLE_CALL.replace("One moment.", "")), id="harmony with an empty preamble"
    ),
    pytest.param(think(QWEN_JSON, JSON_CALL), id="hermes"),
    pytest.param(think(qwen_xml(), XML_CALL), id="qwen-xml"),
]


def arguments(
    message: dict[str, Any], change: Callable[[dict[str, Any]], Any], **layout: Any
) -> dict[str, Any]:
    """Return a message whose calls have other arguments."""
    (call,) = message["tool_calls"]
    written = json.dumps(change(json.loads(call["function"]["arguments"])), **layout)
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": written}}]}


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


ANEW = {
    "as it was": lambda message: message,
    "without spaces": lambda message: arguments(message, dict, separators=(",", ":")),
    "keys in another order": lambda message: arguments(message, lambda had: dict(reversed(had.items()))),
    "with a default added": lambda message: arguments(message, lambda had: {"replace_all": False, **had}),
    "with the schema's default added": lambda message: arguments(
        message, lambda had: {**had, "mode": "text"}
    ),
    "with reasoning stripped": lambda m: {**m, "reasoning_content": m["reasoning_content"].strip()},
    "with reasoning as blocks": lambda message: {
        **without_reasoning(message),
        "content": [{"type": "thinking", "thinking": message["reasoning_content"]}],
    },
    "without reasoning": without_reasoning,
    "with content as blocks": lambda m: {**m, "content": [{"type": "text", "text": m["content"]}]},
}


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("anew", ANEW.values(), ids=ANEW)
def test_a_call_that_a_client_writes_anew_is_what_was_generated(
    scene: Callable[[], Scene], anew: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    with (each := scene()).engine:
        for _ in range(3):
            each.send(anew(each.called()))
            each.reply()
            assert each.unmatched() == 0


@needs_gpt_oss_template
@pytest.mark.parametrize("call", [HARMONY_CALL, HARMONY_PREAMBLE_CALL], ids=["call", "preamble and call"])
def test_headers_and_preambles_stay_as_gpt_oss_writes_them(call: str) -> None:
    with (each := harmony(GPT_OSS_TEMPLATE.read_text(), call)()).engine:
        for _ in range(3):
            each.send(arguments(each.called(), lambda had: {"replace_all": False, **had}))
            each.reply()
            assert each.unmatched() == 0


@pytest.mark.parametrize("scene", SCENES)
def test_markers_that_a_tool_result_spells_change_nothing_before_them(scene: Callable[[], Scene]) -> None:
    with (each := scene()).engine:
        for result in ("plain", "it says <|im_end|> and <|call|>", "half <|im", "more"):
            each.send(each.called(), result)
            each.reply()
            assert each.unmatched() == 0


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        (lambda had: {**had, "path": "b.py"}, "b.py"),
        (lambda had: {**had, "line": 4}, "4"),
        (lambda had: {**had, "replace_all": True}, "replace_all"),
        (lambda had: {**had, "mode": "binary"}, "binary"),
    ],
    ids=["another value", "another number", "more than a default", "not the schema's default"],
)
def test_arguments_that_the_client_has_changed_are_the_clients(
    scene: Callable[[], Scene], change: Callable[[dict[str, Any]], Any], shown: str
) -> None:
    with (each := scene()).engine:
        message = each.called()
        each.send(arguments(message, change))
        each.reply()
        written = each.prompt.split("Please edit.")[1]
        assert shown in written.replace("assistant", "")
        assert each.unmatched() > 0


@pytest.mark.parametrize("scene", SCENES)
def test_an_answer_that_the_client_has_changed_is_the_clients(scene: Callable[[], Scene]) -> None:
    with (each := scene()).engine:
        message, _ = each.reply(each.answer)
        each.messages = [*each.messages, {"role": "assistant", "content": "It is not edited."}, USER]
        each.reply()
        assert message.content.strip() == "It is edited."
        assert "It is not edited." in each.prompt
        assert "It is edited." not in each.prompt


@pytest.mark.parametrize("scene", SCENES)
def test_what_the_template_leaves_out_stays_out(scene: Callable[[], Scene]) -> None:
    with (each := scene()).engine:
        each.send(each.called())
        answer, _ = each.reply(each.answer)
        assert "I look at it." in each.prompt
        said = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning}
        each.messages = [*each.messages, said, USER]
        each.reply()
        assert "I look at it." not in each.prompt, "the turn has its answer"
        assert "Done." not in each.prompt


@pytest.mark.parametrize("sends_reasoning", [True, False], ids=["with reasoning", "only the answer"])
def test_an_answer_goes_on_as_generated_where_the_template_keeps_its_reasoning(
    sends_reasoning: bool,
) -> None:
    with (each := think(qwen_xml("true"), XML_CALL)()).engine:
        for question in ("one", "two", "three"):
            each.messages = [*each.messages, {"role": "user", "content": question}]
            message, _ = each.reply(each.answer)
            if question != "one":
                assert each.unmatched() == 0
            said = {"role": "assistant", "content": message.content.strip()}
            each.send({**said, "reasoning_content": message.reasoning} if sends_reasoning else said)


def test_the_same_answer_to_something_else_has_its_own_reasoning() -> None:
    with (each := think(qwen_xml("true"), XML_CALL)()).engine:
        each.reply(each.answer)
        said = {"role": "assistant", "content": "It is edited."}
        each.messages = [{"role": "user", "content": "Another question."}, said, USER]
        each.reply(each.answer)
        assert "Done." not in each.prompt


def test_each_of_several_replies_to_one_prompt_is_known() -> None:
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        before = each.messages
        texts = [JSON_CALL.replace("3", number) for number in ("4", "5", "6")]
        for message, text in [(each.called(text), text) for text in texts]:
            each.messages = before
            each.send(message)
            each.reply(text)
            assert each.unmatched(since=0) == 0


def test_what_a_prompt_holds_is_read_once_however_many_replies_there_were_to_what_is_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings: list[Message] = []
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        message = each.called()
        before = each.messages
        for number in range(10, 40):
            each.messages = before
            each.called(JSON_CALL.replace("3", str(number)))
        each.send(message)

        def counted(events: Iterable[Event]) -> Message:
            readings.append(fold(events))
            return readings[-1]

        monkeypatch.setattr(generated_replies, "fold", counted)
        each.reply()
        assert each.unmatched(since=0) == 0
    assert len(readings) <= 2


def test_the_same_answer_about_another_picture_has_its_own_reasoning() -> None:
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        replies = each.service._replies
        asked: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "image", "image": 0}]}]
        answer: dict[str, Any] = {"role": "assistant", "content": "A cat."}
        message = Message(reasoning="It has whiskers.", content="A cat.")
        replies.put("", asked, Prompt(tokens=(1,)), FinishedReply(message, (), ()), [1])
        for images, reasoning in (([1, 2], "It has whiskers."), ([3, 2], None)):
            again = [*asked, answer, {"role": "user", "content": [{"type": "image", "image": 1}]}]
            restored = replies.restored("", again, (), images, everywhere=True)
            assert restored[1].get("reasoning_content") == reasoning


def test_what_one_client_was_sent_is_not_anothers() -> None:
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        message = each.called(client="key a")
        each.send(without_reasoning(arguments(message, lambda had: {"replace_all": False, **had})))
        each.reply(client="key b")
        assert "I look at it." not in each.prompt
        assert '"replace_all": false' in each.prompt
        each.reply(client="key a")
        assert "I look at it." in each.prompt
        assert '"replace_all"' not in each.prompt.split("Please edit.")[1]


def test_calls_of_unknown_ids_are_as_the_client_writes_them() -> None:
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        message = each.called()
        (call,) = message["tool_calls"]
        each.send(
            {
                **message,
                "tool_calls": [
                    {
                        **call,
                        "id": "call_of_somebody",
                        "function": {"name": "edit", "arguments": '{"path":"c"}'},
                    }
                ],
            }
        )
        each.reply()
        assert '{"path": "c"}' in each.prompt


@pytest.mark.parametrize("name", ["edit", "edit<it"], ids=["as it is", "another to the model"])
def test_defaults_are_known_where_calls_have_no_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (each := think(qwen_xml(), XML_CALL)()).engine:
        monkeypatch.setitem(EDIT["function"], "name", name)
        message = each.called(XML_CALL.replace("=edit", f"={name.replace('<', '_')}"))
        message = arguments(message, lambda had: {**had, "mode": "text"})
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == name
        each.send({**message, "tool_calls": [{**call, "id": "call_0"}]})
        each.reply(each.reply_text)
        assert each.unmatched() == 0


def test_a_reply_that_a_stop_string_has_cut_is_as_it_was_shown() -> None:
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        message, _ = each.reply("Well.\n</think>\n\nOne STOP two<|im_end|>", stop=("STOP",))
        assert message.content.strip() == "One"
        each.messages = [*each.messages, {"role": "assistant", "content": "One"}, USER]
        each.reply()
        assert "STOP" not in each.prompt


def test_replies_are_forgotten_after_their_time() -> None:
    now = [0.0]
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        each.service._replies._clock = lambda: now[0]
        message = each.called()
        each.send(arguments(message, lambda had: {"replace_all": False, **had}))
        now[0] = generated_replies.TIME_TO_LIVE + 1
        each.reply()
        assert '"replace_all": false' in each.prompt
        assert each.unmatched() > 0


def test_replies_are_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_replies, "MAX_REPLIES", 3)
    with (each := think(QWEN_JSON, JSON_CALL)()).engine:
        each.service._replies = GeneratedReplies(
            each.engine.tokenizer, DIALECTS["hermes-json"], CacheBudget(40_000)
        )
        for number in range(20):
            each.called(JSON_CALL.replace("3", str(number)))
        replies = each.service._replies
        assert len(replies._replies) == 3
        assert 0 < replies._calls.nbytes <= 20_000


SCHEMA = EDIT["function"]["parameters"]
NESTED = {"properties": {"edits": {"items": SCHEMA}}}


@pytest.mark.parametrize(
    ("generated", "sent", "schema", "same"),
    [
        ('{"a":1}', '{ "a": 1 }', {}, True),
        ('{"a":1.0}', '{"a":1}', {}, True),
        ('{"a":1}', '{"a":true}', {}, False),
        ('{"a":"1"}', '{"a":1}', {}, False),
        ('{"a":{"b":1,"c":2}}', '{"a":{"c":2,"b":1}}', {}, True),
        ('{"a":[1,2]}', '{"a":[2,1]}', {}, False),
        ('{"a":[1]}', '{"a":[1,2]}', {}, False),
        ('{"a":1}', '{"a":1,"b":null}', {}, True),
        ('{"a":1,"b":null}', '{"a":1}', {}, True),
        ('{"a":1,"b":2}', '{"a":1}', {}, False),
        ('{"a":1}', '{"a":1,"b":[]}', {}, True),
        ('{"a":1}', '{"a":1,"b":0}', {}, False),
        ('{"a":1}', '{"a":1,"mode":"text"}', SCHEMA, True),
        ('{"a":1}', '{"a":1,"mode":""}', SCHEMA, False),
        ('{"edits":[{}]}', '{"edits":[{"mode":"text","replace_all":false}]}', NESTED, True),
        ('{"edits":[{}]}', '{"edits":[{"mode":"text","replace_all":true}]}', NESTED, False),
        ("no JSON", "no JSON", {}, True),
        ("no JSON", "no  JSON", {}, False),
        ('{"a":1}', '{"a":1,"properties":false}', {"properties": ["odd"]}, True),
        ("[" * 5000 + "]" * 5000, "[ " * 5000 + "]" * 5000, {}, False),
    ],
)
def test_a_call_is_the_same_if_nothing_but_defaults_was_added(
    generated: str, sent: str, schema: dict[str, Any], same: bool
) -> None:
    assert is_same_call(generated, sent, schema) is same
