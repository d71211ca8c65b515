"""The same tools in another order are the same list, in the order in which their client had sent them first."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest
from byte_tokenizer import ByteTokenizer
from chat_templates import QWEN_XML_MARKERS, qwen_xml
from scripted_engine import ScriptedEngine

from mlx_backend.chat.request import ChatRequest, ToolChoice
from mlx_backend.chat.service import Service
from mlx_backend.chat.tool_lists import ToolLists
from mlx_backend.conversation.events import Event, Message
from mlx_backend.conversation.parser import fold
from mlx_backend.engine.base import QueueClient

if TYPE_CHECKING:
    from collections.abc import Iterator


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": parameters},
    }


def reordered(value: Any) -> Any:
    """Return objects with their keys in the opposite order."""
    return {key: reordered(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


TEXT = {"type": "string", "description": "A text."}
TOOLS = [tool("write", path=TEXT, content=TEXT), tool("read", path=TEXT), tool("ask")]
CLIENT = QueueClient("key a")


class Scene:
    """A model, and the prompts that it is given."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(
            lambda _: "Hm.\n</think>\n\nYes.<|im_end|>",
            markers=QWEN_XML_MARKERS,
            chat_template=qwen_xml(),
        )
        self.service = Service(self.engine)

    def prompt(self, tools: list[dict[str, Any]], client: QueueClient = CLIENT, **fields: Any) -> str:
        messages = [{"role": "user", "content": "hello"}]
        request = ChatRequest(messages=messages, tools=tools, **fields)
        return self.engine.tokenizer.decode(self.service.prompt(request, client).tokens)


@pytest.mark.parametrize(
    "tools",
    [TOOLS[::-1], reordered(dict(enumerate(TOOLS))).values(), [TOOLS[1], reordered(TOOLS[0]), TOOLS[2]]],
    ids=["tools", "tools and keys", "a tool's keys"],
)
def test_the_same_tools_in_another_order_make_the_same_prompt(tools: Any) -> None:
    with (scene := Scene()).engine:
        first = scene.prompt(TOOLS)
        assert first.index("To write.") < first.index("To read.") < first.index("To ask."), "as it was sent"
        assert scene.prompt(list(tools)) == first


@pytest.mark.parametrize(
    "tools",
    [TOOLS[1:], [*TOOLS[1:], tool("write", path=TEXT)], [*TOOLS, tool("more")]],
    ids=["fewer", "another schema", "more"],
)
def test_other_tools_are_another_list(tools: list[dict[str, Any]]) -> None:
    with (scene := Scene()).engine, (fresh := Scene()).engine:
        scene.prompt(TOOLS)
        assert scene.prompt(tools) == fresh.prompt(tools)


def test_the_arguments_of_a_strict_tool_have_the_order_of_its_schema() -> None:
    lists = ToolLists()

    def properties(tools: list[dict[str, Any]], *strict: str) -> list[str]:
        choice = ToolChoice(strict=frozenset(strict))
        request = lists.as_first_sent(ChatRequest(messages=[], tools=tools, tool_choice=choice))
        (written,) = (each["function"] for each in request.tools if each["function"]["name"] == "write")
        return list(written["parameters"]["properties"])

    other = reordered(TOOLS[0])
    assert properties(TOOLS) == properties([other, *TOOLS[1:]]) == ["path", "content"]
    assert properties([other, *TOOLS[1:]], "write") == ["content", "path"]
    assert properties([*TOOLS[1:], other], "write") == ["content", "path"]
    assert properties(TOOLS, "write") == ["path", "content"]


def test_lists_take_no_more_memory_than_is_counted() -> None:
    lists = ToolLists()
    nested: dict[str, Any] = {}
    for _ in range(60):
        nested = {"": nested}

    def send(number: int) -> None:
        tools = json.loads(json.dumps([tool(str(number), path=nested)]))
        lists.as_first_sent(ChatRequest(messages=[], tools=tools))

    send(0)
    tracemalloc.start()
    try:
        counted = lists._lists.nbytes
        for number in range(1, 200):
            send(number)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] <= lists._lists.nbytes - counted
    finally:
        tracemalloc.stop()


def test_the_order_is_each_clients_own() -> None:
    with (scene := Scene()).engine:
        first = scene.prompt(TOOLS)
        assert scene.prompt(TOOLS[::-1], QueueClient("key b")) != first


def test_a_tool_that_is_deferred_changes_nothing_of_the_list() -> None:
    with (scene := Scene()).engine:
        first = scene.prompt(TOOLS)
        later = [tool("late"), *TOOLS[::-1]]
        assert scene.prompt(later, deferred_tools=frozenset(["late"])) == first


def test_an_error_names_the_tool_where_its_client_has_put_it() -> None:
    wrong = tool("read", path={"type": "nonsense"})
    choices = [TOOLS[0], wrong], [wrong, TOOLS[0]]
    with (scene := Scene()).engine:
        for tools, place in zip(choices, (1, 0), strict=True):
            scene.prompt(tools)
            request = scene.service._accepted(ChatRequest(messages=[], tools=tools), CLIENT)
            paths = {
                each["function"]["name"]: path
                for each, path in zip(request.tools, request.tool_paths, strict=True)
            }
            assert paths["read"] == f"tools[{place}].function"


# -- a conversation that goes on without its tools ---------------------------------------------------


SESSION = {"prompt_cache_key": "a conversation"}
TURN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Yes."}]
SUMMARISE = {"role": "user", "content": "Summarise all of it."}
CALL = "<tool_call>\n<function=ask>\n</function>\n</tool_call>"


@pytest.fixture
def session() -> Iterator[tuple[ScriptedEngine, Service]]:
    """A model that calls a tool if it can, and answers otherwise; and a turn in a conversation with a name."""
    tokenizer = ByteTokenizer(QWEN_XML_MARKERS, qwen_xml())
    with ScriptedEngine(lambda _: f"Hm.\n</think>\n\n{CALL}Yes.<|im_end|>", tokenizer=tokenizer) as engine:
        service = Service(engine)
        asked(service, ChatRequest(messages=TURN[:1], tools=TOOLS, fields=SESSION))
        yield engine, service


def asked(service: Service, request: ChatRequest, client: QueueClient = CLIENT) -> Message:
    reply = service.chat(request, client)
    return fold(event for event in reply.events() if isinstance(event, Event.__value__))


def test_what_an_agent_asks_without_tools_is_told_of_those_of_its_conversation_and_calls_none(
    session: tuple[ScriptedEngine, Service],
) -> None:
    engine, service = session
    request = ChatRequest(messages=[*TURN, SUMMARISE], fields={**SESSION, "tools": []})
    counted = service.prompt(request, CLIENT)
    message = asked(service, request)
    before, now = engine.requests
    assert now.prompt.startswith(before.prompt.partition("hello")[0])
    assert "To ask." in now.prompt
    assert tuple(counted.tokens) == tuple(now.request.prompt)
    assert not message.tool_calls
    assert "<tool_call>" not in message.content


@pytest.mark.parametrize(
    ("fields", "messages", "client"),
    [
        ({"prompt_cache_key": "another", "tools": []}, TURN, CLIENT),
        ({"tools": []}, TURN, CLIENT),
        (SESSION, TURN, CLIENT),
        ({**SESSION, "tools": []}, [{"role": "user", "content": "A title for: hello"}], CLIENT),
        ({**SESSION, "tools": []}, TURN, QueueClient("key b")),
    ],
    ids=["another name", "no name", "no word of tools", "another conversation", "another client"],
)
def test_any_other_request_without_tools_is_told_of_none(
    session: tuple[ScriptedEngine, Service], fields: Any, messages: Any, client: QueueClient
) -> None:
    engine, service = session
    asked(service, ChatRequest(messages=[*messages, SUMMARISE], fields=fields), client)
    assert "To ask." not in engine.requests[-1].prompt


def test_a_conversation_without_room_for_its_tools_is_answered_without_them() -> None:
    tokenizer = ByteTokenizer(QWEN_XML_MARKERS, qwen_xml())
    with ScriptedEngine(lambda _: "Yes.<|im_end|>", tokenizer=tokenizer, context_length=2_000) as engine:
        service = Service(engine)
        asked(service, ChatRequest(messages=TURN[:1], tools=TOOLS, fields=SESSION))
        room = 2_000 - len(engine.requests[0].request.prompt)
        long = {"role": "user", "content": "x" * room}
        asked(service, ChatRequest(messages=[*TURN, long], fields={**SESSION, "tools": []}))
        assert "To ask." not in engine.requests[-1].prompt
