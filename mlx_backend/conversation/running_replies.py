"""Finds running replies that no client waits for any more: their conversation has gone on without them.

Some clients never say that a user pressed Stop: Dify tells its plugins nothing, and some gateways keep the connection.
The reply is then generated to its end, unseen. But the user's next question shows it.

What is proof. A newer request of the same scope (who asked: an app and its user, a key) whose history holds

    the messages that the running reply answers  ·  an assistant's text  ·  a user's message

where that text is a beginning of what the reply has said so far. Such a history was made from a reply that was shown in
part, and somebody has gone on from there.

What is not. A reply that somebody reads must never be ended, so in doubt it runs on:

- the same question again. A workflow's parallel nodes and iterations, several samples and a regenerated answer all
  begin alike, and each may be read. Only a history that quotes the reply itself counts;
- an empty text, or one of less than MIN_EVIDENCE bytes. Dify puts an empty answer after a question that was asked
  twice within a second, and two conversations may well begin with the same "Yes";
- a text that another reply to the same messages has said as well, running or not. In a workflow one node may have
  finished with those words, and a third go on from them, while the second is still read. So exactly one of the known
  replies to these messages must have said it, and it must be running.

What is remembered: a digest of each running reply's messages, and the first MAX_HEAD characters of what it says; of
those that ended, the latest MAX_ENDED, and the digests of MAX_FORGOTTEN more. A reply is never ended if what another
one to the same messages has said is forgotten.

Safe to use from any thread. Knows no HTTP, no engine and no client: a reply's texts (its answer and its reasoning,
say) are told apart by a name, and what a message quotes is for the caller to say.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    type Quote = tuple[str, str]
    """The name of one of a reply's texts, and what a message quotes of it."""

MIN_EVIDENCE = 32
"""Bytes of UTF-8 that a text must have to prove anything: six words of English, ten characters of Japanese."""

MAX_HEAD = 1024
"""Characters of each text that are remembered; beyond them a quotation is believed."""

MAX_ENDED = 512
"""Replies that are remembered after their end."""

MAX_FORGOTTEN = 16_384
"""Replies of which no more is remembered than what they answered."""


@dataclass(frozen=True, slots=True)
class History:
    """A request's messages, as a reply is known by them."""

    digest: bytes
    """Of all messages: of the reply that answers them."""
    continued: Sequence[tuple[bytes, Mapping[str, Any]]]
    """Each assistant message that a user's message follows, with the digest of the messages before it."""

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], *, ignored_roles: Iterable[str] = ()) -> Self:
        """Digest the messages, in one pass; those of `ignored_roles` count for nothing."""
        ignored = frozenset(ignored_roles)
        counted = [message for message in messages if message.get("role") not in ignored]
        chain = blake2b(digest_size=16)
        continued: list[tuple[bytes, Mapping[str, Any]]] = []
        for index, message in enumerate(counted):
            if message.get("role") == "assistant" and not message.get("tool_calls"):
                following = counted[index + 1] if index + 1 < len(counted) else {}
                if following.get("role") == "user":
                    continued.append((chain.digest(), message))
            encoded = _encode(message)
            chain.update(len(encoded).to_bytes(8, "little") + encoded)
        return cls(chain.digest(), continued)


def _encode(message: Mapping[str, Any]) -> bytes:
    """Encode what a message says. The ids of calls do not count: clients make new ones when they rebuild a history."""
    content = message.get("content")
    text = content.strip() if isinstance(content, str) else _as_json(content)
    calls = message.get("tool_calls")
    functions = (
        [call.get("function") for call in calls if hasattr(call, "get")] if isinstance(calls, list) else []
    )
    parts = (str(message.get("role")), text, _as_json(functions) if functions else "")
    return "\0".join(parts).encode("utf-8", "surrogatepass")


def _as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


@dataclass(eq=False)
class RunningReply:
    """One reply: a context in which it counts as running. `add` notes what it says.

    Of a reply that is not streamed no part can be quoted: it is never superseded, but may be what a history quotes.
    """

    registry: RunningReplies
    key: tuple[Hashable, bytes]
    is_streamed: bool = True
    is_superseded: bool = False
    has_lost_siblings: bool = False
    _is_running: bool = False
    _on_superseded: Callable[[], None] | None = None
    _said: dict[str, tuple[str, int]] = field(default_factory=dict)  # by a text's name: its head, its length

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def may_be_superseded(self) -> bool:
        """Whether it runs where a part of it can be quoted, and no sibling that may have said the same is forgotten."""
        can_be_known = self._is_running and self.is_streamed
        return can_be_known and not self.is_superseded and not self.has_lost_siblings

    def start(self) -> None:
        """Count as running from now on. Idempotent."""
        if not self._is_running:
            self._is_running = True
            self.registry.enter(self)

    def end(self) -> None:
        """Count as running no more. Idempotent."""
        self._on_superseded = None  # it may hold on to much: an ended reply is remembered for a while
        if self._is_running:
            self._is_running = False
            self.registry.leave(self)

    def watch(self, on_superseded: Callable[[], None]) -> None:
        """Call a function, from another thread, once no client waits for the reply; at once if none does already."""
        self._on_superseded = on_superseded
        if self.is_superseded:
            on_superseded()

    def notify(self) -> None:
        """Call the function that `watch` has set."""
        if (on_superseded := self._on_superseded) is not None:
            on_superseded()

    def add(self, name: str, text: str) -> None:
        """Note what the reply says, as it is sent: a further piece of the text of that name."""
        head, length = self._said.get(name, ("", 0))
        if not length:
            text = text.lstrip()
        if text:
            self._said[name] = (head + text[: MAX_HEAD - len(head)], length + len(text))

    def has_said(self, quote: Quote) -> bool:
        """Whether a quotation, long enough to prove anything, is a beginning of what the reply has said."""
        name, text = quote
        text = text.strip()
        head, length = self._said.get(name, ("", 0))
        if len(text) > length or len(text[:MAX_HEAD].encode("utf-8", "surrogatepass")) < MIN_EVIDENCE:
            return False
        return head.startswith(text[:MAX_HEAD])

    @property
    def can_be_quoted(self) -> bool:
        """Whether it has said enough for a quotation that proves anything."""
        return any(self.has_said((name, head)) for name, (head, _) in self._said.items())


class RunningReplies:
    """The replies of one process. `quotes` says what an assistant's message quotes, and of which texts."""

    def __init__(self, quotes: Callable[[Mapping[str, Any]], Sequence[Quote]]) -> None:
        self._quotes = quotes
        self._lock = threading.Lock()
        self._groups: dict[tuple[Hashable, bytes], list[RunningReply]] = {}  # by what they answer
        self._ended: deque[RunningReply] = deque()
        self._forgotten: dict[tuple[Hashable, bytes], None] = {}  # the oldest first

    def reply(self, scope: Hashable, history: History, *, is_streamed: bool = True) -> RunningReply:
        """Return the reply to these messages, not yet started."""
        return RunningReply(self, (scope, history.digest), is_streamed)

    def supersede(self, scope: Hashable, history: History) -> list[RunningReply]:
        """End the running replies that no client waits for, as this history proves, and return them."""
        superseded: list[RunningReply] = []
        for digest, message in history.continued:
            if (scope, digest) not in self._groups:
                continue
            quotes = self._quotes(message)
            with self._lock:
                group = self._groups.get((scope, digest), ())
                having_said = [reply for reply in group if any(map(reply.has_said, quotes))]
                if len(having_said) == 1 and having_said[0].may_be_superseded:
                    having_said[0].is_superseded = True
                    superseded += having_said
        for reply in superseded:
            reply.notify()
        return superseded

    def enter(self, reply: RunningReply) -> None:
        """Take in a reply that has started."""
        with self._lock:
            reply.has_lost_siblings = reply.key in self._forgotten
            self._groups.setdefault(reply.key, []).append(reply)

    def leave(self, reply: RunningReply) -> None:
        """Remember a reply that has ended, if it has said anything that could be quoted, and forget an older one."""
        with self._lock:
            if not reply.can_be_quoted:
                self._remove(reply)
                return
            self._ended.append(reply)
            if len(self._ended) > MAX_ENDED:
                self._forget(self._ended.popleft())

    def _forget(self, reply: RunningReply) -> None:
        self._remove(reply)
        for sibling in self._groups.get(reply.key, ()):
            sibling.has_lost_siblings = True
        self._forgotten.pop(reply.key, None)
        self._forgotten[reply.key] = None
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    def _remove(self, reply: RunningReply) -> None:
        group = self._groups[reply.key]
        group.remove(reply)
        if not group:
            del self._groups[reply.key]
