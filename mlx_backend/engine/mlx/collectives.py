"""The processes that share a model, as MLX sees them: how they find each other, sum, and agree.

What a step does depends on its requests and on lengths alone, and distributed/batch.py brings the same requests to
every rank. The exceptions are settled here: the memory budget (the rank with the least memory decides), and the last
bits of logits, which differ between chips (every rank uses the tokens that rank 0 sampled).
"""

from __future__ import annotations

import json
import logging
import os
import socket
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_backend import __version__
from mlx_backend.device.memory import MARGIN
from mlx_backend.engine.distributed import LAUNCHERS, distributed_backend
from mlx_backend.engine.distributed.transport import Endpoint, Follower, Leader
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.chunk_cost import CacheCost
from mlx_backend.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from mlx_backend.models.engine_options import EngineOptions

log = logging.getLogger(__name__)

ENDPOINT_BYTES = 4096
MIN_SUM = 64
"""Elements of a sum: one of fewer than there are ranks is slow on the ring, and slows down the next."""
# Those with which every rank takes the same steps; "warm_up_seconds" decides which lengths all of them run at load.
SHARED_OPTIONS = (
    "context_length",
    "chat_template",
    "prefill_chunk",
    "warm_up_seconds",
    "packing",
    "cache_bytes",
    "kv_bits",
    "kv_group_size",
    "draft_from_text",
    "draft_tokens",
)


@cache
def group() -> mx.distributed.Group | None:
    """Connect to the other ranks, once; None if there are none. Raises EngineError if they cannot be found."""
    backend = distributed_backend()
    if backend is None:
        return None
    try:
        found = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise EngineError(
            f"This process was started as one of several ({', '.join(LAUNCHERS[backend])} are set), but they did "
            f"not find each other: {error}."
        ) from error
    return found if found.size() > 1 else None


_has_joined = False


def join() -> MLXRanks | None:
    """Join the processes that share a model, which can be done once; None if there are none."""
    global _has_joined
    found = group()
    if found is None:
        return None
    if _has_joined:
        raise EngineError("Processes that share a model can load only that one.")
    _has_joined = True
    return MLXRanks(found)


class MLXRanks:
    """This process's rank among those that share the model. The connection to the others exists once it is open."""

    def __init__(self, group: mx.distributed.Group) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.leader: Leader | None = None  # at rank 0
        self.follower: Follower | None = None  # at the others

    def open(self) -> None:
        """Open the connection. All ranks do this at the same time; MLX must have connected them already."""
        try:
            if self.rank == 0:
                self.leader = Leader(self.size, _addresses())
                self._broadcast_bytes(self.leader.endpoint.to_json())
                self.leader.accept_followers()
            else:
                endpoint = Endpoint.from_json(self._broadcast_bytes(b""))
                self.follower = Follower(self.rank, endpoint)
        except RuntimeError as error:
            raise EngineStopped(f"The other ranks were lost: {error}.") from error

    def all_gather(self, value: Any) -> list[Any]:
        """Wait for every rank's value, and return them in the order of ranks."""
        transport = self.leader or self.follower
        assert transport is not None
        return transport.all_gather(value)

    def refuse_unsupported(self, options: EngineOptions) -> None:
        """Raise EngineError for options that several ranks do not support yet."""
        for name, chosen in (
            ("LoRA adapters", options.adapters),
            ("A draft model or an MTP head as --draft-model", options.draft_model),
            ("A folder for prompt caches", options.cache_folder),
        ):
            if chosen:
                raise EngineError(f"{name}: not possible yet while {self.size} processes share the model.")

    def check_alike(self, folder: Path, options: EngineOptions) -> None:
        """Wait until all ranks have their weights. Raises EngineError if their models, options or versions differ."""
        mine = {
            "version": f"{__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}",
            "config.json": sha256((folder / "config.json").read_bytes()).hexdigest()[:16],
            **{name: getattr(options, name) for name in SHARED_OPTIONS},
        }
        everyone = self.all_gather(mine)
        for rank, theirs in enumerate(everyone):
            for what, value in everyone[0].items():
                if theirs.get(what) != value:
                    raise EngineError(
                        f"Rank {rank}'s {what} differs from rank 0's ({str(theirs.get(what))[:60]}, not "
                        f"{str(value)[:60]}). Start all ranks with the same model and options."
                    )

    def agree_on_memory(self, limit: int, weights: int, cost: CacheCost) -> tuple[int, int, CacheCost, bool]:
        """Agree on the least memory and the most expensive caches, so that all ranks admit the same requests.

        Returns the limit, the weights' bytes, the caches' cost, and whether all have the same caches. If they have not,
        they would evict different prefixes, and must cache none.
        """
        everyone = self.all_gather([limit, weights, cost.as_plain()])
        least = min(everyone, key=lambda each: each[0] * (1 - MARGIN) - each[1])
        highest_cost = max(
            (CacheCost.from_plain(each[2]) for each in everyone), key=lambda each: each(1 << 16)
        )
        are_alike = all(each[2] == everyone[0][2] for each in everyone)
        if not are_alike:
            log.warning("The ranks have different layers, so no prefixes are cached.")
        return least[0], least[1], highest_cost, are_alike

    def broadcast(self, tokens: mx.array) -> mx.array:
        """Return rank 0's tokens on every rank ([tokens])."""
        # Zeros made from the tokens: this sum must not run before the sums that the tokens are computed from.
        mine = tokens if self.rank == 0 else tokens * 0
        count = tokens.shape[0]
        if count < MIN_SUM:
            mine = mx.pad(mine, (0, MIN_SUM - count))
        return mx.distributed.all_sum(mine, group=self.group)[:count]

    def close(self) -> None:
        """Close the connection."""
        transport = self.leader or self.follower
        if transport is not None:
            transport.close()

    def _broadcast_bytes(self, text: bytes) -> bytes:
        """Return rank 0's text, on every rank."""
        padded = mx.array(list(text.ljust(ENDPOINT_BYTES)), dtype=mx.int32)
        mine = padded if self.rank == 0 else mx.zeros_like(padded)
        return bytes(as_ints(mx.distributed.all_sum(mine, group=self.group))).rstrip()


def _addresses() -> list[str]:
    """Return the names under which other machines may reach this one: those that MLX was given, and its own."""
    found: list[str] = []
    with suppress(OSError, ValueError, LookupError, TypeError):
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        found += [str(address).rpartition(":")[0] for address in hosts[0]]
    found += [
        os.environ[name].rpartition(":")[0] or os.environ[name]
        for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP")
        if os.environ.get(name)
    ]
    if found and all(address in ("127.0.0.1", "localhost") for address in found):
        return found[:1]
    return list(dict.fromkeys([*found, *_host_names()]))


def _host_names() -> list[str]:
    name = socket.gethostname()
    names = [name]
    with suppress(OSError):
        names += [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return [each for each in names if each not in ("localhost", "::1") and not each.startswith("127.")]
