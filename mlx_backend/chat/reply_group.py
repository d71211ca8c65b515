"""Several replies to one request, as one: what a server iterates, counts and closes like a single `Reply`.

    generations ─▶ items ready ─▶ each Reply's own events ─▶ GroupEvent(index, event)

The replies are generations like any others. They share the prompt's KV cache as far as prefixes are cached: the engine
has those that begin alike wait until the first is prefilled. They end together: what fails or is closed ends all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from mlx_backend.chat.reply import Reply, Usage
from mlx_backend.conversation.events import StreamEnd
from mlx_backend.engine.base import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mlx_backend.chat.reply import ReplyEvent
    from mlx_backend.conversation.events import FinishReason
    from mlx_backend.engine.base import Queued


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """An event of the choice with this index; its StreamEnd is one of them."""

    index: int
    event: ReplyEvent


type ReplyStart = Callable[[int], Reply]
"""Starts the choice with an index."""


def start_replies(starts: Sequence[ReplyStart], n: int) -> Reply | ReplyGroup:
    """Start n replies to each prompt: one alone is itself."""
    return starts[0](0) if n == len(starts) == 1 else ReplyGroup(starts, n)


class ReplyGroup:
    """Running replies, with what a `Reply` has: iterate the events, close it to cancel."""

    def __init__(self, starts: Sequence[ReplyStart], n: int) -> None:
        """Start n replies to each prompt; their indices are in the order of the prompts."""
        self.finish: FinishReason | None = None
        self._n = n
        self._ready: SimpleQueue[int] = SimpleQueue()  # choices that may have an item
        self._on_item: Callable[[], None] | None = None
        self._usage = Usage(0)
        self.replies: list[Reply] = []
        try:
            for index in range(n * len(starts)):
                self.replies.append(starts[index // n](index))
                self.replies[-1].notify(partial(self._note_item, index))
        except BaseException:
            self.close()
            raise
        first = self.replies[0]
        self.effort, self.priority, self.thinking_budget = first.effort, first.priority, first.thinking_budget
        self.unread = first.unread

    @property
    def usage(self) -> Usage:
        """What all have cost so far: each prompt counts once. Times are from the first start to the last end.

        Always the same object, brought up to date; also at the end.
        """
        own = [reply.usage for reply in self.replies]
        prompts = own[:: self._n]
        first_start = min(each.queue_seconds for each in own)
        first_token = min(each.queue_seconds + each.prefill_seconds for each in own)
        end = max(each.queue_seconds + each.prefill_seconds + each.decode_seconds for each in own)
        usage = self._usage
        usage.match = own[0].match
        usage.prompt_tokens = sum(each.prompt_tokens for each in prompts)
        usage.image_tokens = sum(each.image_tokens for each in prompts)
        usage.completion_tokens = self.completion_tokens
        usage.reasoning_tokens = sum(each.reasoning_tokens for each in own)
        usage.cached_tokens = sum(each.cached_tokens for each in prompts)
        usage.queue_seconds = first_start
        usage.prefill_seconds = first_token - first_start
        usage.decode_seconds = end - first_token
        usage.drafted_tokens = sum(each.drafted_tokens for each in own)
        usage.accepted_tokens = sum(each.accepted_tokens for each in own)
        usage.repeated_run = next((each.repeated_run for each in own if each.repeated_run), None)
        return usage

    @property
    def completion_tokens(self) -> int:
        """How many tokens have been generated so far."""
        return sum(reply.completion_tokens for reply in self.replies)

    def queued(self) -> Queued | None:
        """Return where in the queue they wait; None once the first is prefilled."""
        return self.replies[0].queued()

    def notify(self, on_item: Callable[[], None]) -> None:
        """Have `on_item` called, from any thread, when there may be more events."""
        self._on_item = on_item
        if not self._ready.empty():
            on_item()

    def _note_item(self, index: int) -> None:
        self._ready.put(index)
        if self._on_item is not None:
            self._on_item()

    def close(self) -> None:
        """Stop generating. Idempotent, from any thread."""
        for reply in self.replies:
            reply.close()

    def events(self, patience: float | None = None) -> Iterator[GroupEvent | StreamEnd | Progress | None]:
        """Yield what `Reply.events` does for each choice as it comes, and at last one StreamEnd for all of them."""
        running = {index: reply.events(0) for index, reply in enumerate(self.replies)}
        try:
            while running:
                try:
                    index = self._ready.get(timeout=patience)
                except Empty:
                    yield None
                    continue
                for event in running.get(index, ()):
                    if event is None:  # no further item yet
                        break
                    yield event if isinstance(event, Progress) else GroupEvent(index, event)
                else:
                    running.pop(index, None)
                    if self.replies[index].finish is None:  # closed elsewhere
                        return
            self.finish = self.replies[0].finish
            assert self.finish is not None  # all have ended
            _ = self.usage
            yield StreamEnd(self.finish)
        finally:
            self.close()
            for events in running.values():
                events.close()
