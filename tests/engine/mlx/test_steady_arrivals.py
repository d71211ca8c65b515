"""Who decodes keeps most of its speed next to clients that keep sending new prompts, and those are served too.

The demo model answers; the time is counted in runs and tokens of its network.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from steady_arrivals import RUN_SECONDS, TOKEN_SECONDS, Load, TimedBatch

from mlx_backend.demo import MODEL_PATH
from mlx_backend.engine.base import GenerationRequest
from mlx_backend.engine.mlx import batch
from mlx_backend.engine.mlx.prefill_pacer import MAX_STALL_SECONDS

SECONDS = 5.0


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            batch, "computes_ahead", lambda: False
        )  # a token then comes in the step that its time is in
        load = Load(TimedBatch(MODEL_PATH))
        yield load
        load.close()


@pytest.fixture(scope="module")
def alone(load: Load) -> int:
    """How many answers six clients get who chat by themselves."""
    six = [load.chats("six", 60, 15) for _ in range(6)]
    load.run(1.0, *six)  # their prompts are cached then, as at the start of the next runs
    load.run(SECONDS, *six)
    return load.answers["six"]


@pytest.mark.parametrize(
    ("count", "name", "longest"),
    [(1, "other", 120), (8, "six", 300), (8, "other {}", 60), (40, "other {}", 300)],
)
def test_six_who_chat_keep_half_of_their_speed_next_to_those_who_keep_arriving(
    load: Load, alone: int, count: int, name: str, longest: int
) -> None:
    six = [load.chats("six", 60, 15) for _ in range(6)]
    arriving = [load.newcomers(name.format(at), longest) for at in range(count)]
    load.run(1.0, *six)

    def come_back() -> None:
        for client in six:
            client()

    load.batch.after_step(1, come_back)  # when those who arrive wait already
    load.run(SECONDS, *arriving)
    assert load.answers["six"] >= alone / 2
    assert load.left >= 1
    if name != "six":
        assert max(load.gaps["six"]) <= MAX_STALL_SECONDS + 0.1


def test_a_long_prompt_next_to_a_stream_takes_no_longer_than_gaps_allow(load: Load) -> None:
    stream = load.chats("stream", 60, 1000)
    prompt = load.prompt(600)
    long = GenerationRequest(prompt=prompt, max_tokens=1, client="long")
    load.run(2.0, stream)  # credit is saved up
    load.run(SECONDS, stream, lambda: load.ask("long", lambda: long, again=False))
    [first] = load.first_tokens["long"]
    chunks = 600 / 128
    assert first <= chunks * (RUN_SECONDS + 128 * TOKEN_SECONDS + 2 * (RUN_SECONDS + TOKEN_SECONDS))
    assert max(load.gaps["stream"]) <= MAX_STALL_SECONDS + 0.1


@pytest.mark.parametrize("steps", [1, 6], ids=["prefilled", "answered"])
def test_a_users_prompt_does_not_wait_for_a_background_request_that_is_being(load: Load, steps: int) -> None:
    title = GenerationRequest(prompt=load.prompt(150), max_tokens=200, client="page", priority=1)
    chat = replace(title, prompt=load.prompt(100), max_tokens=1, priority=0)

    def page() -> None:
        # Before the title is sent: the engine's thread begins at once.
        load.batch.after_step(steps, lambda: load.ask("chat", lambda: chat, again=False))
        load.ask("title", lambda: title, again=False)

    load.run(3.0, page)
    [first] = load.first_tokens["chat"]
    own = RUN_SECONDS + 100 * TOKEN_SECONDS
    assert first <= own + 4 * (RUN_SECONDS + TOKEN_SECONDS)
