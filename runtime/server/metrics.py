"""Prometheus metrics of one server, on a registry of its own."""

import bisect
import itertools
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from llmq.runtime.request import EngineStats

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

_GAUGES = (
    ("llmq_requests_running", "Requests in the running batch.", lambda s: s.num_running),
    ("llmq_requests_waiting", "Requests waiting to be admitted.", lambda s: s.num_waiting),
    ("llmq_kv_blocks_total", "KV-cache blocks.", lambda s: s.num_blocks),
    ("llmq_kv_blocks_used", "KV-cache blocks held by requests.", lambda s: s.num_blocks - s.num_free_blocks),
    ("llmq_step_max_tokens", "Tokens that the last step might compute.", lambda s: s.step_max_tokens),
    ("llmq_step_max_seqs", "Requests that the last step might run.", lambda s: s.step_max_seqs),
    ("llmq_step_spread", "What steps take over the prediction, in the SLO's share of cases.", lambda s: s.step_spread),
)
_COUNTERS = (
    ("llmq_engine_steps", "Engine steps.", lambda s: s.num_steps),
    ("llmq_prompt_tokens", "Prompt tokens computed, prefix hits not counted.", lambda s: s.prompt_tokens),
    ("llmq_generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("llmq_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    ("llmq_prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.prefix_cache_hits),
    ("llmq_preemptions", "Requests preempted, to be recomputed.", lambda s: s.num_preemptions),
    ("llmq_preempted_tokens", "Tokens whose KV preemptions threw away.", lambda s: s.preempted_tokens),
    ("llmq_draft_tokens", "Tokens guessed and verified.", lambda s: s.draft_tokens),
    ("llmq_accepted_draft_tokens", "Guessed tokens that were right.", lambda s: s.accepted_draft_tokens),
    ("llmq_pooled_draft_tokens", "Tokens guessed by other requests' answers.", lambda s: s.pooled_draft_tokens),
    ("llmq_draft_seconds", "Time spent on guessing.", lambda s: s.draft_s),
    ("llmq_deferrals", "Steps in which a request waited so that running ones find room.", lambda s: s.num_deferrals),
)


class _EngineCollector(Collector):
    """The engine counts; this shows its last word."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.stats is None:
            return
        for name, text, read in _GAUGES:
            yield GaugeMetricFamily(name, text, value=read(self.stats))
        for name, text, read in _COUNTERS:
            yield CounterMetricFamily(name, text, value=read(self.stats))


class _Histogram(Collector):
    """Latencies that one thread observes: prometheus_client's own takes locks and looks through all buckets, for each
    token of each stream."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(_LATENCY_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(_LATENCY_BUCKETS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(floatToGoString, _LATENCY_BUCKETS), "+Inf"]
        up_to = list(zip(bounds, itertools.accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets=up_to, sum_value=self._sum)


class ServerMetrics:
    """What `/metrics` shows: the engine's state, and latencies as the HTTP process sees them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._requests = Counter(
            "llmq_requests",
            "Finished sequences by reason; 429 of which: shed, the SLO was out of reach; queue_full, --max-queue.",
            ["finish_reason"],
            registry=self._registry,
        )
        self._time_to_first_token = self._histogram(
            "llmq_time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self._inter_token_latency = self._histogram(
            "llmq_inter_token_latency_seconds", "Between consecutive outputs of a sequence."
        )
        self._request_latency = self._histogram(
            "llmq_request_latency_seconds", "From a request's arrival to the end of a sequence."
        )

    def set_engine_stats(self, stats: EngineStats) -> None:
        self._engine.stats = stats

    def observe_output(self, since_arrival_s: float, since_last_s: float | None) -> None:
        """A sequence brought tokens; `since_last_s` is None for the first ones."""
        if since_last_s is None:
            self._time_to_first_token.observe(since_arrival_s)
        else:
            self._inter_token_latency.observe(since_last_s)

    def observe_finish(self, finish_reason: str, since_arrival_s: float) -> None:
        self._requests.labels(finish_reason).inc()
        self._request_latency.observe(since_arrival_s)

    def count_refused(self, num_sequences: int) -> None:
        """There was no room in the queue."""
        self._requests.labels("queue_full").inc(num_sequences)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> _Histogram:
        made = _Histogram(name, text)
        self._registry.register(made)
        return made
