"""Which running reply a newer request shows to be abandoned, and which it must leave alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.conversation import running_replies as module
from mlx_backend.conversation.running_replies import MAX_HEAD, History, RunningReplies, RunningReply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.conversation.running_replies import Quote

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the sea?"}]
SAID = "The sea is the body of salt water that covers most of the Earth."


def quotes(message: Any) -> Sequence[Quote]:
    return [("text", message["content"])]


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


NEXT = {"role": "user", "content": "And a lake?"}


class Replies:
    """A registry, and the shortest way to use it."""

    def __init__(self) -> None:
        self.registry = RunningReplies(quotes)

    def running(
        self, said: str, asked: Sequence[Any] = ASKED, scope: str = "a", **more: bool
    ) -> RunningReply:
        reply = self.registry.reply(scope, History.of(asked), **more)
        reply.start()
        for letter in said:
            reply.add("text", letter)
        return reply

    def superseded_by(self, *messages: Any, scope: str = "a") -> list[RunningReply]:
        return self.registry.supersede(scope, History.of(messages))


@pytest.fixture
def replies() -> Replies:
    return Replies()


@pytest.mark.parametrize("shown", [SAID, SAID[:40], f"\n{SAID[:40]} \n"])
@pytest.mark.parametrize("later", [[], [assistant("A lake is smaller."), NEXT]])
def test_a_history_that_goes_on_from_what_a_reply_has_said_so_far_supersedes_it(
    replies: Replies, shown: str, later: list[Any]
) -> None:
    reply = replies.running(f" {SAID} It holds")
    calls: list[str] = []
    reply.watch(lambda: calls.append("told"))
    assert replies.superseded_by(*ASKED, assistant(shown), NEXT, *later) == [reply]
    assert reply.is_superseded
    assert replies.superseded_by(*ASKED, assistant(shown), NEXT) == []
    assert calls == ["told"]


@pytest.mark.parametrize(
    "messages",
    [
        ASKED,
        [*ASKED, assistant(SAID)],
        [*ASKED, assistant(SAID), assistant("Well."), NEXT],
        [*ASKED, NEXT],
        [*ASKED, assistant(""), NEXT],
        [*ASKED, assistant(SAID[:20]), NEXT],
        [*ASKED, assistant(f"{SAID} It lies"), NEXT],
        [*ASKED, assistant(SAID.upper()), NEXT],
        [*ASKED[1:], assistant(SAID), NEXT],
        [*ASKED[:1], NEXT, assistant(SAID), NEXT],
        [*ASKED, {**assistant(SAID), "tool_calls": [{"id": "1"}]}, NEXT],
    ],
    ids=[
        "the same question again",
        "its answer is to be continued",
        "somebody else answers",
        "another question behind it",
        "an empty answer",
        "a short one",
        "more than it has said",
        "other words",
        "other instructions",
        "another question",
        "a call of a tool",
    ],
)
def test_nothing_less_is_proof(replies: Replies, messages: list[Any]) -> None:
    reply = replies.running(f"{SAID} It holds")
    assert replies.superseded_by(*messages) == []
    assert not reply.is_superseded


def test_another_scope_is_somebody_else(replies: Replies) -> None:
    replies.running(SAID)
    assert replies.superseded_by(*ASKED, assistant(SAID), NEXT, scope="b") == []


def test_parallel_replies_that_say_the_same_are_left_alone(replies: Replies) -> None:
    replies.running(f"{SAID} It holds")
    replies.running(f"{SAID} It is deep")
    assert replies.superseded_by(*ASKED, assistant(SAID), NEXT) == []
    assert len(replies.superseded_by(*ASKED, assistant(f"{SAID} It is"), NEXT)) == 1


def test_a_history_may_go_on_from_a_reply_that_has_ended_while_another_is_read(replies: Replies) -> None:
    """A workflow's first node was limited to these words, its third goes on from them, its second still runs."""
    replies.running(SAID).end()
    second = replies.running(f"{SAID} It holds")
    assert replies.superseded_by(*ASKED, assistant(SAID), NEXT) == []
    assert not second.is_superseded


def test_a_reply_that_has_ended_is_not_superseded(replies: Replies) -> None:
    with replies.running(SAID) as reply:
        pass
    assert replies.superseded_by(*ASKED, assistant(SAID), NEXT) == []
    assert not reply.is_superseded


def test_of_a_reply_that_is_not_streamed_no_part_can_have_been_shown(replies: Replies) -> None:
    replies.running(SAID, is_streamed=False)
    assert replies.superseded_by(*ASKED, assistant(SAID), NEXT) == []


def test_ignored_roles_count_for_nothing() -> None:
    other = [{"role": "system", "content": "It is noon."}, *ASKED[1:]]
    assert History.of(ASKED).digest != History.of(other).digest
    ignored = [
        History.of(messages, ignored_roles=["system"]).digest for messages in (ASKED, other, ASKED[1:])
    ]
    assert len(set(ignored)) == 1


def test_the_ids_of_calls_do_not_count_and_their_arguments_do() -> None:
    def history(identifier: str, arguments: str) -> bytes:
        call = {"id": identifier, "function": {"name": "clock", "arguments": arguments}}
        return History.of([*ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}]).digest

    assert history("a", "{}") == history("b", "{}") != history("a", '{"zone": "UTC"}')


def test_messages_cannot_be_shifted_into_each_other() -> None:
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert History.of(two).digest != History.of([{"role": "user", "content": "a\0user\0b"}]).digest


def test_long_texts_are_told_apart_by_their_beginning_and_length(replies: Replies) -> None:
    reply = replies.running("word " * MAX_HEAD)
    assert replies.superseded_by(*ASKED, assistant("word " * (MAX_HEAD + 1)), NEXT) == []
    assert replies.superseded_by(*ASKED, assistant("word " * (MAX_HEAD - 1)), NEXT) == [reply]


def test_what_is_remembered_is_bounded_and_what_was_forgotten_proves_nothing(
    replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 3)
    replies.running(SAID).end()
    second = replies.running(f"{SAID} It holds")
    for number in range(9):
        replies.running(SAID, [{"role": "user", "content": f"question {number}"}]).end()
    assert len(replies.registry._ended) == 3
    assert len(replies.registry._groups) == 4
    assert replies.superseded_by(*ASKED, assistant(SAID), NEXT) == []
    second.end()
    for number in range(3):
        replies.running(SAID, [{"role": "user", "content": f"later {number}"}]).end()
    assert len(replies.registry._groups) == 3


def test_a_later_reply_to_messages_whose_answer_was_forgotten_is_left_alone_too(
    replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several people ask an app the same question; the first one goes on while the last one's answer runs."""
    monkeypatch.setattr(module, "MAX_ENDED", 0)
    monkeypatch.setattr(module, "MAX_FORGOTTEN", 2)
    replies.running(SAID).end()
    with replies.running(f"{SAID} It holds") as later:
        assert replies.superseded_by(*ASKED, assistant(SAID), NEXT) == []
    for number in range(2):
        replies.running(SAID, [{"role": "user", "content": f"question {number}"}]).end()
    assert len(replies.registry._forgotten) == 2
    assert not later.is_superseded


def test_a_reply_that_said_next_to_nothing_is_not_remembered(replies: Replies) -> None:
    replies.running("Yes.").end()
    assert replies.registry._groups == {}


def test_whoever_watches_too_late_is_told_at_once(replies: Replies) -> None:
    reply = replies.running(SAID)
    replies.superseded_by(*ASKED, assistant(SAID), NEXT)
    calls: list[str] = []
    reply.watch(lambda: calls.append("told"))
    assert calls == ["told"]


def test_many_threads_at_once_leave_nothing_behind(replies: Replies) -> None:
    def converse(number: int) -> int:
        asked = [{"role": "user", "content": f"question {number}"}]
        with replies.running(SAID, asked):
            return len(replies.superseded_by(*asked, assistant(SAID), NEXT))

    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(converse, range(400))) == 400
    assert sum(map(len, replies.registry._groups.values())) == len(replies.registry._ended) == 400


def test_a_long_history_is_digested_in_one_pass(replies: Replies, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, encoded = module._encode, []

    def count(message: Any) -> bytes:
        encoded.append(message)
        return encode(message)

    monkeypatch.setattr(module, "_encode", count)
    history = [*ASKED, *[assistant("Yes, that is as far as I know quite right."), NEXT] * 25_000]
    assert replies.superseded_by(*history) == []
    assert len(encoded) == len(history)
