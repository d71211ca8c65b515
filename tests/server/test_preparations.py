"""Large requests are prepared in turns: nobody else waits, and what nobody waits for any more is not prepared."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from running_server import HELLO, RunningServer, served
from scripted_engine import ScriptedEngine, ScriptedTokenizer
from scripted_server import ANSWER
from single_model import SingleModelRegistry

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.service import Service
from mlx_backend.constraints.compiler import Rules
from mlx_backend.constraints.sandbox import Verdict
from mlx_backend.errors import EngineBusy, RequestError
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.spec import ModelSpec
from mlx_backend.preparation import Preparation, PreparationCancelled, Slots, current
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.registry import MultiModelRegistry
from mlx_backend.server import preparations
from mlx_backend.server.preparations import (
    LARGE_BODY,
    MAX_LARGE,
    MAX_SMALL,
    MAX_SMALL_OF_CLIENT,
    Preparations,
)
from mlx_backend.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

SMALL = "this one takes its time"
LARGE = [{"role": "user", "content": "a" * LARGE_BODY}]


class SlowTokenizer(ScriptedTokenizer):
    """Renders large conversations when it is let, and counts how many at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()
        self.changed = threading.Condition()
        self.rendering = self.most = self.rendered = 0
        self.encoding = self.most_encoding = 0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        if messages == LARGE:
            with self.changed:
                self.rendering += 1
                self.most = max(self.most, self.rendering)
                self.changed.notify_all()
            with current().cancelled_by(self.may_go_on.set):
                self.may_go_on.wait(60)
            with self.changed:
                self.rendering -= 1
                self.rendered += 1
                self.changed.notify_all()
            current().check()
        return super().render(messages, tools, add_generation_prompt=add_generation_prompt, **template_kwargs)

    def encode(self, text: str, *, control_tokens: bool) -> list[int]:
        with self.changed:
            self.encoding += 1
            self.most_encoding = max(self.most_encoding, self.encoding)
            self.changed.notify_all()
        if SMALL in text:
            self.may_go_on.wait(60)
        with self.changed:
            self.encoding -= 1
        return super().encode(text, control_tokens=control_tokens)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60)


@pytest.fixture
def tokenizer() -> Iterator[SlowTokenizer]:
    tokenizer = SlowTokenizer()
    yield tokenizer
    tokenizer.may_go_on.set()


@pytest.fixture
def server(tokenizer: SlowTokenizer) -> Iterator[RunningServer]:
    settings = Settings(port=0, max_queue=32, max_concurrent=8)
    with ScriptedEngine(lambda _: ANSWER, tokenizer=tokenizer, context_length=1 << 20) as engine:
        service = Service(engine, ModelSettings(prewarm=False))
        with served(SingleModelRegistry(service), settings) as server:
            yield server


def in_threads(count: int, call: Callable[[], Any]) -> tuple[list[threading.Thread], list[Any]]:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_beside_large_requests_small_ones_are_answered_and_the_large_ones_take_turns(
    server: RunningServer, tokenizer: SlowTokenizer
) -> None:
    threads, results = in_threads(6, lambda: server.chat(LARGE)["choices"][0]["finish_reason"])
    tokenizer.wait_for(lambda: tokenizer.rendering == MAX_LARGE)
    assert server.chat(HELLO)["choices"][0]["finish_reason"] == "stop"
    assert server.call("/health")[0] == 200
    tokenizer.may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert (results, tokenizer.most) == (["stop"] * 6, MAX_LARGE)


def test_of_many_small_requests_of_one_client_a_few_are_prepared_at_the_same_time(
    server: RunningServer, tokenizer: SlowTokenizer
) -> None:
    messages = [{"role": "user", "content": SMALL}]
    threads, results = in_threads(MAX_SMALL + 4, lambda: server.chat(messages)["choices"][0]["finish_reason"])
    tokenizer.wait_for(lambda: tokenizer.encoding == MAX_SMALL_OF_CLIENT)
    assert server.call("/health")[0] == 200
    tokenizer.may_go_on.set()
    for thread in threads:
        thread.join(60)
    assert results == ["stop"] * len(threads)
    assert tokenizer.most_encoding == MAX_SMALL_OF_CLIENT


def test_a_request_whose_client_has_left_is_not_prepared(
    server: RunningServer, tokenizer: SlowTokenizer
) -> None:
    before, _ = in_threads(MAX_LARGE, lambda: server.chat(LARGE))
    tokenizer.wait_for(lambda: tokenizer.rendering == MAX_LARGE)
    with server.send({"messages": LARGE}), server.send({"messages": LARGE}):
        while server.app.in_flight.count < MAX_LARGE + 2:
            pass
    while server.app.in_flight.count > MAX_LARGE:  # that they have left is noticed within a moment
        pass
    tokenizer.may_go_on.set()
    for thread in before:
        thread.join(60)
    assert server.chat(LARGE)["choices"][0]["finish_reason"] == "stop"  # behind those that left
    assert tokenizer.rendered == MAX_LARGE + 1


def test_a_client_that_leaves_ends_the_preparation_of_its_request(
    server: RunningServer, tokenizer: SlowTokenizer
) -> None:
    with server.send({"messages": LARGE}):
        tokenizer.wait_for(lambda: tokenizer.rendering == 1)
    tokenizer.wait_for(lambda: tokenizer.rendered == 1)  # nobody but the client could end it


def test_a_server_that_is_stopped_prepares_no_large_requests(
    server: RunningServer, tokenizer: SlowTokenizer
) -> None:
    threads, results = in_threads(
        MAX_LARGE + 2, lambda: server.call("/v1/chat/completions", {"messages": LARGE})
    )
    tokenizer.wait_for(lambda: tokenizer.rendering == MAX_LARGE)
    server.app.preparations.drain()
    for thread in threads:
        thread.join(60)
    assert {(status, body["error"]["code"]) for status, body in results} == {(503, "shutting_down")}
    assert server.chat(HELLO)["choices"][0]["finish_reason"] == "stop"  # what is small takes no time
    server.app.preparations.stop()
    assert server.call("/v1/chat/completions", {"messages": HELLO})[0] == 503


@pytest.mark.parametrize(
    ("fields", "words", "code"),
    [
        (
            {"messages": HELLO * 4},
            "The request has 4 messages; this server takes at most 3 (--max-messages).",
            "too_many_messages",
        ),
        (
            {
                "messages": HELLO,
                "tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(3)],
            },
            "The request has 3 tools; this server takes at most 2 (--max-tools).",
            "too_many_tools",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/tokenize"])
def test_messages_and_tools_are_limited_in_number(
    fields: dict[str, Any], words: str, code: str, path: str
) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(ScriptedEngine(lambda _: ANSWER))
        service = Service(engine, ModelSettings(max_messages=3, max_tools=2))
        server = stack.enter_context(served(SingleModelRegistry(service), Settings(port=0, max_queue=1)))
        status, body = server.call(path, fields)
    assert (status, body["error"]["message"], body["error"]["code"]) == (400, words, code)


# -- the parts ----------------------------------------------------------------------------------------------


@contextmanager
def never(_callback: Callable[[], None]) -> Iterator[None]:
    """The client never leaves."""
    yield


def test_a_turn_that_does_not_come_in_time_is_refused() -> None:
    preparations = Preparations(60, wait_seconds=0.01, max_large=1)
    with (
        preparations.of(LARGE_BODY, never),
        preparations.of(LARGE_BODY - 1, never),
        pytest.raises(EngineBusy, match=r"has waited 0\.01 seconds"),
        preparations.of(LARGE_BODY, never),
    ):
        pass
    with preparations.of(LARGE_BODY, never):  # and it left nothing behind
        pass


def test_a_preparation_that_fails_gives_its_turn_to_the_next() -> None:
    preparations = Preparations(60, wait_seconds=0, max_large=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), preparations.of(LARGE_BODY, never):
            _ = 1 / 0


def test_small_requests_take_turns_also_where_nobody_is_to_wait_for_the_engine() -> None:
    """As with `--queue-seconds 0`."""
    each = Preparations(60, wait_seconds=0)
    begun = threading.Barrier(preparations.MAX_SMALL_OF_CLIENT + 1)
    done: list[int] = []

    def prepare(number: int, *, is_first: bool) -> None:
        with each.of(100, lambda _: nullcontext(), "ada"):
            if is_first:
                begun.wait(60)
            done.append(number)

    first = [
        threading.Thread(target=prepare, args=(number,), kwargs={"is_first": True})
        for number in range(preparations.MAX_SMALL_OF_CLIENT)
    ]
    later = threading.Thread(target=prepare, args=(100,), kwargs={"is_first": False})
    for thread in [*first, later]:
        thread.start()
    begun.wait(60)
    for thread in [*first, later]:
        thread.join(60)
    assert len(done) == len(first) + 1


@pytest.mark.parametrize("alike", [False, True])
def test_requests_that_wait_for_a_hard_schema_leave_their_turns_to_others(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are turns, of two clients; each schema is another one, or all are the same."""
    each, rules = Preparations(60, wait_seconds=60), Rules()
    begun, may_go_on = threading.Semaphore(0), threading.Event()

    def validate(_grammar: str) -> Verdict:
        begun.release()
        assert may_go_on.wait(60)
        return Verdict("")

    monkeypatch.setattr("mlx_backend.constraints.compiler.validate_isolated", validate)

    def prepare(number: int) -> str:
        parts = [{"minLength": 1}, {"maxLength": 9 if alike else number + 9}]
        with each.of(100, never, "ada" if number % 2 else "bob"):
            return rules.schema({"type": "string", "allOf": parts}, strict=True).lark

    with ThreadPoolExecutor(MAX_SMALL) as threads:
        found = [threads.submit(prepare, number) for number in range(MAX_SMALL)]
        for _ in range(1 if alike else MAX_SMALL):
            assert begun.acquire(timeout=60)
        for client in ("ada", "eve"):  # begun and ended meanwhile
            with each.of(100, never, client):
                pass
        may_go_on.set()
        assert len({every.result(60) for every in found}) == (1 if alike else MAX_SMALL)
    assert each._small_slots._free == MAX_SMALL
    assert not each._small_slots._running


def test_what_takes_longer_than_it_may_is_refused_with_the_number() -> None:
    preparation = Preparation(0)
    with pytest.raises(RequestError, match="took longer than 0 seconds"), preparation.running():
        pass
    assert current().seconds_left == float("inf")


def test_whoever_is_cancelled_hears_of_it_at_once_or_when_it_asks() -> None:
    preparation = Preparation()
    calls: list[str] = []
    with preparation.cancelled_by(lambda: calls.append("within")):
        preparation.cancel()
        preparation.cancel()
    with preparation.cancelled_by(lambda: calls.append("behind")):
        pass
    assert calls == ["within", "behind"]
    with pytest.raises(PreparationCancelled), preparation.running():
        pass


def test_turns_come_in_order_and_who_is_cancelled_leaves_the_line() -> None:
    slots, order = Slots(1), list[int]()
    waiting = [Preparation() for _ in range(4)]

    def wait(at: int) -> None:
        try:
            with slots.slot_for(waiting[at], 60):
                order.append(at)
        except PreparationCancelled:
            order.append(-at)

    threads = []
    with slots.slot_for(Preparation(), 60):
        for at in range(4):
            threads.append(threading.Thread(target=wait, args=(at,)))
            threads[-1].start()
            while len(slots) == at and threads[-1].is_alive():
                pass
        waiting[1].cancel()
        threads[1].join(60)
        assert order == [-1]
    for thread in threads:
        thread.join(60)
    assert order == [-1, 0, 2, 3]


def test_what_was_freed_goes_back_to_the_system_at_once_after_a_large_request_and_else_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, given_back = [0.0], list[float]()
    monkeypatch.setattr(preparations, "give_back_free_memory", lambda: given_back.append(now[0]))
    each = Preparations(60, wait_seconds=60, clock=lambda: now[0])

    def prepare(body_bytes: int) -> None:
        with each.of(body_bytes, lambda _callback: nullcontext()):
            pass
        each.give_back_memory()

    for second in range(30):
        now[0] = float(second)
        prepare(100)
    assert given_back == [10, 20]
    prepare(2 << 20)
    prepare(100)
    assert given_back == [10, 20, 29]


@contextmanager
def loading(tmp_path: Path) -> Iterator[tuple[RunningServer, threading.Event]]:
    """A server whose only model is loaded once the event is set."""
    may_load = threading.Event()
    engines: list[ScriptedEngine] = []

    def load(spec: ModelSpec, *_: Any) -> ScriptedEngine:
        may_load.wait(60)
        engines.append(ScriptedEngine(lambda _: ANSWER, model_id=spec.name))
        return engines[-1]

    settings = Settings(port=0, max_queue=1, max_concurrent=1)
    catalogue = Catalogue([ModelSpec(name="model", source=str(tmp_path))])
    models = MultiModelRegistry(catalogue, load, EngineOptions(), settings, default_name="model")
    try:
        with served(models, settings) as server:
            yield server, may_load
    finally:
        may_load.set()
        models.stop()
        for engine in engines:
            engine.stop()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/tokenize"])
def test_who_leaves_while_the_model_is_loaded_is_waited_for_no_longer_and_others_are_answered(
    tmp_path: Path, path: str
) -> None:
    with loading(tmp_path) as (server, may_load), ExitStack() as stack:
        leaver = stack.enter_context(server.send({"messages": HELLO}, path))
        while server.app.in_flight.count < 1:
            pass
        other = stack.enter_context(server.send({"messages": HELLO}, path))
        while server.app.in_flight.count < 2:
            pass
        leaver.close()
        while server.app.in_flight.count > 1:
            pass
        may_load.set()
        assert other.recv(12) == b"HTTP/1.1 200"


def test_a_server_that_stops_lets_nobody_wait_for_a_model_to_be_loaded(tmp_path: Path) -> None:
    with loading(tmp_path) as (server, _), server.send({"messages": HELLO}) as waiting:
        while not server.app.in_flight.count:
            pass
        server.app.preparations.drain()
        answer = waiting.recv(65536)
        assert answer.startswith(b"HTTP/1.1 503")
        assert server.app.in_flight.wait_until_idle(60)
        status, refusal = server.call("/v1/chat/completions", {"messages": HELLO})
        assert (status, refusal["error"]["code"]) == (503, "shutting_down")


def test_next_is_the_client_with_the_fewest_in_the_block_and_nobody_has_all_turns() -> None:
    slots, order = Slots(2, max_of_client=1), list[str]()

    def wait(client: str) -> None:
        with slots.slot_for(Preparation(), 60, client):
            order.append(client)

    threads = []
    with slots.slot_for(Preparation(), 60, "many"):  # one slot is left, and not for the same client
        for client in ("many", "many", "one"):
            before = len(slots)
            threads.append(threading.Thread(target=wait, args=(client,)))
            threads[-1].start()
            while threads[-1].is_alive() and len(slots) == before:
                pass
        threads[-1].join(60)
        assert order == ["one"]
    for thread in threads:
        thread.join(60)
    assert order == ["one", "many", "many"]
