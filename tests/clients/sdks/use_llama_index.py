"""LlamaIndex: OpenAILike over both of OpenAI's APIs, and OpenAI by the name of one of its models.

Its OpenAI class knows only names of OpenAI's models: the server has an alias for that.
"""

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI, OpenAIResponses
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

LIKE = {
    "model": "mlx-demo",
    "is_chat_model": True,
    "is_function_calling_model": True,
    "context_window": 16_384,
}
STRUCTURED = {**LIKE, "should_use_structured_outputs": True}
WIRES: dict[str, tuple[Any, dict[str, Any]]] = {
    "OpenAILike": (OpenAILike, STRUCTURED),
    "OpenAILikeResponses": (OpenAILikeResponses, LIKE),
    "OpenAI": (OpenAI, {"model": "gpt-5"}),
    "OpenAIResponses": (OpenAIResponses, {"model": "gpt-5"}),
}

type Make = Callable[..., Any]


class Search(BaseModel):
    """Search an encyclopedia"""

    query: str


def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"-3 C in {city}"


@pytest.fixture(params=WIRES.values(), ids=WIRES)
def llm(request: pytest.FixtureRequest, url: str, key: str) -> Make:
    """Makes a language model of one kind."""
    kind, fields = request.param
    common = {"api_base": f"{url}/v1", "api_key": key, "max_retries": 0}
    return lambda **more: kind(**{**common, **fields, **more})


def test_an_answer_with_its_reasoning_whole_and_streamed(llm: Make) -> None:
    asked = [ChatMessage(role="user", content="What is the capital of France?")]
    whole = llm().chat(asked).message
    assert whole.content == "The capital of France is Paris."
    assert [block.block_type for block in whole.blocks] == ["thinking", "text"]
    assert "".join(piece.delta or "" for piece in llm().stream_chat(asked)).endswith(whole.content)


def test_effort_is_how_much_is_reasoned(llm: Make, request: pytest.FixtureRequest) -> None:
    if "Responses" in request.node.name:
        efforts = [{"additional_kwargs": {"reasoning": {"effort": effort}}} for effort in ("low", "high")]
    else:  # reasoning_effort= is sent only for names that it knows
        efforts = [{"additional_kwargs": {"reasoning_effort": effort}} for effort in ("low", "high")]
    low, high = (
        llm(**effort).chat([ChatMessage("What is the capital of France?")]).raw.usage.total_tokens
        for effort in efforts
    )
    assert low < high


def test_a_call_and_its_result(llm: Make) -> None:
    model, tool = llm(), FunctionTool.from_defaults(get_weather)
    history = [ChatMessage(role="user", content="What is the weather in Oslo?")]
    first = model.chat_with_tools([tool], chat_history=history)
    [call] = model.get_tool_calls_from_response(first)
    assert call.tool_kwargs == {"city": "Oslo"}
    result = ChatMessage(role="tool", content="-3 C", additional_kwargs={"tool_call_id": call.tool_id})
    second = model.chat_with_tools([tool], chat_history=[*history, first.message, result])
    assert "-3 C" in second.message.content


def test_an_agent_calls_a_tool_and_answers(llm: Make) -> None:
    async def run() -> str:
        return str(await FunctionAgent(tools=[get_weather], llm=llm()).run("What is the weather in Oslo?"))

    assert "-3 C in Oslo" in asyncio.run(run())


def test_answers_are_of_the_programs_own_type(llm: Make) -> None:
    asked = [ChatMessage(role="user", content="Use Search for Mount Fuji.")]
    assert isinstance(llm().as_structured_llm(Search).chat(asked).raw, Search)


def test_images_are_seen(llm: Make, red_square: str, request: pytest.FixtureRequest) -> None:
    if "Like" not in request.node.name:
        pytest.skip("LlamaIndex's OpenAI class knows only the names of OpenAI's models")
    picture = ImageBlock(image=base64.b64decode(red_square), image_mimetype="image/png")
    asked = ChatMessage(role="user", blocks=[TextBlock(text="What colour is the shape?"), picture])
    assert "red" in llm(model="mlx-demo-vision").chat([asked]).message.content
