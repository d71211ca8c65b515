"""How much of an engine each client has been given, so that the one who had least is next.

A virtual token counter for each client, as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): it
counts the tokens that the client was served. A client that has had nothing waiting comes back at the level of those
that wait now: what was not used is not saved up. So a client that sends one request waits for a request or two of
each other client, however many those have sent. Knows no requests and no time.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_IDLE_CLIENTS = 1024
"""Clients without a request whose counters are remembered."""
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""What a token counts: one that is decoded takes more of a step than one of a prompt."""


class ClientShare:
    """One client's counters. `submitted` is written where requests are submitted, all else where they are served."""

    __slots__ = ("finished", "name", "served", "submitted", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0
        """Weighted tokens."""
        self.waiting = 0
        self.submitted = 0
        self.finished = 0

    @property
    def unfinished(self) -> int:
        """How many of its requests are waiting or running."""
        return self.submitted - self.finished


class ClientShares:
    """The shares of all clients, by name. Not thread-safe: belongs to the queue that takes requests."""

    def __init__(self) -> None:
        self._shares: OrderedDict[str, ClientShare] = OrderedDict()

    def of(self, name: str) -> ClientShare:
        """Return a client's share."""
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = ClientShare(name)
            if len(self._shares) > MAX_IDLE_CLIENTS:
                self._forget_idle(share)
        self._shares.move_to_end(name)
        return share

    def may_displace(self, share: ClientShare) -> bool:
        """Whether another client has so many requests that one of them should give way to one more of this client."""
        return any(each.unfinished > share.unfinished + 1 for each in self._shares.values())

    def _forget_idle(self, new: ClientShare) -> None:
        idle = [each.name for each in self._shares.values() if not each.unfinished and each is not new]
        for name in idle[: len(self._shares) - MAX_IDLE_CLIENTS]:
            del self._shares[name]


class WaitingShares:
    """Which clients have requests that wait. Not thread-safe: belongs to the queue that serves them."""

    def __init__(self) -> None:
        self._waiting: set[ClientShare] = set()
        self._level = 0  # of the client that was served last

    def begin(self, share: ClientShare) -> None:
        """Note that one more request of the client waits."""
        if not share.waiting:
            least = min((each.served for each in self._waiting), default=self._level)
            share.served = max(share.served, least)
            self._waiting.add(share)
        share.waiting += 1

    def end(self, share: ClientShare) -> None:
        """Note that one request of the client waits no longer."""
        share.waiting -= 1
        if not share.waiting:
            self._waiting.discard(share)
        self._level = share.served
