"""What of a prompt the same client has sent before, and what ended that: why a prefix cache was missed.

A prompt is compared with the client's last ones and their replies: the tokens, and what the messages say. Nothing is
rendered or tokenised for that. Knows no engine: whether it still had what is the same, its own figures say.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from operator import itemgetter
from sys import getsizeof
from typing import TYPE_CHECKING, Any

from mlx_backend.byte_cache import ByteCache
from mlx_backend.common_prefix import common_prefix_length
from mlx_backend.conversation.message_parts import REASONING_CONTENT, hash_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    from mlx_backend.byte_cache import CacheBudget

MAX_PROMPTS = 64
"""Prompts of all clients; of a conversation the last one is enough."""
_INT = "I"
_GENERATION_PROMPT = 16
"""Tokens at a prompt's end that a template may write otherwise once the reply is there, without being asked why."""


@dataclass(frozen=True, slots=True)
class PromptMatch:
    """How many of a prompt's tokens are as in an earlier prompt and its reply.

    `broken_by` is the part of the request from which on they are not, in words; empty if nothing of the earlier ones is
    lost but what a new last message replaces.
    """

    tokens: int = 0
    broken_by: str = ""


@dataclass(slots=True, eq=False)
class SentPrompt:
    """A client's prompt: hashes of what it says, and its tokens, to which those of the reply are added.

    `session` is the client's own name for its conversation, `definitions` the tools of one that has a name, as JSON.
    """

    owner: Hashable
    session: str
    definitions: str
    tools: int
    settings: int
    roles: Sequence[str]
    said: tuple[int, ...]
    reasoned: tuple[int, ...]
    tokens: array[int]
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @classmethod
    def of(
        cls,
        owner: Hashable,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
        tokens: Iterable[int],
        session: str = "",
    ) -> SentPrompt:
        """Make one of a canonical history, and of what else the template was given."""
        return cls(
            owner,
            session,
            json.dumps(tools) if session and tools else "",
            hash(repr(tools)),
            hash(repr(settings)),
            [message["role"] for message in messages],
            said(messages),
            tuple(hash(m.get(REASONING_CONTENT, "")) for m in messages),
            array(_INT, tokens),
        )

    def match(self, earlier: SentPrompt) -> PromptMatch:
        """Compare it with an earlier one."""
        common = common_prefix_length(earlier.tokens.tobytes(), self.tokens.tobytes()) // self.tokens.itemsize
        # The last token of a reply is its end marker, which a template may write otherwise.
        return PromptMatch(
            common, self._broken_by(earlier, common) if common < len(earlier.tokens) - 1 else ""
        )

    def _broken_by(self, earlier: SentPrompt, common: int) -> str:
        if not self.goes_on_from(earlier):
            return ""
        differing = _first_difference(earlier.said, self.said)
        if differing is None and len(self.said) <= len(earlier.said):
            return ""
        if self.tools != earlier.tools:
            return "the tools"
        if differing is not None:
            return self._name(differing)
        if self.settings != earlier.settings and common < earlier.num_prompt - _GENERATION_PROMPT:
            return "the effort or another setting of the chat template"
        if (differing := _first_difference(earlier.reasoned, self.reasoned)) is not None:
            return f"{self._name(differing)}, whose reasoning is gone or another"
        if common < earlier.num_prompt - _GENERATION_PROMPT:
            return "the chat template, which writes earlier messages otherwise now"
        return f"{self._name(len(earlier.said))}, which is not as it was generated"

    def goes_on_from(self, earlier: SentPrompt) -> bool:
        """Whether it is of the same conversation, and not only the last message is another one."""
        same = self.num_same(earlier)
        differing = _first_difference(earlier.said, self.said)
        return same > 0 and differing != len(self.said) - 1

    def num_same(self, earlier: SentPrompt) -> int:
        """Return how many messages that are no instructions are the same in the same places."""
        return sum(
            one == other and role != "system"
            for one, other, role in zip(self.said, earlier.said, self.roles, strict=False)
        )

    def _name(self, index: int) -> str:
        role = self.roles[index]
        if role == "system" and index == 0:
            return "the system message"
        return f"message {index + 1} of {len(self.roles)} ({role})"

    @property
    def key(self) -> tuple[Hashable, int]:
        """What tells it from all others that there are."""
        return self.owner, id(self)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        parts = (self.tokens, self.said, self.reasoned, self.roles, self.definitions)
        return sum(map(getsizeof, parts)) + 64 * len(self.said)


class RecentPrompts:
    """The last prompts of clients to one model. Safe to use from several threads."""

    def __init__(self, caches: CacheBudget | None = None) -> None:
        self._prompts: ByteCache[tuple[Hashable, int], SentPrompt] = ByteCache(
            caches, max_entries=MAX_PROMPTS, owner_of=itemgetter(0)
        )

    def match(self, prompt: SentPrompt) -> PromptMatch:
        """Compare a prompt with the earlier one of its client that is most like it; from now on it is one of them."""
        earlier = max(
            (each for each in reversed(self._prompts.values()) if each.owner == prompt.owner),
            key=lambda each: (prompt.num_same(each), prompt.tools == each.tools),
            default=None,
        )
        self.put(prompt)
        if earlier is None:
            return PromptMatch()
        if prompt.said[: len(earlier.said)] == earlier.said:
            self._prompts.drop(earlier.key)
        return prompt.match(earlier)

    def of_session(self, owner: Hashable, session: str) -> SentPrompt | None:
        """Return the last prompt with tools in a client's conversation of this name."""
        prompts = reversed(self._prompts.values())
        return next((p for p in prompts if p.owner == owner and p.session == session and p.definitions), None)

    def has(self, prompt: SentPrompt) -> bool:
        """Whether it is still one of the last: its conversation has not gone on."""
        return prompt.key in self._prompts

    def put(self, prompt: SentPrompt, reply: Iterable[int] = ()) -> None:
        """Remember a prompt, and the tokens of its reply once they are known."""
        prompt.tokens.extend(reply)
        self._prompts.put(prompt.key, prompt, prompt.nbytes)


def said(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the hashes of what messages say."""
    return tuple(map(hash_of, messages))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    pairs = zip(one, other, strict=False)
    return next((at for at, (first, second) in enumerate(pairs) if first != second), None)
