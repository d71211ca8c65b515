"""Sound Harmony, made and read by openai-harmony, is read the same by us: by ids, by text, in any pieces."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from harmony_data import HARMONY_DATA, needs_o200k_vocabulary

from mlx_backend.conversation.dialects.harmony import HARMONY_TOKENS
from mlx_backend.conversation.events import Message, ToolCall
from mlx_backend.conversation.parser import ChannelParser, fold

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_o200k_vocabulary

TOOLS = ("get_weather", "python_lint", "a-b.c", "x")
BODIES = (
    "We have to think.",
    " spaces \n\n and lines \n",
    "日本語、and ünïcödé 👩‍👩‍👧 too",
    "a < b <| c |> </think> <think> to=functions.f {",
    "```python\nprint('<|')\n```",
    "commentary final analysis assistant",
    "x",
    "",
)
ARGUMENTS = (
    '{"city":"Paris"}',
    "{}",
    '{\n  "a": [1, 2, {"b": "<"}]\n}',
    '{"q": "“ü” \\u00e9 👋"}',
    "print(1)",
)


@pytest.fixture(scope="module")
def encoding() -> Iterator[Any]:
    harmony = pytest.importorskip("openai_harmony")
    before = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(HARMONY_DATA)
    yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    if before is None:
        del os.environ["TIKTOKEN_ENCODINGS_BASE"]
    else:
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = before


def completion(encoding: Any, choose: random.Random) -> list[int]:
    """Render messages with openai-harmony's encoder, as a model would write them after the prompt."""
    from openai_harmony import Conversation, Role
    from openai_harmony import Message as HarmonyMessage

    messages = []
    for _ in range(choose.randint(0, 3)):
        channel = choose.choice(["analysis", "analysis", "commentary"])
        message = HarmonyMessage.from_role_and_content(Role.ASSISTANT, choose.choice(BODIES))
        messages.append(message.with_channel(channel))
    if choose.random() < 0.5:
        call = HarmonyMessage.from_role_and_content(Role.ASSISTANT, choose.choice(ARGUMENTS))
        call = call.with_channel(choose.choice(["commentary", "analysis"]))
        call = call.with_recipient(f"functions.{choose.choice(TOOLS)}")
        if choose.random() < 0.7:
            call = call.with_content_type(choose.choice(["<|constrain|>json", "json", "code"]))
        messages.append(call)
    else:
        message = HarmonyMessage.from_role_and_content(Role.ASSISTANT, choose.choice(BODIES))
        messages.append(message.with_channel("final"))
    tokens = encoding.render_conversation_for_training(Conversation.from_messages(messages))
    return list(tokens[2:])  # the prompt ends with `<|start|>assistant`


def recipient_in_channel(encoding: Any, tokens: list[int]) -> list[int]:
    """Move each recipient from the role part into the channel part, where models write it, too."""
    text = encoding.decode_utf8(tokens)
    for tool in TOOLS:
        for channel in ("commentary", "analysis"):
            moved = f"<|channel|>{channel} to=functions.{tool}"
            text = text.replace(f" to=functions.{tool}<|channel|>{channel}", moved)
    return list(encoding.encode(text, allowed_special="all"))


def oracle(encoding: Any, tokens: list[int]) -> Message:
    from openai_harmony import Role

    reasoning = content = ""
    run = ""  # analysis messages in a row, which are set apart by an empty line
    calls = []
    for message in encoding.parse_messages_from_completion_tokens(tokens, Role.ASSISTANT):
        text = "".join(part.text for part in message.content)
        if message.recipient not in (None, "all"):
            calls.append(ToolCall(message.recipient.removeprefix("functions."), text))
            run = ""
        elif message.channel == "analysis":
            if run and text and (not run[-1].isspace() or run[-1] == "\n"):
                text = "\n" * (2 - min(2, len(run) - len(run.rstrip("\n")))) + text
            run += text
            reasoning += text
        else:
            run = ""
            content += text
    return Message(reasoning, content, tuple(calls), "tool_calls" if calls else "stop")


def incremental_texts(encoding: Any, tokens: list[int]) -> list[str]:
    """Give each token the text it completes, as an engine does."""
    texts: list[str] = []
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = encoding.decode(pending)
        if text.endswith("\ufffd"):
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


@pytest.mark.parametrize("seed", range(150))
def test_sound_harmony_is_read_like_openai_harmony_reads_it(encoding: Any, seed: int) -> None:
    choose = random.Random(seed)
    tokens = completion(encoding, choose)
    if seed % 2:
        tokens = recipient_in_channel(encoding, tokens)
    expected = oracle(encoding, tokens)
    tools = choose.choice([None, TOOLS])

    parser = ChannelParser(tools=tools)
    texts = incremental_texts(encoding, tokens)
    by_ids = [event for text, token in zip(texts, tokens, strict=True) for event in parser.feed(text, token)]
    assert fold(by_ids + parser.close()) == expected

    parser = ChannelParser(tools=tools)
    assert fold([event for text in texts for event in parser.feed(text)] + parser.close()) == expected


def test_the_control_tokens_are_those_of_openai_harmony(encoding: Any) -> None:
    for token, text in HARMONY_TOKENS.items():
        assert encoding.encode(text, allowed_special="all") == [token]
