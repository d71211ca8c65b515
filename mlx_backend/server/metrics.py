"""What the server counts and measures, for /metrics in Prometheus' text format. One registry for each application.

Labels have few values, whatever clients send: names of keys and of models that were loaded, efforts, outcomes and
reasons, which are words of ours. Knows requests by their records, and of engines only their status.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from mlx_backend.server.request_log import LastRequests, outcome_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from prometheus_client import Metric

    from mlx_backend.device.memory import MemoryBudget
    from mlx_backend.registry.base import ModelRegistry
    from mlx_backend.server.request_log import RequestRecord

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_PREFIX = "mlx_backend"
# The time since when each series is counted, for which Prometheus has no use.
disable_created_metrics()  # type: ignore[no-untyped-call]
# Seconds.
_FIRST_TOKEN = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Counters and histograms of one application. Safe to use from any thread."""

    def __init__(self, models: ModelRegistry, memory: MemoryBudget | None = None) -> None:
        self.memory = memory
        self.last_requests = LastRequests()
        self._registry = registry = CollectorRegistry()
        self._guard = threading.Lock()  # a request is on a page with all that it adds, or not at all

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, ["model"], buckets=buckets, registry=registry)

        self._requests = counter("requests", "Requests that have ended.", "outcome", "key")
        self._refused = counter("requests_refused", "Requests that got an error.", "reason", "key")
        self._prefill = counter("prefill_tokens", "Prompt tokens that were computed.", "model", "key")
        self._cached = counter("cached_tokens", "Prompt tokens that were found in a cache.", "model", "key")
        self._decode = counter("decode_tokens", "Tokens that were generated.", "model", "key")
        self._reasoning = counter(
            "reasoning_tokens", "Generated tokens that were reasoning.", "model", "effort"
        )
        self._first_token = histogram(
            "time_to_first_token_seconds", "From a request to the first part of its reply.", _FIRST_TOKEN
        )
        self._between_tokens = histogram(
            "inter_token_seconds", "From one token of a reply to the next.", _BETWEEN_TOKENS
        )
        registry.register(_Now(models, memory))
        ProcessCollector(registry=registry)

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.last_requests.add(record)
        key, fields, error = record.client.key_name, record.fields, record.error
        with self._guard:
            self._requests.labels(outcome_of(record), key).inc()
            if error is not None:
                self._refused.labels(error.code or f"status_{error.status}", key).inc()
            if (model := fields.get("model")) is None:
                return
            cached = fields.get("cached_tokens", 0)
            self._cached.labels(model, key).inc(cached)
            self._prefill.labels(model, key).inc(max(0, fields.get("prompt_tokens", 0) - cached))
            self._decode.labels(model, key).inc(fields.get("completion_tokens", 0))
            if reasoning := fields.get("reasoning_tokens"):
                self._reasoning.labels(model, fields.get("effort") or "").inc(reasoning)
            if fields.get("completion_tokens"):
                self._first_token.labels(model).observe(fields["first_token_seconds"])

    def token_clock(self, model: str) -> TokenClock:
        """Return what measures the times between the tokens of one reply."""
        return TokenClock(self._between_tokens.labels(model).observe)

    def text(self, key: str | None = None, models: Collection[str] | None = None) -> bytes:
        """Return the page: all of it, or of requests only those with this key and without any, and of models these."""

        def is_seen(labels: Mapping[str, str]) -> bool:
            of_key = key is None or labels.get("key", "") in ("", key)
            return of_key and (models is None or labels.get("model") in (None, *models))

        with self._guard:
            return generate_latest(_Seen(self._registry, is_seen))


class _Seen(CollectorRegistry):
    """What of another registry somebody may see, by its labels."""

    def __init__(self, registry: CollectorRegistry, is_seen: Callable[[Mapping[str, str]], bool]) -> None:
        super().__init__()
        self._registry = registry
        self._is_seen = is_seen

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, each with the samples that may be seen."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if self._is_seen(sample.labels)]
            yield metric


class TokenClock:
    """Measures the times between the tokens of one reply. For one thread."""

    def __init__(self, observe: Callable[[float], None]) -> None:
        self._observe = observe
        self._at = 0.0
        self._tokens = 0

    def advance(self, tokens: int) -> None:
        """Note that this many tokens have been generated. Those that come together share the time since the last."""
        new = tokens - self._tokens
        if new <= 0:
            return
        now = time.perf_counter()
        if self._tokens:
            for _ in range(new):
                self._observe((now - self._at) / new)
        self._at, self._tokens = now, tokens


class _Now(Collector):
    """What is looked up when the page is asked for: the engines' queues, and the memory that is reserved."""

    def __init__(self, models: ModelRegistry, memory: MemoryBudget | None) -> None:
        self._models = models
        self._memory = memory

    def describe(self) -> list[GaugeMetricFamily]:
        """Return nothing: otherwise the registry would look all of it up when this is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, and what engines count themselves."""
        running = GaugeMetricFamily(f"{_PREFIX}_requests_running", "Replies in the batch.", labels=["model"])
        waiting = GaugeMetricFamily(f"{_PREFIX}_requests_waiting", "Requests in the queue.", labels=["model"])
        prewarmed = CounterMetricFamily(
            f"{_PREFIX}_prewarmed_tokens",
            "Prompt tokens that were computed while idle, before the request that is likely to come.",
            labels=["model"],
        )
        for status in self._models.statuses():
            if status.state != "unloaded" and not status.shares:
                running.add_metric([status.name], status.running)
                waiting.add_metric([status.name], status.waiting)
                prewarmed.add_metric([status.name], status.prewarmed_tokens)
        yield from (running, waiting, prewarmed)
        if self._memory is not None:
            memory = GaugeMetricFamily(
                f"{_PREFIX}_memory_bytes", "Memory for models and their caches.", labels=["kind"]
            )
            memory.add_metric(["limit"], self._memory.limit)
            memory.add_metric(["reserved"], self._memory.reserved)
            memory.add_metric(["used"], self._memory.used())
            memory.add_metric(["host_cache_limit"], self._memory.host_caches.max_bytes)
            memory.add_metric(["host_caches"], self._memory.host_caches.nbytes)
            yield memory
