"""Long conversations with servers of each make, imitated: who is asked what, what is sent in the end, what is said.

A prompt's tokens are its words here. The imitations count, refuse and cut as the real ones do.
"""

from __future__ import annotations

import json
import logging
import random
from typing import TYPE_CHECKING, Any

import pytest
from fake_servers import FakeServer, event_stream, listed, llama_cpp, lm_studio, mlx_backend, ollama, vllm

from dify_mlx_provider.chat.long_chats import MAX_REFUSALS, LongChat, step_for
from dify_mlx_provider.upstream.credentials import Credentials
from dify_mlx_provider.upstream.errors import PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

pytestmark = pytest.mark.usefixtures("empty_cache")

CONTEXT = 2000
ROOM = CONTEXT * 3 // 4
OK = (200, event_stream("ok"))
SYSTEM = {"role": "system", "content": "Answer briefly. " * 10}

type Message = dict[str, Any]


def tokens_of(body: Mapping[str, Any]) -> int:
    """A prompt's words, and two for each message."""
    words = sum(len(str(message.get("content") or "").split()) + 2 for message in body["messages"])
    return words + sum(len(json.dumps(tool).split()) for tool in body.get("tools") or ())


def words(count: int) -> str:
    return "the " * count


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


def turns(count: int, length: int = 30) -> list[Message]:
    return [
        message
        for turn in range(count)
        for message in (
            user(f"Question {turn}: {words(length)}"),
            reply(f"Answer {turn}: {words(length)}"),
        )
    ]


def ask(
    server: FakeServer,
    messages: Sequence[Message],
    *,
    shorten: bool = True,
    app_messages: int = 0,
    model: str = "m",
    form: Mapping[str, str] | None = None,
    **parameters: Any,
) -> str:
    credentials = Credentials.from_form({"endpoint_url": server.address, **(form or {})})
    body = {"model": model, "messages": list(messages), "stream": True, **parameters}
    limit = parameters.get("max_tokens")
    sent = LongChat(credentials, body, shorten=shorten, app_messages=app_messages, max_tokens=limit)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in sent.answer())
    assert 0.5 < sent.estimated_tokens() / tokens_of(server.bodies[-1]) < 2
    return text


def last_asked(server: FakeServer) -> list[str]:
    """The first words of the messages of the last request, without the system message."""
    messages = [message for message in server.bodies[-1]["messages"] if message["role"] != "system"]
    return [" ".join(message["content"].split()[:2]) for message in messages]


# -- imitations --------------------------------------------------------------------------------------------


def refusing(
    error: Callable[[int, int], Any], *, status: int = 400, counts_answer: bool = False
) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    """A chat that refuses a prompt longer than the context with an error made of both numbers."""

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        prompt = tokens_of(body)
        wanted = prompt + (body.get("max_tokens", 1) if counts_answer else 1)
        if wanted <= CONTEXT:
            return OK
        refusal = error(prompt, body.get("max_tokens", 1))
        return status, refusal if isinstance(refusal, bytes) else {"error": refusal}

    return reply


def our_error(prompt: int, _: int) -> dict[str, Any]:
    return {
        "message": f"The prompt has {prompt} tokens; the context holds {CONTEXT}, and the reply needs room too.",
        "code": "context_length_exceeded",
        "prompt_tokens": prompt,
        "max_model_len": CONTEXT,
    }


def llama_cpp_error(prompt: int, _: int) -> dict[str, Any]:
    return {
        "code": 400,
        "message": f"request ({prompt} tokens) exceeds the available context size ({CONTEXT} tokens)",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": prompt,
        "n_ctx": CONTEXT,
    }


def vllm_error(prompt: int, answer: int) -> dict[str, Any]:
    return {
        "message": f"This model's maximum context length is {CONTEXT} tokens. However, you requested {prompt + answer} "
        f"tokens ({prompt} in the messages, {answer} in the completion).",
        "type": "BadRequestError",
        "code": 400,
    }


def lm_studio_error(prompt: int, _: int) -> bytes:
    """A status of 200, and the error in the stream."""
    text = (
        f"Trying to keep the first {prompt} tokens when context the overflows. However, the model is loaded with "
        f"context length of only {CONTEXT} tokens, which is not enough."
    )
    return f"event: error\ndata: {json.dumps({'error': {'message': text}})}\n\n".encode()


def error_without_numbers(_: int, __: int) -> dict[str, Any]:
    return {
        "message": "The number of tokens to keep is greater than the context length. Provide a shorter prompt."
    }


def counting(context: int | None = CONTEXT, **more: Any) -> FakeServer:
    """mlx-backend, which counts."""
    size = {} if context is None else {"context_length": context}
    return mlx_backend(
        {"id": "m", **size},
        chat=refusing(our_error),
        tokenize=lambda body: (200, {"count": tokens_of(body), "max_model_len": CONTEXT, "tokens": []}),
        **more,
    )


REFUSING: dict[str, Callable[[], FakeServer]] = {
    "llama.cpp": lambda: llama_cpp(chat=refusing(llama_cpp_error)),
    "llama.cpp, older": lambda: llama_cpp(chat=refusing(llama_cpp_error, status=500)),
    "vLLM": lambda: vllm(chat=refusing(vllm_error, counts_answer=True)),
    "LM Studio": lambda: lm_studio(chat=refusing(lm_studio_error, status=200)),
    "no numbers": lambda: FakeServer(
        {"/v1/models": listed({"id": "m", "owned_by": "me"})}, chat=refusing(error_without_numbers)
    ),
    "mlx-backend that cannot count now": lambda: mlx_backend({"id": "m"}, chat=refusing(our_error)),
}


# -- mlx-backend -------------------------------------------------------------------------------------------


def test_a_short_conversation_costs_one_request() -> None:
    with counting() as server:
        assert ask(server, [SYSTEM, *turns(5), user("Now?")]) == "ok"
        assert [path for path in server.paths if path != "/v1/models"] == ["/v1/chat/completions"]


def test_a_conversation_that_leaves_too_little_room_for_an_answer_is_shortened_before_it_is_sent() -> None:
    with counting() as server:
        history = [SYSTEM, *turns(26), user("Now?")]
        assert ask(server, history) == "ok"
        chats = [path for path in server.paths if path.endswith("/completions")]
        assert len(chats) == 1
        assert server.paths.count("/v1/tokenize") <= 4
        assert ROOM // 2 < tokens_of(server.bodies[-1]) <= ROOM
        assert last_asked(server)[0].startswith("Question")
        assert last_asked(server)[-1] == "Now?"
        # With Max tokens that are small, the whole of it fits.
        assert ask(server, history, max_tokens=50) == "ok"
        assert last_asked(server)[0] == "Question 0:"


def test_fifty_thousand_messages_are_never_sent() -> None:
    with counting() as server:
        assert ask(server, [SYSTEM, *turns(25_000, 3), user("Now?")]) == "ok"
        assert len(server.bodies) <= 12
        assert max(tokens_of(body) for body in server.bodies) < 4 * CONTEXT
        assert ROOM // 2 < tokens_of(server.bodies[-1]) <= ROOM


def test_a_server_whose_context_is_unknown_says_it_by_its_refusal() -> None:
    with counting(context=None) as server:
        assert ask(server, [SYSTEM, *turns(60), user("Now?")]) == "ok"
        assert tokens_of(server.bodies[0]) > CONTEXT
        assert ROOM // 2 < tokens_of(server.bodies[-1]) <= ROOM


def test_a_smaller_context_in_the_form_counts() -> None:
    with counting() as server:
        ask(server, [*turns(60), user("Now?")], form={"context_size": "800"})
        assert 200 < tokens_of(server.bodies[-1]) <= 600


@pytest.mark.parametrize("seed", range(8))
def test_random_conversations_keep_what_must_stay_fit_and_keep_their_cut(seed: int) -> None:
    rng = random.Random(seed)
    tools = [{"name": f"tool_{n}", "description": words(20)} for n in range(rng.choice((0, 3)))]
    template = [user("From the template: " + words(20))] * rng.randrange(2)
    history: list[Message] = []
    firsts: list[str] = []
    with counting() as server:
        for turn in range(60):
            question = user(f"Question {turn}: {words(rng.randrange(1, 40))}")
            rounds: list[Message] = []
            for step in range(rng.choice((0, 0, 2))):
                function = {"name": "tool_0", "arguments": "{}"}
                call = {"id": f"{turn}-{step}", "type": "function", "function": function}
                row = f"Row {turn}: {words(rng.randrange(30))}"
                rounds += [
                    {**reply(""), "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": call["id"], "name": "tool_0", "content": row},
                ]
            whole = [SYSTEM, *template, *history, question, *rounds]
            ask(server, whole, tools=tools, app_messages=len(template))
            sent = server.bodies[-1]["messages"]
            first, last = 1 + len(template), 1 + len(rounds)
            assert sent[:first] == whole[:first]
            kept = sent[first:]
            assert kept == whole[len(whole) - len(kept) :]
            assert len(kept) >= last
            assert kept[0]["role"] == "user"
            assert tokens_of(server.bodies[-1]) <= ROOM or len(kept) == last
            firsts.append(kept[0]["content"].split()[1])
            history += [question, *rounds, reply(f"Answer: {words(rng.randrange(60))}")]
    numbers = [int(first.rstrip(":")) for first in firsts]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 0
    assert len(set(numbers)) <= 60 // 3


# -- servers that do not count -----------------------------------------------------------------------------


@pytest.mark.parametrize("make", REFUSING)
def test_a_server_that_refuses_gets_the_conversation_shortened(make: str) -> None:
    with REFUSING[make]() as server:
        model = "openai/gpt-oss-20b" if make in ("vLLM", "LM Studio") else "m"
        firsts = []
        for count in range(40, 60):
            sent_before = len(server.bodies)
            history = [SYSTEM, *turns(count), user("Now?")]
            assert ask(server, history, model=model, max_tokens=300) == "ok"
            chats = [body for body in server.bodies[sent_before:] if body.get("stream")]
            assert len(chats) <= MAX_REFUSALS + 1
            assert CONTEXT // 5 < tokens_of(chats[-1]) <= CONTEXT - (0 if make == "no numbers" else 300)
            assert last_asked(server)[-1] == "Now?"
            firsts.append(last_asked(server)[0])
        if make != "no numbers":
            assert len(set(firsts)) <= 6


def test_an_estimate_that_is_far_too_low_costs_no_turns_where_only_the_prompts_tokens_are_stated() -> None:
    kept = []
    for tokens in (1, 2):  # of each estimated one, in a context that is as much larger

        def reply(body: dict[str, Any], tokens: int = tokens) -> tuple[int, Any]:
            prompt = tokens_of(body)
            message = f"The prompt has {prompt * tokens} tokens: it exceeds the context length."
            return OK if prompt < CONTEXT else (400, {"error": {"message": message}})

        with FakeServer({"/v1/models": listed({"id": "m", "owned_by": "me"})}, chat=reply) as server:
            assert ask(server, [SYSTEM, *turns(40), user("Now?")]) == "ok"
            kept.append(tokens_of(server.bodies[-1]))
    right, too_low = kept
    assert right > CONTEXT // 4
    assert too_low >= right - step_for(right)


def test_a_short_conversation_is_sent_to_them_as_it_is() -> None:
    for make in REFUSING.values():
        with make() as server:
            assert ask(server, [SYSTEM, *turns(3), user("Now?")]) == "ok"
            assert len(server.bodies) == 1


def test_a_server_that_counts_the_answer_too_is_not_sent_less_history_than_necessary() -> None:
    with vllm(chat=refusing(vllm_error, counts_answer=True)) as server:
        history = [*turns(24), user("Now?")]
        assert tokens_of({"messages": [{"content": words(24 * 68)}]}) < CONTEXT
        assert ask(server, history, model="openai/gpt-oss-20b", max_tokens=900) == "ok"
        assert CONTEXT // 4 < tokens_of(server.bodies[-1]) <= CONTEXT - 900


def test_more_max_tokens_than_the_context_has_cost_no_history_and_are_refused_in_the_servers_words() -> None:
    with vllm(chat=refusing(vllm_error, counts_answer=True)) as server:
        history = [*turns(10), user("Now?")]
        with pytest.raises(PromptTooLong, match=r"\(\d+ in the messages, 2000 in the completion\)\.$"):
            ask(server, history, model="openai/gpt-oss-20b", max_tokens=2000)
        assert len(server.bodies) == 1


def test_a_server_that_would_cut_the_prompt_by_itself_is_sent_what_fits_by_the_estimate() -> None:
    with ollama() as server:
        assert ask(server, [*turns(2000), user("Now?")], model="gpt-oss:20b") == "ok"
        assert len(server.bodies) == 1
        assert len(json.dumps(server.bodies[0])) < 24_576 * 5
        assert last_asked(server)[-1] == "Now?"
        # The context of this model is not known.
        assert ask(server, [*turns(200), user("Now?")], model="qwen3:8b") == "ok"
        assert last_asked(server)[0] == "Question 0:"


# -- what is said ------------------------------------------------------------------------------------------


def test_the_log_says_it_once_with_numbers_and_nothing_of_the_conversation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dify_mlx_provider")
    with counting() as server:
        ask(server, [SYSTEM, *turns(60), user("Now?")])
        sent = tokens_of(server.bodies[-1])
        left_out = 60 - (len(last_asked(server)) - 1) // 2
    (line,) = caplog.messages
    assert line.startswith(
        "A conversation with m no longer fits the context of 2000 tokens with room for an answer: the oldest "
        f"{left_out} of its 61 turns were left out, and about {sent} of about "
    )
    assert line.endswith(" tokens were sent.")
    assert "Question" not in line


def test_nothing_is_left_out_if_the_setting_says_refuse() -> None:
    with counting() as server:
        history = [*turns(60), user("Now?")]
        with pytest.raises(
            PromptTooLong, match=r"and the reply needs room too\. Start a new conversation, or set"
        ):
            ask(server, history, shorten=False)
        assert len(server.bodies) == 1


def test_without_a_count_the_sizes_in_an_error_are_said_to_be_estimates() -> None:
    with llama_cpp(chat=refusing(llama_cpp_error)) as server:
        history = [SYSTEM, *turns(60), user(words(2500))]
        with pytest.raises(PromptTooLong) as caught:
            ask(server, history)
    assert str(caught.value).startswith(
        "Without the 60 earlier turns, the prompt has 2524 tokens; the context holds 2000"
    )
    assert "The last question has about 24" in str(caught.value)
    assert "there is room for about 1" in str(caught.value)


def test_without_any_number_the_servers_own_words_come_first() -> None:
    with REFUSING["no numbers"]() as server:
        with pytest.raises(
            PromptTooLong,
            match=r"Provide a shorter prompt\. The last question has the largest share of its tokens",
        ):
            ask(server, [*turns(60), user(words(2500))])
        assert len(server.bodies) <= MAX_REFUSALS + 1


def test_instructions_that_fill_the_context_are_named_with_what_the_rest_needs() -> None:
    with counting() as server:
        history = [{"role": "system", "content": words(2200)}, user(words(2100))]
        with pytest.raises(PromptTooLong, match=r"instructions.* have 2202 tokens, and the rest has 2102"):
            ask(server, history)
