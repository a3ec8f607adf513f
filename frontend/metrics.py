"""Prometheus metrics of one frontend and its core, in a registry of their own."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..engine_core.messages import CoreInfo, CoreStats

PREFIX = "outrider:"
_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """Histograms that the service fills, beside gauges and counters of the core's last stats."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.started = time.monotonic()
        self._core = _CoreCollector()
        self.registry.register(self._core)
        self.requests = self._counter("num_requests", "sequences submitted")
        self._aborted = self._counter("num_aborted_requests", "sequences that ended by an abort")
        self._first = self._histogram("time_to_first_token_seconds", "arrival to first token")
        self._gap = Histogram(
            PREFIX + "inter_token_latency_seconds",
            "time between outputs of a sequence, divided by their tokens",
            buckets=_GAP,
            registry=self.registry,
        )
        self._per_token = Histogram(
            PREFIX + "request_time_per_output_token_seconds",
            "end-to-end latency divided by the tokens of a sequence",
            buckets=_GAP,
            registry=self.registry,
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "arrival to finish")

    def observe_output(
        self, tokens: int, since_start: float, since_last: float, before: int
    ) -> None:
        """Count new tokens of a sequence that had ``before`` tokens; times in seconds."""
        if not tokens:
            return
        if before == 0:
            self._first.observe(since_start)
        else:
            self._gap.observe(since_last / tokens)

    def observe_finish(self, latency: float, tokens: int, kind: str) -> None:
        """Count a finished sequence; ``latency`` in seconds."""
        if kind == "abort":
            self._aborted.inc()
            return
        self._e2e.observe(latency)
        if tokens:
            self._per_token.observe(latency / tokens)

    def observe_left(self) -> None:
        """Count a sequence that ended because its client left."""
        self._aborted.inc()

    def render(self, stats: CoreStats | None, info: CoreInfo) -> bytes:
        """The exposition text; without new ``stats`` the core's last known ones stand."""
        self._core.update(stats, info)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(PREFIX + name, text, buckets=_LATENCY, registry=self.registry)


class _CoreCollector:
    """Turns the latest ``CoreStats`` into metric families at each scrape."""

    def __init__(self) -> None:
        self._stats: CoreStats | None = None
        self._info: CoreInfo | None = None
        self._at = 0.0
        self._throughput = 0.0

    def update(self, stats: CoreStats | None, info: CoreInfo) -> None:
        """Take new stats; throughput is measured between two of them."""
        self._info = info
        if stats is None:
            return
        now = time.monotonic()
        if self._stats is not None and now > self._at:
            new = stats.generated_tokens - self._stats.generated_tokens
            self._throughput = max(new, 0) / (now - self._at)
        self._stats, self._at = stats, now

    def collect(self) -> Iterator[Metric]:
        """Families for the registry."""
        if self._stats is None or self._info is None:
            return
        yield from _gauges(self._stats, self._info, self._throughput)
        yield from _counters(self._stats, self._info)


def average_accept_length(stats: CoreStats) -> float:
    """Accept length (tau) over all verify steps of the core so far; 0 when there were none."""
    return stats.spec_verify_tokens / stats.spec_drafts if stats.spec_drafts else 0.0


def _gauges(stats: CoreStats, info: CoreInfo, throughput: float) -> Iterator[Metric]:
    used = stats.total_pages - stats.free_pages - stats.cached_pages
    rate = stats.spec_accepted_tokens / max(stats.spec_draft_tokens, 1)
    for name, text, value in (
        ("num_running_reqs", "running requests", stats.running),
        ("num_queue_reqs", "waiting requests", stats.waiting),
        ("num_used_tokens", "KV tokens of running requests", used * info.page_size),
        ("token_usage", "share of the KV pool in use", used / max(stats.total_pages, 1)),
        ("max_total_num_tokens", "tokens of the KV pool", info.max_total_tokens),
        ("num_retracted_reqs", "retractions so far", stats.retractions),
        (
            "cache_hit_rate",
            "prompt tokens served by the radix cache",
            stats.cached_tokens / max(stats.prompt_tokens, 1),
        ),
        ("gen_throughput", "tokens a second between the last two scrapes", throughput),
        ("spec_accept_length", "tokens a verify step emits", average_accept_length(stats)),
        ("spec_accept_rate", "accepted over proposed drafts", rate),
        ("spec_num_draft_tokens", "nodes verified a request", info.num_draft_tokens),
        ("ngram_nodes", "nodes of the n-gram trie", stats.ngram_nodes),
        ("spec_window_peak_pages", "most draft pages in use at once", stats.window_peak_pages),
        ("spec_simulated", "1: accept lengths are forced, for timing", int(info.simulated)),
    ):
        yield GaugeMetricFamily(PREFIX + name, text, value=value)


def _counters(stats: CoreStats, info: CoreInfo) -> Iterator[Metric]:
    for name, text, value in (
        ("prompt_tokens", "prompt tokens", stats.prompt_tokens),
        ("generation_tokens", "generated tokens", stats.generated_tokens),
        ("cached_tokens", "prompt tokens found in the radix cache", stats.cached_tokens),
        ("evicted_tokens", "tokens evicted from it", stats.evicted_pages * info.page_size),
        ("spec_verify_calls", "rows verified with a draft", stats.spec_drafts),
        ("spec_decode_num_drafts", "drafts verified", stats.spec_drafts),
        ("spec_decode_num_draft_tokens", "draft tokens verified", stats.spec_draft_tokens),
        ("spec_decode_num_accepted_tokens", "draft tokens accepted", stats.spec_accepted_tokens),
        ("spec_plain_rows", "decode rows without a draft", stats.plain_rows),
        ("spec_draft_invalid", "drafts cut as invalid", stats.draft_invalid),
        ("spec_verify_budget_steps", "steps with a budget of drafts", stats.verify_budget_steps),
        ("spec_verify_budget_drafts", "these budgets, added up", stats.verify_budget_drafts),
        ("spec_verify_cap_trim", "right drafts beyond a cap", stats.verify_trimmed_drafts),
        ("spec_draft_illegal", "drafts left out as a grammar forbids", stats.illegal_drafts),
        ("spec_draft_forced", "drafts that a grammar leaves no choice of", stats.forced_drafts),
        ("spec_window_drafts", "drafts with a draft window", stats.window_drafts),
        (
            "spec_window_short_drafts",
            "of those, made while part of the window had no draft KV",
            stats.window_short_drafts,
        ),
        ("spec_window_page_failures", "draft pages not to be had", stats.window_page_failures),
        ("core_steps", "steps run", stats.steps),
        ("core_plan_cpu_seconds", "CPU time of planning", stats.plan_cpu),
        ("core_commit_cpu_seconds", "CPU time of commits", stats.commit_cpu),
        ("core_propose_cpu_seconds", "CPU time of host drafting", stats.propose_cpu),
        ("worker_busy_seconds", "time the worker computed", stats.worker_busy),
        ("wait_for_drafts_seconds", "time steps waited for host drafts", stats.wait_for_drafts),
        ("wait_for_masks_seconds", "time the GPU waited for grammars' masks", stats.wait_for_masks),
    ):
        yield CounterMetricFamily(PREFIX + name, text, value=value)
    per_position = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos",
        "draft tokens accepted, by position",
        labels=["position"],
    )
    for position, count in enumerate(stats.spec_accepted_per_pos):
        per_position.add_metric([str(position)], count)
    yield per_position
