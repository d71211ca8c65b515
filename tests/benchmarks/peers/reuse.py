"""The row about prompts that were seen before: how many of their tokens are computed again.

Every figure is the server's own: `prompt_tokens` minus `cached_tokens` of its usage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.peers.client import NoAnswer, complete, content_of
from benchmarks.peers.report import Figure, Line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.peers.systems import Fleet, Message, RunningServer

TURNS = (
    "What is the capital of France? I would like to know it because I am going there next summer.",
    "Count to 20. Then I will have something to read on the way, and that would be very kind.",
    "What is 17 + 5? It is for the shopping list that I am writing while we talk.",
)
OTHER = "What colour is a lemon? I have none here, and the one in the picture is black and white."
CHATS = 6


def _system(name: str) -> Message:
    rules = "Answer kindly. Keep it short. Say what you know and nothing else. Do not ask back. " * 3
    return {"role": "system", "content": f"You help {name} with all kinds of questions. {rules}"}


class _Chat:
    """A chat as a client keeps it: the questions, and the answers without their reasoning."""

    def __init__(self, server: RunningServer, system: Message, **fields: Any) -> None:
        self._server, self._fields = server, fields
        self.messages = [system]

    def say(self, text: str) -> tuple[int, int]:
        """Send the next message; return the prompt tokens computed and the prompt's length."""
        self.messages.append({"role": "user", "content": text})
        reply, computed = self.send(self.messages)
        answer = content_of(reply).rpartition("<|message|>")[
            2
        ]  # mlx_lm.server refuses its own markers in a history
        self.messages.append({"role": "assistant", "content": answer})
        return computed

    def send(self, messages: list[Message]) -> tuple[dict[str, Any], tuple[int, int]]:
        """Send these messages as they are."""
        reply = complete(self._server, messages, max_tokens=200, **self._fields)
        usage = reply["usage"]
        whole = int(usage["prompt_tokens"])
        details = usage.get("prompt_tokens_details") or {}
        return reply, (whole - int(details.get("cached_tokens") or 0), whole)


def _sum(requests: list[tuple[int, int]]) -> Figure:
    """Sum up the tokens computed of those sent; of a few requests, list each."""
    total, whole = sum(part for part, _ in requests), sum(of for _, of in requests)
    each = ", ".join(str(part) for part, _ in requests) + ": " if 1 < len(requests) <= 3 else ""
    return Figure(f"{each}{total} of {whole}", total)


def prompt_reuse(fleet: Fleet) -> Iterator[Line]:
    """Count what is computed again over a chat's turns, its variations, and several chats at a time."""
    lines: dict[str, Line] = {}
    for server in fleet.servers("reuse", "real"):
        try:
            for what, requests in _measure(server):
                lines.setdefault(what, Line("reuse", what)).add(server.name, _sum(requests))
        except NoAnswer as problem:
            print(f"({server.name}: {problem})")
    yield from lines.values()


def _measure(server: RunningServer) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    system = _system("Ada")
    chat = _Chat(server, system)
    yield "turns 1, 2, 3 of a chat", [chat.say(text) for text in TURNS]
    last = chat.messages[:-1]
    yield "the last reply regenerated", [chat.send(last)[1]]
    yield "the last turn edited", [chat.send([*last[:-1], {"role": "user", "content": OTHER}])[1]]
    yield "another user, same system prompt", [_Chat(server, system).say(OTHER)]
    seeded = _Chat(server, _system("Bob"), seed=1)
    yield 'turns 1, 2, 3 with "seed"', [seeded.say(text) for text in TURNS]
    chats = [_Chat(server, _system(f"number {at} of {CHATS}")) for at in range(CHATS)]
    for each in chats:
        each.say(TURNS[0])
    yield f"turn 2 of {CHATS} chats that alternate", [each.say(TURNS[1]) for each in chats]
    server.restart()
    yield "the first chat's next turn after a restart", [chat.say(OTHER)]
